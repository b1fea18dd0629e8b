"""This process as others see it: its readiness for the launcher; threads, command line and environment in the kernel.

A forked process that goes on as another program shows what it was forked from. Both are bytes of its own memory, so it can
write the truth there.
"""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

READY_VARIABLE = "OFFBEAT_READY_FILE"
"""Environment variable with the file that a service makes when it is ready; set where it shares a GPU with others."""
GPU_BYTES_VARIABLE = "OFFBEAT_GPU_BYTES"
"""Environment variable with the bytes of its GPU that a learner process takes at its start; set where actors share the GPU."""
TURN_VARIABLE = "OFFBEAT_GPU_TURN"
"""Environment variable with the file by whose locks the learner and the actors use one GPU in turns; set where they do."""
GPU_RESERVE = 0.05
"""Part of a shared GPU that is promised to nobody, because the sums of the plan are estimates."""
ROOM_VARIABLE = "OFFBEAT_ROOM"
"""Environment variable of programs that fork others. It only reserves room for their own variable."""
ROOM = "-" * 64
"""Its value."""
_ROOM_LINE = f"{ROOM_VARIABLE}={ROOM}".encode()

_ARGUMENTS, _ENVIRONMENT = 45, 47
"""Places of their addresses in /proc/PID/stat behind the name: fields 48 and 50 of proc(5), the third is the first here."""


def has_threads() -> bool:
    """Return whether this process has a thread besides the main one, of Python or of a library."""
    return len(list(Path("/proc/self/task").iterdir())) > 1


def show_arguments(arguments: Sequence[str]) -> None:
    """Write a command line where the kernel shows this process's own; what is too long is cut off."""
    start, end = _addresses(_ARGUMENTS)
    line = b"\0".join(map(os.fsencode, arguments))[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def has_room_for_variable() -> bool:
    """Return whether `show_variable` can be called: it needs the room of `ROOM_VARIABLE`, once."""
    return _ROOM_LINE in _shown_environment()


def show_variable(name: str, value: str) -> None:
    """Set an environment variable, also where the kernel shows this process's environment, which its forks inherit."""
    line = f"{name}={value}".encode()
    place = _shown_environment().index(_ROOM_LINE)
    assert len(line) <= len(_ROOM_LINE)
    os.environ.pop(ROOM_VARIABLE, None)
    ctypes.memmove(_addresses(_ENVIRONMENT)[0] + place, line.ljust(len(_ROOM_LINE), b"\0"), len(_ROOM_LINE))
    os.environ[name] = value


def _shown_environment() -> bytes:
    return Path("/proc/self/environ").read_bytes()


def _addresses(place: int) -> tuple[int, int]:
    """Return the first address and the one behind the last."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[place]), int(fields[place + 1])


def report_ready() -> None:
    """Make the file that the launcher waits for before it starts the next process on the same GPU."""
    if READY_VARIABLE in os.environ:
        Path(os.environ[READY_VARIABLE]).touch()
