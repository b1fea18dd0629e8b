"""A run's metrics: rows appended to `metrics.jsonl`, with their scalars copied to TensorBoard."""

import contextlib
import io
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from offbeat.common.records import rows

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=rows.Row)
ROWS_FILE = "metrics.jsonl"
"""Name of the rows file in a run's folder."""

MAX_BYTES = 512 << 20
"""Size of the rows file above which the older rows of single groups, samples and transfers are deleted."""
_DETAILS = (rows.GroupRow, rows.SampleRow, rows.EvalSampleRow, rows.WeightsRow, rows.PullRow, rows.CommitRow)
"""Rows that a long run does without once they are old. Most of its rows are of these kinds."""
_BEGINNING = b'{"kind":"'
"""The beginning of each line that `encode_row` makes."""
_NEWEST_BYTES = 64 << 10
"""End of the rows file that is read for the newest rows: over a hundred, if they are not samples."""
CLOSE_S = 10.0
"""Seconds for which a closing writer tries to write the newest row, which may be the run's final one, to a full disk."""


class MetricsWriter:
    """Appends rows to `folder/metrics.jsonl`; any thread may write.

    Each row reaches the file in one system call, so a killed process leaves at most one torn line. A full or failing disk does
    not stop training: the rows lost are counted, and an event row tells their number once the disk takes rows again.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = False, clock: Callable[[], float] = time.time) -> None:
        """Open the files, creating those that are missing; rows of an earlier process stay.

        Args:
            folder: The run's folder.
            tensorboard: Also write TensorBoard events to `folder/tensorboard`.
            clock: Seconds since the epoch.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._lock = threading.Lock()
        self._rows = _AppendFile(folder / ROWS_FILE)
        self._rows.end_torn_line()
        self._shorten_at = MAX_BYTES
        self._events = _TensorBoardEvents(folder / "tensorboard", clock()) if tensorboard else None
        self._num_lost_in_a_row = 0
        self._refused: rows.Row | None = None
        """The newest row, if the disk did not take it."""

    def write(self, row: rows.Row) -> rows.Row:
        """Append a row, stamped with the current time unless it has one; return the stamped row.

        The numbers of step and evaluation rows also go to TensorBoard, over `policy_version`. Numbers that are not finite
        become null in the file. `TypeError` for values that JSON cannot hold, numpy scalars included.
        """
        with self._lock:
            if math.isnan(row.time):
                row = msgspec.structs.replace(row, time=self._clock())
            if isinstance(row, rows.StepRow) and self._rows.is_elsewhere():
                self._begin_again()
            self._append_row(row)
            if self._rows.num_bytes > self._shorten_at:
                self._shorten()
            if isinstance(row, rows.StepRow | rows.EvalRow) and self._events is not None:
                self._events.append(row.policy_version, row.time, scalars_of(row))
        return row

    def close(self) -> None:
        """Close the files; a second call does nothing. A newest row that the disk refused is tried for `CLOSE_S` seconds."""
        with self._lock:
            self._retry()
            self._rows.close()
            if self._events is not None:
                self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_again(self) -> None:
        """Open a new file in the place of one that somebody has deleted or moved."""
        path = self._rows.path
        try:
            again = _AppendFile(path)
        except OSError:
            # The folder is gone too, which the rollout log reports.
            return
        self._rows.close()
        self._rows = again
        logger.warning("%s was deleted or moved away; the rows from here on are in a new file", path)

    def _append_row(self, row: rows.Row) -> None:
        try:
            self._try_to_append(row)
        except OSError as error:
            self._refused = row
            self._num_lost_in_a_row += 1
            if self._num_lost_in_a_row == 1:
                logger.warning("metrics rows are being lost, training continues: %s", error)

    def _try_to_append(self, row: rows.Row) -> None:
        lines = rows.encode_row(row)
        loss = ""
        if self._num_lost_in_a_row:
            loss = f"{self._num_lost_in_a_row} metrics rows were lost while the disk was full or failed"
            event = rows.EventRow(time=self._clock(), event="metrics_rows_lost", detail=loss)
            # Both in one append: the short event alone would fit long before a row does, and report a recovery at each try.
            lines = rows.encode_row(event) + lines
        self._rows.append(lines)
        self._refused = None
        if loss:
            self._num_lost_in_a_row = 0
            logger.warning("metrics are written again; %s", loss)

    def _retry(self) -> None:
        """Try to append the refused row, if there is one, until the disk takes it or `CLOSE_S` is over."""
        row = self._refused
        if row is None:
            return
        # The row itself is not lost yet.
        self._num_lost_in_a_row -= 1
        logger.warning("the disk did not take the newest metrics row; trying for %g s", CLOSE_S)
        deadline = time.monotonic() + CLOSE_S
        while self._refused is not None and time.monotonic() < deadline:
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                self._try_to_append(row)
        if self._refused is not None:
            self._refused = None
            logger.warning("the newest metrics row is lost: the disk takes no rows")

    def _shorten(self) -> None:
        """Delete the rows of details from the older half of the file. Readers that have it open keep the longer one."""
        path = self._rows.path
        shorter = path.with_suffix(".shorter")
        half, position = self._rows.num_bytes // 2, 0
        beginnings = _beginnings(_DETAILS)
        try:
            with path.open("rb") as old, shorter.open("wb") as new:
                for line in old:
                    if position >= half or not line.startswith(beginnings):
                        new.write(line)
                    position += len(line)
            shorter.replace(path)
        except OSError as error:
            shorter.unlink(missing_ok=True)
            self._shorten_at = self._rows.num_bytes + MAX_BYTES // 8
            logger.warning("%s could not be shortened, and grows: %s", path, error)
            return
        self._rows.close()
        self._rows = _AppendFile(path)
        # What is left may be steps and events alone, which stay.
        self._shorten_at = max(MAX_BYTES, 2 * self._rows.num_bytes)
        logger.info("%s: the older rows of groups, samples and transfers were deleted, to bound its size", path)


