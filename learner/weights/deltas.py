"""The differences between the versions that were lent to actors, from each to the next, for actors that have one of them.

A version is known by its checksum: its number may mean other bytes after a restart. The differences are kept only while they
are smaller together than the weights, so that following them costs an actor less than the weights do.
"""

import logging
import time
from typing import NamedTuple

import torch

from offbeat.common.weights.deltas import encode_delta, word_bytes
from offbeat.learner.weights.double_buffer import WeightSnapshot
from offbeat.protocols.messages import MAX_BASES, TensorSpec

logger = logging.getLogger(__name__)


class Delta(NamedTuple):
    """The difference between a version and the next one that was lent."""

    base: int
    """Checksum of the older version."""
    pieces: tuple[torch.Tensor, ...]
    """One for each chunk of the weights, uint8 `[num_bytes]`."""

    @property
    def num_bytes(self) -> int:
        """The size of all pieces."""
        return sum(len(piece) for piece in self.pieces)


class DeltaChain:
    """The newest lent version, and the differences that lead to it. For the weight server's thread."""

    def __init__(self, layout: tuple[TensorSpec, ...], chunk_bytes: int) -> None:
        self._word_bytes = word_bytes(layout)
        self._chunk_bytes = chunk_bytes
        self._newest: torch.Tensor | None = None
        """A copy of the newest lent version; None before the first."""
        self._newest_checksum = 0
        self.deltas: tuple[Delta, ...] = ()
        """From the oldest version that leads to the newest, to the newest."""

    def advance(self, snapshot: WeightSnapshot) -> None:
        """Extend the chain to this version, which is about to be lent. Takes long: the weights are compared word by word."""
        flat = snapshot.buffer.flat
        if self._newest is None:
            self._newest = flat.clone()
        elif snapshot.checksum != self._newest_checksum:
            self._extend(self._newest, flat, snapshot.policy_version)
            if snapshot.checksum in {delta.base for delta in self.deltas}:
                # The weights are as they were: a chain must not pass a version twice.
                self.deltas = ()
        self._newest_checksum = snapshot.checksum

    def _extend(self, newest: torch.Tensor, flat: torch.Tensor, policy_version: int) -> None:
        started = time.monotonic()
        pieces: list[torch.Tensor] = []
        for old, new in zip(newest.split(self._chunk_bytes), flat.split(self._chunk_bytes), strict=True):
            pieces.append(torch.from_numpy(encode_delta(old.numpy(), new.numpy(), self._word_bytes)))
            old.copy_(new)
        deltas = (*self.deltas, Delta(self._newest_checksum, tuple(pieces)))
        last = deltas[-1].num_bytes
        deltas = deltas[-MAX_BASES:]
        while sum(delta.num_bytes for delta in deltas) >= len(flat):
            deltas = deltas[1:]
        self.deltas = deltas
        logger.info(
            "weights %d: encoded %.3f MB of differences for %.3f MB in %.2f s; the last %d differences are kept",
            policy_version,
            last / 1e6,
            len(flat) / 1e6,
            time.monotonic() - started,
            len(deltas),
        )
