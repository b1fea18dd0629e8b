"""A process beside the learner that gets the rows of a run's metrics, and that the learner never waits for.

rows -> `RowProcess.add` -> queue of bounded length -> stdin of the process
reports of the process <- a pipe
"""

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from offbeat.common.processes.child import start_child
from offbeat.common.records.logs import MAX_FILE_BYTES, bound_log
from offbeat.common.records.rows import Row, encode_row

logger = logging.getLogger(__name__)

MAX_WAITING_ROWS = 1000
"""Rows that wait for a process that is busy; the pipe to it holds some more."""
CLOSE_S = 10.0
"""Longest wait for a process to handle its last rows."""
WARN_AGAIN_S = 60.0
"""Least seconds between two warnings of one kind."""


class RowProcess:
    """A process that is sent rows; where it is too slow, it loses the oldest. Any thread may add rows."""

    def __init__(
        self,
        setting: str,
        command: Sequence[str],
        log: Path,
        on_report: Callable[[bytes], None],
        on_end: Callable[[subprocess.Popen[bytes]], str],
        beginning: bytes = b"",
    ) -> None:
        """Start the process. Call this in the main thread: the process dies with the thread that started it.

        Args:
            setting: The setting that asks for the process; warnings name it.
            command: Its arguments, without the last two.
            log: File for what it prints.
            on_report: Called with each line that it reports, from a thread of its own.
            on_end: Called with the ended process from that thread; returns why it ended, for a warning if it was too early.
            beginning: Sent before the first row.
        """
        self.setting = setting
        self._log = log
        self._on_report = on_report
        self._on_end = on_end
        self._beginning = beginning
        self._changed = threading.Condition()
        """Guards the queue and the counts."""
        self._waiting: deque[Row] = deque()
        self._end_by: float | None = None
        """Monotonic time at which the process is killed, once it was asked to end."""
        self._has_ended = False
        self._num_dropped = 0
        self._warn_at: dict[str, float] = {}
        """Monotonic times before which a warning of this kind is not repeated."""
        self._process = self._start(command)
        self._threads = [
            threading.Thread(target=self._send, name="process-rows", daemon=True),
            threading.Thread(target=self._listen, name="process-reports", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def add(self, row: Row) -> None:
        """Hand over a row without waiting; where the queue is full, its oldest row is dropped."""
        with self._changed:
            if self._has_ended:
                self._num_dropped += 1
                return
            if len(self._waiting) >= MAX_WAITING_ROWS:
                self._waiting.popleft()
                self._num_dropped += 1
                self.warn("dropped", f"it is too slow or hangs: rows are dropped, {self._num_dropped} so far")
            self._waiting.append(row)
            self._changed.notify()

    def warn(self, kind: str, problem: str) -> None:
        """Log a problem unless one of its kind was told a moment ago: every row may have it."""
        now = time.monotonic()
        with self._changed:
            is_due = now >= self._warn_at.get(kind, now)
            if is_due:
                self._warn_at[kind] = now + WARN_AGAIN_S
        if is_due:
            logger.warning("%s: %s", self.setting, problem)

    def ask_to_end(self) -> None:
        """Let the process end after the rows that wait, for which it has `CLOSE_S` from the first call on; do not wait."""
        with self._changed:
            self._end_by = self._end_by or time.monotonic() + CLOSE_S
            self._changed.notify()

    def close(self) -> int:
        """Ask the process to end, and end it at its deadline; return how many rows were dropped."""
        self.ask_to_end()
        assert self._end_by is not None
        try:
            self._process.wait(max(0.0, self._end_by - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("%s: it had not handled the last rows after %g s; its process is killed", self.setting, CLOSE_S)
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            # A process that was left behind may hold the pipes open.
            thread.join(CLOSE_S)
        return self._num_dropped

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._reports, theirs = os.pipe()
        with self._log.open("ab") as log:
            process = start_child(command, theirs, stdin=subprocess.PIPE, log=log)
        os.close(theirs)
        return process

    def _send(self) -> None:
        """Write rows to the process. Waits for: a row, and the process where it is busy. Unblocked by: `close`, its end."""
        rows = self._process.stdin
        assert rows is not None
        with contextlib.suppress(BrokenPipeError), rows:
            rows.write(self._beginning)
            rows.flush()
            while (row := self._next()) is not None:
                rows.write(encode_row(row))
                rows.flush()
                bound_log(self._log, MAX_FILE_BYTES)

    def _next(self) -> Row | None:
        """Return the row that waits longest, None after the last one. Waits for: `add`. Unblocked by: `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._end_by or self._has_ended)
            return self._waiting.popleft() if self._waiting else None

    def _listen(self) -> None:
        """Pass on what the process reports. Waits for: a report. Unblocked by: the end of the process."""
        with os.fdopen(self._reports, "rb") as reports:
            for line in reports:
                self._on_report(line)
        with self._changed:
            self._has_ended = True
            self._num_dropped += len(self._waiting)
            self._waiting.clear()
            self._changed.notify()
            is_early = self._end_by is None
        why = self._on_end(self._process)
        if is_early:
            logger.warning("%s: its process has ended, so it gets no more rows (%s)", self.setting, why)
