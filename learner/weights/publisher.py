"""Sends new weights to the actors while training goes on; one slow or broken actor never holds up the others.

    training thread:  snapshot into a buffer, publish(version)
    publisher thread: behind? -> announce (WeightUpdate) -> wait ready -> go -> broadcast -> wait staged, committed
    server's thread:  new, or failed? -> announce (WeightPull), a few at a time -> chunks -> wait staged, committed
    hub's thread:     joined, handle, distrust, problems

Each phase has a deadline. An actor that misses one, reports an error or is distrusted is reported and skipped for a while;
then it pulls the weights. Every actor that has committed a version takes part in the collectives. An actor without weights of
this learner pulls, unless no actor has any: the first update of a run is a collective. Actors that a collective cannot reach
pull, and so do all actors for a while after collectives failed for no known reason.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Protocol

from offbeat.common.errors import pass_on
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.rows import EventRow, PullRow, Recorder, WeightsRow
from offbeat.common.weights.flat import WeightBuffer
from offbeat.learner.weights.actor_versions import ActorVersions, Recipient
from offbeat.learner.weights.collective import BroadcastOutcome, CollectiveUpdates, FailedEpochs, choose_peers
from offbeat.learner.weights.double_buffer import DoubleBuffer
from offbeat.learner.weights.pulls import PullService
from offbeat.learner.weights.server import WeightServer
from offbeat.learner.weights.transport import Transport
from offbeat.protocols.channels import Hub
from offbeat.protocols.messages import LearnerMessage, TensorSpec, WeightsCommitted, WeightsStaged

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""Longest time between two looks for actors that fell behind without telling."""


class Subscribers(Protocol):
    """The publisher's way to the actors; its threads call it without holding the publisher's lock."""

    def recipients(self) -> list[Recipient]:
        """Return the live actors, with the versions that they committed."""
        ...

    def post(self, peer: bytes, message: LearnerMessage) -> None:
        """Send a message to the actor at this address."""
        ...

    def fail(self, error: BaseException) -> None:
        """Make the training thread raise what ended one of the publisher's threads."""
        ...


