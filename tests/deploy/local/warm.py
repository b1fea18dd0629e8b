"""A process that imports torch, vLLM and DeepSpeed once and then forks the services that tests start.

    test -> socket -> warm process -> fork -> `offbeat ARGUMENTS`; `offbeat train` forks its learner and actors in turn

A real start spends up to ten seconds of CPU time on imports; a fork has them already. A forked service is like a started one in
process id, process group, parent, command line, working folder, environment, output, signals and exit status. A test of the
start itself, or of an environment that imports depend on, uses a real process instead (`Services.start(real=True)`).
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from offbeat.common.processes.own_process import ROOM, ROOM_VARIABLE, TURN_VARIABLE, has_threads, show_arguments
from offbeat.common.processes.shutdown import PARENT_VARIABLE, die_with_parent, end_process
from offbeat.deploy.local.forks import WARM_MODULE, run_module
from offbeat.deploy.local.starts import PROGRAM

MODULES = (PROGRAM[2], WARM_MODULE)
"""The modules that a service may start as `python -m MODULE`, and that are forked instead."""
LATE_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *(PARENT_VARIABLE, ROOM_VARIABLE, TURN_VARIABLE, "OFFBEAT_LOG_LEVEL", "PYTEST_CURRENT_TEST"),
}
"""Environment variables that are only read after the imports. A service that differs in any other gets a real start."""
MODULES_OF_SERVICES = (
    *("offbeat.actor.engines.transformers_engine", "offbeat.actor.service"),
    *("offbeat.deploy.local.launcher", "offbeat.learner.service", "deepspeed"),
)
"""A learner imports DeepSpeed when it makes its engine. One run gains nothing if that is done before, hundreds of forks do."""
MODULES_OF_VLLM = ("offbeat.actor.engines.vllm_engine", "vllm.v1.worker.cpu_worker")
MESSAGE_BYTES = 1 << 18
ROOM_BYTES = 4096
"""Length of an argument that only makes room for the command lines of forked processes."""
START_S = 300.0
POLL_S = 0.02


class WarmProcess:
    """The test's end of the socket. Starts the process when a service is first asked for."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._socket, self._their_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environments: tuple[dict[str, str], dict[str, str]] = ({}, {})

    def start(self, arguments: Sequence[str], cwd: Path, output: int, errors: int) -> "ForkedProcess":
        """Fork `offbeat ARGUMENTS`; `output` and `errors` are the file descriptors that become its stdout and stderr."""
        self.launch()
        environment = service_environment()
        if not _agree(environment, self._environments):
            raise ValueError("the environment has changed since the imports: give the service a real start")
        request = {"arguments": list(arguments), "cwd": str(cwd), "environment": environment}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [output, errors])
        return ForkedProcess(self, list(arguments), self._receive()["pid"])

    def poll(self, pid: int) -> int | None:
        """Return the exit status of a forked process as `subprocess` gives it, None while it runs."""
        self._socket.send(json.dumps({"poll": pid}).encode())
        return self._receive()["status"]

    def close(self) -> None:
        """End the process and what it has forked."""
        self._their_socket.close()
        self._socket.close()
        if self._process is not None:
            self._process.wait()

    def launch(self) -> None:
        """Start the process, unless it is there. It ends with the calling thread."""
        if self._process is not None:
            return
        descriptor = self._their_socket.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.deploy.local.warm", str(descriptor), "-" * ROOM_BYTES],
            cwd=Path(__file__).parents[3],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env={**service_environment(), ROOM_VARIABLE: ROOM},
            process_group=0,
        )
        # The only end of the process's that is left: its death is seen here.
        self._their_socket.close()
        self._socket.settimeout(START_S)
        ready = self._receive()
        self._environments = (ready["before"], ready["after"])

    def _receive(self) -> dict[str, Any]:
        answer = self._socket.recv(MESSAGE_BYTES)
        if not answer:
            raise RuntimeError("the warm process has ended; its last words are on stderr")
        return json.loads(answer)


