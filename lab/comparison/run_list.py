"""`offbeat runs`: the runs in a folder, each with its state, steps, reward and duration."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from offbeat.common.formats import duration, number
from offbeat.common.records.writer import ROWS_FILE
from offbeat.lab.ended_run import EndedRun, read_end, state_without_end
from offbeat.lab.run_settings import read_settings
from offbeat.lab.terminal import FittedTable

DEPTH = 3
"""Levels of folders that are looked into: the runs of a sweep lie in its folder."""
_STYLES = {"finished": "green", "running": "cyan", "stopped": "yellow"}


class ListedRun(msgspec.Struct, frozen=True):
    """One run in short."""

    folder: str
    state: str
    """`finished`, `stopped` or `failed`; `running` while rows come; `unfinished` where they ended without a final one."""
    policy_version: int
    num_steps: int | None
    """`train.num_steps`; None where the settings cannot be read."""
    reward: float | None
    """Mean reward of the last step."""
    wall_s: float | None
    """Seconds from the start of the last learner process to the run's end; None where it has not ended."""
    last_time: float
    """Time of the newest row, in seconds since the epoch."""
    troubles: tuple[str, ...]
    """Reasons of the health rules that hold, or held at the end."""


def list_runs(folders: Sequence[Path], now: float) -> list[ListedRun]:
    """Return the runs in and below these folders, the newest last."""
    found = {path.resolve(): path for folder in folders for path in _run_folders(folder, DEPTH)}
    ends = [(path, end) for path in found.values() if (end := read_end(path)) is not None]
    return sorted((_listed(path, end, now) for path, end in ends), key=lambda run: run.last_time)


def render_runs(runs: Sequence[ListedRun]) -> RenderableType:
    """Return the table of the runs."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("run", "state"):
        table.add_column(name)
    for name in ("step", "reward", "time", "newest row (UTC)", "health"):
        table.add_column(name, justify="right")
    for run in runs:
        steps = f"{run.policy_version:,}" if run.num_steps is None else f"{run.policy_version:,}/{run.num_steps:,}"
        table.add_row(
            # Texts, not markup: anybody may have named a folder.
            Text(run.folder),
            Text(run.state, style=_STYLES.get(run.state, "red")),
            steps,
            number(run.reward),
            "–" if run.wall_s is None else duration(run.wall_s),
            time.strftime("%Y-%m-%d %H:%M", time.gmtime(run.last_time)),
            f"{len(run.troubles)} !" if run.troubles else "good",
        )
    return FittedTable(table)


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders with a run's rows, `folder` itself first; a run's own folders are not looked into."""
    if (folder / ROWS_FILE).is_file():
        yield folder
    elif depth and folder.is_dir():
        for below in sorted(folder.iterdir()):
            if below.is_dir() and not below.is_symlink():
                yield from _run_folders(below, depth - 1)


def _listed(folder: Path, end: EndedRun, now: float) -> ListedRun:
    num_steps = read_settings(folder).number("train", "num_steps")
    return ListedRun(
        folder=str(folder),
        state=end.outcome or state_without_end(end.last_time, now),
        policy_version=end.policy_version,
        num_steps=None if num_steps is None else int(num_steps),
        reward=end.reward,
        wall_s=end.wall_s,
        last_time=end.last_time,
        troubles=tuple(end.health.values()),
    )
