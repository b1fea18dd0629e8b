"""The user's `metrics.callback`: a function that is called with each row, in a process of its own.

    learner -> `Callback.add` -> stdin: lines of metrics.jsonl -> the user's function
    learner <- pipe: `CallbackReport`s: loaded or refused, failures, the wish to stop

The function may be slow, hold the interpreter's lock, crash or end its process: training goes on beside it. A slow function
loses the oldest rows. A function that raises is called with the next row again. Both are counted and reported.
"""

import logging
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from offbeat.common.errors import SettingError, SeveralSettingsError, StopRun
from offbeat.common.processes.child import join_parent
from offbeat.common.records.row_process import RowProcess
from offbeat.common.records.rows import Row
from offbeat.common.user_code.functions import load_function, located
from offbeat.protocols.text import plain

logger = logging.getLogger(__name__)

SETTING = "metrics.callback"
LOAD_S = 30.0
"""Longest wait for the import of the user's module before the run begins without it."""
MAX_REASON = 300
"""Characters of a reason to stop."""

RowCallback = Callable[[dict[str, Any]], object]
"""Takes a row of `metrics.jsonl` as a dict; the result is not used."""


class CallbackReport(msgspec.Struct, frozen=True):
    """A message of the worker to the learner."""

    kind: Literal["loaded", "refused", "failed", "stop"]
    """`refused`: the function cannot be imported. `failed`: a call raised. `stop`: it raised `StopRun`."""
    detail: str = ""
    """The mistake, the error with its place, or the reason to stop."""


def load_callback(path: str) -> RowCallback:
    """Return the function `module:function`. Raises `SettingError` if there is none, or it does not take a row."""
    return load_function(path, setting=SETTING, parameters=("row",))


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
        command = [sys.executable, "-m", "offbeat.common.user_code.callback", path]
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

    def _handle(self, line: bytes) -> None:
        report = msgspec.json.decode(line, type=CallbackReport)
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


# In the process of the function


def call_with_rows(path: str, reports: int) -> None:
    """Call the function with each row from stdin until it ends; send reports to the file descriptor `reports`."""

    def report(kind: Literal["loaded", "refused", "failed", "stop"], detail: str = "") -> None:
        os.write(reports, msgspec.json.encode(CallbackReport(kind, detail)) + b"\n")

    try:
        callback = load_callback(path)
    except SettingError as error:
        report("refused", str(error))
        return
    report("loaded")
    for line in sys.stdin.buffer:
        try:
            callback(msgspec.json.decode(line))
        except StopRun as wish:
            report("stop", plain(" ".join(str(wish).split()), MAX_REASON))
        # The user's code, which may also call `sys.exit`.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            traceback.print_exc()
            report("failed", located(error))


if __name__ == "__main__":
    call_with_rows(sys.argv[1], join_parent())