class WeightPublisher:
    """Decides which actor gets which version when, and by which transport."""

    def __init__(
        self,
        *,
        layout: tuple[TensorSpec, ...],
        transport: Transport,
        open_hub: Callable[[], Hub],
        max_pull_lag: Callable[[], int],
        record: Recorder,
    ) -> None:
        """
        Args:
            open_hub: Opens the weight server's socket.
            max_pull_lag: Returns the largest lag, in optimizer steps, at which an actor that no collective reaches still begins
                to pull the version that others are pulling; otherwise it waits for the next one.
            record: Writes a metrics row.
        """
        self._transport = transport
        self._max_pull_lag = max_pull_lag
        self._record = record
        self._snapshots = DoubleBuffer(layout, None if transport.gpu is None else transport.gpu.number)
        self._changed = threading.Condition()
        """Guards what several threads use. Never held while something outside is called: the caller may hold its own locks."""
        self._closing = threading.Event()
        self._actor_versions = ActorVersions(transport.timeout_s)
        self._failed = FailedEpochs()
        self._reach = choose_peers([], transport)
        self._advice: str | None = None
        """Advice to the operator about NCCL's settings."""
        self._server = WeightServer(open_hub=open_hub, chunk_bytes=transport.chunk_bytes)
        self._pulls = PullService(self._snapshots, self._server, transport)
        self._collective = CollectiveUpdates(transport, self._closing) if transport.backend != "pull" else None
        self._in_collective: set[bytes] = set()
        """Actors in the transfer that is under way."""
        self._distrusted: set[bytes] = set()
        """Actors that `distrust` named since that transfer began: nobody waits for them."""
        self._pull_rows: list[PullRow] = []
        """Pulls that ended since the last `_tell`."""
        self._num_delta_errors = 0
        """Pulls of all weights because differences failed."""
        self._actors: Subscribers | None = None
        self._thread: threading.Thread | None = None

    # The training thread

    def start(self, actors: Subscribers) -> None:
        """Begin to look for actors that are behind."""
        self._actors = actors
        self._server.start(tend=lambda: self._tend_pulls(actors), on_failure=actors.fail)
        if self._collective is not None:
            arguments = (actors, self._collective)
            self._thread = threading.Thread(target=self._run, args=arguments, name="weight-publisher", daemon=True)
            self._thread.start()

    def writing(self) -> AbstractContextManager[WeightBuffer]:
        """Return a buffer that nobody reads: write the snapshot in this context, and `publish` in it or after it."""
        return self._snapshots.writing()

    def publish(self, policy_version: int) -> None:
        """Bring the actors to this version, which is in the buffer now."""
        self._snapshots.publish(policy_version)
        with self._changed:
            self._changed.notify_all()
        self._server.wake()

    def wait_until_taken(self, stop: StopRequest) -> None:
        """Wait until all live actors have the newest version. Unblocked by: commits, exclusions, `stop`, `close`."""
        while self._actors is not None and not stop and not self._closing.is_set():
            recipients = self._actors.recipients()
            newest = self._snapshots.newest_version
            with self._changed:
                if newest is None or not self._actor_versions.lacking(recipients, newest):
                    return
                self._changed.wait(LOOK_S)

    def close(self) -> None:
        """End the threads, within the deadline of the phase they are in."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self._transport.timeout_s + 1)
        self._server.close()
        if self._collective is not None and not (self._thread is not None and self._thread.is_alive()):
            self._collective.close()
        self._tell()

    # The hub's thread

    def problems(self) -> list[str]:
        """Return one line for each actor that is left out, or pulling, for the operator."""
        with self._changed:
            lines = self._actor_versions.problems() + self._pulls.problems()
            lines += [line for line in (self._failed.pause(), self._advice) if line is not None]
        if self._server.num_rejected:
            lines.append(f"the weight server got {self._server.num_rejected} messages that were no requests")
        if self._num_delta_errors:
            lines.append(f"differences of weights failed {self._num_delta_errors} times; the actors pulled all weights instead")
        return lines

    def joined(self, peer: bytes) -> None:
        """Forget what was sent to an actor: it is new, or came back."""
        with self._changed:
            self._actor_versions.forget(peer)
            # The announcement may be lost.
            self._pulls.announce_again(peer)
            self._changed.notify_all()
        self._server.wake()

    def handle(self, actor: str, message: WeightsStaged | WeightsCommitted) -> None:
        """Take an actor's report on an update."""
        with self._changed:
            if isinstance(message, WeightsStaged) and message.epoch < 0:
                self._end_staged_pull(actor, message)
            elif isinstance(message, WeightsStaged) and message.error and self._collective is not None:
                self._collective.report(actor, message.epoch, message.error)
            self._changed.notify_all()
        self._server.wake()

    def distrust(self, peer: bytes, name: str, why: str) -> None:
        """Leave out an actor that does not sample with the weights that it reports, then have it pull.

        `Subscribers.recipients` must give it no version until it has committed what it pulls.
        """
        with self._changed:
            if peer in self._pulls:
                self._pulls.end(peer)
            self._distrusted.add(peer)
            self._actor_versions.exclude(peer, name, why)
        self._server.wake()

    def _end_staged_pull(self, actor: str, message: WeightsStaged) -> None:
        ended = self._pulls.end_staged(actor, message)
        if ended is None:
            return
        peer, row = ended
        if message.error:
            self._actor_versions.exclude(peer, actor, f"could not pull the weights: {message.error}")
            return
        self._actor_versions.note_sent(peer, row.policy_version)
        self._pull_rows.append(row)
        self._num_delta_errors += row.delta_error is not None

    # The publisher's and the server's thread

    def _settle(self, recipients: Sequence[Recipient]) -> None:
        """Bring the actor_versions up to date: actors that left, committed, failed, or are late."""
        newest = self._snapshots.newest_version
        if newest is None:
            return
        with self._changed:
            self._failed.settle({recipient.peer for recipient in recipients})
            self._actor_versions.settle(recipients, newest, self._eligible(recipients))
            idle = self._idle(recipients)
            if self._collective is not None:
                self._settle_errors(idle, newest, self._collective)
            self._actor_versions.exclude_late(idle, newest)
        self._tell()

    def _eligible(self, recipients: Sequence[Recipient]) -> Set[bytes]:
        """Return the actors that the collective can reach now."""
        self._reach = choose_peers(recipients, self._transport)
        return frozenset() if self._failed.pause() is not None else self._reach.peers

    def _settle_errors(self, recipients: Sequence[Recipient], newest: int, collective: CollectiveUpdates) -> None:
        for recipient in recipients:
            error = collective.take_error(recipient.name)
            if error and self._actor_versions.note_break(recipient, error, newest):
                collective.distrust_group()

    def _behind(self, recipients: Sequence[Recipient], *, by_pull: bool) -> list[Recipient]:
        """Return the actors to bring to the newest version now by this transport."""
        newest = self._snapshots.newest_version
        if newest is None:
            return []
        with self._changed:
            return self._actor_versions.behind(self._idle(recipients), newest, by_pull=by_pull)

    def _idle(self, recipients: Sequence[Recipient]) -> list[Recipient]:
        """Return those that are in no transfer."""
        return [one for one in recipients if one.peer not in self._pulls and one.peer not in self._in_collective]

    def _tell(self) -> None:
        """Log and record the exclusions and the pulls that ended."""
        with self._changed:
            news = self._actor_versions.take_news()
            pulls, self._pull_rows = self._pull_rows, []
        for pull in pulls:
            if pull.delta_error:
                logger.warning(
                    "weights %d: %s could not use differences: %s", pull.policy_version, pull.actor, pull.delta_error
                )
            sizes = (pull.sent_bytes / 1e6, pull.full_bytes / 1e6)
            logger.info(
                "weights %d: %s has pulled %.3f MB for %.3f MB in %.2f s", pull.policy_version, pull.actor, *sizes, pull.pull_s
            )
            self._record(pull)
        for name, why, seconds in news:
            detail = f"weights {self._snapshots.newest_version}: {name} {why}; left out for {seconds:g} s"
            logger.warning(detail)
            self._record(EventRow(event="actor_excluded", actor=name, detail=detail))

    # The server's thread

    def _tend_pulls(self, actors: Subscribers) -> None:
        """End the pulls that are over, begin those that are due."""
        recipients = actors.recipients()
        with self._changed:
            self._pulls.end_obsolete(recipients)
            for peer, name, why in self._pulls.late():
                self._pulls.end(peer)
                self._actor_versions.exclude(peer, name, why)
        self._settle(recipients)
        self._begin_pulls(self._behind(recipients, by_pull=True))
        with self._changed:
            announcements = self._pulls.announce()
        for peer, announcement in announcements:
            actors.post(peer, announcement)

    def _begin_pulls(self, waiting: Sequence[Recipient]) -> None:
        with self._changed:
            if not waiting or self._pulls.num_free <= 0 or self._closing.is_set():
                return
            is_lent = self._pulls.lent_version is not None
        # Nobody else lends. It does no harm if the last pull ends meanwhile.
        borrowed = None if is_lent else self._pulls.borrow()
        max_lag = self._max_pull_lag()
        with self._changed:
            if borrowed is not None:
                self._pulls.lend(borrowed)
            lent, newest = self._pulls.lent_version, self._snapshots.newest_version
            has_aged = lent is not None and newest is not None and newest - lent > max_lag
            # An older version is good enough to begin with where the next collective brings the newest.
            able = [one for one in waiting if not has_aged or self._actor_versions.is_eligible(one)]
            self._pulls.admit([one for one in able if one.peer not in self._in_collective])

    # The publisher's thread

    def _run(self, actors: Subscribers, collective: CollectiveUpdates) -> None:
        """Consumes: published versions, the actors' versions. Waits for: an actor that is behind. Unblocked by: `publish`, a
        message of an actor, every `LOOK_S`. Produces: announcements and broadcasts."""
        try:
            while not self._closing.is_set():
                recipients = actors.recipients()
                self._settle(recipients)
                behind = self._behind(recipients, by_pull=False)
                if behind:
                    self._update(behind, actors, collective)
                else:
                    with self._changed:
                        self._changed.wait(LOOK_S)
        except BaseException as error:  # noqa: BLE001  a dead publisher must raise in the training thread
            pass_on(error, actors.fail)

    def _update(self, behind: Sequence[Recipient], actors: Subscribers, collective: CollectiveUpdates) -> None:
        started = time.monotonic()
        with self._changed:
            # The server's thread may have begun to serve one of them, the first commit of a run having come in between.
            members = [recipient for recipient in behind if recipient.peer not in self._pulls]
            self._in_collective = {recipient.peer for recipient in members}
            self._distrusted.clear()
        if not members:
            return
        snapshot = self._snapshots.take()

        def live() -> set[bytes]:
            return {recipient.peer for recipient in actors.recipients()} - self._distrusted

        try:
            transfer = collective.send(members, snapshot, self._reach.backend, live=live, post=actors.post)
        finally:
            self._snapshots.give_back(snapshot)
        with self._changed:
            self._in_collective.clear()
            for recipient, why in transfer.absent:
                if why is not None:
                    self._actor_versions.exclude(recipient.peer, recipient.name, why)
            for recipient in members if transfer.is_sent else ():
                # One that was distrusted meanwhile is left out, and not late.
                if recipient.peer not in self._distrusted:
                    self._actor_versions.note_sent(recipient.peer, snapshot.policy_version)
            pause = self._count_failure(members, transfer)
            self._advice = transfer.advice or self._advice
            num_excluded = self._actor_versions.num_excluded
        for event, text in (("collectives_paused", pause), ("nccl_transports_avoided", transfer.advice)):
            if text is not None:
                detail = f"weights {snapshot.policy_version}: {text}"
                logger.warning(detail)
                self._record(EventRow(event=event, detail=detail))
        if not transfer.is_sent:
            return
        row = WeightsRow(
            policy_version=snapshot.policy_version,
            publish_s=time.monotonic() - started,
            num_members=len(members),
            num_excluded=num_excluded,
        )
        self._record(row)

    def _count_failure(self, members: Sequence[Recipient], transfer: BroadcastOutcome) -> str | None:
        """Count a broadcast that failed with everybody ready; return the reason when actors begin to pull for it."""
        if transfer.error is not None:
            self._failed.note([recipient.peer for recipient in members], transfer.error)
            return self._failed.pause()
        if transfer.is_sent:
            self._failed.clear()
        else:
            self._failed.explain()
        return None
