"""The sockets: one ROUTER in the learner (`Hub`), one DEALER in each actor (`Link`).

With keys both ends are authenticated and the traffic is encrypted (CURVE), and a recorded byte stream is worth nothing: its
keys were of that connection only. Without keys a hub binds to loopback only.
"""

import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, cast

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from offbeat.protocols.addresses import ChannelError, is_loopback
from offbeat.protocols.keys import NO_KEYS, AllowList, KeyPair, PublicKey, Sender
from offbeat.protocols.messages import Ack, ActorMessage, LearnerMessage, Refused
from offbeat.protocols.wire import (
    MAX_FRAMES,
    Array,
    Frame,
    FromActor,
    FromLearner,
    UnknownMessageError,
    VersionError,
    WireError,
    decode_from_actor,
    decode_from_learner,
    encode,
    refusal_for,
)

logger = logging.getLogger(__name__)

# Copying is cheaper than zero-copy bookkeeping below this size.
COPY_THRESHOLD_BYTES = 65536
SEND_QUEUE_MESSAGES = 10_000
RECEIVE_QUEUE_MESSAGES = 32
"""Of each connection at the hub: as the size of messages is bounded, so is what one that floods can make it hold."""
HANDSHAKE_S = 10.0
"""A connection that has not said who it is after so long is closed."""
RETRY_S = 1.0
"""Seconds before a link that was turned away tries again."""
MAX_MALFORMED = 100
"""Who sends so many malformed messages in a row is not listened to for `MUTE_S`."""
MAX_REFUSED = 1000
"""Nor is who gets so many answers in a row that refuse what it sent."""
MUTE_S = 60.0
MAX_REMEMBERED = 16_384
"""Peers that the hub remembers anything about; the one longest unheard of is forgotten first."""
MAX_DROPS_AT_ONCE = 1000
"""Messages that one `receive` drops: a flood must not keep its caller from everything else."""
MAX_DROP_KINDS = 1000
ZAP_DOMAIN = "offbeat"

_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Received(NamedTuple):
    """One message at the hub, or the reason why it was none."""

    peer: bytes
    packet: FromActor | WireError
    sender: Sender = NO_KEYS


