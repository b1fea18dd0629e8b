"""`offbeat.train`: a run in the background of a notebook or a script.

caller -> thread `offbeat-run` -> `offbeat train` -> learner, actors
caller <- RUN/metrics.jsonl, RUN/logs/train.log

The run is the command `offbeat train` in a process of its own. So the caller may be any thread, or a notebook with an event
loop, and whatever it does holds no service up.
"""

import atexit
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import msgspec

from offbeat.common.errors import RunError, ServiceError, SettingError
from offbeat.common.formats import to_toml
from offbeat.common.processes.shutdown import PARENT_VARIABLE
from offbeat.common.records.logs import MAX_FILE_BYTES, bound_log
from offbeat.common.records.run_folder import PROGRAM_LOGS, read_run_config, writing
from offbeat.common.records.writer import ROWS_FILE
from offbeat.deploy.cli.arguments import QUICKSTART, load_config
from offbeat.deploy.local.starts import PROGRAM
from offbeat.deploy.operating.link import ask_status, open_link_to
from offbeat.lab.run_summary import read_end

LOOK_S = 0.1
"""Seconds between two looks at the run's files."""
END_S = 60.0
"""Longest time that a run may take to end in order when the interpreter ends."""
TAIL_BYTES = 1 << 16
"""Bytes at the end of the metrics file in which the final row is looked for."""
LAST_LINES = 15
"""Lines of the log that an error without words of its own has."""
IN_RUN_VARIABLE = "OFFBEAT_IN_RUN"
"""Environment variable of every process of a run that `offbeat.train` started."""
_OWN_LINE = re.compile(r"\S+Z [A-Z]+ train ")
"""A line of the log of `offbeat train` itself."""


