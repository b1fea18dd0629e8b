"""Sends new weights to the actors beside training: whoever is behind, in one collective, with a deadline for each phase.

    training thread: snapshot into the buffer, publish(version)
    publisher thread: who is behind? -> announce (WeightUpdate) -> wait ready -> go -> broadcast -> wait staged, committed

A member that does not get ready, or does not commit, is named and left out for a while; the others go on without it.
Actors are always brought to the newest version, so a joiner, a straggler and a member of the last update are one case.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch._C._distributed_c10d import TCPStore

from common.collectives import POLL_S, CollectiveError, Rendezvous, WeightGroup, serve_store
from common.weights import WeightBuffer
from protocols.messages import LearnerMessage, TensorSpec, WeightsCommitted, WeightsStaged, WeightUpdate

logger = logging.getLogger(__name__)

# How often the thread looks for actors that fell behind without telling.
LOOK_S = 0.05
LONGEST_EXCLUSION_S = 60.0

Members = Callable[[], list[tuple[bytes, str, int]]]
"""Address, name and committed policy version of every live actor."""


@dataclass
class Standing:
    """What the publisher remembers about one actor (by its address, so a restarted one starts anew)."""

    sent_version: int = -1
    """Newest version that was broadcast to it."""
    sent_at: float = 0.0
    failures: int = 0
    """In a row."""
    excluded_until: float = 0.0


class WeightPublisher:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        layout: tuple[TensorSpec, ...],
        members: Members,
        post: Callable[[bytes, LearnerMessage], None],
        record: Callable[..., None],
        host: str,
        listen_on: str,
        port: int,
        backend: Literal["gloo", "nccl"],
        timeout_s: float,
        bucket_bytes: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.buffer = WeightBuffer(layout)
        self._members = members
        self._post = post
        self._record = record
        self._host = host
        self._backend: Literal["gloo", "nccl"] = backend
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._on_failure = on_failure
        self._store: TCPStore = serve_store(host, port, timeout_s, listen_on=listen_on)
        self._policy_version = -1
        self._epoch = 0
        self._group: WeightGroup | None = None
        self._group_peers: list[bytes] = []
        self._sent_version = -1
        """Newest version that went through the group."""
        self._past: list[tuple[Rendezvous, int]] = []
        """Transfers whose keys are in the store still, with their world sizes."""
        self._standings: dict[bytes, Standing] = {}
        self._failed: dict[str, str] = {}
        self._buffer_lock = threading.Lock()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)

    # The training thread

    def start(self) -> None:
        """Begin to look for actors that are behind."""
        self._thread.start()

    @contextlib.contextmanager
    def writing(self) -> Iterator[WeightBuffer]:
        """The buffer, between two transfers: write the snapshot in this context, then `publish`."""
        with self._buffer_lock:
            yield self.buffer

    def publish(self, policy_version: int) -> None:
        """The buffer holds this version now: bring the actors to it."""
        with self._changed:
            self._policy_version = policy_version
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, within the deadline of the phase it is in."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(self._timeout_s + 1)
        self._drop_group()

    # The hub thread

    def joined(self, peer: bytes) -> None:
        """An actor is new, or came back: whatever it was sent before does not count."""
        with self._changed:
            self._standings.pop(peer, None)
            self._changed.notify_all()

    def handle(self, actor: str, message: WeightsStaged | WeightsCommitted) -> None:
        """What an actor says about an update."""
        with self._changed:
            # A report on an older epoch is about a transfer that was given up already.
            if isinstance(message, WeightsStaged) and message.error and message.epoch == self._epoch:
                self._failed[actor] = message.error
            self._changed.notify_all()

    # The publisher thread

    def _run(self) -> None:
        """Consumes: published versions, the members' versions. Waits for: somebody behind. Unblocked by: `publish`, a
        message of an actor, every `LOOK_S`. Produces: announcements and broadcasts."""
        try:
            while not self._is_closed:
                behind = self._behind()
                if behind:
                    self._update(behind)
                else:
                    with self._changed:
                        self._changed.wait(LOOK_S)
        except BaseException as error:  # noqa: BLE001  a dead publisher must raise in the training thread
            self._on_failure(error)

    def _behind(self) -> list[tuple[bytes, str]]:
        """Actors to bring to the newest version now."""
        now = time.monotonic()
        members = self._members()
        live = {peer for peer, _, _ in members}
        with self._changed:
            self._standings = {peer: standing for peer, standing in self._standings.items() if peer in live}
        behind = []
        for peer, name, version in members:
            standing = self._standings.setdefault(peer, Standing())
            if version >= self._policy_version:
                standing.failures = 0
                continue
            if standing.excluded_until > now:
                continue
            error = self._failed.pop(name, "")
            if error:
                standing.sent_version = -1
                self._exclude(peer, name, f"could not take the weights: {error}")
            elif standing.sent_version < self._policy_version:
                behind.append((peer, name))
            elif now - standing.sent_at > self._timeout_s:
                standing.sent_version = -1
                late = f"did not commit version {self._policy_version} within {self._timeout_s:g} s (weights.timeout_s)"
                self._exclude(peer, name, late)
        return behind

    def _update(self, behind: list[tuple[bytes, str]]) -> None:
        with self._buffer_lock:
            started = time.monotonic()
            policy_version = self._policy_version
            peers = [peer for peer, _ in behind]
            # The same version to the same members needs an epoch of its own: keys are never used twice.
            if self._group is None or peers != self._group_peers or policy_version == self._sent_version:
                self._begin_epoch()
            rendezvous = Rendezvous(self._store, epoch=self._epoch, policy_version=policy_version)
            self._announce(peers, policy_version)
            absent = self._wait_ready(behind, rendezvous)
            if not absent:
                # Not earlier: a member that is served by another member need not have seen the go yet when the learner's
                # part of the broadcast is over. Ready for this transfer, it has seen those before.
                self._forget_past()
            self._past.append((rendezvous, len(peers) + 1))
            for peer, name, why in absent:
                if why:
                    self._exclude(peer, name, why)
            if absent:
                self._begin_epoch()
                return
            try:
                self._broadcast(peers, rendezvous)
            except CollectiveError as error:
                # Who is to blame shows in the next round: the one that does not get ready.
                logger.warning("weights %d, epoch %d: %s; asking again who is there", policy_version, self._epoch, error)
                self._begin_epoch()
                return
            self._sent_version = policy_version
            now = time.monotonic()
            with self._changed:
                for peer in peers:
                    standing = self._standings.setdefault(peer, Standing())
                    standing.sent_version, standing.sent_at = policy_version, now
                num_excluded = sum(standing.excluded_until > now for standing in self._standings.values())
            self._record(
                "weights",
                policy_version=policy_version,
                publish_s=now - started,
                num_members=len(peers),
                num_excluded=num_excluded,
            )

    def _announce(self, peers: list[bytes], policy_version: int) -> None:
        for rank, peer in enumerate(peers, start=1):
            update = WeightUpdate(
                policy_version=policy_version,
                epoch=self._epoch,
                rank=rank,
                world_size=len(peers) + 1,
                store_host=self._host,
                store_port=self._store.port,
                backend=self._backend,
                bucket_bytes=self._bucket_bytes,
                timeout_s=self._timeout_s,
            )
            self._post(peer, update)

    def _wait_ready(self, behind: list[tuple[bytes, str]], rendezvous: Rendezvous) -> list[tuple[bytes, str, str]]:
        """The members that did not get ready, and why: nothing for those that left, or are kept waiting by `close`."""
        deadline = time.monotonic() + self._timeout_s
        waiting = dict(enumerate(behind, start=1))
        absent: list[tuple[bytes, str, str]] = []
        while waiting and not self._is_closed:
            live = {peer for peer, _, _ in self._members()}
            for rank, (peer, name) in list(waiting.items()):
                if rendezvous.is_ready(rank):
                    del waiting[rank]
                    continue
                error = self._failed.pop(name, "")
                if error or peer not in live or time.monotonic() > deadline:
                    late = f"did not enter epoch {self._epoch} within {self._timeout_s:g} s (weights.timeout_s)"
                    absent.append((peer, name, error or ("" if peer not in live else late)))
                    del waiting[rank]
            time.sleep(POLL_S)
        return absent + [(peer, name, "") for peer, name in waiting.values()]

    def _broadcast(self, peers: list[bytes], rendezvous: Rendezvous) -> None:
        rendezvous.set_go()
        if self._group is None:
            self._group = WeightGroup(
                self._store,
                epoch=self._epoch,
                rank=0,
                world_size=len(peers) + 1,
                backend=self._backend,
                timeout_s=self._timeout_s,
            )
            self._group_peers = peers
        self._group.broadcast(self.buffer.flat, self._bucket_bytes)

    def _exclude(self, peer: bytes, name: str, why: str) -> None:
        """Leave an actor out of updates for a while, twice as long each time in a row."""
        standing = self._standings.setdefault(peer, Standing())
        standing.failures += 1
        exclusion_s = min(LONGEST_EXCLUSION_S, 2.0**standing.failures)
        standing.excluded_until = time.monotonic() + exclusion_s
        detail = f"weights {self._policy_version}: {name} {why}; left out for {exclusion_s:g} s"
        logger.warning(detail)
        self._record("event", event="actor_excluded", actor=name, detail=detail)

    def _begin_epoch(self) -> None:
        """Give up the group; what its members still report about it is about nothing."""
        self._drop_group()
        self._epoch += 1
        self._failed.clear()

    def _forget_past(self) -> None:
        """Keep the store from growing with the run."""
        for rendezvous, world_size in self._past:
            rendezvous.clear(world_size)
        self._past.clear()

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None
        self._group_peers = []
