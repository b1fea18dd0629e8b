"""Checks in a process of their own: they import much, or run the user's code, which may hang or end its process."""

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from offbeat.common.errors import one_line
from offbeat.common.processes.shutdown import die_with_parent
from offbeat.deploy.checks.findings import Finding

_READ_BYTES = 1 << 16


class Apart:
    """A check that runs in a forked process."""

    def __init__(self, name: str, check: Callable[[], Iterable[Finding]]) -> None:
        """Start the check; `name` says in a warning what was checked."""
        self._name = name
        reader, writer = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(reader)
            _run(check, writer, parent)
        # Both processes set it: whichever is first, the group is there before it is needed.
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(self._pid, self._pid)
        os.close(writer)
        self._reader = reader

    def findings(self, deadline: float) -> list[Finding]:
        """Return what the check found; a warning where it had not ended at `deadline` (monotonic) or died."""
        content = b""
        try:
            while True:
                wait_s = max(0.0, deadline - time.monotonic())
                if not select.select([self._reader], [], [], wait_s)[0]:
                    return [Finding("warning", f"{self._name} took too long to check; the run goes on without this check.")]
                part = os.read(self._reader, _READ_BYTES)
                if not part:
                    break
                content += part
        finally:
            self._end()
        if not content:
            return [Finding("warning", f"{self._name} could not be checked: the check's process ended.")]
        return msgspec.json.decode(content, type=list[Finding])

    def _end(self) -> None:
        os.close(self._reader)
        # The group: a reward may have started processes.
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _run(check: Callable[[], Iterable[Finding]], writer: int, parent: int) -> None:
    """Run a check in the forked process, send what it found, and end the process without any cleaning up."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        die_with_parent(parent)
        content = msgspec.json.encode(list(check()))
    except BaseException as error:  # noqa: BLE001, the user's code runs here, and the fork must end here
        content = msgspec.json.encode([Finding("warning", f"a check did not work: {one_line(error)}")])
    with os.fdopen(writer, "wb") as stream:
        stream.write(content)
    os._exit(0)
