"""The parts of the learner's answers to operators."""

from typing import Literal

import msgspec

from offbeat.protocols.fields import FreeText, Name, Natural, NaturalOrNone


class MemberStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One live actor, for the operator."""

    name: str
    state: Literal["working", "new", "quarantined", "unreachable"]
    """`new`: it has no weights of this learner process yet."""
    policy_version: NaturalOrNone
    num_leases: Natural
    capacity: Natural
    tokens_per_s: float
    """Over the seconds between its last two rows in `metrics.jsonl`."""
    last_seen_s: float
    """Seconds since the last message of this actor."""
    engine: str


class SettingChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A setting that was changed during the run; values are TOML."""

    setting: str
    """`section.key`."""
    before: str
    after: str
    who: str
    at: float
    """Seconds since the epoch, by the learner's clock."""
    policy_version: Natural
    """The learner's policy version at the change."""


class Vitals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest optimizer step in a few numbers, and what is not well. A number is None where no step has it."""

    reward: float | None = None
    """Mean reward of the step."""
    lag_mean: float | None = None
    lag_max: float | None = None
    """Policy lag of the step's groups, in optimizer steps."""
    bound: float | None = None
    """`staleness.max_staleness` at the step."""
    step_s: float | None = None
    """Mean seconds of the last steps, waiting included."""
    reward_by_task: dict[Name, float] = {}
    """Mean reward of each task of the step, where `task.task_field` is set. Since minor version 6."""
    share_by_task: dict[Name, float] = {}
    """Share of each task's prompts that is leased, where `task.curriculum` is set. Since minor version 9."""
    health: tuple[FreeText, ...] = ()
    """A sentence for each health rule that holds, with a hint."""
