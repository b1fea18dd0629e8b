"""Makes the runs of a sweep: `offbeat train` for each, several at a time, with a report after each.

The same command goes on with a sweep that was stopped: ended runs are kept, others are resumed, or begun again where they left
nothing to resume from. A run that is hopeless is asked to stop, saves what a stopped run saves, and has then ended.
"""

import contextlib
import logging
import queue
import shlex
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from offbeat.common.formats import duration
from offbeat.common.processes.shutdown import INTERRUPTED_STATUS, PAUSED_STATUS, StopRequest
from offbeat.common.records.rows import EvalRow, StepRow
from offbeat.common.records.run_folder import CHECKPOINTS, LOG
from offbeat.common.records.writer import ROWS_FILE, read_rows_of
from offbeat.deploy.local.jobs import LOCK_FILE, FolderBusyError, alone_in, run_jobs
from offbeat.deploy.local.launcher import LOOK_S, RestartBudget, Service
from offbeat.deploy.local.starts import PROGRAM, FreshStarts, ProcessStart
from offbeat.deploy.sweep.cells import Cell
from offbeat.deploy.sweep.places import Place
from offbeat.lab.history import RunHistory, fold_rows
from offbeat.lab.sweep.hopeless import Hopeless, evaluations_of, mark_hopeless, read_hopeless, why_hopeless
from offbeat.lab.sweep.measures import final_reward
from offbeat.lab.sweep.plan import CONFIG_FILE, has_ended, read_run, state_of
from offbeat.learner.training import checkpoints

logger = logging.getLogger(__name__)

LOG_FILE = "train.log"
"""File in a cell's folder with the output of its run."""
REPORT_LOCK = ".report.lock"
REPORT_S = 600.0
"""Longest wait for other shards' reports before the last one."""
STOP_S = 1800.0
"""Longest time that a run may take to save what it has when it is asked to stop."""
JUDGE_S = 10.0
"""Seconds between two looks at whether a run is hopeless."""


class RunEnd(NamedTuple):
    """The end of one run."""

    status: int
    """Exit status."""
    seconds: float


def run_sweep(
    cells: Sequence[Cell],
    folder: Path,
    stop: StopRequest,
    *,
    say: Callable[[str], None],
    write_report: Callable[[], Path],
    places: Sequence[Place] = (Place(),),
    stops_hopeless: bool = False,
    program: Sequence[str] = PROGRAM,
) -> int:
    """Make the runs of these cells that have not ended, one at each place, with a report after each.

    Returns the exit status: 0, 1 when a run failed, 130 when asked to stop. Raises `SettingError`, and starts nothing, when
    another sweep makes one of the runs.
    """
    with contextlib.ExitStack() as locks:
        todo = [cell for cell in cells if _take(cell, locks)]
        num_before = len(cells) - len(todo)
        if num_before:
            say(f"{num_before}/{len(cells)} runs are done already")
        run = partial(_run, stop=stop, program=program, stops_hopeless=stops_hopeless)
        num_failed = 0
        with contextlib.closing(_run_cells(todo, places, run, stop, num_before=num_before)) as ends:
            for text, has_failed in ends:
                say(text)
                num_failed += has_failed
                _report_unless_busy(folder, write_report)
    status = INTERRUPTED_STATUS if stop else 1 if num_failed else 0
    with alone_in(folder, name=REPORT_LOCK, wait_s=REPORT_S):
        logger.info("report: %s", write_report())
    if status:
        logger.info("to continue with the unfinished runs, give the same command with --out %s", folder)
    return status


def render_commands(cells: Sequence[Cell], folder: Path) -> str:
    """Return the commands of the runs that have not ended, one per line, and log how to make the report."""
    todo = [cell for cell in cells if not cell.has_ended]
    out = shlex.quote(str(folder))
    logger.info("%d of %d runs are to be done; when they are: offbeat sweep --report --out %s", len(todo), len(cells), out)
    return "\n".join(map(_shell_line, todo))


def _take(cell: Cell, locks: contextlib.ExitStack) -> bool:
    """Lock a run's folder until `locks` is closed, and return True; return False for a run that has ended."""
    with contextlib.ExitStack() as lock:
        lock.enter_context(alone_in(cell.folder))
        # Looked at under the lock: another sweep may have made the run a moment ago.
        if cell.has_ended:
            return False
        locks.enter_context(lock.pop_all())
    return True


def _run_cells(
    todo: Sequence[Cell],
    places: Sequence[Place],
    run: Callable[[Cell, Place], RunEnd],
    stop: StopRequest,
    *,
    num_before: int,
) -> Generator[tuple[str, bool]]:
    """Make the runs; yield for each that ends the line to say, and whether it has failed.

    Waits for: the ends of runs. A signal ends all of them in order, as does an error in one of their threads.
    """
    free: queue.SimpleQueue[Place] = queue.SimpleQueue()
    for place in places:
        free.put(place)
    with ThreadPoolExecutor(len(places)) as threads, _stopping(stop):
        for done in run_jobs(todo, lambda cell: threads.submit(_run_at, cell, free, run), stop, num_at_once=len(places)):
            cell, end = done.job, done.result
            history = read_run(cell.folder)
            reward = final_reward(history)
            outcome = _outcome(cell, history, end.status)
            parts = [outcome, *([] if reward is None else [f"reward {reward:.3g}"]), duration(end.seconds)]
            place = f"{num_before + done.number}/{num_before + len(todo)}"
            text = f"{place} {cell.name.replace('/', ' ')}: {', '.join(parts)}{'' if stop else done.left}"
            yield text, not has_ended(cell.folder, history) and not stop


