"""The end of a service: signals ask it to stop, and it does not outlive the process that started it."""

import atexit
import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl."""

USER_ERROR_STATUS = 2
"""Exit status for a user's mistake. The message names the cure; starting the service again would not help."""
GAVE_UP_STATUS = 3
"""Exit status of a service that cannot continue and has said why, unlike one that crashed."""
PAUSED_STATUS = 143
"""Exit status of a learner that SIGTERM has paused and that is to be started again (`run.grace_s`)."""
INTERRUPTED_STATUS = 130
"""Exit status of a process that Ctrl-C ended."""
PARENT_VARIABLE = "OFFBEAT_PARENT"
"""Environment variable with the process id of a service's parent, with which the service dies."""
LAUNCHED_VARIABLE = "OFFBEAT_LAUNCHED"
"""Environment variable of services whose launcher writes the report and the summary."""


class StopRequest:
    """A flag that SIGTERM, SIGINT, SIGHUP or `ask` set to ask the service to drain; a second signal ends the service at once.

    Work that does not look at the flag runs in `at_once`, where the first signal ends the process.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._is_signalled = False
        self._last_words: str | None = None
        self.reason: str | None = None
        """Name of the first signal, or what `ask` was given, whichever was first; None before it."""
        self.asked_at: float | None = None
        """Monotonic time of that; None before it."""

    def install(self) -> "StopRequest":
        """Handle these signals from now on (main thread only); return this request. SIGHUP stays ignored under nohup."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        return self

    def ask(self, reason: str) -> None:
        """Ask the service to drain for this reason; any thread may call it. A signal after it is a first signal."""
        if self.reason is None:
            self.reason, self.asked_at = reason, time.monotonic()
        self._event.set()

    def __bool__(self) -> bool:
        return self._event.is_set()

    @contextlib.contextmanager
    def at_once(self, last_words: str) -> Iterator[None]:
        """Let a signal in this context end the process after logging `last_words`: imports, a model's loading, a report.

        The words say what is kept and how to go on. The signal raises `SystemExit`, so that contexts are closed: with status 0
        for SIGTERM, as services end that are asked to, and 130 for SIGINT.
        """
        outer, self._last_words = self._last_words, last_words
        try:
            yield
        finally:
            self._last_words = outer

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            # A closed terminal sends it twice: by its shell, and by the kernel.
            signal.signal(number, signal.SIG_IGN)
        if self._last_words is not None:
            # Not through the log: the signal may have interrupted a log line, whose stream cannot be entered again.
            _say(f"{signal.Signals(number).name}: {self._last_words}")
            self._last_words = None
            self.ask(signal.Signals(number).name)
            sys.exit(INTERRUPTED_STATUS if number == signal.SIGINT else 0)
        if self._is_signalled:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._is_signalled = True
        name = signal.Signals(number).name
        self.ask(name)
        _say(f"{name}: stops after the work under way; again: ends at once")


def _say(text: str) -> None:
    # A full pipe that nobody reads must not keep the process from stopping.
    if select.select([], [2], [], 0)[1]:
        # The terminal may be closed.
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode())


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel (Linux) to kill this process when its parent dies, so that kill -9 of the parent leaves no orphan.

    A parent that died before this call is recognized by `parent_pid`; this process then exits at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def end_process(status: int) -> NoReturn:
    """End this process as the interpreter would, but for freeing every module: after an import of vLLM that takes seconds."""
    with contextlib.suppress(Exception):
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # The reader may be gone.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
