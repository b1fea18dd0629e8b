"""The history of every lease of a run, read from its rollout log. Optimizer steps that a restart undid do not count.

    granted -> accepted -> trained
        |         |
        +---------+-> dropped or expired

Samples, traces, replays and fits of timings read leases through this module. `lab.audit` follows them with code of its own: it
checks the accounts that everybody else trusts.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained

Outcome = Literal["trained", "dropped", "expired", "in flight"]


class LeaseHistory(msgspec.Struct):
    """The events of one lease, as far as the log has them."""

    lease_id: int
    granted: Granted | None = None
    """The grant; None where the log does not reach back to the grant."""
    accepted: Accepted | None = None
    over: Dropped | Expired | None = None
    trained: Trained | None = None
    """The batch with the lease's group; None while no batch in the weights has it."""
    epochs: int = 1
    """`train.epochs_per_batch`."""

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
    def actor(self) -> str:
        """Name of the actor; empty where the log has neither the grant nor the group."""
        return self.granted.actor if self.granted is not None else self.accepted.actor if self.accepted is not None else ""

    @property
    def prompt_id(self) -> int | None:
        """Id of the prompt; None where the log does not reach back to the grant."""
        return None if self.granted is None else self.granted.prompt_id

    @property
    def granted_at(self) -> float:
        """Time of the grant, which the log must have, in seconds since the epoch."""
        assert self.granted is not None
        return self.granted.at

    @property
    def duration_s(self) -> float:
        """Seconds from the grant, which the log must have, to the last event, at least 0."""
        last = self.trained or self.over or self.accepted or self.granted
        assert last is not None
        return max(0.0, last.at - self.granted_at)

    @property
    def steps(self) -> Sequence[int]:
        """The optimizer steps that trained on the group, from 1, one in each epoch; each made the version of its number."""
        if self.trained is None:
            return ()
        batch, first = self.trained, self.trained.policy_version + 1
        of_epoch = batch.num_steps // self.epochs
        place = batch.lease_ids.index(self.lease_id) * of_epoch // len(batch.lease_ids)
        return range(first + place, first + batch.num_steps, of_epoch)

    @property
    def step(self) -> int | None:
        """The last optimizer step that trained on the group."""
        return self.steps[-1] if self.steps else None

    @property
    def policy_lag(self) -> int | None:
        """Steps from the oldest version in the group to the one that was trained; None for a group that was not trained on."""
        if self.step is None or self.accepted is None:
            return None
        return max(0, self.step - 1 - self.policy_versions[0])

    @property
    def policy_versions(self) -> list[int]:
        """The versions that sampled the group, oldest first; none without a group."""
        completions = () if self.accepted is None else self.accepted.completions
        return sorted({segment.policy_version for completion in completions for segment in completion.segments})

    @property
    def rewards(self) -> tuple[float, ...]:
        """The reward of each completion; none without a group."""
        return () if self.accepted is None else tuple(completion.reward for completion in self.accepted.completions)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each completion; none without a group."""
        return () if self.accepted is None else tuple(completion.num_tokens for completion in self.accepted.completions)

    @property
    def num_turns(self) -> int:
        """Turns of all episodes of the group; 0 without an environment."""
        completions = () if self.accepted is None else self.accepted.completions
        if not self.environment_s and not any(completion.turns for completion in completions):
            return 0
        return sum(max(1, len(completion.turns)) for completion in completions)

    @property
    def environment_s(self) -> float:
        """The longest time that an episode of the group waited for its environment, in seconds; 0 without one."""
        return 0.0 if self.accepted is None else max(completion.environment_s for completion in self.accepted.completions)


class LeaseHistories:
    """The leases and batches of a run, event by event."""

    def __init__(self, events: Iterable[LeaseEvent] = (), *, epochs: int = 1) -> None:
        """`epochs` is `train.epochs_per_batch`, by which the leases know their steps."""
        self._epochs = epochs
        self.by_lease: dict[int, LeaseHistory] = {}
        """Leases in the order of the first event that the log has of each."""
        self.batches: list[Trained] = []
        """The batches that are in the weights, in order."""
        self.run_id = ""
        """Empty where the log does not reach back to a learner's start."""
        for event in events:
            self.take(event)

    def take(self, event: LeaseEvent) -> None:
        """Add the next event of the log."""
        match event:
            case Started():
                self.run_id = event.run_id
                self._undo(event.policy_version)
            case Granted():
                self.by_lease[event.lease_id] = LeaseHistory(event.lease_id, event, epochs=self._epochs)
            case Accepted():
                self._lease(event.lease_id).accepted = event
            case Dropped() | Expired():
                self._lease(event.lease_id).over = event
            case Trained():
                self.batches.append(event)
                for lease_id in event.lease_ids:
                    self._lease(lease_id).trained = event
            case _:
                pass

    def trained_groups(self) -> Iterator[LeaseHistory]:
        """Yield the leases whose groups are in the weights and in the log, in the order of training."""
        for batch in self.batches:
            for lease_id in batch.lease_ids:
                if self.by_lease[lease_id].accepted is not None:
                    yield self.by_lease[lease_id]

    def _lease(self, lease_id: int) -> LeaseHistory:
        return self.by_lease.setdefault(lease_id, LeaseHistory(lease_id, epochs=self._epochs))

    def _undo(self, version: int) -> None:
        """Take back the batches behind the checkpoint that a learner began from: their groups are trained on again."""
        while self.batches and self.batches[-1].policy_version + self.batches[-1].num_steps > version:
            for lease_id in self.batches.pop().lease_ids:
                self.by_lease[lease_id].trained = None
