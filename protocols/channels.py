"""The sockets: one ROUTER in the learner (`Hub`), one DEALER in each actor (`Link`).

With keys both ends are authenticated and the traffic is encrypted (CURVE) with session keys, so a recorded byte stream cannot
be replayed. Without keys a hub binds to loopback only.
"""

import contextlib
import errno
import logging
import os
import resource
import socket
import time
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from offbeat.protocols import wire
from offbeat.protocols.addresses import ChannelError, address_file, find_address, is_ipv6, is_loopback
from offbeat.protocols.connection_limits import HANDSHAKE_FAILED, ConnectionLimit, FloodGuard, monitor
from offbeat.protocols.keys import NO_KEYS, HubKeys, KeyCheck, LinkKeys, Sender
from offbeat.protocols.messages import ActorMessage, LearnerMessage
from offbeat.protocols.text import plain

logger = logging.getLogger(__name__)

# Copying is cheaper than zero-copy bookkeeping below this size.
COPY_THRESHOLD_BYTES = 65536
SEND_QUEUE_MESSAGES = 10_000
RECEIVE_QUEUE_MESSAGES = 32
"""Messages queued for each connection of the hub. With the bound on their size it bounds the memory that a flood takes."""
HANDSHAKE_S = 10.0
"""Seconds after which a connection without a finished handshake is closed."""
KEEPALIVE_IDLE_S = 60
"""Seconds of silence after which the kernel asks the other end of a connection of the hub whether it is there."""
KEEPALIVE_INTERVAL_S = 15
KEEPALIVE_PROBES = 4
"""Questions without an answer, one in each interval, after which the connection is closed."""
BIND_RETRY_S = 0.2
"""Seconds between two tries to bind a port that is taken."""
RETRY_S = 1.0
"""Seconds before a link that was turned away tries again."""
DESCRIPTORS_PER_SOCKET = 24
"""Descriptors that must be free before a hub or a link is opened: more than either takes."""
MAX_DROPS_AT_ONCE = 1000
"""Messages that one `receive` drops: a flood must not keep its caller from other work."""

# Plain numbers: arithmetic with the enum takes as long as the call.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_DESCRIPTOR = int(zmq.SRCFD)


class Received(NamedTuple):
    """A message at the hub; its packet is the error when it could not be decoded."""

    peer: bytes
    """Identity of the connection; `Hub.send` takes it."""
    packet: wire.FromActor | wire.WireError
    sender: Sender = NO_KEYS


