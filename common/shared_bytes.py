"""Bytes in memory that several processes share. Linux frees them with the last process that uses them."""

import os
import secrets
from pathlib import Path

import torch


class SharedBytes:
    """A buffer that other processes of this user map by its path."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate the memory. Raise `OSError` if there is not enough."""
        # Not in /dev/shm, which is small in containers.
        self._file = os.memfd_create(f"offbeat-weights-{secrets.token_hex(8)}")
        # Unlike `truncate` this reserves the pages; without them a write beyond free memory would kill the process.
        os.posix_fallocate(self._file, 0, num_bytes)
        self.flat = map_bytes(self.path, num_bytes)
        """`[num_bytes]` uint8."""

    @property
    def path(self) -> str:
        """Path of the memory, for `map_bytes` in another process of this user."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def mark(self) -> str:
        """A text that only this memory has, for `find_bytes`."""
        return str(Path(self.path).readlink())

    def close(self) -> None:
        """Release the memory."""
        os.close(self._file)


def map_bytes(path: str, num_bytes: int) -> torch.Tensor:
    """Map the memory at `path`, uint8 `[num_bytes]`, without a copy."""
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def find_bytes(path: str, mark: str, num_bytes: int) -> torch.Tensor | None:
    """Map memory that may be out of reach; None where `path` does not lead to it, as on another machine or in a container."""
    try:
        if str(Path(path).readlink()) != mark:
            return None
        return map_bytes(path, num_bytes)
    # torch.from_file's for a file that cannot be opened.
    except (OSError, RuntimeError):
        return None
