"""A model's weights as one flat buffer: the layout both sides agree on, and views into it by name."""

from collections.abc import Iterable, Iterator

import torch

from protocols.messages import TensorSpec

ALIGNMENT = 64
"""Each tensor starts at a multiple of this many bytes, so that views of any dtype are aligned."""


def tensor_dtype(name: str) -> torch.dtype:
    """`float32` -> `torch.float32`; `ValueError` for anything that is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def make_layout(named_shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """The layout of a buffer that holds these parameters as `dtype`, in this order."""
    name = str(dtype).removeprefix("torch.")
    return tuple(TensorSpec(parameter, tuple(shape), name) for parameter, shape in named_shapes)


class WeightBuffer:
    """One contiguous host allocation with a view per parameter; allocated once, reused by every update."""

    def __init__(self, layout: tuple[TensorSpec, ...]) -> None:
        self.layout = layout
        self._offsets: list[int] = []
        end = 0
        for spec in layout:
            self._offsets.append(end)
            size = torch.Size(spec.shape).numel() * tensor_dtype(spec.dtype).itemsize
            end += -(-size // ALIGNMENT) * ALIGNMENT
        # Zeros, not empty: the pages are touched now, not during the first transfer.
        self.flat = torch.zeros(end, dtype=torch.uint8)
        """`[num_bytes]` uint8, what the collective moves."""

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's name and its view into the buffer."""
        for spec, offset in zip(self.layout, self._offsets, strict=True):
            dtype = tensor_dtype(spec.dtype)
            size = torch.Size(spec.shape).numel() * dtype.itemsize
            yield spec.name, self.flat[offset : offset + size].view(dtype).view(spec.shape)
