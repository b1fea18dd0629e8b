"""The rollout log: each lease event and accepted group, in files, before it is acknowledged; read again after a death.

    FOLDER/00000007.log   segment header, record, record, ...   written by one learner process; the next one begins another file
    FOLDER/lock           locked by the process that writes

    segment header   magic and format | where the history before this segment ended | checksum
    record           checksum | length of body | length of arrays | body: the event, msgpack | zeros up to 8 bytes | arrays

A record is whole when it lies within the file and its checksum is right; the first that is not whole ends its segment. Where
nothing follows, that is the torn tail of a process that died while it wrote, and is no error: opening the log to write cuts it
off, reading stops before it. Where a later segment's header says that the history went on, whole records are lost: reading
raises `LogDamagedError` instead of leaving them out. (In the last segment everything behind the damage is cut: the ledger
cannot apply events across a hole, and after a power failure nothing tells damage from what was never on disk.)

A process killed at any moment leaves at most one short record. What a power failure may take is `log.fsync`'s choice.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from offbeat.common.shutdown import ServiceError
from offbeat.learner.leases.events import Accepted, LeaseEvent
from offbeat.protocols.wire import ITEM_BYTES

logger = logging.getLogger(__name__)

Fsync = Literal["off", "second", "ack"]
Buffer = bytes | bytearray | memoryview

MAGIC = b"offbeat" + bytes([1])
"""The last byte is the format's version."""
ALIGNMENT = 8
"""Arrays begin at multiples of this: numpy and torch are slow on unaligned data."""
LOOK_S = 1.0
"""Seconds between looks at the free space, and between the syncs of `fsync = "second"`."""

_SEGMENT = struct.Struct("<8sQQQ")
_RECORD = struct.Struct("<QII")
_CHECKSUM = struct.Struct("<Q")
_LENGTHS = struct.Struct("<II")
HEADER_BYTES = _SEGMENT.size
_NAME = re.compile(r"\d{8,}\.log")
# A limit on file sizes raises EFBIG.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LeaseEvent)


class Position(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, array_like=True):
    """A place in the log; ordered as the history is."""

    segment: int
    """Number of the segment, from 1; no later process uses it again."""
    offset: int
    """Bytes into the segment's file."""


class Record(NamedTuple):
    """An event in the log."""

    position: Position
    """Start of the record."""
    event: LeaseEvent
    arrays: tuple[memoryview, ...]
    """`Accepted`: raw int32 token ids, raw float32 behavior log-probs; others: none. They are views into the mapped file, read
    from disk when they are used, and valid for as long as they are held: a deleted segment's space is not free before."""


class RawRecord(NamedTuple):
    """A whole record, not decoded."""

    offset: int
    body: memoryview
    arrays: memoryview
    end: int
    """Offset of what follows."""


class LogFullError(OSError):
    """The disk has no space for the record; the log is as it was before."""


class LogDamagedError(ServiceError):
    """Records that others follow are lost or not understood; the text names the file, the offset and what to do."""


class LogFormatError(ServiceError):
    """Another version of offbeat wrote the log, in a format that this one does not know."""


class LogInUseError(ServiceError):
    """Another living process writes this log."""


