"""A model's weights as one flat buffer: the layout both sides agree on, and views into it by name."""

import zlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from offbeat.protocols.messages import TensorSpec

ALIGNMENT = 64
"""Each tensor starts at a multiple of this many bytes, so that views of any dtype are aligned."""
WRONG_CHECKSUM = "wrong checksum"
"""How an actor begins to report bytes that are not the learner's."""
CHECKSUM_BLOCK_BYTES = 512
CHECKSUM_PIECE_BYTES = 1 << 20


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


def layout_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """The layout of a buffer that holds these tensors, each in its own dtype."""
    return tuple(spec for name, tensor in tensors.items() for spec in make_layout([(name, tensor.shape)], tensor.dtype))


def buffer_bytes(layout: tuple[TensorSpec, ...]) -> int:
    """Size of the buffer that holds these tensors."""
    return sum(_aligned_bytes(spec) for spec in layout)


def checksum(flat: torch.Tensor) -> int:
    """32 bits over a buffer `[num_bytes]` (uint8, host, a multiple of 8 bytes): CRC-32 over the sums of its 512-byte blocks.

    Any change inside one word shows, and so does a block in the wrong place. It finds accidents at the speed of memory; against
    a forger it is nothing. One thread, without the interpreter's lock for most of the time.
    """
    value = 0
    # Piece by piece, so that the sums of a large model need no memory to speak of.
    for piece in flat.split(CHECKSUM_PIECE_BYTES):
        words = piece.numpy().view("<u8")
        num_whole = len(words) - len(words) % (CHECKSUM_BLOCK_BYTES // 8)
        sums = words[:num_whole].reshape(-1, CHECKSUM_BLOCK_BYTES // 8).sum(axis=1)
        value = zlib.crc32(np.append(sums, words[num_whole:].sum()).data, value)
    return value


class WeightBuffer:
    """One contiguous host allocation with a view per parameter; allocated once, reused by every update."""

    def __init__(self, layout: tuple[TensorSpec, ...], flat: torch.Tensor | None = None) -> None:
        """Over `flat` if given (uint8, of `buffer_bytes(layout)`), else over memory of its own."""
        self.layout = layout
        # Zeros, not empty: the pages are touched now, not during the first transfer.
        self.flat = torch.zeros(buffer_bytes(layout), dtype=torch.uint8) if flat is None else flat
        """`[num_bytes]` uint8, what the collective moves."""

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's name and its view into the buffer."""
        offset = 0
        for spec in self.layout:
            view = self.flat[offset : offset + _num_bytes(spec)]
            yield spec.name, view.view(tensor_dtype(spec.dtype)).view(spec.shape)
            offset += _aligned_bytes(spec)


def _num_bytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * tensor_dtype(spec.dtype).itemsize


def _aligned_bytes(spec: TensorSpec) -> int:
    return -(-_num_bytes(spec) // ALIGNMENT) * ALIGNMENT
