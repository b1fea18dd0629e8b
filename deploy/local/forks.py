"""Services forked from a warm process, one that has imported what they need, so that the imports are paid for once.

    launcher -> request: arguments, variables, output, gate -> warm process -> forks -> the service
    launcher <- the service's process id <- gate <- the service, as the launcher's own child
    launcher -> "go" -> gate -> the service goes on as `offbeat ARGUMENTS`

The warm process forks twice and the process between ends, so that the kernel makes the service a child of the launcher: exit
status, process group and death with the launcher are those of a new interpreter, and the service outlives the warm process.
The gate is a socket: where it ends before a process id came, nothing has been started, and a new interpreter takes the start.

The learner's imports come first, the engine's with the first actor's request: the learner starts while the engine is imported.
Nothing but imports happens in the warm process before a fork: no thread, no socket, no CUDA, no parallel region of OpenMP.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, NoReturn

from offbeat.common.processes import process_table as processes
from offbeat.common.processes.environment import has_gpu, prepare_environment, with_cpu_defaults
from offbeat.common.processes.own_process import ROOM, ROOM_VARIABLE, has_threads, show_arguments
from offbeat.common.processes.shutdown import PARENT_VARIABLE, die_with_parent, end_process
from offbeat.common.settings.config import Config
from offbeat.deploy.local.starts import PROGRAM, FreshProcess, FreshStarts, ProcessStart

logger = logging.getLogger(__name__)

SERVICES_MODULE = "offbeat.deploy.cli.start"
"""The commands of the services: it imports this module, so it is imported by name."""
WARM_MODULE = "offbeat.deploy.local.forks"
ROOM_BYTES = 4096
"""Length of an argument that only makes room for the command lines of forked processes."""
MAX_WORDS_BYTES = 2_000
"""End of a failed warm process's output in which its last line is looked for."""
MESSAGE_BYTES = 1 << 18
NUM_DESCRIPTORS = 3
"""Descriptors of a request: gate, output, errors."""
GO = b"go"
LOOK_S = 0.001

PR_SET_CHILD_SUBREAPER = 36
"""Option of Linux's prctl: orphans among this process's descendants become its children."""


def choose_starts(config: Config) -> "Starts":
    """Return the way to start the services of a run on this machine.

    Forks where no GPU is: CUDA does not survive a fork, and which GPU a process sees is read by its imports. Nor does it fork
    where the user wants several threads of OpenMP: numpy would start its own when it is imported, and a fork loses threads.
    """
    has_one_thread = os.environ.get("OMP_NUM_THREADS", "1") == "1"
    is_possible = sys.platform == "linux" and not has_gpu() and has_one_thread and adopt_orphans(False)
    return WarmStarts(config.actor.engine) if is_possible else FreshStarts()


