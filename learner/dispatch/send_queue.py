"""The queue of messages that the dispatcher wants sent; the hub's thread empties it."""

from collections import deque
from typing import NamedTuple

from offbeat.protocols.channels import Array
from offbeat.protocols.messages import LearnerMessage


class Outgoing(NamedTuple):
    """A message to send."""

    peer: bytes
    message: LearnerMessage
    arrays: tuple[Array, ...] = ()


class SendQueue:
    """Messages in the order in which they are to be sent."""

    def __init__(self) -> None:
        self._queue: deque[Outgoing] = deque()

    def send(self, peer: bytes, message: LearnerMessage, *arrays: Array) -> None:
        """Queue a message for a peer."""
        self._queue.append(Outgoing(peer, message, arrays))

    def take(self) -> list[Outgoing]:
        """Return the queued messages and forget them."""
        outgoing = list(self._queue)
        self._queue.clear()
        return outgoing
