"""The rollout log's files, read: whole histories and single records, also while another process writes them."""

import logging
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from offbeat.learner.leases import log_records

logger = logging.getLogger(__name__)

_NAME = re.compile(r"\d{8,}\.log")


class Gap(NamedTuple):
    """A place where records are lost, although whole ones follow."""

    start: log_records.Position
    """End of the last whole record before."""
    end: log_records.Position
    """Start of the first whole record behind, or of the segment that has it."""

    def __str__(self) -> str:
        """Return the place in words: files and bytes."""
        first, last = segment_name(self.start.segment), segment_name(self.end.segment)
        if first == last:
            return f"{first}: bytes {self.start.offset} to {self.end.offset} are damaged"
        return f"from offset {self.start.offset} of {first} to offset {self.end.offset} of {last} the log is lost"


def read_log(folder: Path, start: log_records.Position | None = None) -> Iterator[log_records.Record]:
    """Yield the records of `read_history`; gaps are logged as warnings."""
    for found in read_history(folder, start):
        if isinstance(found, Gap):
            logger.warning("%s: %s; the records after it are read", folder, found)
        else:
            yield found


def read_whole_log(folder: Path) -> Iterator[log_records.Record]:
    """Yield the records of `read_history`; raises `LogDamagedError` at a gap."""
    for found in read_history(folder):
        if isinstance(found, Gap):
            raise log_records.LogDamagedError(f"{folder}: {found}; this takes a log without damage")
        yield found


def read_history(folder: Path, start: log_records.Position | None = None) -> Iterator[log_records.Record | Gap]:
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
            raise log_records.LogDamagedError(f"{path} is of run {header.run_id}, and the log before it of run {run_id}")
        if header is None:
            if not begin:
                yield Gap(log_records.Position(number, 0), log_records.Position(number, log_records.HEADER_BYTES))
        elif reached is not None and reached < header.previous_end:
            if number == numbers[0]:
                raise log_records.LogDamagedError(
                    f"{folder}: the history before {path.name} was deleted, and it is needed from offset {reached.offset} of "
                    f"{segment_name(reached.segment)} on. Resume from a checkpoint made after that; or move the folder out of "
                    "run.dir to go on without the log: its groups are generated again."
                )
            yield Gap(reached, header.previous_end)
        offset = max(begin, log_records.HEADER_BYTES)
        for raw in _records_around_damage(segment, offset):
            if raw.offset > offset:
                yield Gap(log_records.Position(number, offset), log_records.Position(number, raw.offset))
            yield log_records.decode_record(raw, number, path)
            offset = raw.end
        reached = log_records.Position(number, offset)


def read_record(folder: Path, position: log_records.Position) -> log_records.Record | None:
    """Return the record that begins at this position, or None when it was deleted or damaged."""
    path = segment_path(folder, position.segment)
    opened = open_segment(path)
    if opened is None or position.offset < log_records.HEADER_BYTES:
        return None
    raw = next(log_records.whole_records(opened[0], position.offset), None)
    return None if raw is None else log_records.decode_record(raw, position.segment, path)


def segment_name(number: int) -> str:
    """Return the name of a segment's file."""
    return f"{number:08d}.log"


def segment_path(folder: Path, number: int) -> Path:
    """Return the path of a segment's file."""
    return folder / segment_name(number)


def read_headers(folder: Path) -> dict[Path, log_records.SegmentHeader]:
    """Return the headers of all segments, without those that are damaged, in order of the files' names."""
    headers: dict[Path, log_records.SegmentHeader] = {}
    for number in segment_numbers(folder):
        path = segment_path(folder, number)
        opened = _open_file(path)
        if opened is not None and opened[1] is not None:
            headers[path] = opened[1]
    return headers


def segment_numbers(folder: Path) -> list[int]:
    """Return the numbers of the segments in the folder, in order."""
    return sorted(int(path.stem) for path in folder.iterdir() if _NAME.fullmatch(path.name))


def open_segment(path: Path) -> tuple[memoryview, log_records.SegmentHeader | None] | None:
    """Return a segment's bytes and header (None: its header is damaged).

    Returns None when the segment is deleted, holds no record, or is another one under this name.
    """
    opened = _open_file(path)
    return None if opened is None or (opened[1] is not None and opened[1].number != int(path.stem)) else opened


def _open_file(path: Path) -> tuple[memoryview, log_records.SegmentHeader | None] | None:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < log_records.HEADER_BYTES:
                return None
            segment = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        return None
    try:
        return segment, log_records.decode_header(segment, path)
    except log_records.LogDamagedError:
        # After a power failure a file can be longer than its written content.
        return None if log_records.find_whole(segment, log_records.HEADER_BYTES) is None else (segment, None)


def find_end(path: Path) -> int:
    """Return the offset at which a segment's last whole record ends; `HEADER_BYTES` without a record, 0 without a header."""
    opened = open_segment(path)
    if opened is None:
        return 0
    end = log_records.HEADER_BYTES
    for raw in _records_around_damage(opened[0], log_records.HEADER_BYTES):
        end = raw.end
    return end


def _records_around_damage(segment: memoryview, offset: int) -> Iterator[log_records.RawRecord]:
    """Yield all whole records of a segment from `offset` on, also those behind bytes that are no record."""
    found: int | None = offset
    while found is not None:
        for raw in log_records.whole_records(segment, found):
            yield raw
            offset = raw.end
        found = log_records.find_whole(segment, offset)