class Hub:
    """The learner's socket. `wake` may be called from any thread, everything else from one."""

    def __init__(
        self,
        bind: str,
        *,
        max_message_bytes: int,
        keys: HubKeys | None = None,
        patience_s: float = 0.0,
        port_setting: str = "hub.address (and hub.bind)",
    ) -> None:
        """Bind the socket; raise `ChannelError` when that fails. With `keys` only those that are allowed may connect.

        A port that is taken is tried again for `patience_s` seconds. The error names `port_setting` as the place to change it.
        """
        self._guard = FloodGuard()
        self.num_dropped = self._guard.num_dropped
        """Messages dropped unread, by `name: reason`; names beyond `MAX_DROP_KINDS` are counted as `others`."""
        self._socket = _open_socket(zmq.ROUTER, max_message_bytes)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
        # A machine that loses its power says no goodbye, and its connection would take a descriptor for good.
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
        # Sending to a peer that went away must raise; by default the message would vanish.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._key_check = None if keys is None else KeyCheck(self._socket, keys, self._guard.is_muted)
        self.connections = ConnectionLimit(self._socket)
        """The limits of its connections, with the numbers of those that were refused or closed."""
        try:
            self._bind(bind, patience_s, port_setting)
        except ChannelError:
            self._close(linger_ms=0)
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The address that was bound, with its port."""
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakened, zmq.POLLIN)

    def wake(self) -> None:
        """End a `wait` on another thread."""
        # A full buffer means that the waiting thread is already being woken.
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"!")

    def wait(self, timeout_s: float) -> None:
        """Wait until a message arrives, `wake` is called, or the timeout."""
        ready = dict(self._poller.poll(round(timeout_s * 1000)))
        if self._wakened.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                while self._wakened.recv(4096):
                    pass

    def receive(self) -> Received | None:
        """Return the next message, or None when there is none now.

        Messages under a revoked key and those of muted senders are counted and dropped.
        """
        for _ in range(MAX_DROPS_AT_ONCE):
            try:
                first_frame = self._socket.recv(_NOBLOCK, copy=False)
            except zmq.Again:
                return None
            frames = self._receive_rest(first_frame)
            peer = first_frame.bytes
            source, sender = (peer, NO_KEYS) if self._key_check is None else self._key_check.identify(first_frame)
            if sender is None:
                self._guard.count_dropped(source.decode(), "its key was revoked")
            elif self._guard.is_muted(source):
                name = plain(peer.decode(errors="backslashreplace"), 64) if sender.role is None else sender.name
                self._guard.count_dropped(name, "not listened to after a flood of bad messages")
            else:
                try:
                    self.connections.know(first_frame.get(_DESCRIPTOR))
                # libzmq does not say which connection a message of ZMTP 1 or 2 came by. No actor speaks these, but the first
                # five bytes of anything else can look like them: of a web page's request, or a port scanner's.
                except zmq.ZMQError:
                    self._guard.count_dropped("a stranger", "it does not speak the protocol")
                else:
                    return Received(peer, self._decode(peer, source, frames), sender)
        return None

    def send(self, peer: bytes, message: LearnerMessage, *arrays: wire.Array) -> bool:
        """Queue a message. Return False when the peer is gone, its queue is full, or its key is no longer allowed.

        A large last array is not copied: the peer gets what it holds when it leaves.
        """
        if self._key_check is not None and not self._key_check.is_allowed(peer):
            return False
        return self._send([peer, *wire.encode(message, *arrays)])

    def note_verdict(self, peer: bytes, *, is_good: bool) -> None:
        """Note whether the learner took a message. After `MAX_REJECTED` in a row that it rejected, their sender is muted."""
        # The guard knows a connection by its key, where keys are in use.
        source = peer if self._key_check is None else self._key_check.key_of(peer) or peer
        self._guard.note_verdict(source, is_good=is_good)

    def close(self) -> None:
        """Send queued messages for half a second at most, and free the port."""
        self._waker.close()
        self._wakened.close()
        self._close(linger_ms=500)

    def __enter__(self) -> "Hub":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bind(self, address: str, patience_s: float, port_setting: str) -> None:
        if not (is_loopback(address) or self._key_check is not None or not address.startswith("tcp://")):
            raise ChannelError(
                f"hub.bind: {address} can be reached from other machines, and without keys anyone who reaches it can send "
                "rollouts. Make keys with `offbeat keygen`, or bind tcp://127.0.0.1:PORT."
            )
        deadline = time.monotonic() + patience_s
        is_told = False
        while True:
            try:
                self._socket.setsockopt(zmq.IPV6, is_ipv6(address))
                self._socket.bind(address)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() >= deadline:
                    tried = f" for {patience_s:g} s" if patience_s else ""
                    raise ChannelError(
                        f"cannot bind {address}{tried}: {error.strerror}. Stop the process that uses it, or set {port_setting} "
                        "to another port."
                    ) from error
                if not is_told:
                    is_told = True
                    logger.warning("hub.bind: another process uses %s; trying for %g s to bind it", address, patience_s)
                time.sleep(BIND_RETRY_S)
            else:
                return

    def _receive_rest(self, first_frame: zmq.Frame) -> list[zmq.Frame]:
        """Return the frames after the first. Keep no more than show that there are too many."""
        frames: list[zmq.Frame] = []
        more = first_frame.more
        while more:
            frame = self._socket.recv(_NOBLOCK, copy=False)
            more = frame.more
            if len(frames) <= wire.MAX_FRAMES:
                frames.append(frame)
        return frames

    def _decode(self, peer: bytes, source: bytes, frames: list[zmq.Frame]) -> wire.FromActor | wire.WireError:
        try:
            packet = wire.decode_from_actor([frame.buffer for frame in frames])
        except wire.UnknownMessageError as error:
            return error
        except wire.WireError as error:
            self._guard.note_form(source, is_good=False)
            if isinstance(error, wire.VersionError):
                self._send([peer, *wire.refusal_for(error)])
            return error
        self._guard.note_form(source, is_good=True)
        return packet

    def _send(self, frames: list[wire.Frame]) -> bool:
        try:
            # Equivalent to `send_multipart` at half its cost, which is enum arithmetic for each frame.
            for frame in frames[:-1]:
                self._socket.send(frame, _NOBLOCK_MORE)
            self._socket.send(frames[-1], _NOBLOCK, copy=len(frames[-1]) <= COPY_THRESHOLD_BYTES)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def _close(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self.connections.close()
        self._socket.close(linger=linger_ms)
        if self._key_check is not None:
            self._key_check.close()
        self._socket.context.term()


class Link:
    """The socket of an actor or an operator; for one thread."""

    def __init__(self, address: str, *, identity: bytes, max_message_bytes: int, keys: LinkKeys | None = None) -> None:
        """Start to connect; raise `ChannelError` for an address that is none.

        `address` may name a file, as `hub.address` may; without it the link waits for `follow`.
        """
        self._setting = address
        self._address: str | None = None
        """The address that the socket connects to; None while there is none."""
        self._identity = identity
        self._max_message_bytes = max_message_bytes
        self._keys = keys
        self._refusal: str | None = None
        self._is_given_up = False
        self._connected_at = time.monotonic()
        self._socket = _open_socket(zmq.DEALER, max_message_bytes)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        # Without a connection a send fails at once: unacknowledged messages wait in the outbox, not in the socket.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.learner_key.public)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.key.owner.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.key.secret)
        self._monitor = monitor(self._socket, HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._connect()
        except ChannelError:
            self._close(linger_ms=0)
            raise

    def send(self, message: ActorMessage, *arrays: wire.Array) -> bool:
        """Queue a message. Return False when there is no connection now; `refusal` may know why."""
        frames = wire.encode(message, *arrays)
        large = sum(len(frame) for frame in frames) > COPY_THRESHOLD_BYTES
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=not large)
        except zmq.Again:
            self._read_events()
            return False
        return True

    def receive(self, timeout_s: float = 0.0) -> wire.FromLearner | None:
        """Return the next message, or None at the timeout. Raise `WireError` for a message that cannot be decoded."""
        if not self._socket.poll(round(timeout_s * 1000), zmq.POLLIN):
            return None
        return wire.decode_from_learner([frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)])

    def refusal(self) -> str | None:
        """Return why the learner cannot be reached or turns this end away, and what to do; None where nobody answers.

        The link goes on trying as long as `send` or `refusal` is called, so a fix at the learner needs no restart here.
        """
        self._read_events()
        if self._address is None:
            return f"the file {address_file(self._setting)} is missing: `offbeat learner` writes it when it has bound hub.bind"
        return self._refusal

    def second_link(self, address: str) -> "Link":
        """Return a link to another socket of the learner, with the same identity and keys."""
        return Link(address, identity=self._identity, max_message_bytes=self._max_message_bytes, keys=self._keys)

    def reconnect(self) -> None:
        """Replace the connection by a new one. Messages under way on the old one may be lost."""
        self._is_given_up = False
        self._connected_at = time.monotonic()
        if self._address is not None:
            self._socket.disconnect(self._address)
        self._connect()

    def follow(self) -> None:
        """Reconnect if the learner's address has changed."""
        if find_address(self._setting) != self._address:
            self.reconnect()

    def close(self) -> None:
        """Send queued messages for a second at most, and disconnect."""
        self._close(linger_ms=1000)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> None:
        self._address = find_address(self._setting)
        if self._address is None:
            return
        try:
            self._socket.setsockopt(zmq.IPV6, is_ipv6(self._address))
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            raise ChannelError(
                f"hub.address: cannot use {self._address!r}: {error.strerror}. It must look like tcp://host:port."
            ) from error

    def _read_events(self) -> None:
        """Learn how the last handshakes ended, and start the next one when it is due."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                self._refusal = self._explain(int(event["event"]), int(event["value"]))
                # The library tries again by itself only when the learner gave no reason.
                self._is_given_up = self._refusal is not None and event["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        if self._is_given_up and time.monotonic() - self._connected_at >= RETRY_S:
            self.reconnect()

    def _explain(self, event: int, value: int) -> str | None:
        """Return the reason and the cure for the end of a handshake; None when it succeeded."""
        learner = f"the learner at {self._address}"
        wants_keys = "set hub.key, hub.learner_key and hub.allowed_keys (`offbeat keygen` makes the files)"
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return None
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and self._keys is not None:
            owner = self._keys.key.owner
            return (
                f"{learner} does not know the key of this {owner.role}: add the line `{owner.line()}` to its hub.allowed_keys"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if value != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return f"what answers at {self._address} is no learner: correct hub.address"
            if self._keys is None:
                return f"{learner} demands keys, and this side has none: {wants_keys}"
            return f"{learner} works without keys, and this side has one: {wants_keys} for the learner too"
        if self._keys is None:
            return f"{learner} breaks off the handshake: it demands keys ({wants_keys}), is no learner, or ended just now"
        causes = "hub.learner_key is not its public key, it works without keys, or it ended just now"
        return f"{learner} breaks off the handshake: {causes}"

    def _close(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        self._socket.context.term()


def _open_socket(kind: int, max_message_bytes: int) -> zmq.Socket:
    """Return a socket with a context of its own.

    Raise `ChannelError` unless descriptors are left for it: ZeroMQ aborts the process that has too few.
    """
    taken: list[int] = []
    try:
        for _ in range(DESCRIPTORS_PER_SOCKET):
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise ChannelError(
            f"too few file descriptors are left for a socket: this process may have {limit} files open. Raise the limit on "
            "open files (ulimit -n)."
        ) from error
    finally:
        for descriptor in taken:
            os.close(descriptor)
    opened = zmq.Context().socket(kind)
    opened.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    opened.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
    opened.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
    return opened
