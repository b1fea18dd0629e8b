"""The start of an environment worker: a fork of a process that has imported what it needs (`forker.py`), or a new interpreter.

The imports take 3 s of CPU time, and with a parser of tool calls 11; a fork takes milliseconds, and shares their memory. The
forker is itself a fork of the actor where that has one thread, so that a launched actor's imports serve its workers too.
"""

import contextlib
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Protocol

from offbeat.actor.environments import forker
from offbeat.actor.rewards.guard import MARK_VARIABLE
from offbeat.common.processes.environment import has_gpu
from offbeat.common.processes.own_process import ROOM, ROOM_VARIABLE, has_room_for_variable, has_threads, show_arguments

logger = logging.getLogger(__name__)

IMPORT_S = 120.0
"""Longest time that the first fork takes: the forker imports before it."""
FORK_S = 10.0
"""Longest time that a later one takes."""
KILL_S = 10.0
"""Longest time that the death of a killed worker takes."""


class Process(Protocol):
    """A worker's process."""

    pid: int

    def kill(self) -> None:
        """Kill the process and wait for its death; its guard kills what it has started."""
        ...


class WorkerStarts(Protocol):
    """A way to start workers."""

    def start(self, end: socket.socket) -> Process:
        """Start a worker that serves the other side of this end of its pipe, which the caller closes."""
        ...

    def close(self) -> None:
        """End whatever helps to start workers; they may end with it."""
        ...


def choose_starts(*, has_parser: bool) -> WorkerStarts:
    """Return the way to start workers on this machine; `has_parser` says whether they read tool calls or reasoning.

    New interpreters where a GPU is, because the user's function may use it, and CUDA does not survive a fork; where the user
    wants several threads of OpenMP, which numpy would start when it is imported; and where the kernel has no descriptors of
    processes (before Linux 5.3), or a container forbids them.
    """
    if has_gpu() or os.environ.get("OMP_NUM_THREADS") != "1" or not _can_watch_processes():
        return NewInterpreters()
    return Forks(has_parser=has_parser)


class NewInterpreters:
    """Starts each worker as a new interpreter."""

    def start(self, end: socket.socket) -> Process:
        return NewInterpreter(forker.WORKER, end, {MARK_VARIABLE: _new_mark()})

    def close(self) -> None:
        pass


class Forks:
    """Forks workers; once that has failed, starts new interpreters."""

    def __init__(self, *, has_parser: bool) -> None:
        """`has_parser` says whether the workers read tool calls or reasoning."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(IMPORT_S)
        with theirs:
            self._forker: Process | None = (
                NewInterpreter(forker.COMMAND, theirs, {ROOM_VARIABLE: ROOM}, forker.PARSER if has_parser else forker.TEXT)
                if has_threads() or not has_room_for_variable()
                else ForkOfActor(theirs, self._socket, has_parser=has_parser)
            )

    def start(self, end: socket.socket) -> Process:
        if self._forker is not None:
            try:
                return self._fork(end)
            except OSError as error:
                self.close()
                logger.warning("environment workers cannot be forked (%s): each is a new interpreter from now on", error)
        return NewInterpreters().start(end)

    def close(self) -> None:
        if self._forker is not None:
            self._socket.close()
            self._forker.kill()
            self._forker = None

    def _fork(self, end: socket.socket) -> Process:
        """Return a fork. Raise `OSError` when there is none."""
        socket.send_fds(self._socket, [_new_mark().encode()], [end.fileno()])
        answer, descriptors, _, _ = socket.recv_fds(self._socket, forker.MESSAGE_BYTES, 1)
        self._socket.settimeout(FORK_S)
        if not descriptors:
            raise OSError("the imports have started threads" if answer == forker.THREADS else "the process to fork has died")
        return Fork(int(answer), descriptors[0])


class NewInterpreter:
    """A process that is a new interpreter."""

    def __init__(self, command: Sequence[str], end: socket.socket, variables: Mapping[str, str], *more: str) -> None:
        """Start it with these variables in addition; its arguments are `end`'s descriptor, this process's id, and `more`."""
        self._process = subprocess.Popen(
            [*command, str(end.fileno()), str(os.getpid()), *more],
            stdin=subprocess.DEVNULL,
            pass_fds=[end.fileno()],
            env={**os.environ, **variables},
        )
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class ForkOfActor:
    """The forker as a fork of this process."""

    def __init__(self, end: socket.socket, other_end: socket.socket, *, has_parser: bool) -> None:
        for stream in (sys.stdout, sys.stderr):
            # What waits there would be written twice.
            stream.flush()
        actor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                other_end.close()
                show_arguments(forker.COMMAND)
                forker.serve_forks(end, actor, has_parser=has_parser)
            except BaseException:  # noqa: BLE001, the interpreter's last resort
                traceback.print_exc()
            finally:
                os._exit(1)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Fork:
    """A worker that the forker has forked. It is not this process's child, so only its descriptor is sure to mean it."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor: int | None = descriptor

    def kill(self) -> None:
        if self._descriptor is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        death = select.poll()
        death.register(self._descriptor, select.POLLIN)
        death.poll(KILL_S * 1000)
        os.close(self._descriptor)
        self._descriptor = None


def _new_mark() -> str:
    return secrets.token_hex(8)


def _can_watch_processes() -> bool:
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True
