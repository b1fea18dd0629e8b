"""The account of every lease: granted once, and ended as exactly one of trained, dropped or expired.

`leased = trained + dropped + expired + in_flight` holds after every call; `in_flight` counts the leases being generated and
the groups that wait in the buffer. The ledger decides nothing and knows no clock: it records, and refuses what cannot be.
"""

from collections import Counter
from typing import Literal

import msgspec

from learner.groups import Group


class LedgerCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sums, as they are reported and kept in checkpoints."""

    leased: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    """By reason."""
    expired: int = 0
    """Taken back from an actor that was late, lost or left; the prompt was leased again."""
    in_flight: int = 0

    @property
    def adds_up(self) -> bool:
        """Whether the conservation law holds."""
        return self.leased == self.trained + sum(self.dropped.values()) + self.expired + self.in_flight


class OpenLease(msgspec.Struct):
    """A lease that has not ended."""

    lease_id: int
    prompt_id: int
    actor: str
    deadline: float
    """Time at which it expires unless its group is there."""
    group: Group | None = None
    """The finished group, once it is in the buffer."""


class Ledger:
    """All leases of this learner process.

    Lease ids start at `first_lease_id`, so that those of a process before it (which an actor may still answer) are unknown.
    """

    def __init__(self, *, first_lease_id: int = 0, counts: LedgerCounts | None = None) -> None:
        counts = counts or LedgerCounts()
        self._first_lease_id = first_lease_id
        self._next_lease_id = first_lease_id
        self._open: dict[int, OpenLease] = {}
        self._leased = counts.leased
        self._trained = counts.trained
        self._dropped = Counter(counts.dropped)
        # What was in flight when the counts were saved did not survive: those prompts are leased again.
        self._expired = counts.expired + counts.in_flight

    @property
    def num_open(self) -> int:
        """Leases in flight or buffered."""
        return len(self._open)

    @property
    def num_ready(self) -> int:
        """Groups in the buffer."""
        return sum(lease.group is not None for lease in self._open.values())

    def counts(self) -> LedgerCounts:
        """The sums now."""
        return LedgerCounts(self._leased, self._trained, dict(self._dropped), self._expired, len(self._open))

    def next_lease_id(self) -> int:
        """A fresh id; evaluation leases take theirs here too, and are not in the account."""
        self._next_lease_id += 1
        return self._next_lease_id - 1

    def grant(self, prompt_id: int, actor: str, deadline: float) -> OpenLease:
        """Record a new lease."""
        lease = OpenLease(self.next_lease_id(), prompt_id, actor, deadline)
        self._open[lease.lease_id] = lease
        self._leased += 1
        return lease

    def generating(self) -> list[OpenLease]:
        """Leases whose group has not arrived, oldest first."""
        return [lease for lease in self._open.values() if lease.group is None]

    def ready_groups(self) -> list[Group]:
        """Groups in the buffer, oldest lease first."""
        return [lease.group for lease in self._open.values() if lease.group is not None]

    def open_prompts(self) -> list[int]:
        """Prompts of all open leases, oldest first: what a resumed run must lease again."""
        return [lease.prompt_id for lease in self._open.values()]

    def status(self, lease_id: int) -> Literal["generating", "ready", "ended", "unknown"]:
        """Where a lease stands."""
        lease = self._open.get(lease_id)
        if lease is not None:
            return "generating" if lease.group is None else "ready"
        return "ended" if self._first_lease_id <= lease_id < self._next_lease_id else "unknown"

    def find(self, lease_id: int) -> OpenLease:
        """An open lease; `KeyError` when it has ended."""
        return self._open[lease_id]

    def accept(self, group: Group) -> None:
        """Put a finished group into the buffer."""
        lease = self._open[group.lease_id]
        assert lease.group is None, f"lease {group.lease_id} has a group already"
        lease.group = group

    def train(self, group: Group) -> None:
        """End a buffered group's lease as trained."""
        lease = self._open.pop(group.lease_id)
        assert lease.group is not None, f"lease {group.lease_id} has no group to train on"
        self._trained += 1

    def drop(self, lease_id: int, reason: str) -> OpenLease:
        """End a lease as dropped, for a reason that is counted."""
        lease = self._open.pop(lease_id)
        self._dropped[reason] += 1
        return lease

    def expire(self, lease_id: int) -> OpenLease:
        """End a lease whose group will not come (or not in time); its prompt is to be leased again."""
        lease = self._open.pop(lease_id)
        assert lease.group is None, f"lease {lease_id} is answered: it cannot expire"
        self._expired += 1
        return lease
