"""A process that imports what services need, once, and then forks them; `deploy/local/forks.py` is the other end.

    the learner's imports -> request (arguments, variables, gate, output) -> fork -> `offbeat ARGUMENTS`

The engine's imports come with the first actor's request: the learner starts while the engine is imported. Nothing but imports
happens before a fork: no thread, no socket, no CUDA, no parallel region of OpenMP.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from offbeat.common.processes.environment import prepare_environment
from offbeat.common.processes.own_process import ROOM_VARIABLE, has_threads, show_arguments
from offbeat.common.processes.shutdown import PARENT_VARIABLE, die_with_parent, end_process
from offbeat.deploy.local.forks import GO
from offbeat.deploy.local.starts import PROGRAM


def run_module(module: str, arguments: Sequence[str]) -> int:
    """Run `python -m MODULE ARGUMENTS` in this process; return its exit status."""
    sys.argv = ["", *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001, the interpreter's last resort
        traceback.print_exc()
        return 1
    return 0


MESSAGE_BYTES = 1 << 18
NUM_DESCRIPTORS = 3
"""Descriptors of a request: gate, output, errors."""
LOOK_S = 0.001


def main() -> None:
    """Serve requests until the launcher closes the socket."""
    launcher = int(os.environ.pop(PARENT_VARIABLE))
    die_with_parent(launcher)
    requests = socket.socket(fileno=int(sys.argv[1]))
    engine = sys.argv[2]
    # The room stays where it is, and programs that are started need none.
    os.environ.pop(ROOM_VARIABLE, None)
    # Modules are a million objects that stay: neither this process nor its forks need look at them.
    gc.disable()
    prepare_environment()
    # Learners come first, and by the time of their request the launcher has looked at the settings for seconds.
    _import_for("learner", engine)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, NUM_DESCRIPTORS)
        if not message:
            # Nothing was begun that needs an end; libraries write pages about what they leak at one.
            os._exit(0)
        request = json.loads(message)
        arguments = request["arguments"]
        _import_for(arguments[0], engine)
        if has_threads():
            raise RuntimeError("the imports have started threads, which a fork would lose")
        gc.freeze()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            if os.fork():
                # The service is an orphan now, and becomes the launcher's child.
                os._exit(0)
            requests.close()
            gate, output, errors = descriptors
            _pass_gate(gate, parent, launcher)
            _become_service(arguments, request["variables"], output, errors)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _import_for(command: str, engine: str) -> None:
    """Import what the service that this command starts needs."""
    importlib.import_module(f"offbeat.deploy.cli.{command}").import_service(engine)


def _pass_gate(descriptor: int, parent: int, launcher: int) -> None:
    """Tell the launcher this process's id once it is its child, and return when it has said go; else end the process."""
    with socket.socket(fileno=descriptor) as gate:
        os.setpgid(0, 0)
        while (now := os.getppid()) != launcher:
            if now != parent:
                # The launcher does not wait for it any more.
                os._exit(1)
            time.sleep(LOOK_S)
        word = b""
        with contextlib.suppress(OSError):
            gate.send(str(os.getpid()).encode())
            word = gate.recv(64)
        if word != GO:
            os._exit(1)


def _become_service(arguments: Sequence[str], variables: Mapping[str, str], output: int, errors: int) -> NoReturn:
    """Go on as a process that has just been started as `offbeat ARGUMENTS`, with these variables added to the environment."""
    for descriptor, own in ((output, 1), (errors, 2)):
        os.dup2(descriptor, own)
    for descriptor in {output, errors} - {1, 2}:
        os.close(descriptor)
    os.environ.update(variables)
    gc.enable()
    # Python's own generator seeds itself in a fork, numpy's does not.
    import numpy

    numpy.random.seed()
    show_arguments([*PROGRAM, *arguments])
    end_process(run_module(PROGRAM[2], arguments))


if __name__ == "__main__":
    main()
