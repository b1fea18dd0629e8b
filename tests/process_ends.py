"""The ends of processes that tests kill, and the memory that they leave."""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from offbeat.common.processes.process_table import LOOK_S, arguments, has_ended

DEADLINE_S = 10.0


def kill_and_wait(pid: int) -> None:
    """Send SIGKILL and wait for the end of the process; raise `TimeoutError` after `DEADLINE_S`."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + DEADLINE_S
    while not has_ended(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not die within {DEADLINE_S:g} s: {arguments(pid)}")
        time.sleep(LOOK_S)


def is_mapped(path: Path, among: Iterable[int] | None = None) -> bool:
    """Return whether a living process has mapped this file into its memory; False for one that is not there.

    `among` are the ids of the processes that count; None for all.
    """
    try:
        number = str(path.stat().st_ino).encode()
    except FileNotFoundError:
        return False
    # By inode, the fifth field: the C library maps a semaphore before it has its name.
    folders = Path("/proc").glob("[0-9]*") if among is None else [Path("/proc", str(pid)) for pid in among]
    lines = (line.split(maxsplit=5) for folder in folders for line in _maps(folder).splitlines())
    return any(fields[4] == number and fields[-1].startswith(bytes(path.parent)) for fields in lines)


def _maps(process: Path) -> bytes:
    try:
        return (process / "maps").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
