"""The rollout log: each lease event and accepted group, in files, before it is acknowledged; read again after a death.

    FOLDER/00000007.log   segment header, record, record, ...   written by one learner process; the next one begins another file
    FOLDER/lock           locked by the process that writes

`learner.leases.log_reading` has the bytes of the records and reads the files.

The log loses nothing that it has. Bytes that are no whole record stay where they are, and whole records behind them are read:
one flipped bit costs one record. At the end of the newest segment such bytes are the torn tail of a process that died while it
wrote. Elsewhere they are damage, which readers tell as a `Gap` at its place in the history; a restart uses what the ledger can
still apply (`learner.leases.recovery`).

A process killed at any moment leaves at most one short record. `log.fsync` decides what a power failure may take.
"""

import errno
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from numpy.typing import NDArray

from offbeat.common.errors import ServiceError
from offbeat.common.processes.files import patiently, sync
from offbeat.learner.leases import log_reading
from offbeat.learner.leases.events import LeaseEvent
from offbeat.learner.leases.log_reading import find_end, segment_numbers, segment_path

logger = logging.getLogger(__name__)

Fsync = Literal["off", "second", "ack"]

SEGMENT_BYTES = 64 << 20
"""Size at which a segment file is closed. Segments are deleted as a whole."""
LOOK_S = 1.0
"""Seconds between looks at the free space, and between the syncs of `fsync = "second"`."""

# A limit on file sizes raises EFBIG.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class LogInUseError(ServiceError):
    """Another living process writes this log."""


