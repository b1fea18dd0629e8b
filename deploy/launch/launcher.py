"""Learner and actors on one machine: starts them, watches them, starts again what died, leaves nothing behind.

The learner owns the terminal; each actor (and each further learner rank) writes to `run.dir/logs`. Every process leads a
process group of its own, so that Ctrl-C reaches only this process, which then asks the learner to stop, and so that what a
process started (reward workers, engine workers) ends with it. A learner that is started again goes on from its newest
checkpoint and its log; the actors have waited for it at the same address.
"""

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from offbeat.common.config import Config
from offbeat.common.metrics import ROWS_FILE
from offbeat.common.settings import SettingError, resolved_toml
from offbeat.common.shutdown import GAVE_UP_STATUS, PARENT_VARIABLE, USER_ERROR_STATUS, ServiceError, StopRequest
from offbeat.lab.report.run_report import write_report

logger = logging.getLogger(__name__)

LOOK_S = 0.1
LEAVE_S = 20.0
"""How long actors may take to leave after the learner ended."""
FIRST_WAIT_S = 1.0
"""Before the first restart; each further one waits twice as long: what killed it (memory, a driver) may need time to leave."""
LONGEST_WAIT_S = 10.0
RESTORING_S = 600.0
"""A service that works for so long has its restarts back."""

PROGRAM = (sys.executable, "-m", "offbeat.deploy.cli")
"""`offbeat`, whatever is on the user's path."""
PORTS = range(20_000, 32_000)
"""For port 0: below those from which kernels take source ports."""


class LaunchError(ServiceError):
    """A service could not be kept running; the text says which, and shows the end of its log."""


class RestartBudget:
    """How often one service may still be started again (`launch.max_restarts`), and after what wait."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._started_at = 0.0

    def __str__(self) -> str:
        return f"{self._num_restarts} of {self._max_restarts}"

    def note_start(self, now: float) -> None:
        """The service starts to work."""
        self._started_at = now

    def spend(self, now: float) -> float | None:
        """The service died: seconds to wait before it is started again; None when the budget is spent."""
        if now - self._started_at >= RESTORING_S:
            self._num_restarts = 0
        if self._num_restarts >= self._max_restarts:
            return None
        self._num_restarts += 1
        return min(FIRST_WAIT_S * 2 ** (self._num_restarts - 1), LONGEST_WAIT_S)


class Command(NamedTuple):
    """How one process is started."""

    arguments: list[str]
    """Of `offbeat`."""
    environment: Mapping[str, str]
    log: Path | None
    """None: the launcher's own terminal."""


class Service:
    """Processes that start, work and end together: the learner's ranks, or one actor."""

    def __init__(self, name: str, budget: RestartBudget, program: list[str]) -> None:
        """`program` takes the arguments of `offbeat`."""
        self.name = name
        self.budget = budget
        self.restart_at: float | None = None
        """When it is to be started again, while it waits for that."""
        self._program = program
        self._processes: list[subprocess.Popen] = []
        self._logs: list[Path | None] = []

    def start(self, commands: list[Command]) -> None:
        """Start all processes; the first one's end is the service's."""
        self.restart_at = None
        self.budget.note_start(time.monotonic())
        self._logs = [command.log for command in commands]
        self._processes = []
        for command in commands:
            self._processes.append(_popen([*self._program, *command.arguments], command.environment, command.log))

    @property
    def status(self) -> int | None:
        """None while it works; else the exit status of the process that failed, or 0 when the first one ended in order."""
        statuses = [process.poll() for process in self._processes]
        return next((status for status in statuses if status), statuses[0])

    def ask_to_stop(self) -> None:
        """SIGTERM to the first process, which brings the others along."""
        self._processes[0].terminate()

    def kill(self) -> None:
        """End every process and all that it started, also what a dead process has left."""
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self._processes:
            process.wait()

    def last_words(self, num_lines: int = 15) -> str:
        """The end of the log of the process that failed; empty where that is on the terminal."""
        for process, log in zip(self._processes, self._logs, strict=True):
            if process.poll() and log is not None:
                lines = log.read_text(errors="replace").splitlines()[-num_lines:]
                return "\n".join([f"The end of {log}:", *lines])
        return "What it said is above."


