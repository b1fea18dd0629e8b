"""Collective updates: one broadcast of a version to actors that have all said that they are ready.

    announce (WeightUpdate) -> wait ready -> go -> broadcast

An epoch is one process group. A new one begins when other actors take part, or when anything about the last transfer failed.

The broadcast runs in a thread of its own. One that neither ends nor moves past the deadlines of its library is left behind, and
counts as a failure like any other.

A member that died in a broadcast is named by the next one, for which it does not get ready. What is left are failures that no
single member explains: two processes on one GPU, a firewall between the machines, a transport that hangs. After two of these
in a row the members pull instead of failing for ever (`FailedEpochs`).

NCCL's peer-to-peer transport hangs between some cards on PCIe, and its shared memory in some containers. Both look the same
from outside: everybody is ready, and nothing moves. So the next try of the same members avoids both, and NCCL goes through
sockets. Where that works, the run keeps to it, and the operator is told what to set (`NcclDetour`).
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Literal, NamedTuple

from offbeat.common.weights.collectives import (
    POLL_S,
    CollectiveError,
    CollectiveLateError,
    GlooGroup,
    Rendezvous,
    Seat,
    run_until,
    serve_store,
)
from offbeat.common.weights.nccl_group import NcclGroup, WeightGroup
from offbeat.learner.weights.actor_versions import Recipient
from offbeat.learner.weights.double_buffer import WeightSnapshot
from offbeat.learner.weights.transport import Transport
from offbeat.protocols.messages import LearnerMessage, NcclTransport, WeightUpdate

logger = logging.getLogger(__name__)

TRANSPORTS: tuple[NcclTransport, ...] = ("P2P", "SHM")


class NcclDetour:
    """The transports that the next NCCL group avoids."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Leave alone the transports that the operator's environment decides on."""
        self._suspects: tuple[NcclTransport, ...] = tuple(
            transport for transport in TRANSPORTS if f"NCCL_{transport}_DISABLE" not in environment
        )
        self._is_confirmed = False
        self._reason = ""
        self.avoided: tuple[NcclTransport, ...] = ()

    def note(self, error: CollectiveError) -> None:
        """Note that a group with all of its members failed."""
        text = str(error).lower()
        if isinstance(error, CollectiveLateError) or "/dev/shm" in text or "shared memory" in text:
            self.avoided = self._suspects
            self._reason = str(error)

    def forget(self) -> None:
        """Note that a member explains the failure."""
        if not self._is_confirmed:
            self.avoided = ()

    def confirm(self) -> str | None:
        """Note that a group worked; return what the operator should know when the detour has just proved necessary."""
        if self._is_confirmed or not self.avoided:
            return None
        self._is_confirmed = True
        settings = " and ".join(f"NCCL_{transport}_DISABLE=1" for transport in self.avoided)
        return (
            f"NCCL works here only with {settings}, which this run uses from now on. Set them in the environment of learner "
            f"and actors to begin with them; NVLink or a larger /dev/shm (docker run --shm-size) make transfers faster. "
            f"Without them: {self._reason}"
        )


MAX_SAME = 2
"""Failures in a row of the same members after which they pull."""
MAX_IN_A_ROW = 4
"""Failures in a row after which all actors pull, whoever took part: members may die of what makes their collectives fail."""
FIRST_PAUSE_S = 60.0
LONGEST_PAUSE_S = 3600.0


class FailedEpochs:
    """The failures since the last success, and the pause that follows them. Not thread-safe: the publisher holds its lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members: Set[bytes] = frozenset()
        """The members of the failures that nobody explains."""
        self._num_same = 0
        """Failures in a row of these members."""
        self._num_in_a_row = 0
        """Failures since the last success."""
        self._last_error = ""
        self._paused_until = 0.0

    def note(self, members: Collection[bytes], error: str) -> None:
        """Note that a collective of these members failed, although all of them were ready."""
        if not self._members <= set(members):
            self.explain()
        if not self._num_same:
            self._members = frozenset(members)
        self._num_same += 1
        self._num_in_a_row += 1
        self._last_error = error
        excess = max(self._num_same - MAX_SAME, self._num_in_a_row - MAX_IN_A_ROW)
        if excess >= 0:
            self._paused_until = self._clock() + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**excess)

    def explain(self) -> None:
        """Note that one of the members explains the failures: it is absent, or has left. The others may do without it."""
        self._members, self._num_same = frozenset(), 0
        if self._num_in_a_row < MAX_IN_A_ROW:
            self._paused_until = 0.0

    def settle(self, live: Set[bytes]) -> None:
        """Look for members that are no longer among the live actors."""
        if not self._members <= live:
            self.explain()

    def clear(self) -> None:
        """Forget the failures: a collective succeeded."""
        self.explain()
        self._num_in_a_row, self._paused_until = 0, 0.0

    def pause(self) -> str | None:
        """Return why the actors pull now, one line; None when they may try a collective."""
        seconds = self._paused_until - self._clock()
        if seconds <= 0:
            return None
        return (
            f"{self._num_in_a_row} collective updates in a row failed although every member was ready: actors pull the "
            f"weights, and try again in {seconds:.0f} s. The last error: {self._last_error}"
        )


class CollectivePeers(NamedTuple):
    """The actors that may take part in collectives; the others pull."""

    backend: Literal["gloo", "nccl"]
    peers: frozenset[bytes]


def choose_peers(recipients: Iterable[Recipient], transport: Transport) -> CollectivePeers:
    """Return which of the live actors a collective reaches.

    NCCL reaches actors with a GPU of their own: it takes one process to a GPU, and none without. Where it reaches nobody, gloo
    reaches everybody, through host memory.
    """
    recipients = sorted(recipients)
    everyone = frozenset(recipient.peer for recipient in recipients)
    match transport.backend:
        case "pull":
            return CollectivePeers("gloo", frozenset())
        case "gloo":
            return CollectivePeers("gloo", everyone)
        case "nccl":
            own = None if transport.gpu is None else transport.gpu.uuid
            # Reversed, so that of those on one GPU the first has it.
            by_gpu = {one.gpu: one.peer for one in reversed(recipients) if one.gpu not in (None, own)}
            return CollectivePeers("nccl", frozenset(by_gpu.values())) if by_gpu else CollectivePeers("gloo", everyone)


RETRY_READY_S = {"gloo": 2.0, "nccl": 30.0}
"""Deadline for getting ready after a broken broadcast, by backend. It is short: live actors already wait for the retry, or for
the start of NCCL's process."""
STUCK_S = 15.0
"""Time beyond the deadline of the group after which a broadcast that does not move is left behind."""