class Hub:
    """The learner's end. `wake` may be called from any thread; all else from one. `allowed` goes with `key`."""

    def __init__(
        self, bind: str, *, max_message_bytes: int, key: KeyPair | None = None, allowed: AllowList | None = None
    ) -> None:
        assert (key is None) == (allowed is None), "keys without an allow-list, or the reverse"
        self.num_dropped: Counter[str] = Counter()
        """Messages that were not even decoded, by `name: reason`; the names of peers beyond a bound are `others`."""
        self._num_refused = 0
        self._allowed = allowed
        self._keys_of: dict[bytes, bytes] = {}
        # By key, or by peer where there are no keys.
        self._num_malformed: dict[bytes, int] = {}
        self._num_refusals: dict[bytes, int] = {}
        """Refusals since the last group of this sender that was accepted."""
        self._muted_until: dict[bytes, float] = {}
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
        # A peer that went away must raise, not swallow messages.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if key is not None and allowed is not None:
            self._demand_keys(key, allowed)
        self._monitor = _watch(self._socket, _HANDSHAKE_FAILED)
        try:
            if not (is_loopback(bind) or key is not None or not bind.startswith("tcp://")):
                raise ChannelError(
                    f"hub.bind: {bind} can be reached from other machines, and without keys whoever reaches it can send "
                    "rollouts. Make keys with `offbeat keygen`, or bind tcp://127.0.0.1:PORT."
                )
            self._socket.bind(bind)
        except (ChannelError, zmq.ZMQError) as error:
            self._close(linger_ms=0)
            if isinstance(error, ChannelError):
                raise
            raise ChannelError(
                f"hub.bind: cannot bind {bind}: {error.strerror}. Stop the process that uses it, or set hub.address "
                "(and hub.bind) to another port."
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The address really bound, with its port."""
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakened, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    @property
    def num_refused(self) -> int:
        """Connections that were turned away: without a key, with one that is not allowed, or not offbeat's at all."""
        self._count_refused()
        return self._num_refused

    def wake(self) -> None:
        """End a `receive` that waits."""
        # A full buffer means that it is already awake.
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"!")

    def wait(self, timeout_s: float) -> None:
        """Until a message arrives, `wake` is called or the time is over."""
        ready = dict(self._poller.poll(round(timeout_s * 1000)))
        if self._wakened.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                while self._wakened.recv(4096):
                    pass
        if self._monitor in ready:
            self._count_refused()

    def receive(self) -> Received | None:
        """The next message, or None when there is none now. What need not be decoded to be wrong is counted and dropped."""
        for _ in range(MAX_DROPS_AT_ONCE):
            try:
                head = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            frames = self._rest(head)
            peer = who = head.bytes
            sender = NO_KEYS
            if self._allowed is not None:
                who = cast(str, head.get("User-Id")).encode()
                _remember(self._keys_of, peer, who)
                # The handshake looked at the list as it was then.
                allowed = self._allowed.sender(who)
                if allowed is None:
                    self._drop(who.decode(), "its key was revoked")
                    continue
                sender = allowed
            if self._muted_until and self._is_muted(who):
                self._drop(sender.name if sender.role else _printable(peer), "not listened to after a flood of bad messages")
                continue
            return Received(peer, self._decode(peer, who, frames), sender)
        return None

    def send(self, peer: bytes, message: LearnerMessage, *arrays: Array) -> bool:
        """Queue a message; False when the peer is gone, its queue is full, or its key is not allowed any more."""
        if self._allowed is not None and self._allowed.sender(self._keys_of.get(peer, b"")) is None:
            return False
        if isinstance(message, Ack | Refused):
            self._judge(self._keys_of.get(peer, peer), is_refusal=isinstance(message, Refused) or message.outcome != "accepted")
        return self._send([peer, *encode(message, *arrays)])

    def close(self) -> None:
        """Send what is queued (half a second at most) and free the port."""
        self._waker.close()
        self._wakened.close()
        self._close(linger_ms=500)

    def __enter__(self) -> "Hub":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _demand_keys(self, key: KeyPair, allowed: AllowList) -> None:
        self._authenticator = ThreadAuthenticator(self._context, log=logging.getLogger("zmq.auth"))
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            domain=ZAP_DOMAIN, credentials_provider=_Doorkeeper(allowed, self._is_muted)
        )
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, key.owner.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        self._socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # If ever nobody answers for the domain, handshakes fail; otherwise whoever knows the public key would be let in.
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def _rest(self, head: zmq.Frame) -> list[zmq.Frame]:
        """The frames behind the first; of a message that is too long, enough to see that."""
        frames: list[zmq.Frame] = []
        more = head.more
        while more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            more = frame.more
            if len(frames) <= MAX_FRAMES:
                frames.append(frame)
        return frames

    def _decode(self, peer: bytes, who: bytes, frames: list[zmq.Frame]) -> FromActor | WireError:
        try:
            packet = decode_from_actor([frame.buffer for frame in frames])
        except UnknownMessageError as error:
            return error
        except WireError as error:
            self._count_bad(who, self._num_malformed, MAX_MALFORMED)
            if isinstance(error, VersionError):
                self._send([peer, *refusal_for(error)])
            return error
        if self._num_malformed:
            self._num_malformed.pop(who, None)
        return packet

    def _judge(self, who: bytes, *, is_refusal: bool) -> None:
        if is_refusal:
            self._count_bad(who, self._num_refusals, MAX_REFUSED)
        elif self._num_refusals:
            self._num_refusals.pop(who, None)

    def _count_bad(self, who: bytes, numbers: dict[bytes, int], limit: int) -> None:
        number = numbers.pop(who, 0) + 1
        if number < limit:
            _remember(numbers, who, number)
        else:
            _remember(self._muted_until, who, time.monotonic() + MUTE_S)

    def _is_muted(self, who: bytes) -> bool:
        """Also called in mid-handshake: who is cut off for rubbish does not get back in with more of it."""
        return time.monotonic() < self._muted_until.get(who, 0.0)

    def _send(self, frames: list[Frame]) -> bool:
        try:
            # What `send_multipart` does, at half its price: it computes with enums for each frame.
            for frame in frames[:-1]:
                self._socket.send(frame, _NOBLOCK_MORE)
            self._socket.send(frames[-1], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def _drop(self, name: str, reason: str) -> None:
        kind = f"{name}: {reason}"
        is_counted = kind in self.num_dropped or len(self.num_dropped) < MAX_DROP_KINDS
        self.num_dropped[kind if is_counted else f"others: {reason}"] += 1

    def _count_refused(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._monitor.recv_multipart(zmq.NOBLOCK):
                self._num_refused += 1

    def _close(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


class Link:
    """The end of an actor or an operator; one thread. `learner_key` (its public key) goes with `key`."""

    def __init__(
        self,
        address: str,
        *,
        identity: bytes,
        max_message_bytes: int,
        key: KeyPair | None = None,
        learner_key: PublicKey | None = None,
    ) -> None:
        assert (key is None) == (learner_key is None), "a key without the learner's, or the reverse"
        self._address = address
        self._owner = None if key is None else key.owner
        self._refusal = ""
        self._is_given_up = False
        self._connected_at = time.monotonic()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
        # Without a connection a send fails at once: what is unacknowledged waits in the outbox, not in the socket.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        if key is not None and learner_key is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, learner_key.public)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, key.owner.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        self._monitor = _watch(self._socket, _HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._close(linger_ms=0)
            raise ChannelError(
                f"hub.address: cannot use {address!r}: {error.strerror}. It must look like tcp://host:port."
            ) from error

    def send(self, message: ActorMessage, *arrays: Array) -> bool:
        """Queue a message; False when there is no connection now (`refusal` may know why)."""
        frames = encode(message, *arrays)
        large = sum(len(frame) for frame in frames) > COPY_THRESHOLD_BYTES
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=not large)
        except zmq.Again:
            self._look()
            return False
        return True

    def receive(self, timeout_s: float = 0.0) -> FromLearner | None:
        """The next message, or None when none came in time; `WireError` for a learner of another version."""
        if not self._socket.poll(round(timeout_s * 1000), zmq.POLLIN):
            return None
        return decode_from_learner(self._socket.recv_multipart(zmq.NOBLOCK))

    def refusal(self) -> str:
        """Why the learner turns this end away, and what to do; empty while it does not, or nobody answers.

        The link goes on trying as long as `send` or this is called: what is mended at the learner needs no restart here.
        """
        self._look()
        return self._refusal

    def reconnect(self) -> None:
        """Give up the connection for a new one. What was sent or received through it and is not read yet may be lost."""
        self._is_given_up = False
        self._connected_at = time.monotonic()
        self._socket.disconnect(self._address)
        self._socket.connect(self._address)

    def close(self) -> None:
        """Send what is queued (a second at most) and disconnect."""
        self._close(linger_ms=1000)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _look(self) -> None:
        """See what became of the last handshakes."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                self._refusal = self._explain(int(event["event"]), int(event["value"]))
                # The library tries again by itself only when it was not told why.
                self._is_given_up = bool(self._refusal) and event["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        if self._is_given_up and time.monotonic() - self._connected_at >= RETRY_S:
            self.reconnect()

    def _explain(self, event: int, value: int) -> str:
        learner = f"the learner at {self._address}"
        wants_keys = "set hub.key, hub.learner_key and hub.allowed_keys (`offbeat keygen` makes the files)"
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return ""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and self._owner is not None:
            line = self._owner.line()
            return f"{learner} does not know the key of this {self._owner.role}: add the line `{line}` to its hub.allowed_keys"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if value != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return f"what answers at {self._address} is no learner: correct hub.address"
            if self._owner is None:
                return f"{learner} demands keys, and this side has none: {wants_keys}"
            return f"{learner} works without keys, and this side has one: {wants_keys} for the learner too"
        if self._owner is None:
            return f"{learner} breaks off the handshake: it demands keys ({wants_keys}), is no learner, or ended just now"
        causes = "hub.learner_key is not its public key, it works without keys, or it ended just now"
        return f"{learner} breaks off the handshake: {causes}"

    def _close(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        self._context.term()


class _Doorkeeper:
    """What the library asks in mid-handshake, on a thread of its own."""

    def __init__(self, allowed: AllowList, is_muted: Callable[[bytes], bool]) -> None:
        self._allowed = allowed
        self._is_muted = is_muted
        self._told: set[bytes] = set()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of this public key may connect."""
        if self._allowed.sender(key) is not None:
            return not self._is_muted(key)
        # Each key once, and not for ever: who knocks chooses the keys.
        if key not in self._told and len(self._told) < MAX_DROP_KINDS:
            self._told.add(key)
            logger.warning("turned away the unknown key %s: %s does not have it", key.decode(), self._allowed.path)
        return False


def _watch(watched: zmq.Socket, events: int) -> zmq.Socket:
    """A socket that tells what happens to the connections of another one."""
    address = f"inproc://events-{id(watched)}"
    watched.monitor(address, events)
    monitor = watched.context.socket(zmq.PAIR)
    # Unbounded: otherwise the watched socket's own thread would wait for the reader. Who reads does it many times a second.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor


def _remember(table: dict, peer: bytes, value: object) -> None:
    """Keep a value as the newest; the oldest goes when there are too many."""
    table.pop(peer, None)
    table[peer] = value
    if len(table) > MAX_REMEMBERED:
        del table[next(iter(table))]


def _printable(peer: bytes) -> str:
    return peer.decode(errors="backslashreplace")[:64]
