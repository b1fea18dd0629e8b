"""Files: those that survive a power failure, as many open ones as the system allows, and the cache of what is made once."""

import errno
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

MOST = 1 << 17
"""Limit that is asked for at most: some libraries walk through all descriptors that there could be."""
PATIENCE_S = 5.0
"""Seconds for which `patiently` waits for a descriptor."""
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)
T = TypeVar("T")


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk."""
    descriptor = patiently(lambda: os.open(path, os.O_RDONLY))
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes) -> None:
    """Write a file so that a killed process leaves the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    sync(partial)
    partial.rename(path)


def open_standard_streams() -> None:
    """Open the null device in the place of each standard stream that this process was started without, as by `>&-`.

    Otherwise the next socket or file would get its number, and what a library prints would be written into it.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system gives the lowest number that is free.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def raise_limit() -> int:
    """Raise this process's soft limit on open files to its hard limit; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def lacks_descriptors(error: OSError) -> bool:
    """Return whether the error is that all descriptors of this process, or of its machine, are taken."""
    return error.errno in _NONE_LEFT


def limit_reached(error: OSError) -> str | None:
    """Return which limit of this process the error is about, with the command that raises it; None for another error."""
    if lacks_descriptors(error):
        return "open files (ulimit -n)"
    return "the size of files (ulimit -f)" if error.errno == errno.EFBIG else None


def patiently(open_it: Callable[[], T]) -> T:
    """Return the result of `open_it`, which is called again for `PATIENCE_S` while no descriptor is free.

    A burst of connections takes all descriptors until the hub's `ConnectionLimit` has closed them, which takes milliseconds.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return open_it()
        except OSError as error:
            if not lacks_descriptors(error) or time.monotonic() >= deadline:
                raise
        time.sleep(0.005)


def cache_folder() -> Path:
    """Return offbeat's folder for what is made once on a machine: below `XDG_CACHE_HOME`, else `~/.cache`. It may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offbeat"