class RolloutLog:
    """The log, open to append by one process, one thread at a time (the caller holds a lock)."""

    def __init__(
        self,
        folder: Path,
        *,
        fsync: Fsync,
        segment_bytes: int,
        retain_bytes: int,
        min_free_bytes: int,
        after: Position | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Cut off what an earlier process did not finish, and continue in a segment above all others and above `after`.

        `after` is the newest position that a checkpoint refers to. A power failure may have taken it from the log, and no new
        record may take its place. The first append creates the segment's file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._fsync: Fsync = fsync
        self._segment_bytes = segment_bytes
        self._retain_bytes = retain_bytes
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._lock = _lock(folder)
        numbers = _segment_numbers(folder)
        self._history_end = self._cut_tail(numbers)
        self._sizes = {number: _path(folder, number).stat().st_size for number in _segment_numbers(folder)}
        self._num_bytes = sum(self._sizes.values())
        self._number = 1 + max([0, *numbers, after.segment if after else 0])
        self._offset = HEADER_BYTES
        self._descriptor: int | None = None
        self._unsynced: set[int] = set()
        self._has_unsynced_name = False
        self._next_sync = self._next_look = clock()
        self._is_full = False

    @property
    def end(self) -> Position:
        """Position at which the next record will begin."""
        return Position(self._number, self._offset)

    @property
    def num_bytes(self) -> int:
        """Size of all segments."""
        return self._num_bytes

    @property
    def is_full(self) -> bool:
        """A record found no space, or less than `min_free_bytes` is free; looked up at most once a second."""
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._is_full = shutil.disk_usage(self._folder).free < self._min_free_bytes
        return self._is_full

    def append(self, event: LeaseEvent, *arrays: Buffer | NDArray[Any]) -> Position:
        """Add a record and return where it begins; `LogFullError` leaves the log unchanged.

        `Accepted` takes its token ids (int32) and behavior log-probs (float32), the other events take no array. The record
        survives the death of the process from now on; `commit` and `sync` protect from power failures.
        """
        parts = encode_record(event, *arrays)
        num_bytes = sum(map(len, parts))
        try:
            self._write(parts, num_bytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._is_full, self._next_look = True, self._clock() + LOOK_S
            raise LogFullError(error.errno, os.strerror(error.errno), str(_path(self._folder, self._number))) from error
        position = self.end
        self._offset += num_bytes
        self._num_bytes += num_bytes
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
            _sync(_path(self._folder, number))
        self._unsynced.clear()
        if self._has_unsynced_name:
            _sync(self._folder)
            _sync(self._folder.parent)
            self._has_unsynced_name = False
        self._next_sync = self._clock() + LOOK_S

    def prune(self, needed: Position) -> None:
        """Delete the oldest segments until at most `retain_bytes` are left, but none at or after `needed`."""
        for number in sorted(self._sizes):
            if self._num_bytes <= self._retain_bytes or number >= min(needed.segment, self._number):
                return
            _path(self._folder, number).unlink(missing_ok=True)
            self._num_bytes -= self._sizes.pop(number)
            self._unsynced.discard(number)

    def is_over(self, needed: Position) -> bool:
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

    def _cut_tail(self, numbers: Sequence[int]) -> Position:
        """Cut what follows the last whole record, delete segments without a record, and return where the history ends."""
        for number in reversed(numbers):
            path = _path(self._folder, number)
            num_whole, num_bytes = _whole_bytes(path), path.stat().st_size
            if num_whole < num_bytes:
                logger.warning(
                    "%s: the last whole record ends at offset %d; cut off the %d bytes after it",
                    *(path, num_whole, num_bytes - num_whole),
                )
                os.truncate(path, num_whole)
            if num_whole > HEADER_BYTES:
                return Position(number, num_whole)
            path.unlink()
        return Position(0, 0)

    def _write(self, parts: Sequence[Buffer], num_bytes: int) -> None:
        """Append to the current segment's file, or leave the file as it was."""
        descriptor = self._descriptor if self._descriptor is not None else self._begin_segment()
        try:
            _write_all(descriptor, parts, num_bytes)
        except OSError:
            os.ftruncate(descriptor, self._offset)
            raise

    def _begin_segment(self) -> int:
        path = _path(self._folder, self._number)
        # Opened for appending, so that a removed record leaves no hole before the next one.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        try:
            _write_all(descriptor, [segment_header(self._history_end)], HEADER_BYTES)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        self._descriptor = descriptor
        self._num_bytes += HEADER_BYTES
        self._sizes[self._number] = HEADER_BYTES
        self._has_unsynced_name = True
        return descriptor

    def _end_segment(self) -> None:
        # Synced before the next segment exists, so that a power failure leaves no hole in the log.
        if self._fsync != "off":
            self.sync()
        self._close_segment()
        self._history_end = self.end
        self._number += 1
        self._offset = HEADER_BYTES

    def _close_segment(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_log(folder: Path, start: Position | None = None) -> Iterator[Record]:
    """Yield the records from `start`, or the oldest there is, to the end; another process may be writing.

    Raises `LogDamagedError` when one of them is missing: see the module's docstring. `Position(0, 0)` asks for the whole
    history and raises when some of it was pruned.
    """
    reached = start
    # Listed once: of a segment that has a successor here, all is written, even while a process writes the log.
    for number in _segment_numbers(folder):
        if start is not None and number < start.segment:
            continue
        path = _path(folder, number)
        opened = _open_segment(path)
        if opened is None:
            continue
        segment, previous_end = opened
        if reached is not None and reached < previous_end:
            raise LogDamagedError(
                f"{_path(folder, reached.segment)}: from offset {reached.offset} on there is no whole record, but the "
                f"history went on to offset {previous_end.offset} of {_path(folder, previous_end.segment).name}. Resume from "
                f"a checkpoint made after that; or delete {path.name} and the segments after it to go on without them: "
                "their groups are generated again."
            )
        offset = start.offset if start is not None and number == start.segment else 0
        offset = max(offset, HEADER_BYTES)
        for raw in whole_records(segment, offset):
            yield decode_record(raw, number, path)
            offset = raw.end
        reached = Position(number, offset)


def read_record(folder: Path, position: Position) -> Record | None:
    """Return the record that begins at this position, or None when it was deleted, cut off or damaged."""
    path = _path(folder, position.segment)
    opened = _open_segment(path)
    if opened is None or position.offset < HEADER_BYTES:
        return None
    raw = next(whole_records(opened[0], position.offset), None)
    return None if raw is None else decode_record(raw, position.segment, path)


# The format, in memory. Everything read is untrusted: nothing is taken for a length before it is known to lie within the file.


def segment_header(previous_end: Position) -> bytes:
    """Return the first bytes of a segment's file."""
    unchecked = _SEGMENT.pack(MAGIC, previous_end.segment, previous_end.offset, 0)[: -_CHECKSUM.size]
    return unchecked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(unchecked))


def read_segment_header(segment: memoryview, path: Path) -> Position:
    """Return where the history before this segment ended. `segment` holds a whole header; `path` is for errors."""
    magic, number, offset, checksum = _SEGMENT.unpack_from(segment)
    if magic[:-1] == MAGIC[:-1] and magic != MAGIC:
        raise LogFormatError(
            f"{path} is in format {magic[-1]} of the log, and this version of offbeat reads and writes format {MAGIC[-1]}: "
            "resume with the version that wrote it."
        )
    if magic != MAGIC or checksum != xxhash.xxh3_64_intdigest(segment[: HEADER_BYTES - _CHECKSUM.size]):
        raise LogDamagedError(
            f"{path}: the header at offset 0 is damaged. Resume from a checkpoint made after this segment; or delete it and "
            "the segments after it to go on without them: their groups are generated again."
        )
    return Position(number, offset)


def encode_record(event: LeaseEvent, *arrays: Buffer | NDArray[Any]) -> list[Buffer]:
    """Return the parts of a record, to write one after another."""
    body = _encoder.encode(event)
    views = [memoryview(array.data if isinstance(array, np.ndarray) else array).cast("B") for array in arrays]
    assert [len(view) for view in views] == _array_lengths(event), f"{type(event).__name__} with arrays of another size"
    checked = _LENGTHS.pack(len(body), sum(map(len, views))) + body + bytes(-len(body) % ALIGNMENT)
    checksum = xxhash.xxh3_64(checked)
    for view in views:
        checksum.update(view)
    return [_CHECKSUM.pack(checksum.intdigest()) + checked, *views]


def whole_records(segment: memoryview, offset: int) -> Iterator[RawRecord]:
    """Yield the records of a segment from `offset` on, up to the first that is not whole."""
    while offset + _RECORD.size <= len(segment):
        checksum, num_body_bytes, num_array_bytes = _RECORD.unpack_from(segment, offset)
        body_start = offset + _RECORD.size
        arrays_start = body_start + num_body_bytes + -num_body_bytes % ALIGNMENT
        end = arrays_start + num_array_bytes
        if end > len(segment) or checksum != xxhash.xxh3_64_intdigest(segment[offset + _CHECKSUM.size : end]):
            return
        yield RawRecord(offset, segment[body_start : body_start + num_body_bytes], segment[arrays_start:end], end)
        offset = end


def decode_record(raw: RawRecord, number: int, path: Path) -> Record:
    """Return the decoded record; raise `LogDamagedError`, naming `path`, when it is whole and not understood."""
    try:
        event = _decoder.decode(raw.body)
        lengths = _array_lengths(event)
        if sum(lengths) != len(raw.arrays):
            raise msgspec.ValidationError(f"{len(raw.arrays)} bytes of arrays, expected {sum(lengths)}")
    # msgspec reports text that is not UTF-8 as UnicodeDecodeError, which is none of its own errors.
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LogDamagedError(
            f"{path}: the record at offset {raw.offset} is whole, but not understood ({error}). If another version of "
            "offbeat wrote it, resume with that version; else delete this segment and those after it to go on without them: "
            "their groups are generated again."
        ) from error
    position = Position(number, raw.offset)
    if not lengths:
        return Record(position, event, ())
    return Record(position, event, (raw.arrays[: lengths[0]], raw.arrays[lengths[0] :]))


def _array_lengths(event: LeaseEvent) -> list[int]:
    """Return the bytes of each array that belongs to the event."""
    if not isinstance(event, Accepted):
        return []
    return [ITEM_BYTES * sum(completion.num_tokens for completion in event.completions)] * 2


# The files


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.log"


def _segment_numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _lock(folder: Path) -> BinaryIO:
    # A second learner would cut off the record that the first is writing. The kernel unlocks when the process ends.
    file = (folder / "lock").open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.close()
        raise LogInUseError(f"{folder} is being written by another learner: stop that one first") from error
    return file


def _open_segment(path: Path) -> tuple[memoryview, Position] | None:
    """Return a segment's bytes and where the history before it ended; None when it is deleted or holds nothing."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < HEADER_BYTES:
                return None
            segment = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        return None
    try:
        return segment, read_segment_header(segment, path)
    except LogDamagedError:
        # After a power failure a file can be longer than its written content.
        if next(whole_records(segment, HEADER_BYTES), None) is None:
            return None
        raise


def _whole_bytes(path: Path) -> int:
    """Return the offset at which a segment's last whole record ends; 0 without a header."""
    opened = _open_segment(path)
    if opened is None:
        return 0
    end = HEADER_BYTES
    for raw in whole_records(opened[0], HEADER_BYTES):
        end = raw.end
    return end


def _write_all(descriptor: int, parts: Sequence[Buffer], num_bytes: int) -> None:
    num_written = os.writev(descriptor, parts)
    if num_written < num_bytes:
        # A disk that becomes full gives short writes, and the reason at the next one.
        rest = memoryview(b"".join(parts))[num_written:]
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def _sync(path: Path) -> None:
    """Sync a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