class ForkedProcess:
    """A forked service, with the part of `subprocess.Popen`'s interface that tests use."""

    def __init__(self, warm: WarmProcess, arguments: list[str], pid: int) -> None:
        self.args = arguments
        self.pid = pid
        self.returncode: int | None = None
        self._warm = warm

    def poll(self) -> int | None:
        """Return the exit status, None while the process runs."""
        if self.returncode is None:
            self.returncode = self._warm.poll(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raise `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def service_environment() -> dict[str, str]:
    """Return the environment of a service that a test starts."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _agree(environment: Mapping[str, str], imported: tuple[Mapping[str, str], Mapping[str, str]]) -> bool:
    """Return whether each variable is as it was before or after the imports, which set some themselves."""
    before, after = imported
    names = {*environment, *before} - LATE_VARIABLES
    return all(environment.get(name) in (before.get(name), after.get(name)) for name in names)


class _Imported:
    """Facts about the warm process that a forked one needs."""

    environments: tuple[dict[str, str], dict[str, str]] = ({}, {})


def _import_everything() -> None:
    # In the order of a service's start: each step sets variables that the next one's modules read when they are imported.
    from offbeat.common.processes.environment import fast_imports, prepare_environment
    from offbeat.common.records.logs import configure_logs

    before = dict(os.environ)
    with fast_imports():
        configure_logs("warm")
        prepare_environment()
        for module in MODULES_OF_SERVICES:
            importlib.import_module(module)
        with contextlib.suppress(ImportError):
            for module in MODULES_OF_VLLM:
                importlib.import_module(module)
    _Imported.environments = (before, dict(os.environ))
    if has_threads():
        raise RuntimeError("the imports have started threads, which a fork would lose")
    # The collector need not look at the modules again, nor a fork copy them.
    gc.freeze()
    subprocess.Popen = _ForkingPopen


def _serve(connection: socket.socket) -> None:
    before, after = _Imported.environments
    connection.send(json.dumps({"before": before, "after": after}).encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
        if not message:
            return
        request = json.loads(message)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                connection.close()
                die_with_parent(parent)
                os.chdir(request["cwd"])
                # `python -m` begins its path with the folder it is started in.
                sys.path[0] = request["cwd"]
                output, errors = descriptors
                _become(PROGRAM[2], request["arguments"], request["environment"], output, errors)
            _lead_group(pid)
            for descriptor in descriptors:
                os.close(descriptor)
            answer = {"pid": pid}
        connection.send(json.dumps(answer).encode())


class _ForkingPopen(subprocess.Popen):
    """`subprocess.Popen` that forks this process where it would start one of `MODULES`."""

    def _execute_child(self, args: Any, *rest: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, _, _, passed, cwd, environment, _, _, shell, p2cread, _, c2pread, c2pwrite, errread, errwrite, *_ = rest
        environment = dict(os.environ if environment is None else environment)
        is_alike = cwd is None and not shell and p2cread == -1 and _agree(environment, _Imported.environments)
        is_known = [*args[:2]] == [*PROGRAM[:2]] and args[2] in MODULES
        if not is_known or not is_alike or has_threads():
            super()._execute_child(args, *rest)  # pyright: ignore[reportAttributeAccessIssue]
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(args[2], args[3:], environment, c2pwrite, errwrite, kept=passed)
        _lead_group(self.pid)
        self._child_created = True
        self._close_pipe_fds(p2cread, -1, c2pread, c2pwrite, errread, errwrite)  # pyright: ignore[reportAttributeAccessIssue]


def _lead_group(pid: int) -> None:
    """Make a child the leader of its process group: both sides do, so that it is one whoever comes first."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)


def _become(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], output: int, errors: int, kept: Sequence[int] = ()
) -> NoReturn:
    """Go on as a process that has just been started as `python -m MODULE ARGUMENTS`; -1 keeps this process's output.

    Of the other descriptors the `kept` ones stay open.
    """
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for descriptor, own in ((output, 1), (errors, 2)):
        if descriptor != -1:
            os.dup2(descriptor, own)
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, 1 << 16)
    # What the imports set, they would have set here.
    before, after = _Imported.environments
    set_at_import = {name: value for name, value in after.items() if value != before.get(name)}
    os.environ.clear()
    os.environ.update({**set_at_import, **environment})
    # What the parent has promised to do at its end is not for this process to do.
    atexit._clear()
    weakref.finalize._registry.clear()  # pyright: ignore[reportAttributeAccessIssue]
    weakref.finalize._registered_with_atexit = False  # pyright: ignore[reportAttributeAccessIssue]
    tempfile.tempdir = None
    import numpy

    numpy.random.seed()
    show_arguments([*PROGRAM[:2], module, *arguments])
    end_process(run_module(module, arguments))


if __name__ == "__main__":
    die_with_parent(os.getppid())
    _import_everything()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    # Nothing was begun that needs an end; libraries write pages about what they leak at one.
    os._exit(0)
