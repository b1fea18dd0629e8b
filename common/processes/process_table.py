"""The processes of this machine, read from /proc (Linux), and the name of its processor."""

import contextlib
import os
import platform
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

KILL_S = 10.0
"""Longest time that killed processes are waited for, in seconds."""
TRACKERS_S = 2.0
"""Seconds that resource trackers have to delete the semaphores and shared memory of processes that were killed."""
_PARENT, _GROUP, _SESSION, _NUM_THREADS = 1, 2, 3, 17
"""Places among the fields of `_stat`."""
LOOK_S = 0.01
"""Seconds between two looks at a dying process."""


def marked(variable: str, value: str) -> list[int]:
    """Return the living processes that have this environment variable, set at their start or inherited."""
    mark = f"{variable}={value}".encode()
    return [pid for pid in _all() if mark in _read(pid, "environ").split(b"\0") and not has_ended(pid)]


def children(pid: int) -> list[int]:
    """Return the living processes that this one started."""
    return _living(_PARENT, pid)


def descendants(pid: int) -> list[int]:
    """Return the living children, their children, and so on."""
    found = children(pid)
    return found + [grandchild for child in found for grandchild in descendants(child)]


def session(leader: int) -> list[int]:
    """Return the living processes of a session."""
    return _living(_SESSION, leader)


def arguments(pid: int) -> list[str]:
    """Return the command line of a process, empty when it has ended."""
    return _read(pid, "cmdline").decode(errors="replace").split("\0")[:-1]


def has_ended(pid: int) -> bool:
    """Return True when the process has ended, even if its parent has not collected the exit status yet."""
    stat = _stat(pid)
    # The first thread may be a zombie while others are dying, and still hold the process's files and locks.
    return not stat or stat[0] == "X" or (stat[0] == "Z" and int(stat[_NUM_THREADS]) <= 1)


def kill_group(leader: int) -> None:
    """Kill a process group, also one whose leader has ended."""
    kill_all(lambda: _living(_GROUP, leader))


def kill_all(find: Callable[[], Collection[int]]) -> None:
    """Kill the processes that `find` returns, again until there are none, or for `KILL_S`: one may fork before it is killed.

    Resource trackers go last: they end by themselves, within milliseconds, once they have deleted the semaphores and the
    shared memory of the others, which would else stay in /dev/shm.
    """
    started = time.monotonic()
    while (members := find()) and (waited := time.monotonic() - started) < KILL_S:
        for pid in members:
            if waited < TRACKERS_S and "resource_tracker" in " ".join(arguments(pid)):
                continue
            # It may have ended since, or be another user's.
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _living(place: int, number: int) -> list[int]:
    """Return the living processes that have this number at a place of `_stat`."""
    return [pid for pid in _all() if _stat(pid)[place : place + 1] == [str(number)] and not has_ended(pid)]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on: state, parent, group, session. Return none when it is gone."""
    # The process name, which comes before the state, may contain blanks and parentheses.
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve")
"""Instruction sets, as Linux calls them, by which libraries choose the kernels of bfloat16 and float32."""
_MOST_LETTERS = 160


def processor_name(device_type: str, cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the GPU's name for a `device_type` of cuda, else the CPU's model and its instruction sets for matrix products.

    Hypervisors may hide the model's name: family and model numbers are told, too.
    """
    if device_type == "cuda":
        # Imported here: whoever lists processes needs no torch.
        import torch

        return torch.cuda.get_device_name()
    try:
        lines = cpu_info.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    first: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        first.setdefault(name.strip(), value.strip())
    name = first.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in first:
        name += f", family {first['cpu family']} model {first.get('model', '?')}"
    flags = set((first.get("flags") or first.get("Features") or "").split())
    sets = " ".join(name for name in _INSTRUCTION_SETS if name in flags)
    return f"{name[:_MOST_LETTERS]} ({sets})" if sets else name[:_MOST_LETTERS]
