"""A run in short, as its folder tells it: its end, its settings, and the list of all runs in a folder (`offbeat runs`)."""

import contextlib
import math
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import RenderableType
from rich.text import Text

from offbeat.common.formats import duration, number
from offbeat.common.records.rows import EventRow, FinalRow, OtherRow, Row, StepRow
from offbeat.common.records.run_folder import CONFIG_FILE
from offbeat.common.records.writer import ROWS_FILE, newest_row, read_rows_of
from offbeat.lab.terminal import table
from offbeat.learner.diagnostics.health import update_troubles
from offbeat.protocols.text import encodable

ALIVE_WITHIN_S = 60.0
"""Age of the newest row up to which a run without a final row counts as running."""

_RESTART_EVENTS = ("checkpoint_damaged", "resumed_with_changes", "log_damaged", "data_appended", "resumed", "setting_kept")
"""Events that a learner process of a resumed run records before `run_started`."""


class ProcessTimes:
    """The first and the last time of each learner process of a run; there are several where it was resumed."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    @property
    def wall_s(self) -> float:
        """Seconds that the processes took together, without the time between the end of one and the start of the next."""
        return sum(end - start for start, end in self._spans)

    def take(self, row: Row | OtherRow) -> None:
        """Extend the times of the newest process by a row, which may be the first of another."""
        event = row.event if isinstance(row, EventRow) else ""
        if event in _RESTART_EVENTS:
            return
        if not self._spans or event == "run_started":
            self._spans.append((row.time, row.time))
        start, end = self._spans[-1]
        if isinstance(row, FinalRow):
            # The process knows how long it took to its first row, too.
            start = row.time - row.wall_s
        self._spans[-1] = min(start, row.time), max(end, row.time)


class EndedRun(msgspec.Struct, frozen=True):
    """The rows of a run so far, in short."""

    outcome: str | None
    """`finished`, `stopped`, `paused` or `failed`; None without a final row: the run goes on, hangs or was killed."""
    detail: str
    """The signal that stopped the run, or the error that ended it."""
    policy_version: int
    last_time: float
    """Time of the newest row, in seconds since the epoch."""
    wall_s: float | None
    """Seconds that the learner's processes took together; None without a final row."""
    reward: float | None
    """Mean reward of the last step."""
    health: dict[str, str]
    """Health rules that held at the end, with their reasons."""
    changed_settings: tuple[str, ...]
    """Each change of a setting in one sentence."""


def state_without_end(last_time: float, now: float) -> str:
    """Return the state of a run that has no final row, and whose newest row is of `last_time`: `running` or `unfinished`."""
    return "running" if now - last_time <= ALIVE_WITHIN_S else "unfinished"


def read_end(run_folder: Path, times: ProcessTimes | None = None) -> EndedRun | None:
    """Return the state of the run in a folder as its rows tell it; None where it has no rows. `times` takes the rows too."""
    step: StepRow | None = None
    final: FinalRow | None = None
    last_time: float | None = None
    times = ProcessTimes() if times is None else times
    health: dict[str, str] = {}
    changes: list[str] = []
    for row in read_rows_of(run_folder / ROWS_FILE, StepRow, EventRow, FinalRow):
        last_time = row.time
        times.take(row)
        match row:
            case StepRow():
                step, final = row, None
            case FinalRow():
                final = row
            case EventRow():
                update_troubles(health, row)
                if row.event == "run_started":
                    final = None
                elif row.event == "setting_changed":
                    changes.append(row.detail)
    if last_time is None:
        return None
    # A step may take minutes; actors report all the time.
    if (newest := newest_row(run_folder / ROWS_FILE)) is not None:
        times.take(newest)
        last_time = max(last_time, newest.time)
    version = final.policy_version if final is not None else step.policy_version if step is not None else 0
    return EndedRun(
        outcome=None if final is None else final.outcome,
        detail="" if final is None else final.detail,
        policy_version=version,
        last_time=last_time,
        wall_s=None if final is None else times.wall_s,
        reward=None if step is None else step.number("reward/mean"),
        health=health,
        changed_settings=tuple(changes),
    )


class RunSettings(NamedTuple):
    """The settings of a run as text and, where they could be read, by section."""

    text: str
    sections: Mapping[str, Any]

    def setting(self, section: str, name: str) -> Any:
        """Return the setting's value; None where the version that made the run did not have it."""
        found = self.sections.get(section)
        return found.get(name) if isinstance(found, dict) else None

    def number(self, section: str, name: str) -> float | None:
        """Return the setting's value if it is a finite number, else None."""
        value = self.setting(section, name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None

    def flat(self) -> dict[str, str]:
        """Return all settings as text by their full names: `staleness.max_staleness`."""
        return dict(_flatten(self.sections))


def read_settings(run_folder: Path) -> RunSettings:
    """Return the settings of a run; none where its config is missing or damaged."""
    try:
        return parse_settings((run_folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return RunSettings("", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return RunSettings(f"# {CONFIG_FILE} could not be read: {error}", {})


def parse_settings(text: str) -> RunSettings:
    """Return the settings of a config's text. Raises `TOMLDecodeError`."""
    return RunSettings(text, tomllib.loads(text))


def _flatten(sections: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in sections.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) else repr(value)


DEPTH = 3
"""Levels of folders that are looked into. A sweep's folders `max_staleness=4/seed=1` do not count, one for each setting."""
_STYLES = {"finished": "green", "running": "cyan", "stopped": "yellow"}


class ListedRun(msgspec.Struct, frozen=True):
    """One run in short."""

    folder: str
    state: str
    """`EndedRun.outcome`; without it `running` while rows come, and `unfinished` where they ended."""
    policy_version: int
    num_steps: int | None
    """`train.num_steps`; None where the settings cannot be read."""
    reward: float | None
    """Mean reward of the last step."""
    wall_s: float | None
    """Seconds that the learner's processes took together; None where the run has not ended."""
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
    head = ("run", "state", "step", "reward", "time", "newest row (UTC)", "health")
    return table(head, map(_cells, runs), texts=("run", "state"))


def _cells(run: ListedRun) -> tuple[str | Text, ...]:
    return (
        run.folder,
        Text(run.state, style=_STYLES.get(run.state, "red")),
        f"{run.policy_version:,}" if run.num_steps is None else f"{run.policy_version:,}/{run.num_steps:,}",
        number(run.reward),
        "–" if run.wall_s is None else duration(run.wall_s),
        time.strftime("%Y-%m-%d %H:%M", time.gmtime(run.last_time)),
        f"{len(run.troubles)} !" if run.troubles else "good",
    )


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders with a run's rows, `folder` itself first; a run's own folders are not looked into."""
    # Folders of others lie beside one's own, such as the `lost+found` of a volume.
    with contextlib.suppress(PermissionError):
        if (folder / ROWS_FILE).is_file():
            yield folder
        elif depth and folder.is_dir():
            for below in sorted(folder.iterdir()):
                if below.is_dir() and not below.is_symlink():
                    yield from _run_folders(below, depth if "=" in below.name else depth - 1)


def _listed(folder: Path, end: EndedRun, now: float) -> ListedRun:
    num_steps = read_settings(folder).number("train", "num_steps")
    return ListedRun(
        # A name that is not UTF-8 has letters that JSON cannot hold.
        folder=encodable(str(folder)),
        state=end.outcome or state_without_end(end.last_time, now),
        policy_version=end.policy_version,
        num_steps=None if num_steps is None else int(num_steps),
        reward=end.reward,
        wall_s=end.wall_s,
        last_time=end.last_time,
        troubles=tuple(end.health.values()),
    )