def _beginnings(kinds: Iterable[type[rows.Row]]) -> tuple[bytes, ...]:
    """Return the bytes with which the lines of these kinds begin, as `encode_row` writes them."""
    return tuple(b'%s%s"' % (_BEGINNING, str(kind.__struct_config__.tag).encode()) for kind in kinds)


def read_rows(path: Path, broken_lines: list[int] | None = None) -> Iterator[rows.Row | rows.OtherRow]:
    """Yield the rows of a metrics file in order, without lines that are no JSON objects; no rows where there is no file.

    A running or killed writer may leave the last line torn. The numbers of skipped lines, from 1, are appended to
    `broken_lines`.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            row = rows.decode_row(line)
            if row is not None:
                yield row
            elif line.strip() and broken_lines is not None:
                broken_lines.append(number)


def read_rows_of(path: Path, *kinds: type[Kind]) -> Iterator[Kind]:
    """Yield the undamaged rows of these kinds in order; no rows where there is no file.

    Lines of other kinds, which are most of a long run's, are not decoded, unless another program has written them anew.
    """
    if not path.is_file():
        return
    beginnings = _beginnings(kinds)
    with path.open("rb") as file:
        for line in file:
            is_candidate = line.startswith(beginnings) or not line.startswith(_BEGINNING)
            if is_candidate and isinstance(row := rows.decode_row(line), kinds):
                yield row


def newest_row(path: Path) -> rows.Row | None:
    """Return the newest row of any kind; None where the end of the file has no undamaged row."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _NEWEST_BYTES))
        found = (row for line in file if isinstance(row := rows.decode_row(line), rows.ROW_TYPES))
        return max(found, key=lambda row: row.time, default=None)


def scalars_of(row: rows.StepRow | rows.EvalRow) -> dict[str, float]:
    """Return the row's numbers by their names in charts; an evaluation's begin with `eval/`."""
    prefix = "" if isinstance(row, rows.StepRow) else "eval/"
    fields = rows.row_fields(row)
    if isinstance(row, rows.EvalRow):
        fields |= {f"pass_at_{k}": share for k, share in row.pass_at.items()}
        fields |= {f"reward/{name}": reward for name, reward in row.sets.items()}
        fields |= {f"own/{name}": number for name, number in row.numbers.items()}
    numbers = {name: value for name, value in fields.items() if isinstance(value, int | float)}
    return {f"{prefix}{name}": number for name, number in numbers.items() if name not in ("time", "policy_version")}


class _AppendFile:
    """A file that grows by whole appends, or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.num_bytes = os.fstat(self._fd).st_size

    def append(self, data: bytes) -> None:
        """Write all of `data`; if the disk takes only a part of it, take that part back and raise the disk's `OSError`."""
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed")
        rest = memoryview(data)
        try:
            # A short write is no full disk yet: the next write tells.
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            if len(rest) < len(data):
                os.ftruncate(self._fd, self.num_bytes)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.num_bytes += len(data)

    def is_elsewhere(self) -> bool:
        """Return whether the path names another file by now, or none."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._fd))
        except FileNotFoundError:
            return True

    def end_torn_line(self) -> None:
        """Start a new line if a killed process left the last one unfinished."""
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            self.append(b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _TensorBoardEvents:
    """A TensorBoard events file.

    `torch.utils.tensorboard` writes from a background thread, which dies when the disk is full; this writes at once.
    """

    def __init__(self, folder: Path, now: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._num_lost = 0
        self._file = _AppendFile(folder / f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}")
        # Imported here: the import takes 0.5 s, and many runs do without TensorBoard.
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        self._event_type, self._summary_type = Event, Summary
        self._append_event(self._event_type(wall_time=now, file_version="brain.Event:2"))

    def append(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        """Add the scalars of one step."""
        values = [self._summary_type.Value(tag=tag, simple_value=number) for tag, number in scalars.items()]
        self._append_event(self._event_type(wall_time=wall_time, step=step, summary=self._summary_type(value=values)))

    def _append_event(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        try:
            self._file.append(record.getvalue())
            self._num_lost = 0
        except OSError as error:
            self._num_lost += 1
            if self._num_lost == 1:
                logger.warning("TensorBoard events are being lost, training continues: %s", error)

    def close(self) -> None:
        self._file.close()
