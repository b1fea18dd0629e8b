"""The learner's end of the user's `metrics.callback`: hands it rows, and never waits for it.

Rows wait in a queue of bounded length for the process that calls the function (`common.callback_worker`). A function that is
too slow loses the oldest of them; one that raises is called with the next row again. Both are counted, and said.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from offbeat.common.callback_worker import SETTING, Report
from offbeat.common.logs import MAX_FILE_BYTES, bound_log
from offbeat.common.rows import Row, encode_row
from offbeat.common.settings import SeveralSettingsError

logger = logging.getLogger(__name__)

MAX_WAITING_ROWS = 1000
"""Rows that wait for a callback that is busy; the pipe to it holds some more."""
LOAD_S = 30.0
"""Longest wait for the import of the user's module before the run begins without it."""
CLOSE_S = 10.0
"""Longest wait for the callback to handle its last rows."""
TELL_S = 60.0
"""Least seconds between two warnings of one kind."""


class Callback:
    """Calls the user's function with rows, in a process of its own; any thread may add rows."""

    def __init__(self, path: str, log: Path, ask_to_stop: Callable[[str], None]) -> None:
        """Start the process. Call this in the main thread: the process dies with the thread that started it.

        Args:
            path: The function, as `module:function`.
            log: File for what the function prints, and for the tracebacks of its errors.
            ask_to_stop: Called from a thread of its own with the reason when the function raises `StopRun`.
        """
        self._path = path
        self._log = log
        self._ask_to_stop = ask_to_stop
        self._changed = threading.Condition()
        """Guards the queue and the counts."""
        self._waiting: deque[Row] = deque()
        self._is_closing = False
        self._has_ended = False
        self._has_asked = False
        self._num_dropped = 0
        self._num_failed = 0
        self._tell_at = {"dropped": 0.0, "failed": 0.0}
        """Monotonic times before which a warning of this kind is not repeated."""
        self._loaded = threading.Event()
        self._refusal: str | None = None
        self._process = self._start()
        self._threads = [
            threading.Thread(target=self._send, name="callback-rows", daemon=True),
            threading.Thread(target=self._listen, name="callback-reports", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def wait_loaded(self) -> None:
        """Wait up to `LOAD_S` for the import of the function. Raises `SettingError` when it cannot be imported."""
        if not self._loaded.wait(LOAD_S):
            logger.warning("%s: importing %s takes more than %g s; the run begins", SETTING, self._path, LOAD_S)
        if self._refusal is not None:
            raise SeveralSettingsError([self._refusal])

    def add(self, row: Row) -> None:
        """Hand over a row without waiting; where the queue is full, its oldest row is dropped."""
        with self._changed:
            if self._has_ended:
                self._num_dropped += 1
                return
            if len(self._waiting) >= MAX_WAITING_ROWS:
                self._waiting.popleft()
                self._num_dropped += 1
                self._warn("dropped", f"it is too slow or hangs: rows are dropped, {self._num_dropped} so far")
            self._waiting.append(row)
            self._changed.notify()

    def close(self) -> None:
        """Let the function handle the rows that wait, for up to `CLOSE_S`, then end its process and say the counts."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            logger.warning("%s: it had not handled the last rows after %g s; its process is killed", SETTING, CLOSE_S)
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            # A process that the user's function left behind may hold the pipes open.
            thread.join(CLOSE_S)
        if self._num_failed or self._num_dropped:
            counts = self._num_failed, self._num_dropped
            logger.warning("%s: in all %d calls failed and %d rows were dropped", SETTING, *counts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._reports, theirs = os.pipe()
        command = [sys.executable, "-m", "offbeat.common.callback_worker", self._path, str(theirs), str(os.getpid())]
        with self._log.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, pass_fds=(theirs,))
        os.close(theirs)
        return process

    def _send(self) -> None:
        """Write rows to the process. Waits for: a row, and the process where it is busy. Unblocked by: `close`, its end."""
        rows = self._process.stdin
        assert rows is not None
        with contextlib.suppress(BrokenPipeError), rows:
            while (row := self._next()) is not None:
                rows.write(encode_row(row))
                rows.flush()
                bound_log(self._log, MAX_FILE_BYTES)

    def _next(self) -> Row | None:
        """Return the row that waits longest, None after the last one. Waits for: `add`. Unblocked by: `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing or self._has_ended)
            return self._waiting.popleft() if self._waiting else None

    def _listen(self) -> None:
        """Act on the reports of the process. Waits for: a report. Unblocked by: the end of the process."""
        with os.fdopen(self._reports, "rb") as reports:
            for line in reports:
                self._handle(msgspec.json.decode(line, type=Report))
        with self._changed:
            self._has_ended = True
            self._num_dropped += len(self._waiting)
            self._waiting.clear()
            self._changed.notify()
            is_early = not self._is_closing
        if is_early:
            why = self._refusal or f"status {self._process.wait()}"
            logger.warning("%s: its process has ended, so it gets no more rows (%s)", SETTING, why)
        if not self._loaded.is_set() and self._refusal is None:
            self._refusal = f'{SETTING} = "{self._path}": importing it ended the process. {self._log} may say why.'
        self._loaded.set()

    def _handle(self, report: Report) -> None:
        match report.kind:
            case "loaded":
                self._loaded.set()
            case "refused":
                self._refusal = report.detail
            case "failed":
                with self._changed:
                    self._num_failed += 1
                    self._warn("failed", f"{self._path} raised {report.detail}; {self._num_failed} calls failed so far")
            case "stop" if not self._has_asked:
                self._has_asked = True
                logger.info("%s asks to stop: %s", SETTING, report.detail)
                self._ask_to_stop(f"{SETTING}: {report.detail}" if report.detail else SETTING)
            case _:
                pass

    def _warn(self, kind: str, problem: str) -> None:
        """Log a problem unless one of its kind was told a moment ago: every row may have it."""
        now = time.monotonic()
        if now >= self._tell_at[kind]:
            self._tell_at[kind] = now + TELL_S
            logger.warning("%s: %s", SETTING, problem)
