"""Makes the runs of a sweep: `offbeat train` for each, several at a time, with a report after each.

The same command goes on with a sweep that was stopped: ended runs are kept, others are resumed, or begun again where they left
nothing to resume from. A run that is hopeless is asked to stop, saves what a stopped run saves, and has then ended.
"""

import contextlib
import logging
import os
import queue
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from offbeat.common.errors import SettingError
from offbeat.common.formats import duration
from offbeat.common.processes.shutdown import INTERRUPTED_STATUS, PAUSED_STATUS, StopRequest
from offbeat.common.records.rows import EvalRow, StepRow
from offbeat.common.records.run_folder import CHECKPOINTS, LOG, MODEL
from offbeat.common.records.writer import ROWS_FILE, read_rows_of
from offbeat.deploy.experiments.jobs import LOCK_FILE, FolderBusyError, alone_in, run_jobs
from offbeat.deploy.experiments.trials import SweepTrial
from offbeat.deploy.local.devices import VISIBLE, Gpu, find_gpus
from offbeat.deploy.local.launcher import LOOK_S, RestartBudget, Service
from offbeat.deploy.local.starts import PROGRAM, FreshStarts, ProcessStart
from offbeat.lab.history import RunHistory, fold_rows
from offbeat.lab.sweep import plan
from offbeat.lab.sweep.measures import final_reward
from offbeat.learner.training import checkpoints

logger = logging.getLogger(__name__)


class MachinePart(NamedTuple):
    """The part of one run. The default is the whole machine."""

    cores: tuple[int, ...] = ()
    """Cores that its processes stay on; empty: all."""
    gpus: tuple[str, ...] = ()
    """Entries of `CUDA_VISIBLE_DEVICES`; empty: as it is."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of the run's processes."""
        return {VISIBLE: ",".join(self.gpus)} if self.gpus else {}

    def enter(self) -> None:
        """Keep the calling thread, and the processes that it starts from now on, on the cores; Linux only."""
        if self.cores and sys.platform == "linux":
            os.sched_setaffinity(0, self.cores)


def places_here(num_runs: int) -> list[MachinePart]:
    """Divide this machine among as many runs; see `divide`."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else range(os.cpu_count() or 1)
    return divide(num_runs, find_gpus().gpus, cores)


def divide(num_runs: int, gpus: Sequence[Gpu], cores: Sequence[int]) -> list[MachinePart]:
    """Return equal parts of the GPUs, or of the cores where there is no GPU; what is left over stays idle.

    One run has the whole machine. Raises `SettingError` for more runs than GPUs or cores.
    """
    if num_runs == 1:
        return [MachinePart()]
    of_which, num_parts = ("GPU", len(gpus)) if gpus else ("core", len(cores))
    if num_runs > num_parts:
        problem = f"each run needs a {of_which} of its own, and there are {num_parts}"
        raise SettingError("--jobs", num_runs, problem, f"Give --jobs {num_parts} or less.")
    size = num_parts // num_runs
    parts = [slice(start, start + size) for start in range(0, size * num_runs, size)]
    if gpus:
        return [MachinePart(gpus=tuple(gpu.entry for gpu in gpus[part])) for part in parts]
    return [MachinePart(cores=tuple(cores[part])) for part in parts]


LOG_FILE = "train.log"
"""File in a trial's folder with the output of its run."""

REPORT_LOCK = ".report.lock"

REPORT_S = 600.0
"""Longest wait for other shards' reports before the last one."""

STOP_S = 1800.0
"""Longest time that a run may take to save what it has when it is asked to stop."""

JUDGE_S = 10.0
"""Seconds between two looks at whether a run is hopeless."""


