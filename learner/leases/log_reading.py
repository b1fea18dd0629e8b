"""The rollout log's files, read: whole histories and single records, also while another process writes them.

    segment header   magic and format | number of the segment | where the history before it ended | run id | checksum
    record           checksum | length of body | length of arrays | body: the event, msgpack | zeros up to 8 bytes | arrays,
                     zeros up to 8 bytes, which count as arrays

A record is whole when it lies within the file and its checksum, seeded with its offset, is right: a copy of it elsewhere is no
record. A segment under another number than its header's is no part of the log. Everything read is untrusted: nothing is taken
for a length before it is known to lie within the file.
"""

import itertools
import logging
import mmap
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from offbeat.common.errors import ServiceError
from offbeat.learner.leases.events import Accepted, LeaseEvent
from offbeat.protocols.wire import ITEM_BYTES, has_context

Buffer = bytes | bytearray | memoryview

MAGIC = b"offbeat" + bytes([2])
"""The last byte is the format's version."""
ALIGNMENT = 8
"""Records and their arrays begin at multiples of this: numpy and torch are slow on unaligned data, and behind damage whole
records are looked for there."""

_SEGMENT = struct.Struct("<8sQQQ16sQ")
_RECORD = struct.Struct("<QII")
_CHECKSUM = struct.Struct("<Q")
_LENGTHS = struct.Struct("<II")
HEADER_BYTES = _SEGMENT.size

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LeaseEvent)


class LogFullError(OSError):
    """The disk has no space for the record; the log is as it was before."""


class Position(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, array_like=True):
    """A place in the log; ordered as the history is."""

    segment: int
    """Number of the segment, from 1; no later process uses it again."""
    offset: int
    """Bytes into the segment's file."""


class SegmentHeader(NamedTuple):
    """The beginning of a segment's file."""

    run_id: str
    """Up to 16 characters."""
    number: int
    """Number of the segment, as in the file's name."""
    previous_end: Position
    """End of the history before the segment."""


class Record(NamedTuple):
    """An event in the log."""

    position: Position
    """Start of the record."""
    event: LeaseEvent
    arrays: tuple[memoryview, ...]
    """`Accepted`: the raw arrays of its `GroupDone`; others: none. They are views into the mapped file, read from disk when
    they are used, and valid for as long as they are held: a deleted segment's space is not free before."""


class RawRecord(NamedTuple):
    """A whole record, not decoded."""

    offset: int
    body: memoryview
    arrays: memoryview
    end: int
    """Offset of what follows."""


class LogDamagedError(ServiceError):
    """Records are lost or not understood, and the log cannot be read around them; the text says where and what to do."""


class LogFormatError(ServiceError):
    """Another version of offbeat wrote the log, in a format that this one does not know."""


def encode_header(header: SegmentHeader) -> bytes:
    """Return the first bytes of a segment's file."""
    run_id, number, end = header
    unchecked = _SEGMENT.pack(MAGIC, number, end.segment, end.offset, run_id.encode("latin-1"), 0)[: -_CHECKSUM.size]
    return unchecked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(unchecked))


def decode_header(segment: memoryview, path: Path) -> SegmentHeader:
    """Return the header of a segment, which has the length of one at least; `path` is for errors."""
    magic, number, end_segment, end_offset, run_id, checksum = _SEGMENT.unpack_from(segment)
    checked = MAGIC + segment[_CHECKSUM.size : HEADER_BYTES - _CHECKSUM.size]
    is_whole = checksum == xxhash.xxh3_64_intdigest(checked)
    # With a right checksum, a bit of the format's number is flipped.
    if magic[:-1] == MAGIC[:-1] and magic != MAGIC and not is_whole:
        raise LogFormatError(
            f"{path} is in format {magic[-1]} of the log, and this version of offbeat reads and writes format {MAGIC[-1]}: "
            "resume with the version that wrote it."
        )
    if magic != MAGIC or not is_whole:
        raise LogDamagedError(f"{path}: the header at offset 0 is damaged")
    return SegmentHeader(run_id.rstrip(b"\0").decode("latin-1"), number, Position(end_segment, end_offset))


def encode_record(offset: int, event: LeaseEvent, *arrays: Buffer | NDArray[Any]) -> list[Buffer]:
    """Return the parts of a record that begins at `offset` of its segment, to write one after another."""
    body = _encoder.encode(event)
    views = [memoryview(array.data if isinstance(array, np.ndarray) else array).cast("B") for array in arrays]
    assert [len(view) for view in views] == _array_lengths(event), f"{type(event).__name__} with arrays of another size"
    num_array_bytes = sum(map(len, views))
    views.append(memoryview(bytes(-num_array_bytes % ALIGNMENT)))
    checked = _LENGTHS.pack(len(body), num_array_bytes + len(views[-1])) + body + bytes(-len(body) % ALIGNMENT)
    checksum = xxhash.xxh3_64(checked, seed=offset)
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
        if end > len(segment) or checksum != xxhash.xxh3_64_intdigest(segment[offset + _CHECKSUM.size : end], seed=offset):
            return
        yield RawRecord(offset, segment[body_start : body_start + num_body_bytes], segment[arrays_start:end], end)
        offset = end


