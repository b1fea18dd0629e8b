"""Strangers at the hub: a crowd of connections that say nothing, and peers of other protocols."""

import contextlib
import random
import socket
import time
from collections.abc import Callable

LOOK_S = 0.05
"""Seconds between two looks at the crowd; those that were sent away are replaced."""


GREETINGS = {
    "ZMTP 1.0": b"\x01\x00\x02\x00x",
    "ZMTP 2.0": b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x05\x00\x00\x00\x02hi",
    "a web page": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n\r\n" + b"a" * 200,
    "curl": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    "random bytes": random.Random(7).randbytes(300),
    "more random bytes": random.Random(8).randbytes(3000),
}
"""First bytes of peers that know nothing of the hub, by who sends them."""
MORE_BYTES = bytes(range(256)) * 8
"""Some greetings announce a long message; these bytes end it."""


def speak(host: str, port: int) -> int:
    """Say every greeting, each on a connection of its own; return how many could be said."""
    num_said = 0
    for greeting in GREETINGS.values():
        # A hub may close the connection at any byte, or be absent.
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0) as connection:
            connection.sendall(greeting + MORE_BYTES)
            num_said += 1
    return num_said


def crowd(host: str, port: int, *, size: int, duration_s: float, pause: Callable[[float], None]) -> int:
    """Keep `size` silent connections to the hub open, or opening, for `duration_s`; return how many were made in all."""
    connections: list[socket.socket] = []
    num_made = 0
    deadline = time.monotonic() + duration_s
    try:
        while time.monotonic() < deadline:
            connections = [connection for connection in connections if not _is_over(connection)]
            for _ in range(size - len(connections)):
                connections.append(_knock(host, port))
                num_made += 1
            pause(LOOK_S)
    finally:
        for connection in connections:
            connection.close()
    return num_made


def _knock(host: str, port: int) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        connection.connect((host, port))
    return connection


def _is_over(connection: socket.socket) -> bool:
    """Return whether the other end has closed a connection, or refused it; close this end then."""
    try:
        # The hub greets first, which is read and left unanswered.
        is_over = not connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        is_over = True
    if is_over:
        connection.close()
    return is_over