@contextlib.contextmanager
def _stopping(stop: StopRequest) -> Iterator[None]:
    """Ask the runs under way to stop when an error leaves the context."""
    try:
        yield
    except BaseException:
        stop.ask("the sweep has failed")
        raise


def _run_at(cell: Cell, free: queue.SimpleQueue[Place], run: Callable[[Cell, Place], RunEnd]) -> RunEnd:
    """Run one cell at a free place, of which there are as many as runs at a time."""
    place = free.get_nowait()
    try:
        place.enter()
        return run(cell, place)
    finally:
        free.put(place)


def _run(cell: Cell, place: Place, *, stop: StopRequest, program: Sequence[str], stops_hopeless: bool) -> RunEnd:
    """Run one cell to its end, until a signal, or until it is hopeless.

    Waits for: the end of its process, looking every `LOOK_S`; `STOP_S` once it was asked to stop.
    """
    started = time.monotonic()
    if not _can_resume(cell):
        _clean(cell)
    run = Service(cell.name, RestartBudget(0), FreshStarts(program))
    run.start([ProcessStart(_arguments(cell), place.environment, cell.folder / LOG_FILE)])
    judge = _Judge(cell) if stops_hopeless else None
    kill_at: float | None = None
    try:
        while run.status is None and (kill_at is None or time.monotonic() < kill_at):
            if kill_at is None and (reason := _why_stop(cell, stop, judge)) is not None:
                logger.info("%s: asking %s to stop", reason, cell.name)
                run.ask_to_stop()
                kill_at = time.monotonic() + STOP_S
            time.sleep(LOOK_S)
    finally:
        run.kill()
    return RunEnd(run.status or 0, time.monotonic() - started)


def _why_stop(cell: Cell, stop: StopRequest, judge: "_Judge | None") -> str | None:
    """Return the reason for which a run is to be asked to stop; one that is hopeless is marked."""
    if stop:
        return f"{stop.reason} (again: end at once)"
    if judge is None or (reason := judge.look()) is None:
        return None
    # Before the run is asked: a sweep that is killed meanwhile does not take it up again.
    mark_hopeless(cell.folder, reason)
    return f"hopeless ({reason})"


class _Judge:
    """Looks from time to time at whether a run is hopeless."""

    def __init__(self, cell: Cell) -> None:
        self._rows_file = cell.folder / ROWS_FILE
        self._lag = cell.config.staleness.max_staleness
        self._next_look = 0.0

    def look(self) -> Hopeless | None:
        """Return the reason when it is time to look, and the run is hopeless."""
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + JUDGE_S
        history = fold_rows(read_rows_of(self._rows_file, StepRow, EvalRow))
        return why_hopeless(evaluations_of(history), lag=self._lag)


def _report_unless_busy(folder: Path, write_report: Callable[[], Path]) -> None:
    # Another shard may be writing it; the last one will have all runs.
    with contextlib.suppress(FolderBusyError), alone_in(folder, name=REPORT_LOCK):
        write_report()


def _shell_line(cell: Cell) -> str:
    command = shlex.join(["offbeat", *_arguments(cell)])
    rows_file = cell.folder / ROWS_FILE
    # `offbeat train` refuses a folder that holds a run; here nothing is left to resume from, so the rows are deleted first.
    return f"rm {shlex.quote(str(rows_file))} && {command}" if rows_file.exists() and not _can_resume(cell) else command


def _arguments(cell: Cell) -> list[str]:
    """Return the arguments of `offbeat` that start or resume the run."""
    resume = ["run.resume=true"] if _can_resume(cell) else []
    return ["train", str(cell.folder / CONFIG_FILE), *resume]


def _can_resume(cell: Cell) -> bool:
    has_log = cell.config.log.enabled and (cell.folder / LOG).is_dir()
    return has_log or checkpoints.newest(cell.folder / CHECKPOINTS) is not None


def _clean(cell: Cell) -> None:
    """Delete the files of a run that cannot be resumed."""
    for path in cell.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (CONFIG_FILE, LOG_FILE, LOCK_FILE):
            path.unlink()


def _outcome(cell: Cell, history: RunHistory, status: int) -> str:
    """Return the end of a run in words."""
    state = state_of(cell.folder, history)
    if state == "finished":
        return "finished"
    if state == "hopeless":
        return f"stopped as hopeless: {read_hopeless(cell.folder)}"
    if status in (INTERRUPTED_STATUS, PAUSED_STATUS):
        return f"stopped at step {history.steps[-1].policy_version if history.steps else 0}"
    lines = (cell.folder / LOG_FILE).read_text(errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return f"FAILED with exit status {status} ({said.strip()}; see {cell.folder / LOG_FILE})"
