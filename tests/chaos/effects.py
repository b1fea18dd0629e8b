"""The effects by which the faults of a round are known to have hit: read from the events of its run, and from its folder."""

from collections.abc import Collection
from pathlib import Path

from offbeat.common.records.run_folder import CHECKPOINTS
from tests.chaos.schedule import Kind

EVENTS: dict[Kind, tuple[str, ...]] = {
    "corrupt log's middle": ("log_damaged",),
    "fill disk in checkpoint": ("checkpoint_failed",),
    "doubt learner": ("actor_quarantined", "learner_doubted"),
    "append data": ("data_appended",),
    "preempt actor": ("actor_left", "actor_lost"),
}
"""Events of which a learner records one when a fault of the kind has hit it."""
CERTAIN: tuple[Kind, ...] = ("damage checkpoint", "append data")
"""Faults that cannot miss: one without its effect is a violation. Others may come at a moment when there is nothing to hit."""


def has_hit(kind: Kind, events: Collection[str], run: Path) -> bool | None:
    """Return whether a fault has had its effect; None for a kind that is known by nothing but the recovery from it.

    `events` are those that the run has recorded since the fault began.
    """
    if kind == "damage checkpoint":
        return any((run / CHECKPOINTS).glob("*.damaged*"))
    return not set(EVENTS[kind]).isdisjoint(events) if kind in EVENTS else None
