"""The clock and the disk that the services of a chaos round see."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

CLOCK_VARIABLE = "OFFBEAT_CHAOS_CLOCK"
SITE_CUSTOMIZE = f'''"""Python imports this module at start: it shifts the time of day that this process sees."""
import os, sys, time

_file = os.path.join(os.environ["{CLOCK_VARIABLE}"], "learner" if "learner" in sys.orig_argv else "actor")
_time, _time_ns = time.time, time.time_ns
_known_s = 0.0


def _offset_s():
    global _known_s
    try:
        with open(_file) as file:
            _known_s = float(file.read() or 0)
    except OSError:
        # Nothing has jumped yet, or a fault has taken all descriptors: the time of day never raises.
        pass
    return _known_s


time.time = lambda: _time() + _offset_s()
time.time_ns = lambda: _time_ns() + int(_offset_s() * 1e9)
'''


class Clock:
    """The time of day that the services see, which may differ from this machine's."""

    def __init__(self, folder: Path) -> None:
        self._offsets = folder / "clock"
        self._offsets.mkdir()
        self._python = folder / "python"
        self._python.mkdir()
        (self._python / "sitecustomize.py").write_text(SITE_CUSTOMIZE)

    def environment(self) -> Mapping[str, str]:
        """Return the environment variables with which a service sees this clock."""
        path = [str(self._python), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {CLOCK_VARIABLE: str(self._offsets), "PYTHONPATH": os.pathsep.join(path)}

    def jump(self, role: Literal["learner", "actor"], offset_s: float) -> None:
        """Let the clocks of these services differ by `offset_s` seconds from this machine's."""
        # Renamed into place: a reader must not find the file empty.
        new = self._offsets / f"{role}.new"
        new.write_text(str(offset_s))
        new.rename(self._offsets / role)


class Disk:
    """A small file system mounted at a run's folder; needs root."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        self._filler = folder / "filler"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "offbeat-chaos", str(folder)], check=True, capture_output=True
        )

    def fill(self, leave_bytes: int) -> None:
        """Fill the file system until `leave_bytes` are free."""
        with self._filler.open("ab") as file:
            while (excess := shutil.disk_usage(self.folder).free - leave_bytes) > 0:
                # The services write at the same time, so the space may be gone.
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), excess)

    def empty(self) -> None:
        """Free the space that `fill` has used."""
        self._filler.unlink()

    def close(self) -> None:
        """Unmount the file system; its files are lost."""
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True, capture_output=True)


def open_disk(folder: Path, num_bytes: int) -> Disk | None:
    """Mount a disk at `folder`; return None where this process may not mount one."""
    try:
        return Disk(folder, num_bytes)
    except (subprocess.CalledProcessError, FileNotFoundError):
        return None