def find_whole(segment: memoryview, offset: int) -> int | None:
    """Return the offset of the first whole record at or behind `offset`, a multiple of `ALIGNMENT`; None without one."""
    if offset + _RECORD.size > len(segment):
        return None
    # Where only body or arrays are damaged, the next record is where the lengths say. Tried first, because it is fast, and
    # because the damaged record's arrays, an actor's numbers, are then not searched for records.
    _, num_body_bytes, num_array_bytes = _RECORD.unpack_from(segment, offset)
    claimed = offset + _RECORD.size + num_body_bytes + -num_body_bytes % ALIGNMENT + num_array_bytes
    if claimed % ALIGNMENT == 0 and _is_whole(segment, claimed):
        return claimed
    return next((start for start in _possible_records(segment, offset) if _is_whole(segment, start)), None)


def _is_whole(segment: memoryview, offset: int) -> bool:
    return next(whole_records(segment, offset), None) is not None


def _possible_records(segment: memoryview, offset: int) -> list[int]:
    """Return the offsets from `offset` on where a record of possible lengths could begin, in order."""
    num_units = (len(segment) - offset) // ALIGNMENT
    units = np.frombuffer(segment[offset : offset + num_units * ALIGNMENT], dtype="<u4").reshape(num_units, 2)
    # A record is a checksum, its lengths, and a body: the first unit, the second, and from the third on.
    num_body_bytes, num_array_bytes = units[1:-1].astype(np.int64).T
    left = (num_units - np.arange(num_body_bytes.size) - 2) * ALIGNMENT
    is_map = (units[2:, 0] & 0xF0) == 0x80
    fits = (num_body_bytes > 0) & (num_array_bytes % ALIGNMENT == 0) & (num_body_bytes + num_array_bytes <= left) & is_map
    return (offset + np.flatnonzero(fits) * ALIGNMENT).tolist()


def decode_record(raw: RawRecord, number: int, path: Path) -> Record:
    """Return the decoded record; raise `LogDamagedError`, naming `path`, when it is whole and not understood."""
    try:
        event = _decoder.decode(raw.body)
        lengths = _array_lengths(event)
        num_bytes = sum(lengths)
        if len(raw.arrays) not in (num_bytes, num_bytes + -num_bytes % ALIGNMENT):
            raise msgspec.ValidationError(f"{len(raw.arrays)} bytes of arrays, expected {num_bytes}")
    # msgspec reports text that is not UTF-8 as UnicodeDecodeError, which is none of its own errors.
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LogDamagedError(
            f"{path}: the record at offset {raw.offset} is whole, but not understood ({error}). If another version of "
            "offbeat wrote it, resume with that version; else delete this segment and those after it to go on without them: "
            "their groups are generated again."
        ) from error
    position = Position(number, raw.offset)
    ends = list(itertools.accumulate(lengths))
    return Record(position, event, tuple(raw.arrays[end - length : end] for end, length in zip(ends, lengths, strict=True)))


def _array_lengths(event: LeaseEvent) -> list[int]:
    """Return the bytes of each array that belongs to the event."""
    if not isinstance(event, Accepted):
        return []
    lengths = [ITEM_BYTES * sum(completion.num_tokens for completion in event.completions)] * 2
    if has_context(event.completions):
        lengths.append(ITEM_BYTES * sum(turn.num_context for completion in event.completions for turn in completion.turns))
    if event.experts is not None:
        lengths.append(event.experts.num_bytes)
    return lengths


logger = logging.getLogger(__name__)

_NAME = re.compile(r"\d{8,}\.log")


class Gap(NamedTuple):
    """A place where records are lost, although whole ones follow."""

    start: Position
    """End of the last whole record before."""
    end: Position
    """Start of the first whole record behind, or of the segment that has it."""

    def __str__(self) -> str:
        """Return the place in words: files and bytes."""
        first, last = segment_name(self.start.segment), segment_name(self.end.segment)
        if first == last:
            return f"{first}: bytes {self.start.offset} to {self.end.offset} are damaged"
        return f"from offset {self.start.offset} of {first} to offset {self.end.offset} of {last} the log is lost"


def read_log(folder: Path, start: Position | None = None) -> Iterator[Record]:
    """Yield the records of `read_history`; gaps are logged as warnings."""
    for found in read_history(folder, start):
        if isinstance(found, Gap):
            logger.warning("%s: %s; the records after it are read", folder, found)
        else:
            yield found


