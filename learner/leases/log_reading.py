"""The rollout log's files, read: whole histories and single records, also while another process writes them."""

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

from offbeat.learner.leases.log_records import (
    HEADER_BYTES,
    LogDamagedError,
    Position,
    Record,
    decode_record,
    read_segment_header,
    whole_records,
)

_NAME = re.compile(r"\d{8,}\.log")


def read_log(folder: Path, start: Position | None = None) -> Iterator[Record]:
    """Yield the records from `start`, or the oldest there is, to the end; another process may be writing.

    Raises `LogDamagedError` when one of them is missing: see the module's docstring. `Position(0, 0)` asks for the whole
    history and raises when some of it was pruned.
    """
    reached = start
    # Listed once: of a segment that has a successor here, all is written, even while a process writes the log.
    for number in segment_numbers(folder):
        if start is not None and number < start.segment:
            continue
        path = segment_path(folder, number)
        opened = open_segment(path)
        if opened is None:
            continue
        segment, previous_end = opened
        if reached is not None and reached < previous_end:
            raise LogDamagedError(
                f"{segment_path(folder, reached.segment)}: from offset {reached.offset} on there is no whole record, but the "
                f"history went on to offset {previous_end.offset} of {segment_path(folder, previous_end.segment).name}. Resume "
                f"from a checkpoint made after that; or delete {path.name} and the segments after it to go on without them: "
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
    path = segment_path(folder, position.segment)
    opened = open_segment(path)
    if opened is None or position.offset < HEADER_BYTES:
        return None
    raw = next(whole_records(opened[0], position.offset), None)
    return None if raw is None else decode_record(raw, position.segment, path)


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.log"


def segment_numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.iterdir() if _NAME.fullmatch(path.name))


def open_segment(path: Path) -> tuple[memoryview, Position] | None:
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


def whole_bytes(path: Path) -> int:
    """Return the offset at which a segment's last whole record ends; 0 without a header."""
    opened = open_segment(path)
    if opened is None:
        return 0
    end = HEADER_BYTES
    for raw in whole_records(opened[0], HEADER_BYTES):
        end = raw.end
    return end