class WarmStarts:
    """Forks processes from a warm one; where that has failed, starts new interpreters."""

    def __init__(self, engine: str) -> None:
        """`engine` is `actor.engine`."""
        self._engine = engine
        self._output: IO[bytes] | None = None
        """A file without a name that holds the output of the newest warm process."""
        self._fresh = FreshStarts()
        self._warm: subprocess.Popen | None = None
        self._socket: socket.socket | None = None
        self._is_useless = False
        """True once a warm process has ended without a single fork: the next one would end like it."""
        self._has_forked = False
        self._num_awaited = 0
        """Requests whose process has not come."""

    def prepare(self) -> None:
        """Begin what can be done before it is known which processes will start; do not wait for anything."""
        if self._socket is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        logger.info("preloading libraries for all services")
        # Before the first import: numpy's threads would be lost in a fork.
        environment = {**with_cpu_defaults(os.environ), PARENT_VARIABLE: str(os.getpid()), ROOM_VARIABLE: ROOM}
        command = [sys.executable, "-m", WARM_MODULE, str(theirs.fileno()), self._engine, "-" * ROOM_BYTES]
        if self._output is not None:
            self._output.close()
        self._output = output = tempfile.TemporaryFile()  # noqa: SIM115, read when a fork fails
        with theirs:
            self._warm = subprocess.Popen(
                command, env=environment, process_group=0, pass_fds=[theirs.fileno()], stdout=output, stderr=output
            )
        self._has_forked = False
        self._socket = ours

    def start(self, start: ProcessStart) -> "Process":
        """Start a process; do not wait for anything."""
        if self._warm is not None and (status := self._warm.poll()) is not None:
            self.close()
            self._is_useless = not self._has_forked
            logger.warning("the process that services are forked from has ended with status %d", status)
        if self._is_useless:
            return self._fresh.start(start)
        self.prepare()
        assert self._socket is not None
        self._num_awaited += 1
        adopt_orphans(True)
        gate, their_gate = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        gate.setblocking(False)
        request = json.dumps({"arguments": start.arguments, "variables": start.all_variables()}).encode()
        with their_gate, contextlib.ExitStack() as stack:
            output, errors = 1, 2
            if start.log is not None:
                output = errors = stack.enter_context(start.log.open("ab")).fileno()
            # A warm process that has just died leaves the gate closed, like one that dies later.
            with contextlib.suppress(OSError):
                socket.send_fds(self._socket, [request], [their_gate.fileno(), output, errors])
        return ForkedProcess(gate, start, self)

    def close(self) -> None:
        """End the warm process; the started ones go on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._warm is not None:
            self._warm.kill()
            self._warm.wait()
            self._warm = None

    def note_answer(self, *, is_forked: bool) -> None:
        """Record that a request's process has come, or will not come or is not wanted any more."""
        self._has_forked = self._has_forked or is_forked
        self._num_awaited -= 1
        if not self._num_awaited:
            adopt_orphans(False)

    def start_fresh(self, start: ProcessStart) -> FreshProcess:
        """Start what the warm process could not."""
        logger.warning(
            "%s could not be forked and starts normally; preloading ended with %r", start.arguments[0], self._last_line()
        )
        return self._fresh.start(start)

    def _last_line(self) -> str:
        """Return the last line of the newest warm process's output, "" where it said nothing."""
        if self._output is None:
            return ""
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - MAX_WORDS_BYTES))
        lines = self._output.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")


class ForkedProcess:
    """A forked process that leads its own process group; before the fork, and where it fails, whatever stands for it."""

    def __init__(self, gate: socket.socket, start: ProcessStart, starts: WarmStarts) -> None:
        self._gate = gate
        self._start = start
        self._starts = starts
        self._pid: int | None = None
        self._fresh: FreshProcess | None = None
        """The new interpreter that replaces a failed fork."""
        self._status: int | None = None

    def status(self) -> int | None:
        """Return the exit status as `subprocess` gives it, None before the end."""
        self._meet()
        if self._fresh is not None:
            return self._fresh.status()
        if self._pid is not None and self._status is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return self._status

    def ask_to_stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal that services take as a request to end."""
        if self.status() is not None:
            return
        if self._fresh is not None:
            self._fresh.ask_to_stop(number)
        elif self._pid is not None:
            os.kill(self._pid, number)
        else:
            self._renounce()

    def kill(self) -> None:
        """Kill the process and its children, also the children of a process that is dead already."""
        self._meet()
        if self._fresh is not None:
            self._fresh.kill()
        elif self._pid is None:
            self._renounce()
        else:
            processes.kill_group(self._pid)
            if self._status is None:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _meet(self) -> None:
        """Take the process id when it is here, and let the process go on; start a new interpreter if it will not come."""
        if self._pid is not None or self._fresh is not None or self._status is not None:
            return
        try:
            said = self._gate.recv(64)
        except BlockingIOError:
            return
        except ConnectionResetError:
            said = b""
        if said:
            self._pid = int(said)
            with contextlib.suppress(OSError):
                self._gate.send(GO)
        else:
            self._fresh = self._starts.start_fresh(self._start)
        self._gate.close()
        self._starts.note_answer(is_forked=bool(said))

    def _renounce(self) -> None:
        """End a process that has not come yet: it does not go on without a word at the gate."""
        if self._status is None:
            self._gate.close()
            self._status = 0
            self._starts.note_answer(is_forked=False)


Process = FreshProcess | ForkedProcess
Starts = FreshStarts | WarmStarts


def adopt_orphans(is_wanted: bool) -> bool:
    """Make this process the parent of its orphaned descendants, or no longer; return False where the kernel refuses.

    Only while a fork is awaited: an adopted child of a killed service would stay a zombie until the launcher ends.
    """
    return ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0) == 0


# In the warm process and its forks


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
    importlib.import_module(SERVICES_MODULE).import_service(command, engine)


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