class RolloutLog:
    """The log, open to append by one process, one thread at a time (the caller holds a lock)."""

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        fsync: Fsync,
        retain_bytes: int,
        min_free_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        after: log_reading.Position | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continue in a segment above all others and above `after`.

        `after` is the newest position that a checkpoint refers to. A power failure may have taken it from the log, and no new
        record may take its place. The first append creates the segment's file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._run_id = run_id
        self._fsync: Fsync = fsync
        self._segment_bytes = segment_bytes
        self._retain_bytes = retain_bytes
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._lock = _lock(folder)
        numbers = segment_numbers(folder)
        self._history_end = self._find_history_end(numbers)
        self._sizes = {number: segment_path(folder, number).stat().st_size for number in segment_numbers(folder)}
        self.num_bytes = sum(self._sizes.values())
        """Size of all segments."""
        self._number = 1 + max([0, *numbers, after.segment if after else 0])
        self._offset = log_reading.HEADER_BYTES
        self._descriptor: int | None = None
        self._unsynced: set[int] = set()
        self._has_unsynced_name = False
        self._next_sync = self._next_look = clock()
        self._is_full = False
        self._refused_bytes = 0
        """Size of the largest record that found no space since the log was last known to have room."""

    @property
    def end(self) -> log_reading.Position:
        """Position at which the next record will begin."""
        return log_reading.Position(self._number, self._offset)

    @property
    def is_full(self) -> bool:
        """A record found no space, or less than `min_free_bytes` is free; looked up at most once a second.

        After a refused record it stays True until a trial write of the same size succeeds.
        """
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._is_full = shutil.disk_usage(self._folder).free < self._min_free_bytes or not self._fits_refused()
        return self._is_full

    def append(self, event: LeaseEvent, *arrays: log_reading.Buffer | NDArray[Any]) -> log_reading.Position:
        """Add a record and return where it begins; `LogFullError` leaves the log unchanged.

        `Accepted` takes its token ids (int32) and behavior log-probs (float32), the other events take no array. The record
        survives the death of the process from now on; `commit` and `sync` protect from power failures.
        """
        parts = log_reading.encode_record(self._offset, event, *arrays)
        num_bytes = sum(map(len, parts))
        try:
            self._write(parts, num_bytes)
        except OSError as error:
            path = str(segment_path(self._folder, self._number))
            if error.errno not in _FULL:
                raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
            self._is_full, self._next_look = True, self._clock() + LOOK_S
            self._refused_bytes = max(self._refused_bytes, num_bytes)
            raise log_reading.LogFullError(error.errno, os.strerror(error.errno), path) from error
        position = self.end
        self._offset += num_bytes
        self.num_bytes += num_bytes
        self._sizes[self._number] = self._offset
        self._unsynced.add(self._number)
        if self._offset >= self._segment_bytes:
            self._end_segment()
        return position

    def commit(self) -> None:
        """Sync what was appended to the disk if `fsync` asks for it; call it before acknowledgements leave.

        An `OSError` from here or from `sync` is final: the kernel forgets what it could not write, so a retry would succeed
        without having written it.
        """
        if self._fsync == "ack" or (self._fsync == "second" and self._clock() >= self._next_sync):
            self.sync()

    def sync(self) -> None:
        """Sync everything appended to the disk, under any policy: a checkpoint is about to refer to it."""
        if not self._unsynced:
            return
        for number in sorted(self._unsynced):
            sync(segment_path(self._folder, number))
        self._unsynced.clear()
        if self._has_unsynced_name:
            sync(self._folder)
            sync(self._folder.parent)
            self._has_unsynced_name = False
        self._next_sync = self._clock() + LOOK_S

    def prune(self, needed: log_reading.Position) -> None:
        """Delete the oldest segments until at most `retain_bytes` are left, but none at or after `needed`."""
        for number in sorted(self._sizes):
            if self.num_bytes <= self._retain_bytes or number >= min(needed.segment, self._number):
                return
            segment_path(self._folder, number).unlink(missing_ok=True)
            self.num_bytes -= self._sizes.pop(number)
            self._unsynced.discard(number)

    def is_over(self, needed: log_reading.Position) -> bool:
        """Return whether a checkpoint is due: `prune(needed)` would leave more than `retain_bytes`, `prune(end)` would not.

        False while only the segment that is being written is needed: a checkpoint would free nothing.
        """
        num_needed = sum(size for number, size in self._sizes.items() if number >= needed.segment)
        return num_needed > self._retain_bytes and needed.segment < self._number

    def close(self) -> None:
        """Let another process write, after a sync under any policy but `off`."""
        if self._fsync != "off":
            self.sync()
        self._close_segment()
        self._lock.close()

    def _find_history_end(self, numbers: Sequence[int]) -> log_reading.Position:
        """Return where the last whole record ends; delete newer segments of which nothing but a header was written."""
        for number in reversed(numbers):
            path = segment_path(self._folder, number)
            end, num_bytes = find_end(path), path.stat().st_size
            if end < num_bytes and num_bytes > log_reading.HEADER_BYTES:
                logger.warning(
                    "%s: the last whole record ends at offset %d; the %d bytes after it are not a record and are skipped",
                    *(path, end, num_bytes - end),
                )
            if end > log_reading.HEADER_BYTES:
                return log_reading.Position(number, end)
            if num_bytes <= log_reading.HEADER_BYTES:
                path.unlink()
        return log_reading.Position(0, 0)

    def _fits_refused(self) -> bool:
        """Return whether a record of `_refused_bytes` would fit now, and forget the refused record if so."""
        # The free space of the disk shows neither a quota nor a limit on the size of files.
        if not self._refused_bytes:
            return True
        try:
            # Not in the segment: a reader that has mapped it is killed when the segment is cut off again.
            with patiently(lambda: tempfile.TemporaryFile(dir=self._folder, buffering=0)) as file:
                file.seek(self._offset)
                # Random bytes, because a compressing file system stores zeros in no space.
                _write_all(file.fileno(), [os.urandom(self._refused_bytes)], self._refused_bytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return False
        self._refused_bytes = 0
        return True

    def _write(self, parts: Sequence[log_reading.Buffer], num_bytes: int) -> None:
        """Append to the current segment's file, or leave the file as it was."""
        descriptor = self._descriptor if self._descriptor is not None else self._begin_segment()
        try:
            _write_all(descriptor, parts, num_bytes)
        except OSError:
            os.ftruncate(descriptor, self._offset)
            raise

    def _begin_segment(self) -> int:
        path = segment_path(self._folder, self._number)
        # Opened for appending, so that a removed record leaves no hole before the next one.
        descriptor = patiently(lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666))
        try:
            header = log_reading.SegmentHeader(self._run_id, self._number, self._history_end)
            _write_all(descriptor, [log_reading.encode_header(header)], log_reading.HEADER_BYTES)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        self._descriptor = descriptor
        self.num_bytes += log_reading.HEADER_BYTES
        self._sizes[self._number] = log_reading.HEADER_BYTES
        self._has_unsynced_name = True
        return descriptor

    def _end_segment(self) -> None:
        # Synced before the next segment exists, so that a power failure leaves no hole in the log.
        if self._fsync != "off":
            self.sync()
        self._close_segment()
        self._history_end = self.end
        self._number += 1
        self._offset = log_reading.HEADER_BYTES

    def _close_segment(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lock(folder: Path) -> BinaryIO:
    # A second learner would cut off the record that the first is writing. The kernel unlocks when the process ends.
    file = (folder / "lock").open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.close()
        raise LogInUseError(f"{folder} is being written by another learner: stop that one first") from error
    return file


def _write_all(descriptor: int, parts: Sequence[log_reading.Buffer], num_bytes: int) -> None:
    num_written = os.writev(descriptor, parts)
    if num_written < num_bytes:
        # A disk that becomes full gives short writes, and the reason at the next one.
        rest = memoryview(b"".join(parts))[num_written:]
        while rest:
            rest = rest[os.write(descriptor, rest) :]
