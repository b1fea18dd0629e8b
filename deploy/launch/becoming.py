"""A forked process that goes on as if it had been started as another program."""

import ctypes
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path


def has_threads() -> bool:
    """Return whether this process has a thread besides the main one, of Python or of a library."""
    return len(list(Path("/proc/self/task").iterdir())) > 1


def run_module(module: str, arguments: Sequence[str]) -> int:
    """Run `python -m MODULE ARGUMENTS` in this process; return its exit status."""
    sys.argv = ["", *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001, the interpreter's last resort
        traceback.print_exc()
        return 1
    return 0


def show_arguments(arguments: Sequence[str]) -> None:
    """Write a command line where the kernel shows this process's own; what is too long is cut off."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # Fields 48 and 49 of proc(5), the third is the first here.
    start, end = int(fields[45]), int(fields[46])
    line = b"\0".join(map(os.fsencode, arguments))[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)
