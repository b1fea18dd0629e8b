"""Programs confined by Landlock and seccomp, where user namespaces are forbidden, as in most containers.

Nothing is hidden by namespaces here: the kernel refuses to open what the program may not see, and the seccomp filter refuses
every call that would reach the network or another process. Its folder is a real one, whose size is looked at while it runs.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offbeat.actor.sandbox import confine
from offbeat.actor.sandbox.launch import (
    DISK_BYTES,
    INSIDE,
    INTERPRETER,
    MAX_FILES,
    Launch,
    Usage,
    threads_and_cpu_time,
    visible_paths,
)
from offbeat.actor.sandbox.seccomp import seccomp_filter

_READ = ("/dev/zero", "/dev/random", "/dev/urandom")
_WRITE = ("/dev/null",)


class Landlock:
    """Confines programs by Landlock."""

    name = "Landlock"

    @contextmanager
    def launch(self, folders: Sequence[str]) -> Iterator[Launch]:
        if not confine.landlock_version():
            raise OSError("the kernel has no Landlock: it came with Linux 5.13, and can be switched off")
        folder = tempfile.mkdtemp(prefix="offbeat-sandbox-")

        def arguments(pid: int) -> Mapping[str, Any]:
            read = [*visible_paths(), *_READ, *folders]
            code = seccomp_filter(pid)
            return {"parent": os.getpid(), "folder": folder, "read": read, "write": list(_WRITE), "filter": code}

        try:
            yield Launch([*INTERPRETER, str(INSIDE)], (), folder, arguments, lambda pid: _usage(pid, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _usage(pid: int, folder: str) -> Usage:
    num_files, num_bytes = _folder_size(folder)
    # Files without a name take room until they are closed.
    for entry in os.scandir(f"/proc/{pid}/fd"):
        status = entry.stat()
        if status.st_nlink == 0:
            num_bytes += 512 * status.st_blocks
    return Usage(*threads_and_cpu_time(pid), num_files, num_bytes)


def _folder_size(folder: str) -> tuple[int, int]:
    """Return the number of files and folders below a folder, and their bytes. Stops counting once a limit is exceeded."""
    num_files = num_bytes = 0
    folders = [Path(folder)]
    while folders:
        for entry in os.scandir(folders.pop()):
            status = entry.stat(follow_symlinks=False)
            num_files += 1
            num_bytes += 512 * status.st_blocks
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            if num_files > MAX_FILES or num_bytes > DISK_BYTES:
                return num_files, num_bytes
    return num_files, num_bytes
