"""The live actors as the learner knows them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from protocols.messages import ActorStats, Hello


@dataclass
class Member:
    """One actor between its hello and its end."""

    peer: bytes
    """Its address at the hub."""
    hello: Hello
    last_heard: float
    capacity: int = 0
    policy_version: int = -1
    """The newest version it said it committed since it joined: what it held before may be of another learner process."""
    stats: ActorStats = field(default_factory=ActorStats)
    lease_ids: set[int] = field(default_factory=set)
    """What it holds, evaluation included."""
    is_reachable: bool = True
    """False from a message that could not be sent to the next one received."""

    @property
    def name(self) -> str:
        """The actor's name."""
        return self.hello.actor

    @property
    def free(self) -> int:
        """Leases it would still take."""
        return self.capacity - len(self.lease_ids)


class Members:
    """Actors by their address and by name."""

    def __init__(self) -> None:
        self._by_peer: dict[bytes, Member] = {}

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
