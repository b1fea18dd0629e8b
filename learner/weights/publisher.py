"""Brings new weights to the actors beside training, each phase with a deadline and an owner: collectives and pulls.

    training thread:  snapshot into a buffer, publish(version)
    publisher thread: who is behind? -> announce (WeightUpdate) -> wait ready -> go -> broadcast -> wait staged, committed
    server's thread:  who is new, or failed? -> announce (WeightPull), a few at a time -> chunks -> wait staged, committed

A member that does not get ready, does not commit, reports an error or is distrusted is named and left out for a while; then it
pulls. The others go on without it. Whoever has committed takes part in the collectives. Who has nothing of this learner's
pulls, unless nobody has: a run's first update is a collective.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch._C._distributed_c10d import TCPStore

from offbeat.common.collectives import POLL_S, CollectiveError, Rendezvous, WeightGroup, serve_store
from offbeat.common.rows import EventRow, Recorder, WeightsRow
from offbeat.common.weights import WRONG_CHECKSUM, WeightBuffer
from offbeat.learner.weights.editions import Edition, Editions
from offbeat.learner.weights.server import WeightServer
from offbeat.protocols.channels import Hub
from offbeat.protocols.messages import LearnerMessage, TensorSpec, WeightPull, WeightsCommitted, WeightsStaged, WeightUpdate

logger = logging.getLogger(__name__)

# How often the thread looks for actors that fell behind without telling.
LOOK_S = 0.05
RETRY_READY_S = 2.0
"""How long members have to get ready after a broadcast that broke: whoever is alive is waiting for just that."""
LONGEST_EXCLUSION_S = 60.0
"""Also how long an actor must do well before its failures are forgotten."""

Member = tuple[bytes, str, int]
"""Address, name and committed policy version of a live actor; -1: it has no weights of this learner process that it may use."""
Members = Callable[[], list[Member]]
Peers = list[tuple[bytes, str]]


@dataclass
class Standing:
    """What the publisher remembers about one actor (by its address, so a restarted one starts anew)."""

    sent_version: int = -1
    """Newest version that was broadcast to it, or that it pulled."""
    sent_at: float = 0.0
    needs_pull: bool = False
    """It failed since it last committed."""
    errors: int = 0
    """Collectives in a row that broke for it."""
    failures: int = 0
    """Exclusions in a row."""
    excluded_until: float = 0.0
    why: str = ""
    """Name and reason of the last failure."""


class Pull(NamedTuple):
    """An actor that is pulling."""

    name: str
    policy_version: int
    num_chunks: int
    begun_at: float
    is_announced: bool = False
    """`WeightPull` was posted, on the connection that the actor has now."""


class Behind(NamedTuple):
    """The actors to bring to a newer version now."""

    by_collective: Peers
    by_pull: list[Member]


class WeightPublisher:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        layout: tuple[TensorSpec, ...],
        members: Members,
        post: Callable[[bytes, LearnerMessage], None],
        record: Recorder,
        host: str,
        listen_on: str,
        port: int,
        backend: Literal["gloo", "nccl", "pull"],
        timeout_s: float,
        bucket_bytes: int,
        open_hub: Callable[[], Hub],
        chunk_bytes: int,
        max_pulls: int,
        max_pull_lag: Callable[[], int],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`open_hub` opens the weight server's socket. With the backend `pull`, actors that come while others still pull a
        version that is more than `max_pull_lag()` behind wait for the next one."""
        self._editions = Editions(layout)
        self._members = members
        self._post = post
        self._record = record
        self._host = host
        self._backend: Literal["gloo", "nccl", "pull"] = backend
        self._timeout_s = timeout_s
        self._in_time = f"within {timeout_s:g} s (weights.timeout_s)"
        self._bucket_bytes = bucket_bytes
        self._chunk_bytes = chunk_bytes
        self._max_pulls = max_pulls
        self._max_pull_lag = max_pull_lag
        self._on_failure = on_failure
        self._standings: dict[bytes, Standing] = {}
        self._news: list[tuple[str, str]] = []
        """Exclusions that were not told yet: name and detail."""
        self._changed = threading.Condition()
        """Guards what both threads use. Never held while something outside is called: the caller may hold its own locks."""
        self._is_closed = False

        self._store: TCPStore | None = None
        if backend != "pull":
            self._store = serve_store(host, port, timeout_s, listen_on=listen_on)
        self._epoch = 0
        self._group: WeightGroup | None = None
        self._group_peers: list[bytes] = []
        self._sent_version = -1
        """Newest version that went through the group."""
        self._is_retry = False
        """The last broadcast broke."""
        self._is_group_broken = False
        """A member of the last broadcast says that it broke."""
        self._in_collective: set[bytes] = set()
        """Members of the transfer that is under way."""
        self._distrusted: set[bytes] = set()
        """Actors that `distrust` named since it began: nobody waits for them."""
        self._past: list[tuple[Rendezvous, int]] = []
        """Transfers whose keys are in the store still, with their world sizes."""
        self._failed: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)

        self._pulls: dict[bytes, Pull] = {}
        self._lent: Edition | None = None
        """What they all pull; None when nobody does."""
        self._server = WeightServer(open_hub=open_hub, chunk_bytes=chunk_bytes, tend=self._tend_pulls, on_failure=on_failure)

    # The training thread

    def start(self) -> None:
        """Begin to look for actors that are behind."""
        self._server.start()
        if self._store is not None:
            self._thread.start()

    def writing(self) -> AbstractContextManager[WeightBuffer]:
        """A buffer that nobody reads: write the snapshot in this context, and `publish` in it or after it."""
        return self._editions.writing()

    def publish(self, policy_version: int) -> None:
        """The buffer holds this version now: bring the actors to it."""
        self._editions.publish(policy_version)
        with self._changed:
            self._changed.notify_all()
        self._server.wake()

    def close(self) -> None:
        """End the threads, within the deadline of the phase they are in."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(self._timeout_s + 1)
        self._server.close()
        if not self._thread.is_alive():
            self._drop_group()
        self._tell()

    def problems(self) -> list[str]:
        """One line for each actor that is left out, or pulling, for the operator."""
        now = time.monotonic()
        with self._changed:
            lines = [
                f"{standing.why}; no weights for another {standing.excluded_until - now:.0f} s"
                for standing in self._standings.values()
                if standing.excluded_until > now
            ]
            for peer, pull in self._pulls.items():
                num_requests = self._server.visitor(peer).num_requests
                lines.append(
                    f"{pull.name} pulls weights {pull.policy_version}: asked for {num_requests} of {pull.num_chunks} chunks"
                )
        if self._server.num_rejected:
            lines.append(f"the weight server got {self._server.num_rejected} messages that were no requests")
        return lines

    # The hub thread

    def joined(self, peer: bytes) -> None:
        """An actor is new, or came back: whatever it was sent before does not count."""
        with self._changed:
            self._standings.pop(peer, None)
            # The announcement may be lost. One that has begun goes on: it does not need the hub.
            if peer in self._pulls and not self._server.visitor(peer).num_requests:
                self._pulls[peer] = self._pulls[peer]._replace(is_announced=False)
            self._changed.notify_all()
        self._server.wake()

    def handle(self, actor: str, message: WeightsStaged | WeightsCommitted) -> None:
        """What an actor says about an update."""
        with self._changed:
            if isinstance(message, WeightsStaged) and message.epoch < 0:
                self._pull_staged(actor, message)
            # A report on an older epoch is about a transfer that was given up already.
            elif isinstance(message, WeightsStaged) and message.error and message.epoch == self._epoch:
                self._failed[actor] = message.error
            self._changed.notify_all()
        self._server.wake()

    def distrust(self, peer: bytes, name: str, why: str) -> None:
        """This actor does not sample with the weights that it reports: leave it out for a while, then have it pull.

        `members` must give it version -1 until it has committed what it pulls.
        """
        with self._changed:
            if peer in self._pulls:
                self._end_pull(peer)
            self._distrusted.add(peer)
            self._exclude(peer, name, why)
        self._server.wake()

    def _pull_staged(self, actor: str, message: WeightsStaged) -> None:
        for peer, pull in list(self._pulls.items()):
            if pull.name != actor or pull.policy_version != message.policy_version:
                continue
            self._end_pull(peer)
            if message.error:
                self._exclude(peer, actor, f"could not pull the weights: {message.error}")
                continue
            now = time.monotonic()
            standing = self._standings.setdefault(peer, Standing())
            standing.sent_version, standing.sent_at = pull.policy_version, now
            logger.info("weights %d: %s has pulled them in %.2f s", pull.policy_version, actor, now - pull.begun_at)

    # Both threads

    def _behind(self) -> Behind:
        """Whom to bring to the newest version now, and how. Those who are late are excluded."""
        members = self._members()
        newest = self._newest()
        now = time.monotonic()
        has_anyone = any(version >= 0 for _, _, version in members)
        behind = Behind([], [])
        with self._changed:
            live = {peer for peer, _, _ in members}
            self._standings = {peer: standing for peer, standing in self._standings.items() if peer in live}
            for peer, name, version in members:
                standing = self._standings.setdefault(peer, Standing())
                if version >= newest or version >= standing.sent_version >= 0:
                    standing.needs_pull = False
                    standing.errors = 0
                if peer in self._pulls or peer in self._in_collective:
                    continue
                error = self._failed.pop(name, "")
                if version >= newest or standing.excluded_until > now:
                    continue
                is_new = version < 0 and standing.sent_version < 0 and has_anyone
                pulls = standing.needs_pull or is_new or self._backend == "pull"
                standing.errors += bool(error)
                if error and (standing.errors > 1 or pulls or error.startswith(WRONG_CHECKSUM)):
                    self._exclude(peer, name, f"could not take the weights: {error}")
                elif error:
                    # A member that leaves or dies in mid-transfer breaks it for those behind it too: not theirs to answer for.
                    standing.sent_version = -1
                    self._is_group_broken = True
                elif version < standing.sent_version and (pulls or standing.sent_version == newest):
                    if now - standing.sent_at > self._timeout_s:
                        self._exclude(peer, name, f"did not commit version {standing.sent_version} {self._in_time}")
                elif pulls:
                    behind.by_pull.append((peer, name, version))
                else:
                    behind.by_collective.append((peer, name))
        return behind

    def _newest(self) -> int:
        return self._editions.current.policy_version

    def _exclude(self, peer: bytes, name: str, why: str) -> None:
        """Leave an actor out of updates for a while, twice as long each time in a row; afterwards it pulls."""
        now = time.monotonic()
        standing = self._standings.setdefault(peer, Standing())
        if now - standing.excluded_until > LONGEST_EXCLUSION_S:
            standing.failures = 0
        standing.failures += 1
        standing.sent_version = -1
        standing.needs_pull = True
        exclusion_s = min(LONGEST_EXCLUSION_S, 2.0**standing.failures)
        standing.excluded_until = now + exclusion_s
        standing.why = f"{name} {why}"
        detail = f"weights {self._newest()}: {name} {why}; left out for {exclusion_s:g} s"
        self._news.append((name, detail))

    def _tell(self) -> None:
        with self._changed:
            news, self._news = self._news, []
        for name, detail in news:
            logger.warning(detail)
            self._record(EventRow(event="actor_excluded", actor=name, detail=detail))

    # The server's thread

    def _tend_pulls(self) -> None:
        """End the pulls that are over, begin those that are due."""
        self._end_late_pulls()
        waiting = self._behind().by_pull
        self._tell()
        self._admit(waiting)
        self._announce_pulls()

    def _admit(self, waiting: list[Member]) -> None:
        with self._changed:
            num_free = self._max_pulls - len(self._pulls)
            if not waiting or num_free <= 0 or self._is_closed:
                return
            is_lent = self._lent is not None
        # Nobody else lends; that the last pull ends meanwhile does no harm.
        fresh = None if is_lent else self._take_edition()
        max_pull_lag = self._max_pull_lag()
        with self._changed:
            if fresh is not None:
                self._lent = fresh
                self._server.lend(fresh.policy_version, fresh.buffer.flat)
            lent = self._lent
            # An older one is good enough to begin with where the next collective brings the newest.
            if lent is None or (self._backend == "pull" and self._newest() - lent.policy_version > max_pull_lag):
                return
            num_chunks = -(-len(lent.buffer.flat) // self._chunk_bytes)
            able = [
                (peer, name)
                for peer, name, version in waiting
                if version < lent.policy_version and peer not in self._in_collective
            ]
            for peer, name in able[:num_free]:
                self._pulls[peer] = Pull(name, lent.policy_version, num_chunks, time.monotonic())
                self._server.admit(peer)
            if not self._pulls:
                self._take_back()

    def _announce_pulls(self) -> None:
        with self._changed:
            lent = self._lent
            if lent is None:
                return
            new = {peer: pull._replace(is_announced=True) for peer, pull in self._pulls.items() if not pull.is_announced}
            self._pulls.update(new)
        for peer, pull in new.items():
            logger.info("weights %d: %s pulls them", pull.policy_version, pull.name)
            announcement = WeightPull(
                policy_version=pull.policy_version,
                host=self._host,
                port=self._server.port,
                num_bytes=len(lent.buffer.flat),
                chunk_bytes=self._chunk_bytes,
                checksum=lent.checksum,
                timeout_s=self._timeout_s,
            )
            self._post(peer, announcement)

    def _take_edition(self) -> Edition:
        """The newest, to lend it. Training must find another buffer before."""
        self._editions.provide_spare()
        return self._editions.take()

    def _end_late_pulls(self) -> None:
        live = {peer: version for peer, _, version in self._members()}
        now = time.monotonic()
        with self._changed:
            for peer, pull in list(self._pulls.items()):
                visitor = self._server.visitor(peer)
                if peer not in live or live[peer] >= pull.policy_version:
                    self._end_pull(peer)
                elif now - visitor.asked_at > self._timeout_s:
                    self._end_pull(peer)
                    has_all = visitor.num_requests >= pull.num_chunks
                    failing = "did not commit" if has_all else "asked for no chunk of"
                    self._exclude(peer, pull.name, f"{failing} version {pull.policy_version} {self._in_time}")

    def _end_pull(self, peer: bytes) -> None:
        self._pulls.pop(peer)
        self._server.dismiss(peer)
        if not self._pulls:
            self._take_back()

    def _take_back(self) -> None:
        if self._lent is not None:
            self._server.withdraw()
            self._editions.give_back(self._lent)
            self._lent = None

    # The publisher thread

    def _run(self) -> None:
        """Consumes: published versions, the members' versions. Waits for: somebody behind. Unblocked by: `publish`, a
        message of an actor, every `LOOK_S`. Produces: announcements and broadcasts."""
        assert self._store is not None
        try:
            while not self._is_closed:
                behind = self._behind().by_collective
                if behind:
                    self._update(behind, self._store)
                else:
                    with self._changed:
                        self._changed.wait(LOOK_S)
        except BaseException as error:  # noqa: BLE001  a dead publisher must raise in the training thread
            self._on_failure(error)

    def _update(self, behind: Peers, store: TCPStore) -> None:
        started = time.monotonic()
        with self._changed:
            # The server's thread may have begun to serve one of them, the first commit of a run having come in between.
            behind = [(peer, name) for peer, name in behind if peer not in self._pulls]
            self._in_collective = {peer for peer, _ in behind}
            self._distrusted.clear()
        edition = self._editions.take()
        try:
            is_sent = bool(behind) and self._send(behind, edition, store)
        finally:
            self._editions.give_back(edition)
        now = time.monotonic()
        with self._changed:
            self._in_collective.clear()
            if not is_sent:
                return
            for peer, _ in behind:
                standing = self._standings.setdefault(peer, Standing())
                standing.sent_version, standing.sent_at = edition.policy_version, now
            num_excluded = sum(standing.excluded_until > now for standing in self._standings.values())
        row = WeightsRow(
            policy_version=edition.policy_version,
            publish_s=now - started,
            num_members=len(behind),
            num_excluded=num_excluded,
        )
        self._record(row)

    def _send(self, behind: Peers, edition: Edition, store: TCPStore) -> bool:
        """One collective; whether it took place."""
        policy_version = edition.policy_version
        peers = [peer for peer, _ in behind]
        # The same version to the same members needs an epoch of its own: keys are never used twice.
        is_fresh_needed = self._is_group_broken or policy_version == self._sent_version
        if self._group is None or peers != self._group_peers or is_fresh_needed:
            self._begin_epoch()
        rendezvous = Rendezvous(store, epoch=self._epoch, policy_version=policy_version)
        self._announce(peers, edition, store.port)
        absent = self._wait_ready(behind, rendezvous)
        if not absent:
            # Not earlier: a member that is served by another member need not have seen the go yet when the learner's
            # part of the broadcast is over. Ready for this transfer, it has seen those before.
            self._forget_past()
        self._past.append((rendezvous, len(peers) + 1))
        if absent:
            with self._changed:
                for peer, name, why in absent:
                    if why:
                        self._exclude(peer, name, why)
            self._begin_epoch()
            return False
        try:
            self._broadcast(peers, edition, rendezvous, store)
        except CollectiveError as error:
            # Who is to blame shows in the next round: the one that does not get ready.
            logger.warning("weights %d, epoch %d: %s; asking again who is there", policy_version, self._epoch, error)
            self._is_retry = True
            self._begin_epoch()
            return False
        self._is_retry = False
        self._sent_version = policy_version
        return True

    def _announce(self, peers: list[bytes], edition: Edition, store_port: int) -> None:
        assert self._backend != "pull"
        for rank, peer in enumerate(peers, start=1):
            update = WeightUpdate(
                policy_version=edition.policy_version,
                epoch=self._epoch,
                rank=rank,
                world_size=len(peers) + 1,
                store_host=self._host,
                store_port=store_port,
                backend=self._backend,
                bucket_bytes=self._bucket_bytes,
                checksum=edition.checksum,
                timeout_s=self._timeout_s,
            )
            self._post(peer, update)

    def _wait_ready(self, behind: Peers, rendezvous: Rendezvous) -> list[tuple[bytes, str, str]]:
        """The members that did not get ready, and why: nothing for those that left, or are kept waiting by `close`."""
        limit_s = min(self._timeout_s, RETRY_READY_S) if self._is_retry else self._timeout_s
        deadline = time.monotonic() + limit_s
        waiting = dict(enumerate(behind, start=1))
        absent: list[tuple[bytes, str, str]] = []
        while waiting and not self._is_closed:
            live = {peer for peer, _, _ in self._members()} - self._distrusted
            for rank, (peer, name) in list(waiting.items()):
                if rendezvous.is_ready(rank):
                    del waiting[rank]
                    continue
                error = self._failed.pop(name, "")
                if error or peer not in live or time.monotonic() > deadline:
                    within = f"within {limit_s:g} s of a broken broadcast" if self._is_retry else self._in_time
                    late = f"did not enter epoch {self._epoch} {within}"
                    absent.append((peer, name, error or ("" if peer not in live else late)))
                    del waiting[rank]
            time.sleep(POLL_S)
        return absent + [(peer, name, "") for peer, name in waiting.values()]

    def _broadcast(self, peers: list[bytes], edition: Edition, rendezvous: Rendezvous, store: TCPStore) -> None:
        assert self._backend != "pull"
        rendezvous.set_go()
        if self._group is None:
            self._group = WeightGroup(
                store,
                epoch=self._epoch,
                rank=0,
                world_size=len(peers) + 1,
                backend=self._backend,
                timeout_s=self._timeout_s,
            )
            self._group_peers = peers
        self._group.broadcast(edition.buffer.flat, self._bucket_bytes)

    def _begin_epoch(self) -> None:
        """Give up the group; what its members still report about it is about nothing."""
        self._drop_group()
        self._epoch += 1
        self._failed.clear()
        self._is_group_broken = False

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
