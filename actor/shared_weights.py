"""Weights in shared memory, for a model that is spread over several worker processes."""

import os
from collections.abc import Iterable

import torch

from offbeat.common.weights import WeightBuffer, buffer_bytes
from offbeat.protocols.messages import TensorSpec


class SharedWeights:
    """Shared memory for one update. Linux frees it with the last process that uses it."""

    def __init__(self, layout: tuple[TensorSpec, ...]) -> None:
        """Allocate the memory. Raise `OSError` if there is not enough."""
        self.layout = layout
        self._file = os.memfd_create("offbeat-weights")
        # Unlike `truncate` this reserves the pages; without them a write beyond free memory would kill the process.
        os.posix_fallocate(self._file, 0, buffer_bytes(layout))
        self._buffer = map_weights(self.path, layout)

    @property
    def path(self) -> str:
        """Path of the memory, for `map_weights` in another process of this user."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy all tensors, in the layout's order."""
        for (_, view), tensor in zip(self._buffer.views(), tensors, strict=True):
            view.copy_(tensor)

    def close(self) -> None:
        """Release the memory."""
        os.close(self._file)


def map_weights(path: str, layout: tuple[TensorSpec, ...]) -> WeightBuffer:
    """Map the weights at `path`, without a copy."""
    flat = torch.from_file(path, shared=True, size=buffer_bytes(layout), dtype=torch.uint8)
    return WeightBuffer(layout, flat)