class Absent(NamedTuple):
    """An actor that did not get ready."""

    recipient: Recipient
    why: str | None
    """The reason to blame it; None when it left, or `close` ended the wait."""


class BroadcastOutcome(NamedTuple):
    """The outcome of one update."""

    is_sent: bool
    absent: list[Absent]
    error: str | None = None
    """The reason for a broadcast that failed although everybody was ready."""
    advice: str | None = None
    """Settings without which NCCL does not work here, as this broadcast was the first to show."""


class CollectiveUpdates:
    """The rendezvous store and the process group of the current epoch. Only the publisher's thread sends."""

    def __init__(self, transport: Transport, closing: threading.Event) -> None:
        """Open the store; a set `closing` ends every wait for actors."""
        self._transport = transport
        self._closing = closing
        self._store = serve_store(transport.host, transport.port, transport.timeout_s, listen_on=transport.listen_on)
        self._epoch = 0
        self._group: WeightGroup | None = None
        self._group_of: tuple[str, list[bytes]] = ("", [])
        """Backend and members of the group."""
        self._detour = NcclDetour()
        self._sent_version: int | None = None
        """Newest version that went through a group."""
        self._is_retry = False
        """The last broadcast broke."""
        self._is_group_broken = False
        """A member of the last broadcast reported that it broke."""
        self._past: list[tuple[Rendezvous, int]] = []
        """Transfers whose keys are still in the store, with their world sizes."""
        self._errors: dict[str, str] = {}
        """Errors that members reported about the current epoch, by name."""

    def report(self, actor: str, epoch: int, error: str) -> None:
        """Take an actor's report on a transfer that broke; one on an older epoch is about a transfer already given up."""
        if epoch == self._epoch:
            self._errors[actor] = error

    def take_error(self, actor: str) -> str | None:
        """Return what this actor has reported since the last call."""
        return self._errors.pop(actor, None)

    def distrust_group(self) -> None:
        """Begin the next transfer with a new epoch."""
        self._is_group_broken = True

    def send(
        self,
        recipients: Sequence[Recipient],
        snapshot: WeightSnapshot,
        backend: Literal["gloo", "nccl"],
        *,
        live: Callable[[], set[bytes]],
        post: Callable[[bytes, LearnerMessage], None],
    ) -> BroadcastOutcome:
        """Broadcast a snapshot to all of the recipients, or to none.

        Waits for: every recipient to get ready, `timeout_s` at most. Unblocked by: their keys in the store, a reported error,
        a peer that `live` no longer returns, `closing`.
        """
        policy_version = snapshot.policy_version
        peers = [recipient.peer for recipient in recipients]
        # The same version to the same members needs another epoch: keys are never used twice.
        is_fresh_needed = self._is_group_broken or policy_version == self._sent_version
        if self._group is None or (backend, peers) != self._group_of or is_fresh_needed:
            self._begin_epoch()
            self._group_of = (backend, peers)
        rendezvous = Rendezvous(self._store, epoch=self._epoch, policy_version=policy_version)
        self._announce(peers, snapshot, backend, post)
        try:
            # Before the wait: NCCL's process starts while the actors start theirs.
            self._group = self._group or self._make_group(len(peers) + 1, backend)
            return self._send(recipients, self._group, snapshot, rendezvous, live)
        except CollectiveError as error:
            # The next round shows who is to blame: the member that does not get ready.
            logger.warning("weights %d, epoch %d: %s; asking the actors again", policy_version, self._epoch, error)
            self._is_retry = True
            if backend == "nccl":
                self._detour.note(error)
            self._begin_epoch()
            return BroadcastOutcome(is_sent=False, absent=[], error=str(error))

    def _send(
        self,
        recipients: Sequence[Recipient],
        group: WeightGroup,
        snapshot: WeightSnapshot,
        rendezvous: Rendezvous,
        live: Callable[[], set[bytes]],
    ) -> BroadcastOutcome:
        absent = self._wait_ready(recipients, rendezvous, live)
        if not absent:
            # Not earlier: a member that is served by another member need not have seen the go yet when the learner's
            # part of the broadcast is over. Ready for this transfer, it has seen those before.
            # Forgotten, because the store would else grow with the run.
            for past, world_size in self._past:
                past.clear(world_size)
            self._past.clear()
        self._past.append((rendezvous, len(recipients) + 1))
        if absent:
            # They explain the failure before.
            self._detour.forget()
            self._begin_epoch()
            return BroadcastOutcome(is_sent=False, absent=absent)
        group.prepare()
        rendezvous.set_go()
        if isinstance(group, GlooGroup):
            group.make(lambda: next(iter(list(self._errors.values())), ""))
        broadcast = partial(group.broadcast, snapshot.buffer)
        watched(broadcast, self._transport.timeout_s + STUCK_S, f"the broadcast of epoch {self._epoch}")
        self._is_retry = False
        self._sent_version = snapshot.policy_version
        return BroadcastOutcome(is_sent=True, absent=[], advice=self._detour.confirm() if self._group_of[0] == "nccl" else None)

    def close(self) -> None:
        """Give up the group."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def _announce(
        self,
        peers: Sequence[bytes],
        snapshot: WeightSnapshot,
        backend: Literal["gloo", "nccl"],
        post: Callable[[bytes, LearnerMessage], None],
    ) -> None:
        for rank, peer in enumerate(peers, start=1):
            update = WeightUpdate(
                policy_version=snapshot.policy_version,
                epoch=self._epoch,
                rank=rank,
                world_size=len(peers) + 1,
                store_host=self._transport.host,
                store_port=self._store.port,
                backend=backend,
                bucket_bytes=self._transport.bucket_bytes,
                checksum=snapshot.checksum,
                timeout_s=self._transport.timeout_s,
                avoided=self._detour.avoided if backend == "nccl" else (),
            )
            post(peer, update)

    def _wait_ready(
        self, recipients: Sequence[Recipient], rendezvous: Rendezvous, live: Callable[[], set[bytes]]
    ) -> list[Absent]:
        """Return the recipients that did not get ready."""
        timeout_s = self._transport.timeout_s
        limit_s = min(timeout_s, RETRY_READY_S[self._group_of[0]]) if self._is_retry else timeout_s
        within = f"{limit_s:g} s of a broken broadcast" if self._is_retry else f"{limit_s:g} s (weights.timeout_s)"
        late = f"did not enter epoch {self._epoch} within {within}"
        deadline = time.monotonic() + limit_s
        waiting = dict(enumerate(recipients, start=1))
        absent: list[Absent] = []
        while waiting and not self._closing.is_set():
            present = live()
            for rank, recipient in list(waiting.items()):
                if rendezvous.is_ready(rank):
                    del waiting[rank]
                    continue
                error = self.take_error(recipient.name)
                has_left = recipient.peer not in present
                if error or has_left or time.monotonic() > deadline:
                    absent.append(Absent(recipient, error or (None if has_left else late)))
                    del waiting[rank]
            time.sleep(POLL_S)
        return absent + [Absent(recipient, None) for recipient in waiting.values()]

    def _make_group(self, world_size: int, backend: Literal["gloo", "nccl"]) -> WeightGroup:
        seat = Seat(self._epoch, 0, world_size, self._transport.bucket_bytes, self._transport.timeout_s)
        if backend == "gloo":
            return GlooGroup(self._store, seat)
        assert self._transport.gpu is not None, "NCCL is the backend only of a learner on a GPU"
        return NcclGroup(self._store, seat, self._transport.gpu.number, self._detour.avoided)

    def _begin_epoch(self) -> None:
        """Give up the group; reports about it do not count any more."""
        self.close()
        self._epoch += 1
        self._errors.clear()
        self._is_group_broken = False


def watched(work: Callable[[Callable[[], None]], None], quiet_s: float, what: str) -> None:
    """Run `work(beat)` in a thread of its own, and raise what it raises.

    Raises `CollectiveError` when it has neither ended nor called `beat` for `quiet_s`.
    """
    beat_at = time.monotonic()

    def beat() -> None:
        nonlocal beat_at
        beat_at = time.monotonic()

    def problem() -> str:
        quiet = time.monotonic() - beat_at
        return f"{what} has been stuck for {quiet:.0f} s; its thread is abandoned" if quiet > quiet_s else ""

    run_until(problem, lambda: work(beat), "weight-broadcast")
