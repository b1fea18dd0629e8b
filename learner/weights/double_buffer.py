"""The buffers of weights: training writes the next version while an older one is still being sent.

There is one buffer as long as every version is sent before the next one is written. A second one is made when a version is lent
to actors that pull, or when a transfer hangs; there is never a third.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.common.weights.flat import WeightBuffer, checksum, pin
from offbeat.protocols.messages import TensorSpec

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""Longest wait of training for a transfer to end; after it, training allocates a second buffer."""


@dataclass(eq=False)
class WeightSnapshot:
    """One version in a buffer, which is not overwritten while it has readers."""

    buffer: WeightBuffer
    published: int | None
    """The trainer's version when the buffer was written; None while nothing is published."""
    num_readers: int = 0
    known_checksum: int | None = None
    """Checksum of the whole buffer; None until the first `take` has computed it."""

    @property
    def policy_version(self) -> int:
        """The version of a snapshot that was taken."""
        assert self.published is not None, "nothing is taken before the first publication"
        return self.published

    @property
    def checksum(self) -> int:
        """Checksum of the whole buffer of a snapshot that was taken."""
        assert self.known_checksum is not None, "`take` computes it"
        return self.known_checksum


class DoubleBuffer:
    """Lends the newest version to readers, and a free buffer to the one writer. Any thread may read."""

    def __init__(self, layout: tuple[TensorSpec, ...], gpu_index: int | None = None) -> None:
        """`gpu_index`: the GPU that versions are copied from, which reaches pinned memory faster; None: the CPU."""
        self.layout = layout
        self._gpu_index = gpu_index
        self._current = WeightSnapshot(self._pinned(WeightBuffer(layout)), None)
        self._spare: WeightBuffer | None = None
        self._has_second = False
        self._is_writing = False
        self._changed = threading.Condition()

    @property
    def newest_version(self) -> int | None:
        """The version published last; None before the first."""
        return self._current.published

    @contextlib.contextmanager
    def writing(self) -> Iterator[WeightBuffer]:
        """Yield a buffer that nobody reads.

        Waits for: the end of a transfer, `PATIENCE_S` at most unless both buffers are being read.
        """
        with self._changed:
            if not self._changed.wait_for(self._is_a_buffer_free, PATIENCE_S) and not self._has_second:
                # Its pages are touched by pinning or by the snapshot: filling it with zeros first would keep training waiting.
                self._spare = self._pinned(WeightBuffer(self.layout, is_reserved=False))
                self._has_second = True
            self._changed.wait_for(self._is_a_buffer_free)
            buffer = self._current.buffer
            if self._current.num_readers:
                assert self._spare is not None
                buffer, self._spare = self._spare, None
            self._current = WeightSnapshot(buffer, self._current.published)
            self._is_writing = True
        try:
            yield buffer
        finally:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()

    def publish(self, policy_version: int) -> None:
        """Name the version that was written last."""
        with self._changed:
            self._current.published = policy_version

    def take(self) -> WeightSnapshot:
        """Return the newest snapshot, checksum computed, to read it until `give_back`. Waits for: the end of `writing`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_writing)
            snapshot = self._current
            snapshot.num_readers += 1
        if snapshot.known_checksum is None:
            snapshot.known_checksum = checksum(snapshot.buffer.flat)
        return snapshot

    def give_back(self, snapshot: WeightSnapshot) -> None:
        """End a reading; the last reader of an old snapshot leaves its buffer to training."""
        with self._changed:
            snapshot.num_readers -= 1
            if not snapshot.num_readers and snapshot is not self._current:
                self._spare = snapshot.buffer
            self._changed.notify_all()

    def provide_spare(self) -> None:
        """Make the second buffer if there is none, before a snapshot is lent: not in the training thread, as it takes long.

        Where its memory is refused, training waits for the end of a transfer, and the next call tries again.
        """
        with self._changed:
            if self._has_second:
                return
            self._has_second = True
        spare: WeightBuffer | None = None
        try:
            spare = self._pinned(WeightBuffer(self.layout))
        except (OSError, RuntimeError) as error:
            logger.warning("no memory for a second buffer of weights (%s): training waits while actors pull weights", error)
        with self._changed:
            self._spare, self._has_second = spare, spare is not None
            self._changed.notify_all()

    def _pinned(self, buffer: WeightBuffer) -> WeightBuffer:
        if self._gpu_index is not None:
            pin(buffer.flat.untyped_storage(), self._gpu_index)
        return buffer

    def _is_a_buffer_free(self) -> bool:
        return not self._current.num_readers or self._spare is not None
