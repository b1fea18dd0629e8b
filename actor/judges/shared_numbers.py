"""Numbers that all processes of an actor share: when the judge may be asked next, and what it was asked so far."""

import fcntl
import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

COUNTS = ("requests", "failed", "cached", "tokens", "seconds")
"""Requests that were sent, unusable answers and missing ones, answers from the cache, tokens, seconds of all requests."""
_NEXT, _PAUSED, _FIRST_COUNT = 0, 1, 2
_FORMAT = struct.Struct(f"<{_FIRST_COUNT + len(COUNTS)}d")


class SharedNumbers:
    """A small file, mapped into each process and locked for each change. The lock of a process that dies is released."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the file, which `create` has made; `clock` must be the same in all processes."""
        self._file: BinaryIO = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), _FORMAT.size)
        self._clock = clock

    @staticmethod
    def create(path: Path) -> None:
        """Make the file."""
        path.write_bytes(bytes(_FORMAT.size))

    def take_turn(self, interval_s: float, longest_wait_s: float) -> float | None:
        """Reserve the next moment for a request, and return the seconds until then.

        Moments are at least `interval_s` apart and not within a pause. Reserve none and return None when the wait would exceed
        `longest_wait_s`.
        """
        numbers = self._locked()
        try:
            now = self._clock()
            starts_at = max(now, numbers[_NEXT], numbers[_PAUSED])
            if starts_at > now + longest_wait_s:
                return None
            numbers[_NEXT] = starts_at + interval_s
            return starts_at - now
        finally:
            self._store(numbers)

    def pause(self, seconds: float) -> None:
        """Let no request start for some time, as the judge has asked."""
        numbers = self._locked()
        numbers[_PAUSED] = max(numbers[_PAUSED], self._clock() + seconds)
        self._store(numbers)

    def add(self, **counts: float) -> None:
        """Add to some of `COUNTS`."""
        numbers = self._locked()
        for name, number in counts.items():
            numbers[_FIRST_COUNT + COUNTS.index(name)] += number
        self._store(numbers)

    def counts(self) -> dict[str, float]:
        """Return `COUNTS` by name."""
        numbers = self._locked()
        self._store(numbers)
        return dict(zip(COUNTS, numbers[_FIRST_COUNT:], strict=True))

    def _locked(self) -> list[float]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return list(_FORMAT.unpack_from(self._map))

    def _store(self, numbers: list[float]) -> None:
        _FORMAT.pack_into(self._map, 0, *numbers)
        fcntl.flock(self._file, fcntl.LOCK_UN)
