"""The account of every lease, so that no rollout is lost or trained on twice, whatever process dies.

    state        meaning                              event -> next state
    (none)                                            Granted -> generating
    generating   an actor works on the group          Accepted -> ready, Dropped (aborted) -> ended, Expired -> ended
    ready        the group waits in the buffer        Trained -> ended, Dropped -> ended
    ended        counted as trained, dropped or expired; the lease id is never used again

`leased = trained + dropped + expired + in_flight` holds after every event; `in_flight` counts the leases that are generating
or ready. The prompt of an expired lease, and of a dropped one unless the drop is final, is re-queued under a new lease id. The
ledger makes no decisions and has no clock: it applies events, live or read from the rollout log at a restart, and refuses an
event that cannot follow the events before it.
"""

from collections import Counter
from collections.abc import Callable, Collection
from copy import copy, deepcopy
from typing import Literal

import msgspec

from offbeat.common.records.rows import LedgerSums
from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained, Tuned, Weighed
from offbeat.learner.leases.groups import Group, Tallies, add_group, copy_tallies
from offbeat.learner.leases.log_reading import Position

ZERO_VARIANCE = "zero_variance"
"""Reason for dropping a group whose rewards are all equal (`loss.zero_variance`)."""

UNSEEN_LEASES = 1 << 20
"""Lease ids skipped at a restart: more than a dead learner can have granted without a record in the log."""