class Run:
    """A run that `offbeat.train` has started. As a context it is stopped, if it has not ended, when the context is left."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        """Start `command` for a run in `folder`. Raises `SettingError` when the folder cannot be written."""
        self.folder = folder.absolute()
        """The run's folder: metrics, checkpoints, report, model, logs."""
        self._rows_file = self.folder / ROWS_FILE
        self._log = self.folder / PROGRAM_LOGS / "train.log"
        is_new = not self.folder.exists()
        with writing(folder):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log.touch()
        self._log_start = self._log.stat().st_size
        self._rows_before = _inode_and_size(self._rows_file)
        """The rows file of an earlier start, and its size. A new run moves it away."""
        self._start_time = time.time()
        self._started: Future[subprocess.Popen[bytes]] = Future()
        self._ended = threading.Event()
        self._owner = os.getpid()
        threading.Thread(target=self._work, args=(command,), name="offbeat-run", daemon=True).start()
        self._process = self._started.result()
        self._await_learner(is_new=is_new)

    @property
    def pid(self) -> int:
        """The process id of the command."""
        return self._process.pid

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of `metrics.jsonl` since this start, as dicts, as they are written, until the run ends.

        Raises `RunError` after the last row of a run that has failed. An interrupt while it waits stops the run.
        """
        yield from self._follow()
        self._final_row()

    def wait(self) -> dict[str, Any]:
        """Wait for the end of the run; return its final row. Raises `RunError` when it has failed.

        An interrupt stops the run.
        """
        while not self._ended.is_set():
            self._wait(LOOK_S)
        return self._final_row()

    def stop(self) -> None:
        """End the run as Ctrl-C ends `offbeat train`: after the step under way, with a checkpoint and the report.

        An interrupt while it waits kills the run. Does nothing when the run has ended.
        """
        try:
            self._signal(signal.SIGTERM)
            while not self._ended.wait(LOOK_S):
                pass
        except KeyboardInterrupt:
            self.kill()
            raise

    def kill(self) -> None:
        """End every process of the run at once; its checkpoints and its log are kept."""
        self._signal(signal.SIGKILL)
        self._ended.wait()

    def status(self) -> dict[str, Any]:
        """Return what `offbeat status --json` prints: the learner's answer, or how the run has ended.

        Raises `RunError` when the learner does not answer.
        """
        ended = read_end(self.folder)
        if ended is not None and (ended.outcome is not None or self._ended.is_set()):
            return msgspec.to_builtins(ended)
        try:
            hub = read_run_config(self.folder).hub
            return msgspec.to_builtins(ask_status(open_link_to(hub, "operator"), hub.address, self.folder))
        except (ServiceError, SettingError) as error:
            raise RunError(str(error)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<offbeat run in {self.folder}, {'ended' if self._ended.is_set() else 'at work'}>"

    def _work(self, command: Sequence[str]) -> None:
        """Start the command and wait for its end, in a thread that lives as long as the interpreter.

        The command dies with the thread that started it, which the caller's own thread may not outlive.
        """
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid()), IN_RUN_VARIABLE: "1"}
        try:
            with self._log.open("ab") as log:
                # Its own process group: an interrupt of the kernel goes to the kernel's whole group.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0
                )
        except OSError as error:
            self._started.set_exception(error)
            return
        self._process = process
        atexit.register(self._end_with_interpreter)
        self._started.set_result(process)
        while process.poll() is None:
            bound_log(self._log, MAX_FILE_BYTES)
            self._ended.wait(LOOK_S)
        atexit.unregister(self._end_with_interpreter)
        self._ended.set()

    def _await_learner(self, *, is_new: bool) -> None:
        """Return when the learner is at work; raise `RunError` when the command ends before, and leave no empty folder."""
        if any(row.get("event") == "run_started" for row in self._follow()):
            return
        text = self._error_text()
        if is_new and {path.name for path in self.folder.rglob("*")} == {PROGRAM_LOGS, self._log.name}:
            self._log.unlink()
            self._log.parent.rmdir()
            self.folder.rmdir()
        raise RunError(text)

    def _wait(self, seconds: float) -> None:
        """Wait for the end of the run, for `seconds` at most; an interrupt stops the run."""
        try:
            self._ended.wait(seconds)
        except KeyboardInterrupt:
            self.stop()
            raise

    def _follow(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of this start as they are written.

        Waits for: a row. Unblocked by: the end of the run, an interrupt.
        """
        (inode, position), last_time = self._rows_before, self._start_time
        while True:
            # Looked at first: what is written before the end is read then.
            has_ended = self._ended.is_set()
            # A new run moves the file of an earlier one away, and a long run shortens its own: both leave another inode.
            is_other = inode != (inode := _inode_and_size(self._rows_file)[0])
            for row, end in self._rows_from(0 if is_other else position):
                position = end
                if is_other and row.get("time", math.inf) <= last_time:
                    continue
                last_time = row.get("time", last_time)
                yield row
            if has_ended:
                return
            self._wait(LOOK_S)

    def _rows_from(self, position: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the whole rows behind `position`, in bytes, and where each ends."""
        try:
            file = self._rows_file.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                position += len(line)
                row = _decode(line)
                if row is not None:
                    yield row, position

    def _final_row(self) -> dict[str, Any]:
        """Return the final row of a run that has ended; raise `RunError` for one that has failed, or was killed."""
        with self._rows_file.open("rb") as file:
            file.seek(max(0, self._rows_file.stat().st_size - TAIL_BYTES))
            final = _decode(file.read().rstrip().rpartition(b"\n")[2])
        if final is None or final["kind"] != "final" or final["outcome"] == "failed":
            raise RunError(self._error_text())
        return final

    def _error_text(self) -> str:
        """Return the errors that the command has printed; the end of its log where it printed none."""
        status = self._process.returncode
        try:
            with self._log.open("rb") as log:
                # A log that has grown too large was emptied meanwhile.
                log.seek(self._log_start if self._log.stat().st_size >= self._log_start else 0)
                lines = log.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return f"the run ended with status {status}. {self._log} was deleted or renamed."
        found = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        if not found:
            return "\n".join([f"the run ended with status {status}. The end of {self._log}:", *lines[-LAST_LINES:]])
        errors = [lines[number].removeprefix("error: ") for number in found]
        # The last one may quote the end of a service's log.
        return "\n".join([*errors, *(line for line in lines[found[-1] + 1 :] if not _OWN_LINE.match(line))])

    def _signal(self, number: int) -> None:
        if not self._ended.is_set():
            self._process.send_signal(number)

    def _end_with_interpreter(self) -> None:
        # A process that the caller has forked is not the one whose end this is.
        if os.getpid() != self._owner or self._ended.is_set():
            return
        print(f"this program ends, so the run in {self.folder} is stopped; run.wait() waits for its end", file=sys.stderr)
        self._signal(signal.SIGTERM)
        if not self._ended.wait(END_S):
            self._signal(signal.SIGKILL)


def start(config: str | Path | None, settings: Mapping[str, object], program: Sequence[str] = PROGRAM) -> Run:
    """Start a run, and return when its learner is at work; `offbeat.train` describes the arguments.

    Raises `RunError` with the words of `offbeat train` for a mistake, and for a start that fails.
    """
    if IN_RUN_VARIABLE in os.environ:
        raise RunError(
            "offbeat.train was called in a process of a run: a module that the settings name calls it when it is imported. "
            'Put the call under `if __name__ == "__main__":`.'
        )
    try:
        arguments = [
            *([] if config is None else [str(config)]),
            *(f"{name}={_text(name, settings[name])}" for name in settings),
        ]
        folder = load_config(arguments, default=QUICKSTART).run.dir
        # Where the folder is named after the time, the command would choose another one.
        return Run(Path(folder), [*program, "train", *arguments, f"run.dir={to_toml(folder)}"])
    except SettingError as error:
        raise RunError("\n".join(error.texts)) from None


def _text(name: str, value: object) -> str:
    """Return the value of a setting as the command line takes it. Raises `SettingError` for a function."""
    if callable(value):
        function, module = getattr(value, "__qualname__", "function"), getattr(value, "__module__", "__main__")
        named = f'Name it: "{module}:{function}".'
        in_file = f'Put it into a file, in a notebook with %%writefile my_code.py, and name it: "my_code:{function}".'
        problem = "a function of this process cannot be called by the processes of the run"
        raise SettingError(name, function, problem, in_file if module == "__main__" else named)
    if value is None:
        return "none"
    return to_toml(str(value) if isinstance(value, Path) else value)


def _decode(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line; None for the torn line of a learner that was killed."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _inode_and_size(file: Path) -> tuple[int, int]:
    """Return the inode and the size of a file, (-1, 0) where there is none."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return -1, 0
    return found.st_ino, found.st_size
