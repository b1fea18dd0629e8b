"""Weights in memory that worker processes map: how they reach a model that is spread over several of them."""

import os
from collections.abc import Iterable

import torch

from offbeat.common.weights import WeightBuffer, buffer_bytes
from offbeat.protocols.messages import TensorSpec


class SharedWeights:
    """Memory of the size of one update, written anew by each; it is gone with the processes that use it (Linux)."""

    def __init__(self, layout: tuple[TensorSpec, ...]) -> None:
        """`OSError` if there is not enough memory."""
        self.layout = layout
        self._file = os.memfd_create("offbeat-weights")
        # Not `truncate`: without its pages the first write past the memory there is would kill the process.
        os.posix_fallocate(self._file, 0, buffer_bytes(layout))
        self._buffer = map_weights(self.path, layout)

    @property
    def path(self) -> str:
        """What another process of this user gives to `map_weights`."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy all tensors, in the layout's order."""
        for (_, view), tensor in zip(self._buffer.views(), tensors, strict=True):
            view.copy_(tensor)

    def close(self) -> None:
        """Let go of the memory."""
        os.close(self._file)


def map_weights(path: str, layout: tuple[TensorSpec, ...]) -> WeightBuffer:
    """The weights that lie at `path`, without a copy."""
    flat = torch.from_file(path, shared=True, size=buffer_bytes(layout), dtype=torch.uint8)
    return WeightBuffer(layout, flat)