class EpochAccount(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The prompts of one pass over the data that are done with."""

    num_trained: int
    dropped: dict[str, list[int]]
    """Prompts that will not be leased again in this pass, by reason."""
    num_left_out: int = 0
    """Prompts that are not leased in this pass, because of the shares of their tasks (`data.curriculum`)."""

    @property
    def num_ended(self) -> int:
        """Prompts trained on, dropped for good, or left out."""
        return self.num_trained + sum(len(prompt_ids) for prompt_ids in self.dropped.values()) + self.num_left_out


class OpenLease(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """A lease that has not ended, in the ledger and in a checkpoint."""

    lease_id: int
    prompt_id: int
    epoch: int
    actor: str
    position: Position | None
    """The group's position in the rollout log; None while the group is being generated, or without a log."""
    is_ready: bool
    """The finished group is in the buffer."""
    oldest_version: int
    """See `Granted.oldest_version`."""
    granted_at: float
    """Seconds since the epoch."""


class LedgerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `Ledger` in a checkpoint."""

    counts: LedgerSums
    next_lease_id: int
    open: tuple[OpenLease, ...]
    epochs: dict[int, EpochAccount]
    tasks: Tallies = {}
    """The results of tasks, where tasks are told apart."""


class Ledger:
    """All leases of a run."""

    def __init__(self) -> None:
        self._next_lease_id = 0
        self._open: dict[int, OpenLease] = {}
        self._leased = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._expired = 0
        self._groups: dict[int, Group] = {}
        """The groups in the buffer, by lease."""
        self.epochs: dict[int, EpochAccount] = {}
        """Passes over the data that began and that `end_epoch` has not returned yet."""
        self.tasks: Tallies = {}
        """The results of tasks, where tasks are told apart."""

    @classmethod
    def from_state(cls, state: LedgerState) -> "Ledger":
        """Return a checkpoint's ledger with all open leases being generated; the caller brings groups back by `restore`."""
        ledger = cls()
        ledger._next_lease_id = state.next_lease_id
        ledger._leased = state.counts.leased
        ledger._trained = state.counts.trained
        ledger._dropped = Counter(state.counts.dropped)
        ledger._expired = state.counts.expired
        ledger._open = {lease.lease_id: msgspec.structs.replace(lease, position=None, is_ready=False) for lease in state.open}
        ledger.epochs = deepcopy(state.epochs)
        ledger.tasks = copy_tallies(state.tasks)
        return ledger

    def state(self) -> LedgerState:
        """Return what `from_state` takes."""
        # Copied: a state is written to disk while the ledger goes on.
        leases = tuple(map(copy, self._open.values()))
        return LedgerState(self.counts(), self._next_lease_id, leases, deepcopy(self.epochs), copy_tallies(self.tasks))

    @property
    def num_open(self) -> int:
        """Leases in flight or buffered."""
        return len(self._open)

    @property
    def num_ready(self) -> int:
        """Groups in the buffer."""
        return len(self._groups)

    def counts(self) -> LedgerSums:
        """Return the counts as they are now."""
        return LedgerSums(self._leased, self._trained, dict(self._dropped), self._expired, len(self._open))

    def next_lease_id(self) -> int:
        """Return a fresh id. Evaluation leases take theirs here too and are not in the account."""
        self._next_lease_id += 1
        return self._next_lease_id - 1

    def skip_lease_ids(self, number: int = UNSEEN_LEASES) -> None:
        """Skip the ids that an earlier learner process may have granted without a record."""
        self._next_lease_id += number

    def generating(self) -> list[OpenLease]:
        """Return the leases whose group has not arrived, oldest first."""
        return [lease for lease in self._open.values() if not lease.is_ready]

    def ready_groups(self) -> list[Group]:
        """Return the groups in the buffer, oldest lease first."""
        # Many more leases may be open than groups are ready.
        return [self._groups[lease_id] for lease_id in sorted(self._groups)]

    def status(self, lease_id: int) -> Literal["generating", "ready", "ended", "unknown"]:
        """Return the state of a lease."""
        lease = self._open.get(lease_id)
        if lease is not None:
            return "ready" if lease.is_ready else "generating"
        return "ended" if 0 <= lease_id < self._next_lease_id else "unknown"

    def find(self, lease_id: int) -> OpenLease:
        """Return an open lease; `KeyError` when it has ended."""
        return self._open[lease_id]

    def holding(self, prompt_id: int, epoch: int) -> OpenLease | None:
        """Return the open lease of a prompt's turn; None without one."""
        return next((lease for lease in self._open.values() if (lease.prompt_id, lease.epoch) == (prompt_id, epoch)), None)

    def apply(self, event: LeaseEvent, group: Group | None = None, position: Position | None = None) -> None:
        """Enter an event; `group` and its `position` in the log come with `Accepted` alone.

        Raises `KeyError` for a lease that is not open, `AssertionError` for an event that cannot follow those before.
        """
        match event:
            case Granted():
                self._grant(event)
            case Accepted():
                assert group is not None, "an accepted lease has a group"
                self.restore(group, position)
            case Dropped():
                lease, group = self._close(event.lease_id)
                self._dropped[event.reason] += 1
                if event.reason == ZERO_VARIANCE and group is not None:
                    add_group(self.tasks, group)
                if event.is_final:
                    self._epoch(lease.epoch).dropped.setdefault(event.reason, []).append(lease.prompt_id)
            case Expired():
                assert not self._open[event.lease_id].is_ready, f"lease {event.lease_id} is answered: it cannot expire"
                self._close(event.lease_id)
                self._expired += 1
            case Trained():
                for lease_id in event.lease_ids:
                    assert self._open[lease_id].is_ready, f"lease {lease_id} has no group to train on"
                for lease_id in event.lease_ids:
                    lease, group = self._close(lease_id)
                    self._epoch(lease.epoch).num_trained += 1
                    assert group is not None
                    add_group(self.tasks, group)
                self._trained += len(event.lease_ids)
            case Started() | Tuned() | Weighed():
                pass

    def leave_out(self, epoch: int, number: int) -> None:
        """Enter prompts that will not be leased in this pass over the data, because of the shares of their tasks."""
        self._epoch(epoch).num_left_out += number

    def restore(self, group: Group, position: Position | None) -> None:
        """Put a finished group into the buffer."""
        lease = self._open[group.lease_id]
        assert not lease.is_ready, f"lease {group.lease_id} has a group already"
        lease.position, lease.is_ready = position, True
        self._groups[group.lease_id] = group

    def end_epoch(self, size_of: Callable[[int], int]) -> tuple[int, EpochAccount] | None:
        """Return the oldest pass over the data whose prompts are all done with, once; None when there is none.

        `size_of` returns the number of prompts of a pass.
        """
        for epoch, account in self.epochs.items():
            if account.num_ended >= size_of(epoch):
                return epoch, self.epochs.pop(epoch)
        return None

    def _grant(self, event: Granted) -> None:
        assert event.lease_id not in self._open, f"lease {event.lease_id} is open already"
        self._open[event.lease_id] = OpenLease(
            event.lease_id, event.prompt_id, event.epoch, event.actor, None, False, event.oldest_version, event.at
        )
        self._next_lease_id = max(self._next_lease_id, event.lease_id + 1)
        self._leased += 1
        self._epoch(event.epoch)

    def _close(self, lease_id: int) -> tuple[OpenLease, Group | None]:
        return self._open.pop(lease_id), self._groups.pop(lease_id, None)

    def _epoch(self, epoch: int) -> EpochAccount:
        return self.epochs.setdefault(epoch, EpochAccount(0, {}))


def needed_position(leases: Collection[OpenLease], log_end: Position) -> Position:
    """Return the first record of the log that a restart from this state reads."""
    return min([log_end, *(lease.position for lease in leases if lease.position is not None)])
