"""A process that imports what environment workers need, once, and then forks them; `worker_starts.py` is the other end.

    actor -> request: the worker's mark, its end of the pipe -> this process -> fork -> worker
    actor <- the worker's process id and a descriptor of it  <-

It runs no code of the user's, and has one thread: a fork would lose others, and keep what they have locked. A worker dies with
it, and it dies with the actor.
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from offbeat.actor.environments.worker import run_worker
from offbeat.actor.rewards.guard import MARK_VARIABLE
from offbeat.common.processes.environment import fast_imports, prepare_environment
from offbeat.common.processes.own_process import ROOM_VARIABLE, has_threads, show_arguments, show_variable
from offbeat.common.processes.shutdown import die_with_parent

MESSAGE_BYTES = 256
THREADS = b"threads"
"""The answer to a request when the imports have started threads."""
COMMAND = (sys.executable, "-m", "offbeat.actor.environments.forker")
WORKER = (sys.executable, "-m", "offbeat.actor.environments.worker")
"""The command of a worker that is a new interpreter, which forks show too."""
PARSER, TEXT = "parser", "text"
"""Forms of a turn: with tool calls or reasoning, or text alone."""


def serve_forks(requests: socket.socket, parent: int, *, has_parser: bool) -> NoReturn:
    """Fork a worker at each request, until the actor closes the socket.

    Consumes: requests. Waits for: the actor. Unblocked by: its end of the socket. Produces: workers.

    Args:
        parent: The actor's process id.
        has_parser: The workers read tool calls or reasoning.
    """
    die_with_parent(parent)
    # Both reach the actor's whole group, and its workers go on until it ends them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    # The room stays where it is, and programs that a worker starts need none.
    os.environ.pop(ROOM_VARIABLE, None)
    requests.set_inheritable(False)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _import(has_parser=has_parser)
    # Neither this process nor its forks need look at the modules again.
    gc.freeze()
    while True:
        mark, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 1)
        _forget_the_dead()
        if not mark:
            os._exit(0)
        with socket.socket(fileno=descriptors[0]) as end:
            if has_threads():
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


def main() -> None:
    """Serve the actor with the process id in the second argument; the first is the socket's descriptor, the third the form."""
    descriptor, parent, form = sys.argv[1:]
    serve_forks(socket.socket(fileno=int(descriptor)), int(parent), has_parser=form == PARSER)


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


def _forget_the_dead() -> None:
    """Collect the workers that have ended; each is a zombie until then."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become_worker(end: socket.socket, mark: str, forker: int) -> NoReturn:
    """Go on as a worker that was started as a new interpreter."""
    try:
        show_variable(MARK_VARIABLE, mark)
        show_arguments(WORKER)
        # The actor's handlers would write what a library of the user's says into its log.
        logging.getLogger().handlers.clear()
        # Python's own generator seeds itself in a fork, numpy's does not.
        import numpy

        numpy.random.seed()
        run_worker(end, forker)
    except BaseException:  # noqa: BLE001, the interpreter's last resort
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
