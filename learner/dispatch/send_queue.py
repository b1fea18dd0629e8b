"""Messages that wait to be sent: the dispatcher's queue, which the hub's thread empties, and leases without an actor yet."""

from collections import deque
from typing import NamedTuple

import numpy as np

from offbeat.learner.leases.prompts import Prompt
from offbeat.protocols.messages import LearnerMessage, Lease, Sampling
from offbeat.protocols.payload import ImageReference
from offbeat.protocols.wire import Array


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


class Offer(NamedTuple):
    """One group to generate, under a fresh lease id."""

    lease_id: int
    prompt: Prompt
    group_size: int
    sampling: Sampling
    min_policy_version: int
    """The actor must not start under older weights."""
    is_evaluation: bool = False

    def lease(self, timeout_s: float) -> Lease:
        """Return the message to send beside `arrays`."""
        return Lease(
            lease_id=self.lease_id,
            prompt_id=self.prompt.prompt_id,
            group_size=self.group_size,
            sampling=self.sampling,
            min_policy_version=self.min_policy_version,
            timeout_s=timeout_s,
            prompt=self.prompt.text,
            row=self.prompt.row,
            is_evaluation=self.is_evaluation,
            images=tuple(ImageReference(image.num_bytes, image.hash) for image in self.prompt.images),
        )

    def arrays(self) -> tuple[Array, ...]:
        """Return the prompt's token ids, and with images the bytes of their files; raise `ServiceError` for a changed file."""
        if not self.prompt.images:
            return (self.prompt.token_ids,)
        files = b"".join(image.read() for image in self.prompt.images)
        return self.prompt.token_ids, np.frombuffer(files, dtype=np.uint8)
