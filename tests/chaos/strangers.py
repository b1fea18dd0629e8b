"""A crowd of strangers at the hub: connections that say nothing, each of which takes a descriptor of the learner."""

import contextlib
import socket
import time
from collections.abc import Callable

LOOK_S = 0.05
"""Seconds between two looks at the crowd; those that were sent away are replaced."""


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
