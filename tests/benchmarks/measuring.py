"""Tools of all benchmarks: processes that end with the benchmark, costs, spreads and tables."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from typing import Any, NamedTuple, TypeVar

from offbeat.common.processes.shutdown import die_with_parent
from offbeat.common.records.rows import ActorRow, OtherRow, Row, StepRow
from offbeat.common.records.writer import ROWS_FILE, read_rows

NUM_ROUNDS = 3
"""Measurements of each variant. The variants take turns within a round, so that other load affects all of them."""

Kind = TypeVar("Kind", bound=Row)

PATIENCE_S = 60.0
"""Longest wait for an answer of another process."""

context = multiprocessing.get_context("spawn")


class Cost(NamedTuple):
    """The time of one trial."""

    wall_s: float
    cpu_s: float
    """CPU time of all processes of the trial."""


class OffbeatRun(NamedTuple):
    """A run of `offbeat train` that succeeded."""

    rows: list[Row | OtherRow]
    cost: Cost
    """The cost of the whole command, start-up and report included."""

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        """Return the rows of one kind, in order."""
        return [row for row in self.rows if isinstance(row, kind)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return `median (min–max)`."""
    low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), median(values), max(values)))
    return f"{middle} ({low}–{high})"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table with aligned columns, and the machine's load under it."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(f"\n{title}\n")
    for row in (header, ["-" * width for width in widths], *rows):
        print(f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |")
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"\nload average (1, 5, 15 min): {loads} on {os.cpu_count()} cores", flush=True)


@contextmanager
def processes(target: Callable[..., None], num_processes: int, *arguments: Any) -> Iterator[list[Connection]]:
    """Run `target(connection, *arguments)` in new processes; yield their connections. Kill the processes at the end."""
    connections: list[Connection] = []
    started = []
    try:
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            # No daemon, which could not start processes of its own; it dies with this one all the same.
            process = context.Process(target=_run, args=(target, os.getpid(), theirs, *arguments))
            process.start()
            theirs.close()
            started.append(process)
            connections.append(ours)
        yield connections
    finally:
        for process in started:
            process.kill()
            process.join()


def _run(target: Callable[..., None], parent_pid: int, connection: Connection, *arguments: Any) -> None:
    die_with_parent(parent_pid)
    target(connection, *arguments)


def receive_from(connection: Connection, timeout_s: float = PATIENCE_S) -> Any:
    """Return the next message of another process. Raise TimeoutError when none comes, EOFError when the process has died."""
    if not connection.poll(timeout_s):
        raise TimeoutError(f"the other process did not answer within {timeout_s:g} s")
    return connection.recv()


def run_offbeat(*arguments: str, timeout_s: float) -> OffbeatRun:
    """Run `offbeat train ARGUMENTS` with a temporary run folder. End the benchmark if the run fails or takes longer."""
    started, cpu_before = time.monotonic(), children_cpu_s()
    with tempfile.TemporaryDirectory(prefix="offbeat-benchmark-") as folder:
        log = Path(folder) / "train.log"
        command = [sys.executable, "-m", "offbeat.deploy.cli.main", "train", *arguments, f'run.dir="{folder}/run"']
        with log.open("wb") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, process_group=0)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            sys.exit(f"offbeat train did not end within {timeout_s:g} s:\n{log.read_text(errors='replace')[-4000:]}")
        finally:
            if process.poll() is None:
                # The children of `offbeat train` ask the kernel to die with it.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status:
            sys.exit(f"offbeat train ended with status {status}:\n{log.read_text(errors='replace')[-4000:]}")
        rows = list(read_rows(Path(folder) / "run" / ROWS_FILE))
    return OffbeatRun(rows, Cost(time.monotonic() - started, children_cpu_s() - cpu_before))


def children_cpu_s() -> float:
    """Return the CPU time of all child processes that have ended and been waited for, in seconds."""
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def actor_shares(run: OffbeatRun) -> dict[str, list[float]]:
    """Return each actor's share of time in each activity, between the first and the last step.

    `other` is the time of no activity: messages, and the loop itself.
    """
    steps = run.of_kind(StepRow)
    first_time, last_time = steps[0].time, steps[-1].time
    shares: dict[str, list[float]] = {}
    for name in {row.actor for row in run.of_kind(ActorRow)}:
        beats = [row for row in run.of_kind(ActorRow) if row.actor == name and first_time <= row.time <= last_time]
        wall_s = beats[-1].time - beats[0].time
        for account, seconds in beats[-1].seconds.items():
            shares.setdefault(account, []).append((seconds - beats[0].seconds[account]) / wall_s)
        named = sum(of_actors[-1] for account, of_actors in shares.items() if account != "other")
        shares.setdefault("other", []).append(1 - named)
    return shares


def learner_shares(run: OffbeatRun) -> dict[str, float]:
    """Return the share of each activity in the training loop's time, between the first and the last step."""
    steps = run.of_kind(StepRow)[1:]
    wall_s = sum(step.measured("time/step_s") for step in steps)
    names = ("wait_rollouts", "train", "snapshot", "publish_wait")
    shares = {name: sum(step.measured(f"time/{name}_s") for step in steps) / wall_s for name in names}
    return {**shares, "other": 1 - sum(shares.values())}