def run_sweep(
    trials: Sequence[SweepTrial],
    folder: Path,
    stop: StopRequest,
    say: Callable[[str], None],
    write_report: Callable[[], Path],
    *,
    places: Sequence[MachinePart] = (MachinePart(),),
    stops_hopeless: bool = False,
    program: Sequence[str] = PROGRAM,
) -> int:
    """Make the runs of these trials that have not ended, one at each place, with a report after each.

    Returns the exit status: 0, 1 when a run failed, 130 when asked to stop. Raises `SettingError`, and starts nothing, when
    another sweep makes one of the runs.

    Waits for: the ends of runs. A signal ends all of them in order, as does an error in one of their threads.
    """
    run = _stopping(stop)(partial(_run, stop=stop, program=program, stops_hopeless=stops_hopeless))
    free: queue.SimpleQueue[MachinePart] = queue.SimpleQueue()
    for place in places:
        free.put(place)
    num_failed = 0
    with contextlib.ExitStack() as locks:
        todo = [trial for trial in trials if _take(trial, locks)]
        num_before = len(trials) - len(todo)
        if num_before:
            say(f"{num_before}/{len(trials)} runs are done already")
        with ThreadPoolExecutor(len(places)) as threads, _stopping(stop):
            done = run_jobs(todo, lambda trial: threads.submit(run, trial, free), stop, num_at_once=len(places))
            for number, (trial, end, left) in enumerate(done, start=num_before + 1):
                history = plan.read_run(trial.folder)
                say(f"{number}/{len(trials)} {_describe_end(trial, *end, history)}{'' if stop else left}")
                num_failed += plan.state_of(trial.folder, history) not in plan.ENDED and not stop
                # Another shard may be writing it; the last one will have all runs.
                with contextlib.suppress(FolderBusyError), alone_in(folder, name=REPORT_LOCK):
                    write_report()
    status = INTERRUPTED_STATUS if stop else 1 if num_failed else 0
    with alone_in(folder, name=REPORT_LOCK, wait_s=REPORT_S):
        logger.info("report: %s", write_report())
    if status:
        logger.info("to continue with the unfinished runs, give the same command with --out %s", folder)
    return status


def render_commands(trials: Sequence[SweepTrial], folder: Path) -> str:
    """Return the commands of the runs that have not ended, one per line, and log how to make the report."""
    todo = [trial for trial in trials if not trial.has_ended]
    out = shlex.quote(str(folder))
    logger.info("%d of %d runs are to be done; when they are: offbeat sweep --report --out %s", len(todo), len(trials), out)
    return "\n".join(map(_shell_line, todo))


def _take(trial: SweepTrial, locks: contextlib.ExitStack) -> bool:
    """Lock a run's folder until `locks` is closed, and return True; return False for a run that has ended."""
    with contextlib.ExitStack() as lock:
        lock.enter_context(alone_in(trial.folder))
        # Looked at under the lock: another sweep may have made the run a moment ago.
        if trial.has_ended:
            return False
        locks.enter_context(lock.pop_all())
    return True


@contextlib.contextmanager
def _stopping(stop: StopRequest) -> Iterator[None]:
    """Ask the runs under way to stop when an error leaves the context."""
    try:
        yield
    except BaseException:
        stop.ask("the sweep has failed")
        raise


def _run(
    trial: SweepTrial,
    free: queue.SimpleQueue[MachinePart],
    *,
    stop: StopRequest,
    program: Sequence[str],
    stops_hopeless: bool,
) -> tuple[int, float]:
    """Run one trial at a free place to its end, until a signal, or until it is hopeless; return exit status and seconds.

    Waits for: the end of its process, looking every `LOOK_S`; `STOP_S` once it was asked to stop.
    """
    started = time.monotonic()
    # There are as many places as runs at a time.
    place = free.get_nowait()
    run = Service(trial.name, RestartBudget(0), FreshStarts(program))
    judge = _Judge(trial) if stops_hopeless else None
    kill_at: float | None = None
    try:
        place.enter()
        if not _can_resume(trial):
            _clean(trial)
        run.start([ProcessStart(_arguments(trial), place.environment, trial.folder / LOG_FILE)])
        while run.status is None and (kill_at is None or time.monotonic() < kill_at):
            if kill_at is None and (reason := _why_stop(trial, stop, judge)) is not None:
                logger.info("%s: asking %s to stop", reason, trial.name)
                run.ask_to_stop()
                kill_at = time.monotonic() + STOP_S
            time.sleep(LOOK_S)
    finally:
        run.kill()
        free.put(place)
    return run.status or 0, time.monotonic() - started


