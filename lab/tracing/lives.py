"""The lives of a run's groups, read from its rollout log: granted, generated, rewarded, received, taken, trained.

All times are stamps of the learner's clock. What happened on an actor is known by its length alone, and placed back from the
moment at which the group was received; the rest of that time is the way of lease and group, and the wait for weights.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from offbeat.common.errors import SettingError
from offbeat.lab.tracing.spans import Span
from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained

Outcome = Literal["trained", "dropped", "expired", "in flight"]


class Life(msgspec.Struct):
    """The course of one lease, as the log tells it so far."""

    granted: Granted
    accepted: Accepted | None = None
    trained: Trained | None = None
    step: int | None = None
    """The optimizer step that trained on the group, from 1."""
    over: Dropped | Expired | None = None

    @property
    def outcome(self) -> Outcome:
        """The end of the lease, in a word."""
        if self.trained is not None:
            return "trained"
        match self.over:
            case Dropped():
                return "dropped"
            case Expired():
                return "expired"
            case None:
                return "in flight"

    @property
    def seconds(self) -> float:
        """Seconds from the grant to the last stamp, at least 0."""
        last = self.trained or self.over or self.accepted or self.granted
        return max(0.0, last.at - self.granted.at)


class Lives(msgspec.Struct):
    """The leases and batches of a run."""

    by_lease: dict[int, Life]
    batches: list[Trained]
    """The batches that are in the weights, in order."""
    run_id: str
    """Empty where the log does not reach back to a learner's start."""


def read_lives(events: Iterable[LeaseEvent], groups_per_step: int) -> Lives:
    """Follow every lease whose grant is in the log. Steps that a restart undid are left out."""
    lives = Lives({}, [], "")
    for event in events:
        match event:
            case Started():
                lives.run_id = event.run_id
                _undo(lives, event.policy_version)
            case Granted():
                lives.by_lease[event.lease_id] = Life(event)
            case Accepted():
                if (life := lives.by_lease.get(event.lease_id)) is not None:
                    life.accepted = event
            case Dropped() | Expired():
                if (life := lives.by_lease.get(event.lease_id)) is not None:
                    life.over = event
            case Trained():
                lives.batches.append(event)
                for index, lease_id in enumerate(event.lease_ids):
                    if (life := lives.by_lease.get(lease_id)) is not None:
                        life.trained = event
                        life.step = event.policy_version + 1 + index // groups_per_step
            case _:
                pass
    return lives


def choose(lives: Lives, *, lease: int | None, step: int | None, slowest: int) -> list[Life]:
    """Return one lease, the groups of one step, or the slowest trained groups, by their grant; `SettingError` without any."""
    if lease is not None:
        if lease not in lives.by_lease:
            raise SettingError("--lease", lease, "the log has no such lease", "It keeps log.retain_mb of the newest groups.")
        return [lives.by_lease[lease]]
    trained = [life for life in lives.by_lease.values() if life.trained is not None and step in (None, life.step)]
    if not trained:
        told = ("--slowest", slowest) if step is None else ("--step", step)
        raise SettingError(*told, "the log has no group that was trained on then", "Name a step that the log still has.")
    if step is None:
        trained = sorted(trained, key=lambda life: -life.seconds)[:slowest]
    return sorted(trained, key=lambda life: life.granted.at)


def life_span(life: Life) -> Span:
    """Return a lease's life as a span, with its stages as children."""
    granted, accepted = life.granted, life.accepted
    stages = _Stages(granted.at)
    if accepted is not None:
        received = max(granted.at, accepted.at)
        rewarded_from = max(granted.at, received - accepted.reward_s)
        stages.until(max(granted.at, rewarded_from - accepted.generate_s), "wait")
        stages.until(rewarded_from, "generate", **_generated(accepted))
        if accepted.reward_s:
            stages.until(received, "reward")
    if life.trained is not None:
        stages.until(life.trained.selected_at, "queue")
        stages.until(life.trained.at, "train", step=life.step or 0)
    elif life.over is not None:
        stages.until(life.over.at, "queue" if accepted is not None else "wait")
    attributes: dict[str, str | int | float] = {
        "lease": granted.lease_id,
        "prompt": granted.prompt_id,
        "epoch": granted.epoch,
        "actor": granted.actor,
        "outcome": life.outcome,
        "granted_at_version": granted.policy_version,
    }
    if life.over is not None and life.trained is None:
        attributes["reason"] = life.over.reason
    if life.trained is not None and accepted is not None and life.step is not None:
        attributes["policy_lag"] = max(0, life.step - 1 - min(_versions(accepted)))
    return Span(f"lease {granted.lease_id}", granted.at, stages.now, attributes, tuple(stages.spans))


class _Stages:
    """Consecutive stages, none of which ends before it begins: a learner that moved may have another clock."""

    def __init__(self, start: float) -> None:
        self.now = start
        self.spans: list[Span] = []

    def until(self, end: float, name: str, **attributes: str | int | float) -> None:
        """Add the stage from the last one's end on."""
        end = max(self.now, end)
        self.spans.append(Span(name, self.now, end, attributes))
        self.now = end


def _generated(accepted: Accepted) -> dict[str, str | int | float]:
    versions = _versions(accepted)
    lengths = [completion.num_tokens for completion in accepted.completions]
    attributes: dict[str, str | int | float] = {
        "policy_versions": ", ".join(map(str, versions)),
        "completions": len(lengths),
        "tokens": sum(lengths),
        "longest_completion": max(lengths),
        "mean_reward": sum(completion.reward for completion in accepted.completions) / len(lengths),
    }
    environment_s = [completion.environment_s for completion in accepted.completions]
    if any(environment_s) or any(completion.turns for completion in accepted.completions):
        attributes["turns"] = sum(max(1, len(completion.turns)) for completion in accepted.completions)
        attributes["longest_environment_s"] = max(environment_s)
    return attributes


def _versions(accepted: Accepted) -> Sequence[int]:
    return sorted({segment.policy_version for completion in accepted.completions for segment in completion.segments})


def _undo(lives: Lives, version: int) -> None:
    """Take back the batches behind the checkpoint that a learner began from: their groups are trained on again."""
    while lives.batches and lives.batches[-1].policy_version + lives.batches[-1].num_steps > version:
        for lease_id in lives.batches.pop().lease_ids:
            if (life := lives.by_lease.get(lease_id)) is not None:
                life.trained = life.step = None
