"""Guards of reward processes: each guard ends the processes that its reward process leaves behind.

A reward may start programs (a compiler, a test run, a sandbox). At the time limit only the reward's own process is killed,
and after kill -9 of the actor nobody is left to kill anything. Therefore each reward process leads a session of its own, in
which its children stay, and forks a guard, which the kernel wakes when the reward process ends.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from offbeat.common.processes import process_table as processes
from offbeat.common.processes.shutdown import PR_SET_PDEATHSIG

MARK_VARIABLE = "OFFBEAT_GUARD"
"""Environment variable by which a guard also finds processes that have left its session: whoever starts a guarded process gives
it a value of its own, which its descendants inherit."""
KILL_TIMEOUT_S = 10.0
"""Longest time in which a guard tries to end the processes of its session, in seconds."""


def guard_session() -> None:
    """Make this process the leader of a new session, all of whose processes are killed when it ends, however it ends.

    A process that leaves the session (a daemon) is found by `MARK_VARIABLE` alone. Only Linux has the guard. Call it before any
    thread is started.
    """
    os.setsid()
    if sys.platform != "linux":
        return
    # Blocked before the fork: the signal must not reach the guard before it waits for it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    leader = os.getpid()
    if os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    try:
        _await_end(leader)
        _kill_session(leader)
    finally:
        os._exit(0)


def _await_end(leader: int) -> None:
    """Wait, in the guard, for the end of the process that forked it."""
    os.setsid()
    # Pipes of the reward process: readers at their other ends wait for their last holder.
    for number in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            os.close(int(number.name))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    while os.getppid() == leader:
        signal.sigwait({signal.SIGTERM})


def _kill_session(leader: int) -> None:
    """Kill the processes of a session, again until there is none: one may fork before it is killed."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    mark = os.environ.get(MARK_VARIABLE)

    def left() -> set[int]:
        marked = processes.marked(MARK_VARIABLE, mark) if mark else []
        return {*processes.session(leader), *marked} - {os.getpid()}

    while (members := left()) and time.monotonic() < deadline:
        for pid in members:
            # It may have ended since, or be another user's.
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
