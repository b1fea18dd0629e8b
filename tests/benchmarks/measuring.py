"""What the benchmarks share: processes that end with the benchmark, costs, spreads and tables."""

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

from offbeat.common.metrics import ROWS_FILE, read_rows
from offbeat.common.rows import ActorRow, OtherRow, Row, StepRow
from offbeat.common.shutdown import die_with_parent

NUM_ROUNDS = 3
"""How often each variant is measured; the variants take turns within a round, so that other load hits all of them."""

Kind = TypeVar("Kind", bound=Row)

PATIENCE_S = 60.0
"""Longest wait for an answer of another process."""

context = multiprocessing.get_context("spawn")


class Cost(NamedTuple):
    """What one trial took."""

    wall_s: float
    cpu_s: float
    """Of all processes that took part."""


class OffbeatRun(NamedTuple):
    """A run of `offbeat train` that ended well."""

    rows: list[Row | OtherRow]
    cost: Cost
    """Start-up and report included."""

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        """Return the rows of one kind, in order."""
        return [row for row in self.rows if isinstance(row, kind)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (min–max)`."""
    low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), median(values), max(values)))
    return f"{middle} ({low}–{high})"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table whose columns are aligned, the machine's load under it."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(f"\n{title}\n")
    for row in (header, ["-" * width for width in widths], *rows):
        print(f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |")
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"\nload average (1, 5, 15 min): {loads} on {os.cpu_count()} cores", flush=True)


@contextmanager
def processes(target: Callable[..., None], num_processes: int, *arguments: Any) -> Iterator[list[Connection]]:
    """Run `target(connection, *arguments)` in processes of their own; they are killed when the context ends."""
    connections: list[Connection] = []
    started = []
    try:
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(target, os.getpid(), theirs, *arguments), daemon=True)
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
    """`offbeat train ARGUMENTS` with a run folder of its own; a run that fails or takes longer ends the benchmark."""
    started, cpu_before = time.monotonic(), _children_cpu_s()
    with tempfile.TemporaryDirectory(prefix="offbeat-benchmark-") as folder:
        log = Path(folder) / "train.log"
        command = [sys.executable, "-m", "offbeat.deploy.cli", "train", *arguments, f'run.dir="{folder}/run"']
        with log.open("wb") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, process_group=0)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            sys.exit(f"offbeat train did not end within {timeout_s:g} s:\n{log.read_text(errors='replace')[-4000:]}")
        finally:
            if process.poll() is None:
                # Its children ask the kernel to die with it.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status:
            sys.exit(f"offbeat train ended with status {status}:\n{log.read_text(errors='replace')[-4000:]}")
        rows = list(read_rows(Path(folder) / "run" / ROWS_FILE))
    return OffbeatRun(rows, Cost(time.monotonic() - started, _children_cpu_s() - cpu_before))


def _children_cpu_s() -> float:
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def actor_shares(run: OffbeatRun) -> dict[str, list[float]]:
    """For every second that an actor keeps account of, the share of each actor's time, between first and last step.

    `other` is what no account names: messages, and the loop itself.
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
    """What the training loop's time went to, as shares, between first and last step."""
    steps = run.of_kind(StepRow)[1:]
    wall_s = sum(step.measured("time/step_s") for step in steps)
    names = ("wait_rollouts", "train", "snapshot", "publish_wait")
    shares = {name: sum(step.measured(f"time/{name}_s") for step in steps) / wall_s for name in names}
    return {**shares, "other": 1 - sum(shares.values())}
