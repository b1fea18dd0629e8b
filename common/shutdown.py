"""How a service ends: signals become an event, and a child does not outlive the process that started it."""

import ctypes
import os
import signal
import sys
import threading
from types import FrameType

PR_SET_PDEATHSIG = 1

USER_ERROR_STATUS = 2
"""Exit status of a service that told its user what to mend: starting it again would not help."""
GAVE_UP_STATUS = 3
"""Exit status of a service that cannot go on and said why, unlike one that crashed."""
PARENT_VARIABLE = "OFFBEAT_PARENT"
"""Environment variable by which a service's parent gives its own process id: the service dies with it."""


class ServiceError(RuntimeError):
    """A service cannot go on; the text is for its user, who is shown it without a traceback. Exit status `GAVE_UP_STATUS`."""


class StopRequest:
    """SIGTERM and SIGINT ask the service to drain; a second one ends it at once."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""
        """The name of the first signal, empty before it."""

    def install(self) -> "StopRequest":
        """Take over SIGTERM and SIGINT (main thread only)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        return self

    def __bool__(self) -> bool:
        return self._event.is_set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._event.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.reason = signal.Signals(number).name
        self._event.set()


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux), so that kill -9 of a parent leaves no orphan.

    `parent_pid` closes the gap between fork and this call: a parent already gone ends the process here.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
