"""Everything to which the learner's rows go: files, terminal, live page, trackers, the user's callback, health rules."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import log_to_file
from offbeat.common.records.rows import EvalRow, EventRow, Recorder, Row, StepRow
from offbeat.common.records.run_folder import PROGRAM_LOGS
from offbeat.common.records.step_metrics import TASK_REWARDS, TASK_SHARES
from offbeat.common.records.writer import MetricsWriter
from offbeat.common.settings.config import Config
from offbeat.common.user_code.callback import Callback
from offbeat.learner.diagnostics.health import Health, update_troubles
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.dispatch.reports import report
from offbeat.learner.reporting.live_page import LivePage, serving
from offbeat.learner.reporting.terminal import NUM_RECENT_STEPS, Progress
from offbeat.learner.reporting.tracking import tracking
from offbeat.protocols.messages import Vitals


class Outlets(NamedTuple):
    """The open outlets. `health.record` takes a row to all of them."""

    health: "HealthWatch"
    progress: Progress
    page: LivePage | None
    callback: Callback | None

    def wait_loaded(self) -> None:
        """Wait for the import of the user's callback; raise `SettingError` when it cannot be imported."""
        if self.callback is not None:
            self.callback.wait_loaded()

    @contextmanager
    def showing(self, config: Config, dispatcher: Dispatcher) -> Iterator[None]:
        """Show the run in the terminal, and on the live page with the dispatcher's status."""
        with ExitStack() as stack:
            if self.page is not None:
                routes = self.page.routes(dispatcher.status_report, dispatcher.silence_s)
                stack.enter_context(serving(routes, config.metrics.bind, Path(config.run.dir)))
            stack.enter_context(self.progress)
            yield


@contextmanager
def open_outlets(config: Config, stop: StopRequest, report_command: Sequence[str]) -> Iterator[Outlets]:
    """Open what the settings ask for, in the main thread; the run's folder is there.

    `report_command` prints the report of the run in the folder that is its last argument.
    """
    folder = Path(config.run.dir)
    log_to_file(folder / PROGRAM_LOGS / "learner.log", "learner")
    with ExitStack() as stack:
        metrics = stack.enter_context(MetricsWriter(folder, tensorboard=config.metrics.tensorboard))
        progress = Progress(config.train.num_steps)
        page = LivePage(folder.resolve().name, [*report_command, str(folder)]) if config.metrics.bind else None
        if page is not None:
            stack.callback(page.close)
        path = config.metrics.callback
        callback = Callback(path, folder / PROGRAM_LOGS / "callback.log", stop.ask) if path else None
        if callback is not None:
            stack.callback(callback.close)
        takers = [progress.add, *(taker.add for taker in (page, callback) if taker is not None)]

        def record(row: Row) -> None:
            row = metrics.write(row)
            for take in takers:
                take(row)

        takers.append(stack.enter_context(tracking(config, record)))
        yield Outlets(HealthWatch(record), progress, page, callback)


class HealthWatch:
    """Passes rows on, and watches the steps and the health events among them. Any thread may call it."""

    def __init__(self, record: Recorder) -> None:
        """`record` takes every row to where rows are kept."""
        self._record = record
        self._lock = threading.Lock()
        """Never held while a row is recorded."""
        self._health = Health()
        self._troubles: dict[str, str] = {}

    def record(self, row: Row) -> None:
        """Record a row, and after a step the events of the health rules that begin or cease to hold."""
        self._record(row)
        events: list[EventRow] = []
        with self._lock:
            match row:
                case StepRow():
                    events = self._health.take(row)
                case EvalRow():
                    self._health.note_evaluation(row)
                case EventRow():
                    update_troubles(self._troubles, row)
                case _:
                    pass
        for event in events:
            report(self.record, event)

    def vitals(self) -> Vitals:
        """Return the newest step in short, and what is not well, for the operator."""
        with self._lock:
            steps, health = list(self._health.steps)[-NUM_RECENT_STEPS:], tuple(self._troubles.values())
        if not steps:
            return Vitals(health=health)
        step = steps[-1]
        seconds = [step_s for one in steps if (step_s := one.number("time/step_s")) is not None]
        return Vitals(
            reward=step.number("reward/mean"),
            lag_mean=step.number("lag/mean"),
            lag_max=step.number("lag/max"),
            bound=step.number("staleness/bound"),
            step_s=sum(seconds) / len(seconds) if seconds else None,
            reward_by_task=_by_task(step, TASK_REWARDS),
            share_by_task=_by_task(step, TASK_SHARES),
            health=health,
        )


def _by_task(step: StepRow, prefix: str) -> dict[str, float]:
    """Return the step's metric of each task, by the task's name."""
    return {
        name.removeprefix(prefix): number
        for name in step.metrics
        if name.startswith(prefix) and (number := step.number(name)) is not None
    }
