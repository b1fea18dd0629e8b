"""Weights in shared memory, for a model that is spread over several worker processes."""

from collections.abc import Iterable

import torch

from offbeat.common.shared_bytes import SharedBytes, map_bytes
from offbeat.common.weights import WeightBuffer, buffer_bytes
from offbeat.protocols.messages import TensorSpec


class SharedWeights:
    """Shared memory for one update."""

    def __init__(self, layout: tuple[TensorSpec, ...]) -> None:
        """Allocate the memory. Raise `OSError` if there is not enough."""
        self.layout = layout
        self._bytes = SharedBytes(buffer_bytes(layout))
        self._buffer = WeightBuffer(layout, memory=self._bytes)

    @property
    def path(self) -> str:
        """Path of the memory, for `map_weights` in another process of this user."""
        return self._bytes.path

    def write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy all tensors, in the layout's order."""
        for (_, view), tensor in zip(self._buffer.views(), tensors, strict=True):
            view.copy_(tensor)

    def close(self) -> None:
        """Release the memory."""
        self._bytes.close()


def map_weights(path: str, layout: tuple[TensorSpec, ...]) -> WeightBuffer:
    """Map the weights at `path`, without a copy."""
    return WeightBuffer(layout, map_bytes(path, buffer_bytes(layout)))
