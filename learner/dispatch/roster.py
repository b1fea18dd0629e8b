"""The live actors as the learner knows them."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from offbeat.protocols.messages import ActorStats, Hello, MemberStatus

MAX_REPLACED = 1000
"""How many replaced actor processes are remembered, to refuse them when they come back."""


@dataclass
class Member:
    """One actor between its hello and its end."""

    peer: bytes
    """Its address at the hub."""
    hello: Hello
    last_heard: float
    key_name: str = "*"
    """The name (or pattern) that its key is listed under."""
    capacity: int = 0
    policy_version: int = -1
    """The newest version it said it committed since it joined: what it held before may be of another learner process."""
    good_version: int = -1
    """The newest version under which its log-probs of the canary were right."""
    is_quarantined: bool = False
    """They were wrong since."""
    stats: ActorStats = field(default_factory=ActorStats)
    stats_at: float = -math.inf
    tokens_per_s: float = 0.0
    lease_ids: set[int] = field(default_factory=set)
    """What it holds, evaluation included."""
    newest_lease_id: int = -1
    """The newest lease sent to it."""
    is_reachable: bool = True
    """False from a message that could not be sent to the next one received."""

    @property
    def name(self) -> str:
        """The actor's name."""
        return self.hello.actor

    @property
    def takes_leases(self) -> bool:
        """Whether it may be sent any, had it room."""
        return self.is_reachable and not self.is_quarantined

    @property
    def free(self) -> int:
        """Leases it would still take."""
        return self.capacity - len(self.lease_ids)

    def status(self, now: float) -> MemberStatus:
        """For the operator; `now` is on the clock of `last_heard`."""
        if self.is_quarantined:
            state = "quarantined"
        elif not self.is_reachable:
            state = "unreachable"
        else:
            state = "new" if self.policy_version < 0 else "working"
        engine = self.hello.engine
        return MemberStatus(
            name=self.name,
            state=state,
            policy_version=self.policy_version,
            num_leases=len(self.lease_ids),
            capacity=self.capacity,
            tokens_per_s=self.tokens_per_s,
            last_seen_s=now - self.last_heard,
            engine=f"{engine.name} {engine.version}",
        )


class Members:
    """Actors by their address and by name."""

    def __init__(self) -> None:
        self._by_peer: dict[bytes, Member] = {}
        self._replaced: dict[tuple[str, int], None] = {}
        """Processes whose name another one has taken, oldest first."""

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_peer.values()))

    def __len__(self) -> int:
        return len(self._by_peer)

    def find(self, peer: bytes) -> Member | None:
        """The member behind an address."""
        return self._by_peer.get(peer)

    def named(self, name: str) -> Member | None:
        """The live member of that name."""
        return next((member for member in self._by_peer.values() if member.name == name), None)

    def add(self, member: Member) -> None:
        """Admit a member."""
        self._by_peer[member.peer] = member

    def remove(self, member: Member) -> None:
        """Forget a member."""
        self._by_peer.pop(member.peer, None)

    def remember_replaced(self, member: Member) -> None:
        """Another process has taken this one's name: it is to be known when it comes back."""
        self._replaced[member.name, member.hello.incarnation] = None
        if len(self._replaced) > MAX_REPLACED:
            del self._replaced[next(iter(self._replaced))]

    def was_replaced(self, hello: Hello) -> bool:
        """Whether this comes from such a process; of many, only the last are known."""
        return (hello.actor, hello.incarnation) in self._replaced


class Room:
    """The members that take leases now, for one round of granting: each turn goes to the one with the most room."""

    def __init__(self, members: Members) -> None:
        # With many actors, looking at all of them for each lease would take longer than all else.
        self._turns = [
            (-member.free, order, member) for order, member in enumerate(members) if member.takes_leases and member.free > 0
        ]
        """A heap; `order` decides between equals."""
        heapq.heapify(self._turns)

    def take(self, min_policy_version: int) -> Member | None:
        """The member that gets the next lease, if any has such weights; in a round the version asked for never falls."""
        while self._turns:
            minus_free, order, member = self._turns[0]
            if member.policy_version < min_policy_version or minus_free == -1:
                heapq.heappop(self._turns)
            else:
                heapq.heapreplace(self._turns, (minus_free + 1, order, member))
            if member.policy_version >= min_policy_version:
                return member
        return None
