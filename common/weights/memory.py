"""Memory for weights: shared by several processes until the last one ends, and pinned for copies at the speed of the bus."""

import contextlib
import errno
import os
import secrets
import weakref
from pathlib import Path
from typing import NamedTuple

import torch


class Address(NamedTuple):
    """The way to memory for other processes of its machine and user."""

    path: str
    mark: str
    """A text that only this memory has: numbers of processes and files come again, here and on other machines."""


class SharedBytes:
    """A buffer that other processes of this user map by its address."""

    def __init__(self, num_bytes: int, *, is_reserved: bool = True) -> None:
        """Allocate the memory. Raise `OSError` if there is not enough.

        Without `is_reserved` nothing is written now, and a write beyond free memory may end the process.
        """
        # Not in /dev/shm, which is small in containers.
        self._file = os.memfd_create(f"offbeat-{secrets.token_hex(8)}")
        self._end = weakref.finalize(self, os.close, self._file)
        if is_reserved:
            # An empty range is refused.
            os.posix_fallocate(self._file, 0, max(1, num_bytes))
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.address = Address(path, str(Path(path).readlink()))
        self.flat = _map(path, num_bytes)
        """`[num_bytes]` uint8, zeros."""

    def close(self) -> None:
        """Take the address away; who has mapped the memory keeps it."""
        self._end()


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
