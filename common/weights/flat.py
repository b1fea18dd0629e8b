"""A model's weights as one flat buffer: the layout both sides agree on, views into it by name, and its memory.

The memory is shared by several processes until the last one ends, or pinned for copies at the speed of the bus.
"""

import contextlib
import errno
import os
import secrets
import weakref
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.protocols.messages import TensorSpec


class Address(NamedTuple):
    """The way to memory for other processes of its machine and user."""

    path: str
    mark: str
    """A text that only this memory has: numbers of processes and files come again, here and on other machines."""


def map_bytes(address: Address, num_bytes: int) -> torch.Tensor:
    """Map the memory at this address, uint8 `[num_bytes]`, without a copy; raise `OSError` where it cannot be reached."""
    if str(Path(address.path).readlink()) != address.mark:
        raise FileNotFoundError(errno.ENOENT, "the memory is not of this machine, or its process is gone", address.path)
    return _map(address.path, num_bytes)


def _map(path: str, num_bytes: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


PORTABLE = 1
"""CUDA's flag for memory that is pinned for every GPU of the process."""


def pin(storage: torch.UntypedStorage, gpu_index: int) -> None:
    """Pin memory until it is freed, unless it is pinned already. Where the driver refuses, copies are slower.

    torch's own pinned memory comes in powers of two: up to twice as much as is asked for.
    """
    runtime = torch.cuda.cudart()
    assert runtime is not None, "torch is built for GPUs"
    # A thread without a device of its own would make a context on the first one.
    with torch.cuda.device(gpu_index):
        if storage.is_pinned():
            return
        address = storage.data_ptr()
        if runtime.cudaHostRegister(address, storage.nbytes(), PORTABLE) == runtime.cudaError.success:
            # At the process's end CUDA may be gone first, and has no need of it.
            weakref.finalize(storage, runtime.cudaHostUnregister, address).atexit = False
            return
        # CUDA reports a refusal once more, at the next kernel.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")


ALIGNMENT = 64
"""Each tensor starts at a multiple of this many bytes, so that views of any dtype are aligned."""
WRONG_CHECKSUM = "wrong checksum"
"""The beginning of an actor's report that its bytes are not the learner's."""
CHECKSUM_BLOCK_BYTES = 512
CHECKSUM_PIECE_BYTES = 1 << 20
CHECKSUM_PART_BYTES = 16 << 20
"""Bytes that a thread sums up at once."""
CHECKSUM_THREADS = 8


def tensor_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name, `float32` for instance; raise `ValueError` for any other text."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def make_layout(named_shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """Return the layout of a buffer that holds these parameters as `dtype`, in this order."""
    name = str(dtype).removeprefix("torch.")
    return tuple(TensorSpec(parameter, tuple(shape), name) for parameter, shape in named_shapes)


def buffer_bytes(layout: tuple[TensorSpec, ...]) -> int:
    """Return the size of the buffer that holds these tensors."""
    return sum(_aligned_bytes(spec) for spec in layout)


def checksum(flat: torch.Tensor) -> int:
    """Return 32 bits over a buffer `[num_bytes]` (uint8, host, a multiple of 8 bytes): the CRC-32 of its 512-byte blocks' sums.

    The checksum changes with any change inside one 8-byte word, and with the order of the blocks. It finds accidents at the
    speed of memory, and is no protection against forgery. It runs mostly without the interpreter's lock; more than
    `CHECKSUM_PART_BYTES` in a thread for every two cores, `CHECKSUM_THREADS` at most.
    """
    if len(flat) <= CHECKSUM_PART_BYTES:
        return zlib.crc32(_block_sums(flat).data)
    value = 0
    num_threads = max(1, min(CHECKSUM_THREADS, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weight-checksum") as threads:
        for sums in threads.map(_block_sums, flat.split(CHECKSUM_PART_BYTES)):
            value = zlib.crc32(sums.data, value)
    return value


def _block_sums(part: torch.Tensor) -> NDArray[np.uint64]:
    """Return the sums of a part's blocks; after those of each piece comes that of the words that are left."""
    sums: list[NDArray[np.uint64]] = []
    for piece in part.split(CHECKSUM_PIECE_BYTES):
        words = piece.numpy().view("<u8")
        num_whole = len(words) - len(words) % (CHECKSUM_BLOCK_BYTES // 8)
        sums += [words[:num_whole].reshape(-1, CHECKSUM_BLOCK_BYTES // 8).sum(axis=1), words[num_whole:].sum(keepdims=True)]
    return np.concatenate(sums)


class WeightBuffer:
    """One contiguous host allocation with a view per parameter, which other processes of this user map by its address; reused
    by every update."""

    def __init__(self, layout: tuple[TensorSpec, ...], *, is_reserved: bool = True) -> None:
        """Allocate the memory, of zeros. Raise `OSError` if there is not enough.

        With `is_reserved=False` each page is allocated when it is written, and a write beyond free memory may end the process.
        """
        self.layout = layout
        num_bytes = buffer_bytes(layout)
        # Not in /dev/shm, which is small in containers.
        file = os.memfd_create(f"offbeat-{secrets.token_hex(8)}")
        # Whoever has mapped the memory keeps it.
        weakref.finalize(self, os.close, file)
        if is_reserved:
            # An empty range is refused.
            os.posix_fallocate(file, 0, max(1, num_bytes))
        path = f"/proc/{os.getpid()}/fd/{file}"
        self.address = Address(path, str(Path(path).readlink()))
        self.flat = _map(path, num_bytes)
        """`[num_bytes]` uint8: the bytes that are sent."""

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter's name and its view into the buffer."""
        return named_views(self.flat, self.layout)


def named_views(flat: torch.Tensor, layout: tuple[TensorSpec, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter's name and its view into a buffer `[num_bytes]` (uint8) of this layout."""
    offset = 0
    for spec in layout:
        view = flat[offset : offset + _num_bytes(spec)]
        yield spec.name, view.view(tensor_dtype(spec.dtype)).view(spec.shape)
        offset += _aligned_bytes(spec)


def _num_bytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * tensor_dtype(spec.dtype).itemsize


def _aligned_bytes(spec: TensorSpec) -> int:
    return -(-_num_bytes(spec) // ALIGNMENT) * ALIGNMENT
