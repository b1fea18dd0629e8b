"""The start of environment workers: forks of a process that has imported what they need, or new interpreters.

    actor -> request: the worker's mark, its end of the pipe -> forker -> fork -> worker
    actor <- the worker's process id and a descriptor of it  <-

The imports take 3 s of CPU time, and with a parser of tool calls 11; a fork takes milliseconds, and shares their memory. The
forker runs no code of the user's, and has one thread: a fork would lose others, and keep what they have locked. It is itself a
fork of the actor where that has one thread, so that a launched actor's imports serve its workers too. A worker dies with the
forker, which dies with the actor.
"""

import contextlib
import gc
import logging
import os
import secrets
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from offbeat.actor.environments.worker import run_worker
from offbeat.common.processes import own_process
from offbeat.common.processes.child import MARK_VARIABLE, Fork, become_child, join_parent, start_child
from offbeat.common.processes.environment import fast_imports, has_gpu, prepare_environment

logger = logging.getLogger(__name__)

IMPORT_S = 120.0
"""Longest time that the first fork takes: the forker imports before it."""
FORK_S = 10.0
"""Longest time that a later one takes."""
MESSAGE_BYTES = 256
THREADS = b"threads"
"""The answer to a request when the imports have started threads."""
FORKER = (sys.executable, "-m", "offbeat.actor.environments.worker_starts")
WORKER = (sys.executable, "-m", "offbeat.actor.environments.worker")
"""The command of a worker that is a new interpreter, which forks show too."""
PARSER, TEXT = "parser", "text"
"""Forms of a turn: with tool calls or reasoning, or text alone."""


def can_fork() -> bool:
    """Return whether workers may be forks on this machine.

    Not where a GPU is, because the user's function may use it, and CUDA does not survive a fork; nor where the user wants
    several threads of OpenMP, which numpy would start when it is imported; nor where the kernel has no descriptors of processes
    (before Linux 5.3), or a container forbids them.
    """
    return not has_gpu() and os.environ.get("OMP_NUM_THREADS") == "1" and _can_watch_processes()


class WorkerStarts:
    """Starts workers: forks, until one has failed, and then new interpreters."""

    def __init__(self, *, forks: bool, has_parser: bool) -> None:
        """`forks` is what `can_fork` says; `has_parser` says whether the workers read tool calls or reasoning."""
        self._forker: Fork | subprocess.Popen[bytes] | None = None
        if not forks:
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(IMPORT_S)
        with theirs:
            if own_process.has_threads() or not own_process.has_room_for_variable():
                command = [*FORKER, PARSER if has_parser else TEXT]
                self._forker = start_child(command, theirs.fileno(), {own_process.ROOM_VARIABLE: own_process.ROOM})
            else:
                self._forker = fork_forker(theirs, self._socket, has_parser=has_parser)

    def start(self, end: socket.socket) -> Fork | subprocess.Popen[bytes]:
        """Start a worker that serves the other side of this end of its pipe, which the caller closes."""
        if self._forker is not None:
            try:
                return self._fork(end)
            except OSError as error:
                self.close()
                logger.warning("environment workers cannot be forked (%s): each is a new interpreter from now on", error)
        return start_child(WORKER, end.fileno(), {MARK_VARIABLE: _new_mark()})

    def close(self) -> None:
        """End the forker; its workers end with it."""
        if self._forker is not None:
            self._socket.close()
            self._forker.kill()
            self._forker.wait()
            self._forker = None

    def _fork(self, end: socket.socket) -> Fork:
        """Return a fork. Raise `OSError` when there is none."""
        socket.send_fds(self._socket, [_new_mark().encode()], [end.fileno()])
        answer, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
        self._socket.settimeout(FORK_S)
        if not descriptors:
            raise OSError("the imports have started threads" if answer == THREADS else "the process to fork has died")
        return Fork(int(answer), descriptors[0])


def fork_forker(end: socket.socket, other_end: socket.socket, *, has_parser: bool) -> Fork:
    """Return a forker that is a fork of this process, which has one thread."""
    for stream in (sys.stdout, sys.stderr):
        # What waits there would be written twice.
        stream.flush()
    actor = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            other_end.close()
            own_process.show_arguments(FORKER)
            become_child(actor, end.fileno())
            serve_forks(end, has_parser=has_parser)
        except BaseException:  # noqa: BLE001, the interpreter's last resort
            traceback.print_exc()
        finally:
            os._exit(1)
    return Fork(pid, os.pidfd_open(pid))


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


# In the forker


def serve_forks(requests: socket.socket, *, has_parser: bool) -> NoReturn:
    """Fork a worker at each request, until the actor closes the socket.

    Consumes: requests. Waits for: the actor. Unblocked by: its end of the socket. Produces: workers.
    """
    # The room stays where it is, and programs that a worker starts need none.
    os.environ.pop(own_process.ROOM_VARIABLE, None)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _import(has_parser=has_parser)
    # Neither this process nor its forks need look at the modules again.
    gc.freeze()
    while True:
        mark, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 1)
        # Collect the workers that have ended; each is a zombie until then.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not mark:
            os._exit(0)
        with socket.socket(fileno=descriptors[0]) as end:
            if own_process.has_threads():
                requests.send(THREADS)
                continue
            forker = os.getpid()
            pid = os.fork()
            if pid == 0:
                requests.close()
                _become_worker(end, mark.decode(), forker)
        watched = os.pidfd_open(pid)
        socket.send_fds(requests, [str(pid).encode()], [watched])
        os.close(watched)


def _import(*, has_parser: bool) -> None:
    with fast_imports():
        prepare_environment()
        from transformers import AutoTokenizer  # noqa: F401

        if has_parser:
            # A worker says what is missing.
            with contextlib.suppress(ImportError):
                import vllm.entrypoints.openai.chat_completion.protocol
                import vllm.parser.parser_manager
                import vllm.reasoning
                import vllm.tool_parsers  # noqa: F401


def _become_worker(end: socket.socket, mark: str, forker: int) -> NoReturn:
    """Go on as a worker that was started as a new interpreter."""
    try:
        own_process.show_variable(MARK_VARIABLE, mark)
        own_process.show_arguments(WORKER)
        # The actor's handlers would write what a library of the user's says into its log.
        logging.getLogger().handlers.clear()
        # Python's own generator seeds itself in a fork, numpy's does not.
        import numpy

        numpy.random.seed()
        become_child(forker, end.fileno())
        run_worker(end)
    except BaseException:  # noqa: BLE001, the interpreter's last resort
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    serve_forks(socket.socket(fileno=join_parent()), has_parser=sys.argv[1] == PARSER)