def _why_stop(trial: SweepTrial, stop: StopRequest, judge: "_Judge | None") -> str | None:
    """Return the reason for which a run is to be asked to stop; one that is hopeless is marked."""
    if stop:
        return f"{stop.reason} (again: end at once)"
    if judge is None or (reason := judge.look()) is None:
        return None
    # Before the run is asked: a sweep that is killed meanwhile does not take it up again.
    plan.mark_hopeless(trial.folder, reason)
    return f"hopeless ({reason})"


class _Judge:
    """Looks from time to time at whether a run is hopeless."""

    def __init__(self, trial: SweepTrial) -> None:
        self._rows_file = trial.folder / ROWS_FILE
        self._lag = trial.config.staleness.max_staleness
        self._next_look = 0.0

    def look(self) -> plan.Hopeless | None:
        """Return the reason when it is time to look, and the run is hopeless."""
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + JUDGE_S
        history = fold_rows(read_rows_of(self._rows_file, StepRow, EvalRow))
        return plan.why_hopeless(plan.evaluations_of(history), lag=self._lag)


def _shell_line(trial: SweepTrial) -> str:
    command = shlex.join(["offbeat", *_arguments(trial)])
    if not (trial.folder / ROWS_FILE).exists() or _can_resume(trial):
        return command
    # `offbeat train` refuses a folder that holds a run; here nothing is left to resume from, so that is deleted first.
    left = [str(path) for path in (trial.folder / ROWS_FILE, trial.folder / MODEL) if path.exists()]
    return f"{shlex.join(['rm', '-r', *left])} && {command}"


def _arguments(trial: SweepTrial) -> list[str]:
    """Return the arguments of `offbeat` that start or resume the run."""
    resume = ["run.resume=true"] if _can_resume(trial) else []
    return ["train", str(trial.folder / plan.CONFIG_FILE), *resume]


def _can_resume(trial: SweepTrial) -> bool:
    has_log = trial.config.log.enabled and (trial.folder / LOG).is_dir()
    return has_log or checkpoints.newest(trial.folder / CHECKPOINTS) is not None


def _clean(trial: SweepTrial) -> None:
    """Delete the files of a run that cannot be resumed."""
    for path in trial.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (plan.CONFIG_FILE, LOG_FILE, LOCK_FILE):
            path.unlink()


def _describe_end(trial: SweepTrial, status: int, seconds: float, history: RunHistory) -> str:
    """Return how a run has ended, with its reward if it has one, and how long it took."""
    reward = final_reward(history)
    parts = [_outcome(trial, history, status), *([] if reward is None else [f"reward {reward:.3g}"]), duration(seconds)]
    return f"{trial.name.replace('/', ' ')}: {', '.join(parts)}"


def _outcome(trial: SweepTrial, history: RunHistory, status: int) -> str:
    """Return the end of a run in words."""
    state = plan.state_of(trial.folder, history)
    if state == "finished":
        return "finished"
    if state == "hopeless":
        return f"stopped as hopeless: {plan.read_hopeless(trial.folder)}"
    if status in (INTERRUPTED_STATUS, PAUSED_STATUS):
        return f"stopped at step {history.steps[-1].policy_version if history.steps else 0}"
    lines = (trial.folder / LOG_FILE).read_text(errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return f"FAILED with exit status {status} ({said.strip()}; see {trial.folder / LOG_FILE})"