def read_whole_log(folder: Path) -> Iterator[Record]:
    """Yield the records of `read_history`; raises `LogDamagedError` at a gap."""
    for found in read_history(folder):
        if isinstance(found, Gap):
            raise LogDamagedError(f"{folder}: {found}; this takes a log without damage")
        yield found


def read_history(folder: Path, start: Position | None = None) -> Iterator[Record | Gap]:
    """Yield the records from `start`, or the oldest there is, to the end, and every gap between them.

    Another process may be writing. `Position(0, 0)` asks for the whole history. Raises `LogDamagedError` when the segments from
    `start` on were deleted, for segments of two runs, and for a record that is whole but not understood.
    """
    reached = start
    run_id: str | None = None
    # Listed once: of a segment that has a successor here, all is written, even while a process writes the log.
    numbers = segment_numbers(folder)
    for number in numbers:
        if start is not None and number < start.segment:
            continue
        path = segment_path(folder, number)
        opened = open_segment(path)
        if opened is None:
            continue
        segment, header = opened
        begin = start.offset if start is not None and number == start.segment else 0
        if header is not None and header.run_id != (run_id := run_id or header.run_id):
            raise LogDamagedError(f"{path} is of run {header.run_id}, and the log before it of run {run_id}")
        if header is None:
            if not begin:
                yield Gap(Position(number, 0), Position(number, HEADER_BYTES))
        elif reached is not None and reached < header.previous_end:
            if number == numbers[0]:
                raise LogDamagedError(
                    f"{folder}: the history before {path.name} was deleted, and it is needed from offset {reached.offset} of "
                    f"{segment_name(reached.segment)} on. Resume from a checkpoint made after that; or move the folder out of "
                    "run.dir to go on without the log: its groups are generated again."
                )
            yield Gap(reached, header.previous_end)
        offset = max(begin, HEADER_BYTES)
        for raw in _records_around_damage(segment, offset):
            if raw.offset > offset:
                yield Gap(Position(number, offset), Position(number, raw.offset))
            yield decode_record(raw, number, path)
            offset = raw.end
        reached = Position(number, offset)


def read_record(folder: Path, position: Position) -> Record | None:
    """Return the record that begins at this position, or None when it was deleted or damaged."""
    path = segment_path(folder, position.segment)
    opened = open_segment(path)
    if opened is None or position.offset < HEADER_BYTES:
        return None
    raw = next(whole_records(opened[0], position.offset), None)
    return None if raw is None else decode_record(raw, position.segment, path)


def segment_name(number: int) -> str:
    """Return the name of a segment's file."""
    return f"{number:08d}.log"


def segment_path(folder: Path, number: int) -> Path:
    """Return the path of a segment's file."""
    return folder / segment_name(number)


def read_headers(folder: Path) -> dict[Path, SegmentHeader]:
    """Return the headers of all segments, without those that are damaged, in order of the files' names."""
    headers: dict[Path, SegmentHeader] = {}
    for number in segment_numbers(folder):
        path = segment_path(folder, number)
        opened = _open_file(path)
        if opened is not None and opened[1] is not None:
            headers[path] = opened[1]
    return headers


def segment_numbers(folder: Path) -> list[int]:
    """Return the numbers of the segments in the folder, in order."""
    return sorted(int(path.stem) for path in folder.iterdir() if _NAME.fullmatch(path.name))


def open_segment(path: Path) -> tuple[memoryview, SegmentHeader | None] | None:
    """Return a segment's bytes and header (None: its header is damaged).

    Returns None when the segment is deleted, holds no record, or is another one under this name.
    """
    opened = _open_file(path)
    return None if opened is None or (opened[1] is not None and opened[1].number != int(path.stem)) else opened


def _open_file(path: Path) -> tuple[memoryview, SegmentHeader | None] | None:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < HEADER_BYTES:
                return None
            segment = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        return None
    try:
        return segment, decode_header(segment, path)
    except LogDamagedError:
        # After a power failure a file can be longer than its written content.
        return None if find_whole(segment, HEADER_BYTES) is None else (segment, None)


def find_end(path: Path) -> int:
    """Return the offset at which a segment's last whole record ends; `HEADER_BYTES` without a record, 0 without a header."""
    opened = open_segment(path)
    if opened is None:
        return 0
    end = HEADER_BYTES
    for raw in _records_around_damage(opened[0], HEADER_BYTES):
        end = raw.end
    return end


def _records_around_damage(segment: memoryview, offset: int) -> Iterator[RawRecord]:
    """Yield all whole records of a segment from `offset` on, also those behind bytes that are no record."""
    found: int | None = offset
    while found is not None:
        for raw in whole_records(segment, found):
            yield raw
            offset = raw.end
        found = find_whole(segment, offset)
