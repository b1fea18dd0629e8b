"""The learner's end of the user's `metrics.callback`: hands it rows, and never waits for it.

The function is called in a process of its own (`common.records.row_process`, `common.user_code.callback_worker`). A slow
function loses the oldest rows. A function that raises is called with the next row again. Both are counted and reported.
"""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from offbeat.common.errors import SeveralSettingsError
from offbeat.common.records.row_process import RowProcess
from offbeat.common.records.rows import Row
from offbeat.common.user_code.callback_worker import SETTING, Report

logger = logging.getLogger(__name__)

LOAD_S = 30.0
"""Longest wait for the import of the user's module before the run begins without it."""


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
        self._has_asked = False
        self._num_failed = 0
        self._loaded = threading.Event()
        self._refusal: str | None = None
        command = [sys.executable, "-m", "offbeat.common.user_code.callback_worker", path]
        self._rows = RowProcess(SETTING, command, log, self._handle, self._end)

    def wait_loaded(self) -> None:
        """Wait up to `LOAD_S` for the import of the function. Raises `SettingError` when it cannot be imported."""
        if not self._loaded.wait(LOAD_S):
            logger.warning("%s: importing %s takes more than %g s; the run begins", SETTING, self._path, LOAD_S)
        if self._refusal is not None:
            raise SeveralSettingsError([self._refusal])

    def add(self, row: Row) -> None:
        """Hand over a row without waiting."""
        self._rows.add(row)

    def close(self) -> None:
        """Let the function handle the rows that wait, then end its process and say the counts."""
        num_dropped = self._rows.close()
        if self._num_failed or num_dropped:
            logger.warning("%s: in all %d calls failed and %d rows were dropped", SETTING, self._num_failed, num_dropped)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _handle(self, line: bytes) -> None:
        report = msgspec.json.decode(line, type=Report)
        match report.kind:
            case "loaded":
                self._loaded.set()
            case "refused":
                self._refusal = report.detail
            case "failed":
                self._num_failed += 1
                self._rows.warn("failed", f"{self._path} raised {report.detail}; {self._num_failed} calls failed so far")
            case "stop" if not self._has_asked:
                self._has_asked = True
                logger.info("%s asks to stop: %s", SETTING, report.detail)
                self._ask_to_stop(f"{SETTING}: {report.detail}" if report.detail else SETTING)
            case _:
                pass

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        """Return why the process ended; where it never loaded the function, that is the user's mistake."""
        why = self._refusal or f"status {process.wait()}"
        if not self._loaded.is_set() and self._refusal is None:
            self._refusal = f'{SETTING} = "{self._path}": importing it ended the process. {self._log} may say why.'
        self._loaded.set()
        return why
