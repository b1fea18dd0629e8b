"""The actor's contact with the learner: hello and welcome, heartbeats, and what happens when the learner is silent."""

import contextlib
import importlib.metadata
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from offbeat.common.errors import ServiceError
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import weighted_reward
from offbeat.common.user_code.functions import hash_sources
from offbeat.protocols.channels import Link
from offbeat.protocols.message_parts import EngineInfo
from offbeat.protocols.messages import HEARTBEAT_S, ActorHeartbeat, ActorMessage, Hello, LearnerHeartbeat, Welcome
from offbeat.protocols.wire import Array, FromLearner, UnknownMessageError, VersionError

logger = logging.getLogger(__name__)

HELLO_INTERVAL_S = 1.0
"""Seconds between two hellos that are not answered."""
FIRST_LOG_WAITING_S = 3.0
"""Seconds after which an actor that waits for the learner says so for the first time, with the reason where it is known."""
LOG_WAITING_INTERVAL_S = 30.0
"""Seconds between two log lines of an actor that waits for the learner."""


class RefusedError(ServiceError):
    """The learner does not work with this actor, or does not answer; the text says why."""


class ActorIdentity(NamedTuple):
    """The names of one actor process."""

    name: str
    """Unique among live actors."""
    incarnation: int
    """Random, one for each process."""

    def peer(self) -> bytes:
        """Return the identity of the actor's connections."""
        return f"{self.name}/{self.incarnation:x}".encode()


class HeartbeatRepeater:
    """A thread that sends a heartbeat again and again while the actor's loop is busy with one long piece of work."""

    def __init__(self, send: Callable[[ActorMessage], bool], interval_s: float, clock: Callable[[], float]) -> None:
        self._send = send
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        """Held while a heartbeat is sent: the loop and this thread take turns at the connection."""
        self._heartbeat: ActorHeartbeat | None = None
        """The heartbeat to send during a long step of the loop; None while the loop is not busy."""
        self._ends_at = 0.0
        self._what = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def repeating(self, heartbeat: ActorHeartbeat | None, limit_s: float, what: str) -> Iterator[None]:
        """Repeat this heartbeat while the caller does `what`, at most for `limit_s`; None repeats nothing."""
        with self._lock:
            self._heartbeat, self._ends_at, self._what = heartbeat, self._clock() + limit_s, what
        try:
            yield
        finally:
            with self._lock:
                self._heartbeat = None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            with self._lock:
                if self._heartbeat is None:
                    continue
                if self._clock() < self._ends_at:
                    self._send(self._heartbeat)
                    continue
                self._heartbeat = None
                logger.error(
                    "%s has not ended in time: this actor hangs. It sends no more heartbeats, so the learner gives its work to "
                    "others. End the process, and look for the cause at its engine and its machine",
                    self._what,
                )


def receive_from_learner(link: Link, timeout_s: float, address: str) -> FromLearner | None:
    """Return the next message, or None at the timeout. Raise `RefusedError` for a learner of another major version."""
    try:
        return link.receive(timeout_s)
    except UnknownMessageError as error:
        # A newer learner expects no answer to messages that this version does not know.
        logger.debug("ignored: %s", error)
        return None
    except VersionError as error:
        raise RefusedError(f"the learner at {address}: {error}") from error


