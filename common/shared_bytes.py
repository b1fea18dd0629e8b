"""Bytes in memory that several processes share. Linux frees them with the last process that uses them."""

import os

import torch


class SharedBytes:
    """A buffer that other processes of this user map by its path."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate the memory. Raise `OSError` if there is not enough."""
        # Not in /dev/shm, which is small in containers.
        self._file = os.memfd_create("offbeat-weights")
        # Unlike `truncate` this reserves the pages; without them a write beyond free memory would kill the process.
        os.posix_fallocate(self._file, 0, num_bytes)
        self.flat = map_bytes(self.path, num_bytes)
        """`[num_bytes]` uint8."""

    @property
    def path(self) -> str:
        """Path of the memory, for `map_bytes` in another process of this user."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Release the memory."""
        os.close(self._file)


def map_bytes(path: str, num_bytes: int) -> torch.Tensor:
    """Map the memory at `path`, uint8 `[num_bytes]`, without a copy."""
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