class Launcher:
    """See the module's docstring."""

    def __init__(self, config: Config, stop: StopRequest, program: tuple[str, ...] = PROGRAM) -> None:
        self._config = _with_free_port(config)
        self._stop = stop
        self._folder = Path(config.run.dir)
        self._config_file = self._folder / "launch.toml"
        max_restarts = config.launch.max_restarts
        self._learner = Service("learner", RestartBudget(max_restarts), list(program))
        self._actors = [
            Service(f"actor-{index}", RestartBudget(max_restarts), list(program)) for index in range(config.launch.num_actors)
        ]

    def run(self) -> int:
        """Run to the end; the exit status. Writes the report whatever the end was, if there is anything to report."""
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        self._config_file.write_text(resolved_toml(self._config))
        try:
            self._start_learner()
            for index in range(len(self._actors)):
                self._start_actor(index)
            status = self._watch()
            if status == 0:
                self._await_actors()
        finally:
            for service in [self._learner, *self._actors]:
                service.kill()
            if (self._folder / ROWS_FILE).exists():
                logger.info("report: %s", write_report(self._folder))
        return 130 if self._stop else status

    def _start_learner(self, *settings: str) -> None:
        launch = self._config.launch
        shared = {"WORLD_SIZE": str(launch.learner_processes)}
        if launch.learner_processes > 1:
            # Another one each time: the port of ranks that were killed may not be free yet.
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
        if launch.learner_gpus:
            shared["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.learner_gpus))
        self._learner.start(
            [
                Command(
                    ["learner", str(self._config_file), *settings],
                    {**shared, "LOCAL_RANK": str(rank), "RANK": str(rank)},
                    self._log(f"learner-{rank}") if rank else None,
                )
                for rank in range(launch.learner_processes)
            ]
        )

    def _start_actor(self, index: int) -> None:
        actor = self._actors[index]
        gpus = self._config.launch.actor_gpus
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus[index]))} if gpus else {}
        arguments = ["actor", str(self._config_file), f'actor.name="{actor.name}"']
        actor.start([Command(arguments, environment, self._log(actor.name))])

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"

    def _watch(self) -> int:
        """Until the learner ended for good; its exit status.

        Waits for: any service's end, looking every `LOOK_S`. Raises `LaunchError` when one cannot be kept running.
        """
        while not self._stop:
            status = self._keep_running(self._learner, self._restart_learner)
            if status is not None:
                return status
            for index, actor in enumerate(self._actors):
                self._keep_running(actor, lambda index=index: self._start_actor(index))
            time.sleep(LOOK_S)
        if self._learner.restart_at is not None:
            for actor in self._actors:
                actor.ask_to_stop()
            return 0
        logger.info("%s: asking the learner to stop (again: end at once)", self._stop.reason)
        self._learner.ask_to_stop()
        while (status := self._learner.status) is None:
            time.sleep(LOOK_S)
        return status

    def _keep_running(self, service: Service, start_again: Callable[[], None]) -> int | None:
        """Start a service again once it has died and its wait is over; the exit status of one that need not be."""
        now = time.monotonic()
        if service.restart_at is not None:
            if now >= service.restart_at:
                start_again()
            return None
        status = service.status
        if not status:
            return status
        service.kill()
        problem = f"{service.name} ended with {_describe(status)}"
        if service is self._learner and status == USER_ERROR_STATUS:
            # It has said what to mend, on this terminal.
            return status
        # Another try would end alike. An actor that gave up may find its learner the next time.
        is_final = status == USER_ERROR_STATUS or (service is self._learner and status == GAVE_UP_STATUS)
        wait_s = None if is_final else service.budget.spend(now)
        if wait_s is None:
            tried = "" if is_final else f" after {service.budget} restarts (launch.max_restarts)"
            raise LaunchError(f"{problem}{tried}. {service.last_words()}")
        logger.warning("%s; restart %s in %g s", problem, service.budget, wait_s)
        service.restart_at = now + wait_s
        return None

    def _restart_learner(self) -> None:
        self._start_learner("run.resume=true")
        # A learner that ends may have sent them away.
        for index, actor in enumerate(self._actors):
            if actor.restart_at is None and actor.status == 0:
                self._start_actor(index)

    def _await_actors(self) -> None:
        """The learner told the actors to leave: give them time to."""
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline and any(actor.status is None for actor in self._actors):
            time.sleep(LOOK_S)


def _popen(command: list[str], environment: Mapping[str, str], log: Path | None) -> subprocess.Popen:
    environment = {**os.environ, **environment, PARENT_VARIABLE: str(os.getpid())}
    if log is None:
        return subprocess.Popen(command, env=environment, process_group=0)
    with log.open("ab") as stream:
        return subprocess.Popen(command, env=environment, process_group=0, stdout=stream, stderr=subprocess.STDOUT)


def _with_free_port(config: Config) -> Config:
    """Port 0 in `hub.address` becomes one that is free, so that the actors know it."""
    host, _, port = config.hub.address.rpartition(":")
    if port != "0":
        return config
    address = f"{host}:{free_port(host.removeprefix('tcp://'))}"
    return replace(config, hub=replace(config.hub, address=address))


def free_port(host: str) -> int:
    """A free port that stays free while the learner is away.

    Port 0 would give one from which the kernel also takes source ports: an actor that tries to reconnect could be given
    just that one, connect to itself, and hold it against the learner.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise SettingError("hub.address", f"{host}:0", "no port is free there", "Name an address of this machine.")


def _describe(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
