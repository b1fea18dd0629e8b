"""Hands the run's kit to actors that ask for it, part by part."""

import hashlib
from typing import NamedTuple

import numpy as np

from offbeat.learner.dispatch.send_queue import SendQueue
from offbeat.protocols.message_parts import PART_BYTES
from offbeat.protocols.messages import Refused, RunPart

MAX_SERVINGS = 4
"""A peer may ask for each part this many times on average."""
MAX_PEERS = 4096
"""Peers whose requests are counted; one that is forgotten begins anew."""


class Kit(NamedTuple):
    """The run for actors that bring neither settings nor model."""

    content: bytes = b""
    """An encoded `protocols.message_parts.RunKit`; empty where there is none."""
    obstacle: str = "this learner hands out no run"
    """The reason why there is none, with the cure."""


class Handout:
    """Answers requests for parts of the kit. The dispatcher's lock guards it."""

    def __init__(self, kit: Kit, send_queue: SendQueue) -> None:
        self._kit = kit
        self._send_queue = send_queue
        self._digest = hashlib.sha256(kit.content).hexdigest()
        self._num_parts = -(-len(kit.content) // PART_BYTES)
        self._num_served: dict[bytes, int] = {}
        """Parts that each peer was sent, oldest peer first: a peer that asks and does not read would fill the memory."""

    def answer(self, peer: bytes, index: int) -> None:
        """Send a peer this part, or the reason why it gets none."""
        if not self._num_parts:
            self._send_queue.send(peer, Refused(reason=self._kit.obstacle))
            return
        num_served = self._num_served.get(peer, 0)
        if index >= self._num_parts or num_served >= MAX_SERVINGS * self._num_parts:
            reason = f"the run has {self._num_parts} parts, and {num_served} were sent: start the actor anew"
            self._send_queue.send(peer, Refused(reason=reason))
            return
        self._num_served[peer] = num_served + 1
        if len(self._num_served) > MAX_PEERS:
            del self._num_served[next(iter(self._num_served))]
        part = np.frombuffer(self._kit.content, np.uint8, offset=index * PART_BYTES)[:PART_BYTES]
        self._send_queue.send(peer, RunPart(index=index, num_parts=self._num_parts, digest=self._digest), part)
