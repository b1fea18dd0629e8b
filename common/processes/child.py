"""Child processes: started, tied to this process's life, talked to over a pipe, and ended with all that they have started.

    parent: start_child(command, end) ------------------> child: join_parent()
            Pipe(other end).exchange() <--- messages ---         read_message(), framed()
            kill it                                              `guard_session` kills what it has started

A child is a new interpreter, or a `Fork` that another process has made for this one.
"""

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Generic, TypeVar

import msgspec

from offbeat.common.processes import process_table as processes
from offbeat.common.processes.shutdown import PR_SET_PDEATHSIG, die_with_parent

MARK_VARIABLE = "OFFBEAT_GUARD"
"""Environment variable by which a guard also finds processes that have left its session: whoever starts a guarded process gives
it a value of its own, which its descendants inherit."""
MAX_BYTES = 64 << 20
"""Largest message, and most bytes that wait for a child that does not read."""
READ_BYTES = 1 << 18
HEAD = struct.Struct("<I")

Message = TypeVar("Message")


def start_child(
    command: Sequence[str],
    end: int,
    variables: Mapping[str, str] | None = None,
    *,
    stdin: int = subprocess.DEVNULL,
    log: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a new interpreter that has the descriptor `end`; it dies with the thread that calls this.

    Its last two arguments are that descriptor and this process's id, which `join_parent` reads. `variables` are set in addition
    to this process's; `log` takes all output.
    """
    whole = [*command, str(end), str(os.getpid())]
    errors = None if log is None else subprocess.STDOUT
    environment = {**os.environ, **(variables or {})}
    return subprocess.Popen(whole, pass_fds=[end], env=environment, stdin=stdin, stdout=log, stderr=errors)


def join_parent() -> int:
    """Become a child in a process that `start_child` has started; return the descriptor that it was given."""
    end, parent = map(int, sys.argv[-2:])
    become_child(parent, end)
    return end


def become_child(parent: int, end: int | None = None, ignored: Sequence[int] = (signal.SIGINT, signal.SIGTERM)) -> None:
    """Die with the process `parent`, and ignore signals, which may reach its whole group: it ends its children when it can.

    `end` is the descriptor of a pipe to it, which the programs that this process starts must not keep open.
    """
    die_with_parent(parent)
    for number in ignored:
        # A handler, not SIG_IGN: programs that the child starts would inherit that.
        signal.signal(number, lambda *_: None)
    if end is not None:
        os.set_inheritable(end, False)


class Fork:
    """A forked process, known by a descriptor: it may be no child of this process, so that its id may come to mean another."""

    def __init__(self, pid: int, descriptor: int) -> None:
        """`descriptor` is that of `os.pidfd_open`."""
        self.pid = pid
        self._descriptor: int | None = descriptor

    def kill(self) -> None:
        """Kill the process, unless it is known to be dead."""
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self) -> None:
        """Wait for the death of the killed process, `processes.KILL_S` at most."""
        if self._descriptor is None:
            return
        death = select.poll()
        death.register(self._descriptor, select.POLLIN)
        death.poll(processes.KILL_S * 1000)
        os.close(self._descriptor)
        self._descriptor = None
        # A child of this process is a zombie until then.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)


def guard_session() -> None:
    """Make this process the leader of a new session, all of whose processes are killed when it ends, however it ends.

    A child that runs the user's functions may start programs (a compiler, a test run, a sandbox). Whoever ends the child kills
    the child alone, and after kill -9 of the parent nobody is left to kill anything. Therefore the child forks a guard, which
    the kernel wakes when the child ends. A process that has left the session (a daemon) is found by `MARK_VARIABLE` alone.
    Only Linux has the guard. Call this before any thread is started.
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
    # Pipes of the leader: readers at their other ends wait for their last holder.
    for number in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            os.close(int(number.name))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    while os.getppid() == leader:
        signal.sigwait({signal.SIGTERM})


def _kill_session(leader: int) -> None:
    """Kill the processes of a session, and those that have left it and bear its mark."""
    mark = os.environ.get(MARK_VARIABLE)

    def left() -> set[int]:
        marked = processes.marked(MARK_VARIABLE, mark) if mark else []
        return {*processes.session(leader), *marked} - {os.getpid()}

    processes.kill_all(left)


def framed(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message on a pipe."""
    body = msgspec.msgpack.encode(message)
    return HEAD.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Return the next message of a pipe, still encoded. Raise `IncompleteReadError` at its end."""
    (length,) = HEAD.unpack(await reader.readexactly(HEAD.size))
    return await reader.readexactly(length)


class ChildError(Exception):
    """A child has closed its pipe, does not read, or has sent something else than messages; the text says which."""


class Pipe(Generic[Message]):
    """The parent's end of a pipe with messages: sends and receives without waiting.

    Each message is four bytes with its length, then msgpack. Bytes that the socket does not take stay in a buffer.
    """

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        """`decoder` checks the child's messages: the user's code runs there."""
        end.setblocking(False)
        self._socket = end
        self._decoder = decoder
        self._unsent = bytearray()
        self._received = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; raise `ChildError` when too much waits already."""
        if len(self._unsent) > MAX_BYTES:
            raise ChildError("it has not read its messages")
        self._unsent += framed(message)

    def exchange(self) -> list[Message]:
        """Send what the socket takes, and return the messages that have arrived. Raise `ChildError`."""
        try:
            if self._unsent:
                with contextlib.suppress(BlockingIOError):
                    del self._unsent[: self._socket.send(self._unsent)]
            with contextlib.suppress(BlockingIOError):
                self._receive()
        except OSError as error:
            raise ChildError("it has ended") from error
        return self._decode()

    def close(self) -> None:
        """Close the pipe, which ends the child."""
        self._socket.close()

    def _receive(self) -> None:
        while more := self._socket.recv(READ_BYTES):
            self._received += more
            if len(more) < READ_BYTES:
                return
        raise ChildError("it has ended")

    def _decode(self) -> list[Message]:
        messages: list[Message] = []
        while len(self._received) >= HEAD.size:
            (length,) = HEAD.unpack_from(self._received)
            if length > MAX_BYTES:
                raise ChildError("it has sent something else than messages")
            if len(self._received) < HEAD.size + length:
                break
            body = bytes(self._received[HEAD.size : HEAD.size + length])
            del self._received[: HEAD.size + length]
            try:
                messages.append(self._decoder.decode(body))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ChildError(f"it has sent something else than messages: {error}") from error
        return messages
