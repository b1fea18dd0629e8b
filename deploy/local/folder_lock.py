"""Locks a folder for one program: two that work in it would write the same files."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from offbeat.common.errors import SettingError

LOCK_FILE = ".lock"
LOOK_S = 0.1
"""Seconds between two tries to get a lock that another program holds."""


class FolderBusyError(SettingError):
    """Another program works in the folder."""


@contextlib.contextmanager
def alone_in(folder: Path, *, name: str = LOCK_FILE, wait_s: float = 0.0) -> Iterator[None]:
    """Lock the folder by a file of this name, and make the folder if need be. The kernel frees the lock of a dead process.

    Waits for: the end of another program's lock, `wait_s` seconds. Raises `FolderBusyError` when it still holds then.
    """
    deadline = time.monotonic() + wait_s
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    problem = "another sweep or study is running there"
                    raise FolderBusyError("--out", str(folder), problem, "Wait for its end, or stop it.") from error
            time.sleep(LOOK_S)
        yield
