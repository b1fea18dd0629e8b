"""The end of a run in short, read from its folder, for operators who ask when no learner is there to answer."""

from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from offbeat.common.records.rows import EventRow, FinalRow, StepRow
from offbeat.common.records.writer import ROWS_FILE, read_rows_of
from offbeat.learner.diagnostics.health import update_troubles

ALIVE_WITHIN_S = 60.0
"""Age of the newest row up to which a run without a final row counts as running."""


class EndedRun(msgspec.Struct, frozen=True):
    """The rows of a run so far, in short."""

    outcome: str | None
    """`finished`, `stopped` or `failed`; None without a final row: the run goes on, hangs or was killed."""
    detail: str
    """The signal that stopped the run, or the error that ended it."""
    policy_version: int
    last_time: float
    """Time of the newest of these rows, in seconds since the epoch."""
    wall_s: float | None
    """Seconds since the learner process was started; None without a final row."""
    reward: float | None
    """Mean reward of the last step."""
    health: dict[str, str]
    """Health rules that held at the end, with their reasons."""
    changed_settings: tuple[str, ...]
    """Each change of a setting in one sentence."""


def state_without_end(last_time: float, now: float) -> str:
    """Return the state of a run that has no final row, and whose newest row is of `last_time`: `running` or `unfinished`."""
    return "running" if now - last_time <= ALIVE_WITHIN_S else "unfinished"


def read_end(run_folder: Path) -> EndedRun | None:
    """Return the state of the run in a folder as its rows tell it; None where it has no rows."""
    step: StepRow | None = None
    final: FinalRow | None = None
    last_time: float | None = None
    health: dict[str, str] = {}
    changes: list[str] = []
    for row in read_rows_of(run_folder / ROWS_FILE, StepRow, EventRow, FinalRow):
        last_time = row.time
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
            case _:
                pass
    if last_time is None:
        return None
    version = final.policy_version if final is not None else step.policy_version if step is not None else 0
    return EndedRun(
        outcome=None if final is None else final.outcome,
        detail="" if final is None else final.detail,
        policy_version=version,
        last_time=last_time,
        wall_s=None if final is None else final.wall_s,
        reward=None if step is None else step.number("reward/mean"),
        health=health,
        changed_settings=tuple(changes),
    )


def render_end(ended: EndedRun, num_steps: int) -> RenderableType:
    """Return the end of a run as text; `num_steps` is `train.num_steps`."""
    good = ended.outcome == "finished"
    head = Text(f"{ended.outcome or 'no final row'}", style="bold green" if good else "bold red")
    head.append(f": step {ended.policy_version} of {num_steps}", style="bold")
    if ended.wall_s is not None:
        head.append(f"   wall time {ended.wall_s:,.0f} s")
    if ended.reward is not None:
        head.append(f"   reward {ended.reward:.3f} at the last step")
    # Texts, not markup: rows are files that anybody may have written.
    lines = [Text(ended.detail, style="red")] if ended.detail else []
    lines += [Text(f"! {reason}", style="yellow") for reason in ended.health.values()]
    lines += [Text(f"set: {change}", style="cyan") for change in ended.changed_settings]
    return Group(head, *lines)
