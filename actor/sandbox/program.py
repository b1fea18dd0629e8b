"""The program that a sandbox runs: its result, what it may see and have, and how a backend launches it.

Both backends launch a program in the same way, and show it the same part of the machine.
"""

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

TIMEOUT_S = 10.0
"""Default of `timeout_s`."""
MEMORY_MB = 512
"""Default of `memory_mb`."""
DISK_BYTES = 16 << 20
"""Bytes that a program may have in its folder."""
MAX_FILES = 1000
"""Files and folders that a program may have in its folder."""
MAX_THREADS = 64
"""Threads that a program may have."""
INSIDE = Path(__file__).with_name("inside.py")
ENVIRONMENT = {"LANG": "C.UTF-8", "HOME": "/tmp", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""The whole environment of a program. The same program has the same order in its sets, and numpy few threads."""
INTERPRETER = (str(Path(sys.executable).resolve()), "-s", "-S", "-P", "-B", "-X", "utf8")
"""The interpreter with its standard library and nothing else."""
Files = Mapping[str, str] | None
"""Texts by their paths in a program's folder, into which they are written first."""
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")


class Result(NamedTuple):
    """The outcome of a program."""

    exit_code: int
    """0: it ended well. 128 plus the number of a signal: it was killed, by itself or at a limit."""
    stdout: str
    """The output of the program; one longer than the limit is cut, and says so at its end."""
    stderr: str
    """Its errors, with the traceback; cut like `stdout`."""
    is_timeout: bool
    """True when it was ended at `timeout_s`."""
    is_out_of_memory: bool
    """True when it ended because `memory_mb` did not suffice."""
    seconds: float
    """Wall time of the program, without the start of the sandbox."""


class Program(NamedTuple):
    """A Python program that nobody has read, with what it gets."""

    code: str
    stdin: str = ""
    files: Mapping[str, str] = {}
    """Written into its folder first, by name."""
    timeout_s: float = TIMEOUT_S
    memory_mb: int = MEMORY_MB


class Sandbox(Protocol):
    """Runs programs that nobody has read. `Local` does so on this machine."""

    async def run(
        self, code: str, *, stdin: str = "", files: Files = None, timeout_s: float = TIMEOUT_S, memory_mb: int = MEMORY_MB
    ) -> Result:
        """Run a Python program and return what it did, also when it failed or broke a limit.

        Raise `offbeat.RewardUnavailable`, or an error of a connection, when the sandbox fails and not the program: the episode
        or the reward is then tried again.
        """
        ...


class Usage(NamedTuple):
    """The resources that a program has in use."""

    num_threads: int
    cpu_s: float
    num_files: int
    disk_bytes: int


class Launch(NamedTuple):
    """A program on its way."""

    command: Sequence[str]
    pass_fds: Sequence[int]
    folder: str | None
    """The folder it is started in; None for that of this process, which the program does not see."""
    confine: Callable[[int], Mapping[str, Any] | None]
    """Given its process id, returns the arguments of `confine.confine`; None when the command confines it already."""
    usage: Callable[[int], Usage]
    """Given its process id, returns what it has in use. Raises `OSError` when it has ended."""


def visible_paths() -> list[str]:
    """Return the files and folders that every program may read: interpreter, standard library, shared libraries."""
    libraries = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib").glob("libpython3*")
    # In a virtual environment the second is otherwise a folder of the environment, with all that is installed.
    base = {"platbase": sys.base_exec_prefix}
    own = [INTERPRETER[0], *map(str, libraries), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib", vars=base)]
    paths = (str(Path(path).resolve()) for path in own)
    return [path for path in dict.fromkeys([*_SYSTEM, *paths]) if Path(path).exists()]


def children_of(pid: int) -> list[int]:
    """Return the children that the first thread of a process has started. Raise `OSError` when it has ended."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def threads_and_cpu_time(pid: int) -> tuple[int, float]:
    """Return the threads of a process, and its CPU time in seconds. Raise `OSError` when it has ended."""
    # The name, which comes before the state, may contain blanks and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[17]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
