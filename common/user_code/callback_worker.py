"""The process that calls the user's `metrics.callback` with each row.

learner -> stdin: lines of metrics.jsonl -> the user's function
learner <- pipe: `Report`s: loaded or refused, failures, the wish to stop

The user's function may be slow, hold the interpreter's lock, crash or end its process: training goes on beside it.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from offbeat.common.errors import SettingError, StopRun
from offbeat.common.processes.shutdown import die_with_parent
from offbeat.common.user_code.functions import load_function, located
from offbeat.protocols.text import plain

SETTING = "metrics.callback"
MAX_REASON = 300
"""Characters of a reason to stop."""

RowCallback = Callable[[dict[str, Any]], object]
"""Takes a row of `metrics.jsonl` as a dict; the result is not used."""


class Report(msgspec.Struct, frozen=True):
    """A message of the worker to the learner."""

    kind: Literal["loaded", "refused", "failed", "stop"]
    """`refused`: the function cannot be imported. `failed`: a call raised. `stop`: it raised `StopRun`."""
    detail: str = ""
    """The mistake, the error with its place, or the reason to stop."""


def load_callback(path: str) -> RowCallback:
    """Return the function `module:function`. Raises `SettingError` if there is none, or it does not take a row."""
    return load_function(path, setting=SETTING, parameters=("row",))


def call_with_rows(path: str, reports: int) -> None:
    """Call the function with each row from stdin until it ends; send reports to the file descriptor `reports`."""

    def report(kind: Literal["loaded", "refused", "failed", "stop"], detail: str = "") -> None:
        os.write(reports, msgspec.json.encode(Report(kind, detail)) + b"\n")

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


def main() -> None:
    """Serve the learner with the process id in the third argument; the others are the function and the pipe for reports."""
    path, reports, parent = sys.argv[1:]
    die_with_parent(int(parent))
    # What the user's function starts must not keep the pipe open.
    os.set_inheritable(int(reports), False)
    # Ctrl-C on a terminal reaches the learner's whole group; the learner ends this process after its last row.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    call_with_rows(path, int(reports))


if __name__ == "__main__":
    main()