class LearnerContact:
    """The actor's side of the handshake. Everything between actor and hub goes through it."""

    def __init__(
        self,
        link: Link,
        identity: ActorIdentity,
        config: Config,
        engine: EngineInfo,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._identity = identity
        self._config = config
        self._engine = engine
        self._clock = clock
        self._software = importlib.metadata.version("offbeat")
        self._sources = hash_sources(config.task.environment or config.task.reward)
        self._address = config.hub.address
        self.is_welcome = False
        """True while the learner is believed to know this actor."""
        self._run_id: str | None = None
        self._learner_incarnation: int | None = None
        self.newest_lease_id: int | None = None
        """The learner's newest lease for this actor, as its last heartbeat said."""
        now = clock()
        self._heard_at = now
        self._searching_since = now
        self._hello_at = float("-inf")
        self._heartbeat_at = float("-inf")
        self._log_waiting_at = now + FIRST_LOG_WAITING_S
        self._heartbeat: ActorHeartbeat | None = None
        """The last one sent."""
        self._repeater = HeartbeatRepeater(link.send, HEARTBEAT_S, clock)

    def send(self, message: ActorMessage, *arrays: Array) -> bool:
        """Queue a message. Return False when there is no connection now."""
        return self._link.send(message, *arrays)

    def receive(self, timeout_s: float) -> FromLearner | None:
        """Return the next message, or None at the timeout; raise as `receive_from_learner`."""
        received = receive_from_learner(self._link, timeout_s, self._address)
        if received is not None:
            self._heard_at = self._clock()
        return received

    def accept(self, welcome: Welcome) -> bool:
        """Take note that the learner admitted this actor. Return True when it is another process than the one before."""
        is_another = self._learner_incarnation not in (None, welcome.learner_incarnation)
        if not self.is_welcome:
            logger.info("joined run %s at policy version %d", welcome.run_id, welcome.policy_version)
        self.is_welcome = True
        self._run_id = welcome.run_id
        self._learner_incarnation = welcome.learner_incarnation
        # The hello listed all leases held here. The learner takes back the others itself, and counts anew.
        self.newest_lease_id = None
        return is_another

    def note_heartbeat(self, heartbeat: LearnerHeartbeat) -> None:
        """Remember the newest lease that the learner sent to this actor."""
        self.newest_lease_id = None if heartbeat.newest_lease_id < 0 else heartbeat.newest_lease_id

    def lose(self) -> None:
        """Start to look for the learner again."""
        # Since now, not since the last message: an actor that was suspended must not give up before it has looked.
        self._searching_since = self._clock()
        self._log_waiting_at = self._searching_since + FIRST_LOG_WAITING_S
        self.is_welcome = False

    def reconnect_if_silent(self) -> None:
        """Give up a connection on which nothing was heard for `hub.dead_after_s`."""
        silent_s = self._clock() - self._heard_at
        if self.is_welcome and silent_s > self._config.hub.dead_after_s:
            logger.warning("the learner at %s is silent for %.1f s", self._address, silent_s)
            # The connection may be half open, or closed to this actor's key. A new one shows which.
            self._link.reconnect()
            self.lose()

    def say_hello(self, lease_ids: tuple[int, ...]) -> None:
        """Send a hello when one is due. Raise `RefusedError` after `actor.connect_timeout_s` without a welcome."""
        now = self._clock()
        self._check_patience(now - self._searching_since)
        if now - self._hello_at < HELLO_INTERVAL_S:
            return
        self._link.follow()
        hello = Hello(
            actor=self._identity.name,
            incarnation=self._identity.incarnation,
            engine=self._engine,
            temperature=self._config.rollout.temperature,
            reward=weighted_reward(self._config.task),
            software=self._software,
            run_id=self._run_id or "",
            lease_ids=lease_ids,
            sources=self._sources,
        )
        if self._link.send(hello):
            self._hello_at = now

    def is_heartbeat_due(self) -> bool:
        """Return True when the next heartbeat is due."""
        return self._clock() - self._heartbeat_at >= HEARTBEAT_S

    def send_heartbeat(self, heartbeat: ActorHeartbeat) -> None:
        """Send a heartbeat; the next one is due `HEARTBEAT_S` later."""
        self._heartbeat_at = self._clock()
        self._heartbeat = heartbeat
        self._link.send(heartbeat)

    @contextlib.contextmanager
    def busy(self, limit_s: float, what: str) -> Iterator[None]:
        """Repeat the last heartbeat while the caller does `what`, which may take long, and leaves this object alone.

        After `limit_s` the heartbeats end, with an error in the log: the learner must find an actor that hangs.
        """
        began = self._clock()
        with self._repeater.repeating(self._heartbeat if self.is_welcome else None, limit_s, what):
            yield
        # Nobody has read messages meanwhile, so this was no silence of the learner.
        self._heard_at += self._clock() - began

    def close(self) -> None:
        """End the thread that repeats heartbeats."""
        self._repeater.close()

    def _check_patience(self, searching_s: float) -> None:
        limit_s = self._config.actor.connect_timeout_s
        if limit_s and searching_s > limit_s:
            cure = self._link.refusal() or "start `offbeat learner`, or correct hub.address"
            raise RefusedError(
                f"no learner answered at {self._address} for {searching_s:.0f} s (actor.connect_timeout_s): {cure}"
            )
        if self._clock() >= self._log_waiting_at:
            self._log_waiting_at = self._clock() + LOG_WAITING_INTERVAL_S
            refusal = self._link.refusal()
            reason = "" if refusal is None else f": {refusal}"
            logger.info("waiting for the learner at %s, %.0f s so far%s", self._address, searching_s, reason)
