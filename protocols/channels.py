"""The sockets: one ROUTER in the learner (`Hub`), one DEALER in each actor (`Link`). The only module that imports zmq."""

import contextlib
import socket
from types import TracebackType
from typing import NamedTuple

import numpy as np
import zmq
from numpy.typing import NDArray

from protocols.messages import ActorMessage, LearnerMessage
from protocols.wire import FromActor, FromLearner, WireError, decode_from_actor, decode_from_learner, encode

Array = NDArray[np.int32] | NDArray[np.float32]

# Copying is cheaper than zero-copy bookkeeping below this size.
COPY_THRESHOLD_BYTES = 65536
SEND_QUEUE_MESSAGES = 10_000


class ChannelError(RuntimeError):
    """The socket could not be opened; the text names the address and the cure."""


def host_of(address: str) -> str:
    """`tcp://host:port` -> `host`, without the brackets of an IPv6 address; `*` is every interface."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return "0.0.0.0" if host == "*" else host


class Received(NamedTuple):
    """One message at the hub, or the reason why it was none."""

    peer: bytes
    packet: FromActor | WireError


class Hub:
    """The learner's end. `wake` may be called from any thread; all else from one."""

    def __init__(self, bind: str, *, max_message_bytes: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        # A peer that went away must raise, not swallow messages.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
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

    def receive(self) -> Received | None:
        """The next message, or None when there is none now."""
        try:
            peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        try:
            return Received(peer.bytes, decode_from_actor([frame.buffer for frame in frames]))
        except WireError as error:
            return Received(peer.bytes, error)

    def send(self, peer: bytes, message: LearnerMessage, *arrays: Array) -> bool:
        """Queue a message; False when the peer is gone or its queue is full."""
        frames = encode(message, *arrays)
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Send what is queued (half a second at most) and free the port."""
        self._waker.close()
        self._wakened.close()
        self._socket.close()
        self._context.term()

    def __enter__(self) -> "Hub":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Link:
    """The actor's end; one thread."""

    def __init__(self, address: str, *, identity: bytes, max_message_bytes: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        # Without a connection a send fails at once: what is unacknowledged waits in the outbox, not in the socket.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ChannelError(
                f"hub.address: cannot use {address!r}: {error.strerror}. It must look like tcp://host:port."
            ) from error

    def send(self, message: ActorMessage, *arrays: Array) -> bool:
        """Queue a message; False when there is no connection now."""
        frames = encode(message, *arrays)
        large = sum(len(frame) for frame in frames) > COPY_THRESHOLD_BYTES
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=not large)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_s: float = 0.0) -> FromLearner | None:
        """The next message, or None when none came in time; `WireError` for a learner of another version."""
        if not self._socket.poll(round(timeout_s * 1000), zmq.POLLIN):
            return None
        return decode_from_learner(self._socket.recv_multipart(zmq.NOBLOCK))

    def close(self) -> None:
        """Send what is queued (a second at most) and disconnect."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
