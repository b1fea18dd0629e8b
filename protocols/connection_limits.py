"""Limits for peers that misbehave: how many may connect without a word, and how much nonsense they may send.

`ConnectionLimit` bounds the connections of a socket by the limit on open files, and closes the oldest stranger when there are
too many. A stranger is a connection from which no message has arrived that the hub listens to. ZeroMQ accepts every connection,
and closes one that does not finish its handshake only after a while; until then each takes a descriptor that the log and the
checkpoints need. `ConnectionLimit` learns of each connection through the socket's monitor, on a thread of its own: the hub's
thread may be busy, or wait for a descriptor itself.

`FloodGuard` mutes senders that flood the hub with bad messages. A sender is a public key, or the identity of a connection where
no keys are in use. Names and keys are chosen by the senders, so everything remembered about them is bounded.
"""

import contextlib
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

MAX_MALFORMED = 100
"""Mute a sender after this many malformed messages in a row."""
MAX_REJECTED = 1000
"""Mute a sender after this many rejected messages in a row."""
MUTE_S = 60.0
"""Seconds during which the messages of a muted sender are dropped unread."""
MAX_REMEMBERED = 16_384
"""Senders remembered for one purpose; the one heard least recently is forgotten first."""
MAX_DROP_KINDS = 1000
"""Keys of `FloodGuard.num_dropped`; the names of further senders are replaced by `others`."""
V = TypeVar("V")


class FloodGuard:
    """Counts bad messages by sender, and decides who is muted. Only `is_muted` may be called by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num_dropped: Counter[str] = Counter()
        """Messages dropped unread, by `name: reason`."""
        self._num_malformed: dict[bytes, int] = {}
        """Malformed messages since the sender's last well-formed one."""
        self._num_rejected: dict[bytes, int] = {}
        """Rejected messages since the sender's last accepted one."""
        self._muted_until: dict[bytes, float] = {}

    def is_muted(self, sender: bytes) -> bool:
        """Return True while the sender's messages are to be dropped unread."""
        return bool(self._muted_until) and self._clock() < self._muted_until.get(sender, 0.0)

    def note_form(self, sender: bytes, *, is_good: bool) -> None:
        """Count a message that could not be decoded; a good one forgives those before it."""
        self._note(sender, self._num_malformed, MAX_MALFORMED, is_good=is_good)

    def note_verdict(self, sender: bytes, *, is_good: bool) -> None:
        """Count a message whose content the learner rejected; a good one forgives those before it."""
        self._note(sender, self._num_rejected, MAX_REJECTED, is_good=is_good)

    def count_dropped(self, name: str, reason: str) -> None:
        """Count a message that was dropped unread."""
        kind = f"{name}: {reason}"
        is_counted_by_name = kind in self.num_dropped or len(self.num_dropped) < MAX_DROP_KINDS
        self.num_dropped[kind if is_counted_by_name else f"others: {reason}"] += 1

    def _note(self, sender: bytes, numbers: dict[bytes, int], limit: int, *, is_good: bool) -> None:
        number = numbers.pop(sender, 0) + 1
        if is_good:
            return
        if number < limit:
            remember(numbers, sender, number)
        else:
            remember(self._muted_until, sender, self._clock() + MUTE_S)


def remember(table: dict[bytes, V], sender: bytes, value: V) -> None:
    """Store a sender's value as the newest entry; drop the oldest entry above `MAX_REMEMBERED`."""
    table.pop(sender, None)
    table[sender] = value
    if len(table) > MAX_REMEMBERED:
        del table[next(iter(table))]


SHARE = 3
"""A socket may use one in this many descriptors. The hub and the weight server take a third each; files, collectives and
libraries have the rest."""
STRANGERS = 4
"""Strangers may have one in this many of a socket's connections."""
FILES_PER_PEER = 4
"""Descriptors that the limit must allow for each peer: a peer gets three quarters of a third of them."""
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = HANDSHAKE_FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class ConnectionLimit:
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
        self._thread = threading.Thread(target=self._run, name="connection-limit", daemon=True)
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
