"""The learner's health as the run goes on: the rules over its steps, and what is not well now."""

import threading
from collections import deque

from offbeat.common.records.rows import EventRow, Recorder, Row, StepRow
from offbeat.common.records.step_metrics import TASK_REWARDS, TASK_SHARES
from offbeat.learner.diagnostics.health import Health, update_troubles
from offbeat.learner.dispatch.reports import report
from offbeat.protocols.messages import Vitals

NUM_RECENT_STEPS = 10
"""Steps over which the duration of a step is a mean."""


class HealthWatch:
    """Passes rows on, and watches the steps and the health events among them. Any thread may call it."""

    def __init__(self, record: Recorder) -> None:
        """`record` takes every row to where rows are kept."""
        self._record = record
        self._lock = threading.Lock()
        """Never held while a row is recorded."""
        self._health = Health()
        self._steps: deque[StepRow] = deque(maxlen=NUM_RECENT_STEPS)
        self._troubles: dict[str, str] = {}

    def record(self, row: Row) -> None:
        """Record a row, and after a step the events of the health rules that begin or cease to hold."""
        self._record(row)
        events: list[EventRow] = []
        with self._lock:
            match row:
                case StepRow():
                    self._steps.append(row)
                    events = self._health.take(row)
                case EventRow():
                    update_troubles(self._troubles, row)
                case _:
                    pass
        for event in events:
            report(self.record, event)

    def vitals(self) -> Vitals:
        """Return the newest step in short, and what is not well, for the operator."""
        with self._lock:
            steps, health = list(self._steps), tuple(self._troubles.values())
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
