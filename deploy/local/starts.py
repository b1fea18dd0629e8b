"""The start of a service's process: its command line, environment and output, and a new interpreter that takes them."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from offbeat.common.processes import process_table as processes
from offbeat.common.processes.shutdown import LAUNCHED_VARIABLE, PARENT_VARIABLE

PROGRAM = (sys.executable, "-m", "offbeat.deploy.cli.main")
"""The command `offbeat` of this environment, independent of the user's PATH."""


class ProcessStart(NamedTuple):
    """The command line, environment and output of one process."""

    arguments: list[str]
    """Arguments of `offbeat`."""
    environment: Mapping[str, str]
    """Variables that are set in addition to the launcher's own."""
    log: Path | None
    """File for the output. None: the launcher's terminal."""

    def all_variables(self) -> dict[str, str]:
        """Return `environment`, and the variables by which a service knows its launcher."""
        return {**self.environment, PARENT_VARIABLE: str(os.getpid()), LAUNCHED_VARIABLE: "1"}


class FreshProcess:
    """A process that is a new interpreter, and leads its own process group."""

    def __init__(self, command: Sequence[str], start: ProcessStart) -> None:
        environment = {**os.environ, **start.all_variables()}
        if start.log is None:
            self._process = subprocess.Popen(command, env=environment, process_group=0)
            return
        with start.log.open("ab") as stream:
            self._process = subprocess.Popen(command, env=environment, process_group=0, stdout=stream, stderr=subprocess.STDOUT)

    def status(self) -> int | None:
        """Return the exit status as `subprocess` gives it, None before the end."""
        return self._process.poll()

    def ask_to_stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal that services take as a request to end."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and its children, also the children of a process that is dead already."""
        processes.kill_group(self._process.pid)
        self._process.wait()


class FreshStarts:
    """Starts each process as a new interpreter."""

    def __init__(self, program: Sequence[str] = PROGRAM) -> None:
        """`program` is the command that takes the arguments of `offbeat`."""
        self._program = program

    def prepare(self) -> None:
        """Do nothing: a new interpreter needs no preparation."""

    def start(self, start: ProcessStart) -> FreshProcess:
        """Start a process; do not wait for anything."""
        return FreshProcess([*self._program, *start.arguments], start)

    def close(self) -> None:
        """Do nothing: the started processes go on."""
