"""The sandbox of this machine: bubblewrap, or Landlock where user namespaces are forbidden, and never nothing.

`run` and `run_sync` use it unless `use` has named another.
"""

import asyncio
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Literal

from offbeat.actor.rewards.samples import RewardUnavailable
from offbeat.actor.sandbox.bubblewrap import Bubblewrap, find_bubblewrap
from offbeat.actor.sandbox.landlock import Landlock, sweep_folders
from offbeat.actor.sandbox.program import MEMORY_MB, TIMEOUT_S, Files, Program, Result, Sandbox
from offbeat.actor.sandbox.running import run_program
from offbeat.actor.sandbox.seccomp import is_known_machine
from offbeat.common.processes.environment import num_cores

LEAST_MEMORY_MB = 64
"""The interpreter alone takes half of this."""
PROGRAM_FILE = "main.py"
"""Name of the program in its folder, as `inside.py` writes it."""
MAX_NAME_BYTES = 255
"""Longest name of a file or folder, in bytes of UTF-8."""
BackendName = Literal["bubblewrap", "landlock"]
Backend = Bubblewrap | Landlock


class NoSandboxError(Exception):
    """Raised where no sandbox works on this machine; the text names the reasons and the cure."""


class Local:
    """Runs programs on this machine."""

    def __init__(
        self, backend: BackendName | None = None, *, concurrency: int | None = None, folders: Sequence[str | Path] = ()
    ) -> None:
        """Start nothing yet.

        Args:
            backend: None takes bubblewrap where it works, else Landlock.
            concurrency: Programs that run at the same time at most; others wait for their turn. None: one for each core.
            folders: Folders that programs may read and import from, such as one with numpy; they have the standard library.
        """
        self.backend: BackendName | None = backend
        self._folders = [str(Path(folder).resolve(strict=True)) for folder in folders]
        self._concurrency = concurrency or num_cores()
        self._executor: ThreadPoolExecutor | None = None
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._working: Backend | None = None

    async def run(
        self, code: str, *, stdin: str = "", files: Files = None, timeout_s: float = TIMEOUT_S, memory_mb: int = MEMORY_MB
    ) -> Result:
        """Run a Python program: see `Sandbox.run`. Raise `NoSandboxError` where no sandbox works."""
        files = files or {}
        _check_names(files)
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {timeout_s}, and must be more than 0")
        if memory_mb < LEAST_MEMORY_MB:
            raise ValueError(f"memory_mb is {memory_mb}, and a Python program takes {LEAST_MEMORY_MB} at least")
        stop = threading.Event()
        try:
            program = Program(code, stdin, files, timeout_s, memory_mb)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads(), lambda: self._run(self._chosen(), program, stop))
        finally:
            # The episode was cancelled, or the program has ended.
            stop.set()

    def check(self) -> None:
        """Raise `NoSandboxError` with the cure when no sandbox works on this machine."""
        self._chosen()

    def _threads(self) -> ThreadPoolExecutor:
        """Return the threads that wait for programs, one for each that may run. A fork has none of its parent's."""
        if self._executor is None or self._process_id != os.getpid():
            self._executor = ThreadPoolExecutor(self._concurrency, "sandbox")
            self._process_id = os.getpid()
        return self._executor

    def _run(self, backend: Backend, program: Program, stop: threading.Event) -> Result:
        try:
            with backend.launch(self._folders) as launch:
                return run_program(launch, program, self._folders, stop)
        except OSError as error:
            # The machine has no room for one more process or file now, which says nothing about the program.
            raise RewardUnavailable(f"the sandbox cannot start a program: {error}") from error

    def _chosen(self) -> Backend:
        with self._lock:
            if self._working is None:
                self._working = self._first_that_works()
            return self._working

    def _first_that_works(self) -> Backend:
        reasons = [] if self.backend == "landlock" or find_bubblewrap() else ["bubblewrap is not installed"]
        if not is_known_machine():
            raise NoSandboxError(_cure(["this is no Linux on x86_64 or aarch64"]))
        sweep_folders()
        for backend in self._candidates():
            try:
                result = self._run(backend, Program("print('works')"), threading.Event())
            except RewardUnavailable as error:
                reasons.append(f"{backend.name}: {error}")
                continue
            if result.stdout == "works\n":
                return backend
            reasons.append(f"{backend.name}: {result.stderr.strip()[-200:]}")
        raise NoSandboxError(_cure(reasons))

    def _candidates(self) -> list[Backend]:
        bubblewraps: list[Backend] = [] if self.backend == "landlock" else [Bubblewrap(path) for path in find_bubblewrap()]
        return bubblewraps if self.backend == "bubblewrap" else [*bubblewraps, Landlock()]


def _check_names(files: Iterable[str]) -> None:
    """Raise `ValueError` for names that no file of a program can have: the model may have chosen them."""
    paths = {PurePosixPath(name): name for name in (PROGRAM_FILE, *files)}
    for path, name in paths.items():
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"files: {name!r} is not a path below the program's folder")
        if "\0" in name or any(len(part.encode()) > MAX_NAME_BYTES for part in path.parts):
            raise ValueError(f"files: {name!r} is not a name that a file can have")
        if taken := paths.keys() & set(path.parents):
            raise ValueError(f"files: {name!r} is below {paths[taken.pop()]!r}, which is a file")


def _cure(reasons: list[str]) -> str:
    tried = "; ".join(reasons)
    return (
        f"no sandbox works on this machine ({tried}). Where user namespaces are allowed, install bubblewrap (pip install "
        "'offbeat[sandbox]', or apt-get install bubblewrap); else take a kernel with Landlock, or use a remote sandbox: "
        "docs/environments.md"
    )


_chosen: Sandbox = Local()


def use(sandbox: Sandbox) -> None:
    """Make `run` and `run_sync` use this sandbox. Call it in your module, beside its functions."""
    global _chosen
    _chosen = sandbox


def check() -> None:
    """Raise `NoSandboxError` with the cure when the sandbox in use is the one of this machine, and it does not work here."""
    if isinstance(_chosen, Local):
        _chosen.check()


async def run(
    code: str, *, stdin: str = "", files: Files = None, timeout_s: float = TIMEOUT_S, memory_mb: int = MEMORY_MB
) -> Result:
    """Run a Python program in the sandbox in use: see `Sandbox.run`."""
    return await _chosen.run(code, stdin=stdin, files=files, timeout_s=timeout_s, memory_mb=memory_mb)


def run_sync(
    code: str, *, stdin: str = "", files: Files = None, timeout_s: float = TIMEOUT_S, memory_mb: int = MEMORY_MB
) -> Result:
    """Do the same in a function that is not async."""
    return asyncio.run(_chosen.run(code, stdin=stdin, files=files, timeout_s=timeout_s, memory_mb=memory_mb))
