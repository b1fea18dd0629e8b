"""Programs confined by Landlock and seccomp, where user namespaces are forbidden, as in most containers.

Nothing is hidden by namespaces here: the kernel refuses to open what the program may not see, and the seccomp filter refuses
every call that would reach the network or another process. Its folder is a real one, whose size is looked at while it runs.
"""

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offbeat.actor.sandbox import confine, program
from offbeat.actor.sandbox.seccomp import seccomp_filter

logger = logging.getLogger(__name__)

PREFIX = "offbeat-sandbox-"
"""Names of programs' folders begin with it."""
NEW_S = 60.0
"""Seconds for which a folder without a lock is left alone."""
_READ = ("/dev/zero", "/dev/random", "/dev/urandom")
_WRITE = ("/dev/null",)


class Landlock:
    """Confines programs by Landlock."""

    name = "Landlock"

    @contextmanager
    def launch(self, folders: Sequence[str]) -> Iterator[program.Launch]:
        if not confine.landlock_version():
            raise OSError("the kernel has no Landlock: it came with Linux 5.13, and can be switched off")
        folder = tempfile.mkdtemp(prefix=PREFIX)
        lock = _try_lock(folder)

        def arguments(pid: int) -> Mapping[str, Any]:
            read = [*program.visible_paths(), *_READ, *folders]
            code = seccomp_filter(pid)
            return {"parent": os.getpid(), "folder": folder, "read": read, "write": list(_WRITE), "filter": code}

        try:
            command = [*program.INTERPRETER, str(program.INSIDE)]
            yield program.Launch(command, (), folder, arguments, lambda pid: _usage(pid, folder))
        finally:
            _remove(folder)
            if lock is not None:
                os.close(lock)


def sweep_folders() -> None:
    """Delete the folders of programs whose actor or worker was killed: no living process has locked them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            # One that is new may be locked in a moment. In a folder of another user, or open to others, nothing is safe.
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
            if is_own and status.st_mtime < time.time() - NEW_S and (lock := _try_lock(str(folder))) is not None:
                try:
                    _remove(str(folder))
                finally:
                    os.close(lock)


def _try_lock(folder: str) -> int | None:
    """Lock a folder until the returned descriptor is closed, or this process dies; return None where another has."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove(folder: str) -> None:
    """Delete the folder of a program, however deep the program nested folders in it.

    `shutil.rmtree` recurses, and gives up at the depth of Python's stack or the longest path. Here each folder in the top one
    gives its own folders to the top one, until none is left.
    """
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    # No name that the program chose, so that nothing is replaced.
    moved = (f"{token}-{number}" for token in [secrets.token_hex(8)] for number in itertools.count())
    try:
        while names := os.listdir(top):  # noqa: PTH208, a descriptor
            for name in names:
                if not _make_folder_writable(top, name):
                    os.unlink(name, dir_fd=top)
                    continue
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
                try:
                    for entry in os.listdir(inner):  # noqa: PTH208, a descriptor
                        _make_folder_writable(inner, entry)
                        os.rename(entry, next(moved), src_dir_fd=inner, dst_dir_fd=top)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    except OSError as error:
        logger.warning("the folder %s of a program stays: %s", folder, error)
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        Path(folder).rmdir()


def _make_folder_writable(parent: int, name: str) -> bool:
    """Give a folder back to its owner, who may have taken the right to change it; return False for what is no folder."""
    is_folder = stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    if is_folder:
        os.chmod(name, 0o700, dir_fd=parent)
    return is_folder


def _usage(pid: int, folder: str) -> program.Usage:
    num_files, num_bytes = _folder_size(folder)
    # Files without a name take room until they are closed.
    for entry in os.scandir(f"/proc/{pid}/fd"):
        status = entry.stat()
        if status.st_nlink == 0:
            num_bytes += 512 * status.st_blocks
    return program.Usage(*program.threads_and_cpu_time(pid), num_files, num_bytes)


def _folder_size(folder: str) -> tuple[int, int]:
    """Return the number of files and folders below a folder, and their bytes. Stops counting once a limit is exceeded."""
    num_files = num_bytes = 0
    folders = [Path(folder)]
    try:
        while folders:
            for entry in os.scandir(folders.pop()):
                status = entry.stat(follow_symlinks=False)
                num_files += 1
                num_bytes += 512 * status.st_blocks
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                if num_files > program.MAX_FILES or num_bytes > program.DISK_BYTES:
                    return num_files, num_bytes
    except OSError as error:
        # Folders in each other beyond the longest path cannot be counted from here, so they are too many.
        if error.errno == errno.ENAMETOOLONG:
            return program.MAX_FILES + 1, num_bytes
        raise
    return num_files, num_bytes
