"""One program from its start to its end: fed, listened to, looked at, killed at its limits."""

import errno
import marshal
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from offbeat.actor.rewards.samples import RewardUnavailable
from offbeat.actor.sandbox import confine
from offbeat.actor.sandbox.program import DISK_BYTES, ENVIRONMENT, MAX_FILES, MAX_THREADS, Launch, Program, Result, children_of

OUTPUT_BYTES = 1 << 20
"""Bytes of each output stream that are kept; a program that writes more is ended."""
START_S = 30.0
"""Longest time from the start of the sandbox to that of the program."""
END_S = 10.0
"""Longest time that a killed program may take to be gone."""
LOOK_S = 0.02
"""Seconds between two looks at what a program has in use."""
_MARK = b"\x06offbeat\n"
"""The line that the sandbox writes when all limits are taken, just before the program begins."""
_KILLED = 128 + 9
_NO_MEMORY = f"OSError: [Errno {errno.ENOMEM}]"
_CHUNK = 1 << 16


def run_program(launch: Launch, program: Program, folders: Sequence[str], stop: threading.Event) -> Result:
    """Run a program to its end. Raise `RewardUnavailable` when the sandbox fails, `OSError` when it cannot be started."""
    limits = {"RLIMIT_AS": program.memory_mb << 20, "RLIMIT_FSIZE": DISK_BYTES, "RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0}
    process = subprocess.Popen(
        launch.command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=ENVIRONMENT,
        cwd=launch.folder,
        pass_fds=launch.pass_fds,
    )
    with process:
        try:
            confinement = launch.confine(process.pid)
            order = {
                "code": program.code.encode(),
                "files": {name: text.encode() for name, text in program.files.items()},
                "folders": list(folders),
                "limits": limits,
                "mark": _MARK,
                "confine": confinement,
                "confine_source": Path(confine.__file__).read_text(encoding="utf-8") if confinement else "",
            }
            data = marshal.dumps(order)
            stdin = len(data).to_bytes(8, "little") + data + program.stdin.encode()
            return Running(process, launch, stdin).result(program.timeout_s, stop)
        finally:
            process.kill()


class Running:
    """A process and its pipes."""

    def __init__(self, process: subprocess.Popen[bytes], launch: Launch, stdin: bytes) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process = process
        self._launch = launch
        self._unsent = memoryview(stdin)
        self._stdout, self._stderr = bytearray(), bytearray()
        self._selector = selectors.DefaultSelector()
        os.set_blocking(process.stdin.fileno(), False)
        self._selector.register(process.stdin, selectors.EVENT_WRITE)
        self._selector.register(process.stdout, selectors.EVENT_READ, self._stdout)
        self._selector.register(process.stderr, selectors.EVENT_READ, self._stderr)

    def result(self, timeout_s: float, stop: threading.Event) -> Result:
        """Wait for the end of the program, or end it.

        Waits for: output, room for input, the end of its pipes. Unblocked by: `timeout_s`, a limit, `stop`.
        """
        exit_descriptor = os.pidfd_open(self._process.pid)
        self._selector.register(exit_descriptor, selectors.EVENT_READ)
        try:
            self._await(self._has_begun, START_S, stop)
            if not self._has_begun():
                detail = self._stderr.decode(errors="replace").strip()[-500:]
                raise RewardUnavailable(f"the sandbox did not start: {detail or 'no answer'}")
            del self._stdout[: len(_MARK)]
            began_at = time.monotonic()
            reason = self._await(self._has_ended, timeout_s, stop)
            seconds = time.monotonic() - began_at
            self._kill()
            self._await(self._has_ended, END_S, threading.Event())
            return self._result(reason, seconds)
        finally:
            os.close(exit_descriptor)
            self._selector.close()

    def _kill(self) -> None:
        """Kill the program; what has started it then ends by itself, and leaves no dead process behind."""
        programs: list[int] = []
        with suppress(OSError):
            programs = children_of(self._process.pid)
        for pid in programs:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not programs:
            self._process.kill()

    def _result(self, reason: str | None, seconds: float) -> Result:
        returned = self._process.wait(END_S)
        exit_code = 128 - returned if returned < 0 else returned
        if reason is None and exit_code == _KILLED:
            raise RewardUnavailable("the program was killed from outside: the machine may be out of memory")
        ending = f"\n[ended: {reason}]" if reason else ""
        errors = _text(self._stderr)
        last_line = errors.rstrip().rpartition("\n")[2]
        return Result(
            exit_code=exit_code if reason is None else _KILLED,
            stdout=_text(self._stdout),
            stderr=errors + ending,
            is_timeout=reason == "timeout",
            is_out_of_memory=exit_code == 1
            and (last_line.partition(":")[0].endswith("MemoryError") or last_line.startswith(_NO_MEMORY)),
            seconds=seconds,
        )

    def _has_begun(self) -> bool:
        return self._stdout.startswith(_MARK)

    def _has_ended(self) -> bool:
        """Return True when the process is gone and nothing more can come from its pipes."""
        readers = (key for key in self._selector.get_map().values() if key.data is not None)
        return self._process.poll() is not None and not any(readers)

    def _await(self, condition: Callable[[], bool], timeout_s: float, stop: threading.Event) -> str | None:
        """Move bytes until the condition holds, or the program has ended; return why it must be ended."""
        deadline = time.monotonic() + timeout_s
        look_at = time.monotonic() + LOOK_S
        while not condition() and not self._has_ended():
            now = time.monotonic()
            if now > deadline:
                return "timeout"
            if stop.is_set():
                return "cancelled"
            if max(len(self._stdout), len(self._stderr)) > OUTPUT_BYTES:
                return f"more than {OUTPUT_BYTES} bytes of output"
            if now > look_at and condition == self._has_ended:
                look_at = now + LOOK_S
                if excess := self._excess(timeout_s):
                    return excess
            self._exchange(min(LOOK_S, deadline - now))
        return None

    def _excess(self, timeout_s: float) -> str | None:
        """Return the limit that the program exceeds. Several threads may take more CPU time than wall time."""
        try:
            usage = self._launch.usage(self._process.pid)
        except OSError:
            # It has ended, or is about to begin.
            return None
        if usage.cpu_s > timeout_s:
            return "timeout"
        if usage.num_threads > MAX_THREADS:
            return f"more than {MAX_THREADS} threads"
        if usage.num_files > MAX_FILES:
            return f"more than {MAX_FILES} files"
        return f"more than {DISK_BYTES} bytes in files" if usage.disk_bytes > DISK_BYTES else None

    def _exchange(self, timeout_s: float) -> None:
        """Write and read what is possible within `timeout_s`."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.events & selectors.EVENT_WRITE:
                self._write(key)
            elif key.data is not None:
                chunk = os.read(key.fd, _CHUNK)
                key.data.extend(chunk)
                if not chunk:
                    self._selector.unregister(key.fileobj)
            else:
                # The process has ended.
                self._selector.unregister(key.fileobj)

    def _write(self, key: selectors.SelectorKey) -> None:
        with suppress(BrokenPipeError):
            self._unsent = self._unsent[os.write(key.fd, self._unsent[:_CHUNK]) :]
            if self._unsent:
                return
        # All is sent, or nobody reads it.
        self._selector.unregister(key.fileobj)
        assert self._process.stdin is not None
        self._process.stdin.close()


def _text(output: bytearray) -> str:
    text = output[:OUTPUT_BYTES].decode(errors="replace")
    return text if len(output) <= OUTPUT_BYTES else f"{text}\n[cut at {OUTPUT_BYTES} bytes]"
