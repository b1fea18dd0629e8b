"""The pull service: which actors fetch which snapshot of the weights now, a few at a time, each with a deadline.

waiting actors -> admit -> announcements (WeightPull) -> [the server's chunks] -> staged -> the snapshot is given back
"""

import time
from collections.abc import Iterable
from typing import NamedTuple

from offbeat.common.records.rows import PullRow
from offbeat.learner.weights.actor_versions import Recipient
from offbeat.learner.weights.double_buffer import DoubleBuffer, WeightSnapshot
from offbeat.learner.weights.server import Delta, DeltaChain, WeightServer
from offbeat.learner.weights.transport import Transport
from offbeat.protocols.messages import WeightPull, WeightsStaged


class Pull(NamedTuple):
    """An actor that is pulling."""

    name: str
    policy_version: int
    begun_at: float
    """Start of the pull, on `time.monotonic` like all times here."""
    is_announced: bool = False
    """True when `WeightPull` was posted on the connection that the actor has now."""


class PullService:
    """The pulls under way. All pull the same snapshot, which is lent until the last of them ends.

    Not thread-safe: the publisher holds its lock, but for `borrow`, which takes long.
    """

    def __init__(self, snapshots: DoubleBuffer, server: WeightServer, transport: Transport) -> None:
        self._snapshots = snapshots
        self._server = server
        self._transport = transport
        self._pulls: dict[bytes, Pull] = {}
        self._deltas = DeltaChain(snapshots.layout, transport.chunk_bytes) if transport.delta else None
        self._lent: WeightSnapshot | None = None

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._pulls

    @property
    def lent_version(self) -> int | None:
        """The version that they all pull; None when nobody pulls."""
        return None if self._lent is None else self._lent.policy_version

    @property
    def num_free(self) -> int:
        """Actors that may still begin."""
        return self._transport.max_pulls - len(self._pulls)

    def borrow(self) -> WeightSnapshot:
        """Return the newest snapshot, to `lend` it. Waits for the end of a snapshot, makes the second buffer if need be, and
        encodes the difference from the snapshot lent before."""
        # Training must find another buffer before this one is lent.
        self._snapshots.provide_spare()
        snapshot = self._snapshots.take()
        if self._deltas is not None:
            self._deltas.advance(snapshot)
        return snapshot

    def lend(self, snapshot: WeightSnapshot) -> None:
        """Serve what was borrowed."""
        assert self._lent is None
        self._lent = snapshot
        self._server.lend(snapshot.policy_version, snapshot.buffer.flat, self._chain)

    def admit(self, waiting: Iterable[Recipient]) -> None:
        """Begin pulls of those that the lent version brings forward, as many as may pull; with none, take the snapshot back."""
        lent = self._lent
        if lent is None:
            return
        able = [one for one in waiting if one.policy_version is None or one.policy_version < lent.policy_version]
        for recipient in able[: self.num_free]:
            self._pulls[recipient.peer] = Pull(recipient.name, lent.policy_version, time.monotonic())
            self._server.admit(recipient.peer)
        self._take_back_unused()

    def announce(self) -> list[tuple[bytes, WeightPull]]:
        """Return the announcements to post now, by the actor's address, and take them for posted."""
        lent = self._lent
        if lent is None:
            return []
        new = {peer: pull._replace(is_announced=True) for peer, pull in self._pulls.items() if not pull.is_announced}
        self._pulls.update(new)
        announcement = WeightPull(
            policy_version=lent.policy_version,
            host=self._transport.host,
            port=self._server.port,
            num_bytes=len(lent.buffer.flat),
            chunk_bytes=self._transport.chunk_bytes,
            checksum=lent.checksum,
            timeout_s=self._transport.timeout_s,
            bases=tuple(delta.base for delta in self._chain),
        )
        return [(peer, announcement) for peer in new]

    def announce_again(self, peer: bytes) -> None:
        """Announce a pull once more: its actor came back. One that has begun goes on: it does not need the hub."""
        if peer in self._pulls and not self._server.visitor(peer).num_requests:
            self._pulls[peer] = self._pulls[peer]._replace(is_announced=False)

    def end_staged(self, actor: str, staged: WeightsStaged) -> tuple[bytes, PullRow] | None:
        """End the pull that an actor reports; return its address and the row about it, None when there is no such pull."""
        for peer, pull in self._pulls.items():
            if (pull.name, pull.policy_version) == (actor, staged.policy_version):
                assert self._lent is not None
                row = PullRow(
                    actor=actor,
                    policy_version=pull.policy_version,
                    pull_s=time.monotonic() - pull.begun_at,
                    sent_bytes=self._server.visitor(peer).num_bytes,
                    full_bytes=len(self._lent.buffer.flat),
                    delta_error=staged.delta_error or None,
                )
                self.end(peer)
                return peer, row
        return None

    def end_obsolete(self, recipients: Iterable[Recipient]) -> None:
        """End the pulls of actors that left, or have committed the version by now."""
        live = {recipient.peer: recipient.policy_version for recipient in recipients}
        for peer, pull in list(self._pulls.items()):
            version = live.get(peer)
            if peer not in live or (version is not None and version >= pull.policy_version):
                self.end(peer)

    def late(self) -> list[tuple[bytes, str, str]]:
        """Return address, name and failure of each actor that did not go on pulling, or did not commit, in time."""
        now = time.monotonic()
        limit_s = self._transport.timeout_s
        late: list[tuple[bytes, str, str]] = []
        for peer, pull in self._pulls.items():
            visitor = self._server.visitor(peer)
            if now - visitor.asked_at > limit_s:
                failing = self._failing(visitor.num_requests, pull.policy_version)
                late.append((peer, pull.name, f"{failing} within {limit_s:g} s (weights.timeout_s)"))
        return late

    def end(self, peer: bytes) -> None:
        """End a pull: the actor is served no longer, and the last one's snapshot is given back."""
        del self._pulls[peer]
        self._server.dismiss(peer)
        self._take_back_unused()

    def problems(self) -> list[str]:
        """Return a line for each pull."""
        return [
            f"{pull.name} pulls weights {pull.policy_version}: asked for {self._server.visitor(peer).num_requests} of "
            f"{self._num_chunks} chunks"
            for peer, pull in self._pulls.items()
        ]

    def _failing(self, num_requests: int, policy_version: int) -> str:
        """Return what an actor failed to do that has asked for this many chunks."""
        if num_requests == 0:
            # An actor whose buffer holds the version already commits it without a chunk.
            return f"neither asked for a chunk of version {policy_version} nor committed it"
        return f"{'asked for no chunk of' if num_requests < self._num_chunks else 'did not commit'} version {policy_version}"

    @property
    def _chain(self) -> tuple[Delta, ...]:
        return () if self._deltas is None else self._deltas.deltas

    @property
    def _num_chunks(self) -> int:
        assert self._lent is not None
        return -(-len(self._lent.buffer.flat) // self._transport.chunk_bytes)

    def _take_back_unused(self) -> None:
        if self._lent is not None and not self._pulls:
            self._server.withdraw()
            self._snapshots.give_back(self._lent)
            self._lent = None
