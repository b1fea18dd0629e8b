"""The hub's door: bounds the connections by the limit on open files, and closes the oldest stranger when there are too many.

A stranger is a connection from which no message has arrived that the hub listens to. ZeroMQ accepts every connection, and
closes one that does not finish its handshake only after a while; until then each takes a descriptor that the log and the
checkpoints need. The door hears of each connection through the socket's monitor, on a thread of its own: the hub's thread may
be busy, or wait for a descriptor itself.
"""

import contextlib
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

SHARE = 3
"""A socket may use one in this many descriptors. The hub and the weight server take a third each; files, collectives and
libraries have the rest."""
STRANGERS = 4
"""Strangers may have one in this many of a socket's connections."""
FILES_PER_PEER = 4
"""Descriptors that the limit must allow for each peer: a peer gets three quarters of a third of them."""

HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = HANDSHAKE_FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class Door:
    """Watches the connections of one socket until that socket's monitor stops."""

    def __init__(self, watched: zmq.Socket) -> None:
        """Start to watch; the socket must not be bound yet. The bounds come from the limit on open files as it is now."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE
        self._max_strangers = max(1, most // STRANGERS)
        self.max_known = max(1, most - self._max_strangers)
        """Connections that may stay open as long as they like."""
        self.num_refused = 0
        """Connections that were turned away: without a key, with a key that is not allowed, or with another protocol."""
        self.num_closed = 0
        """Connections of strangers that were closed because there were too many."""
        self._lock = threading.Lock()
        self._strangers: dict[int, Any] = {}
        """The other end's address by descriptor, oldest first."""
        self._known: set[int] = set()
        self._monitor = monitor(watched, _EVENTS)
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def know(self, descriptor: int) -> None:
        """Note that a message worth hearing came from this connection: no stranger can crowd it out."""
        with self._lock:
            if descriptor in self._strangers and len(self._known) < self.max_known:
                del self._strangers[descriptor]
                self._known.add(descriptor)

    def close(self) -> None:
        """Wait for the end of the thread; the socket's monitor must have been stopped."""
        self._thread.join()
        self._monitor.close(linger=0)

    def _run(self) -> None:
        while True:
            event = parse_monitor_message(self._monitor.recv_multipart())
            match event["event"]:
                case zmq.EVENT_MONITOR_STOPPED:
                    return
                case zmq.EVENT_ACCEPTED:
                    self._accept(int(event["value"]))
                case zmq.EVENT_DISCONNECTED:
                    # Told before the descriptor is closed, so before another connection can have its number.
                    with self._lock:
                        self._strangers.pop(int(event["value"]), None)
                        self._known.discard(int(event["value"]))
                case _:
                    self.num_refused += 1

    def _accept(self, descriptor: int) -> None:
        with self._lock:
            self._strangers[descriptor] = _peer_name(descriptor)
            while len(self._strangers) > self._max_strangers:
                oldest = next(iter(self._strangers))
                _shut_down(oldest, self._strangers.pop(oldest))
                self.num_closed += 1


def monitor(watched: zmq.Socket, events: int) -> zmq.Socket:
    """Return a socket that reports these events of the connections of `watched`."""
    address = f"inproc://events-{id(watched)}"
    watched.monitor(address, events)
    reader = watched.context.socket(zmq.PAIR)
    # Unbounded: with a bound the I/O thread of `watched` would wait for a slow reader. It is read many times a second.
    reader.setsockopt(zmq.RCVHWM, 0)
    reader.connect(address)
    return reader


def _peer_name(descriptor: int) -> Any:
    """Return the address of the other end; None for a connection that is gone."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        return connection.getpeername()
    return None


def _shut_down(descriptor: int, peer_name: Any) -> None:
    """End the connection to `peer_name`; ZeroMQ, which owns the descriptor, then closes it."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        # The connection may have ended meanwhile, and the descriptor be another's.
        if connection.getpeername() == peer_name:
            connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Give a socket object for a descriptor that stays open; raise `OSError` when it is no socket."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()
