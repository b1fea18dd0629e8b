"""Learner and actors on one machine: starts them, watches them, restarts an actor that died, leaves nothing behind.

The learner owns the terminal; each actor (and each further learner rank) writes to `run.dir/logs`. Every child leads a
process group of its own, so that Ctrl-C reaches only this process, which then asks the learner to stop, and so that a
child's children (reward workers, engine workers) end with it.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from common.config import Config
from common.metrics import ROWS_FILE
from common.settings import resolved_toml
from common.shutdown import ServiceError, StopRequest
from deploy.report import write_report

logger = logging.getLogger(__name__)

LOOK_S = 0.1
LEAVE_S = 20.0
"""How long actors may take to leave after the learner ended."""
RESTART_WAIT_S = 1.0
USER_ERROR_STATUS = 2
"""A child that exits with it has told the user what to mend: starting it again would not help."""


class LaunchError(ServiceError):
    """A service could not be kept running; the text says which, and shows the end of its log."""


@dataclass
class Child:
    """One process."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path | None
    """None: the launcher's own terminal."""
    process: subprocess.Popen
    num_restarts: int = 0
    restart_at: float | None = None


class Launcher:
    """See the module's docstring."""

    def __init__(self, config: Config, stop: StopRequest) -> None:
        self._config = _with_free_port(config)
        self._stop = stop
        self._folder = Path(config.run.dir)
        self._learners: list[Child] = []
        self._actors: list[Child] = []

    def run(self) -> int:
        """Run to the end; the exit status. Writes the report whatever the end was, if there is anything to report."""
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        config_file = self._folder / "config.toml"
        config_file.write_text(resolved_toml(self._config))
        try:
            self._start(config_file)
            status = self._watch()
            self._await_actors()
        finally:
            self._end_all()
            if (self._folder / ROWS_FILE).exists():
                logger.info("report: %s", write_report(self._folder))
        if status not in (0, USER_ERROR_STATUS):
            raise LaunchError(f"the learner ended with {_describe(status)}; what it said is above the report's line")
        return 130 if self._stop else status

    def _start(self, config_file: Path) -> None:
        launch = self._config.launch
        port = str(_free_port("127.0.0.1")) if launch.learner_processes > 1 else ""
        for rank in range(launch.learner_processes):
            environment = {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(launch.learner_processes)}
            if port:
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if launch.learner_gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.learner_gpus))
            name = "learner" if rank == 0 else f"learner-{rank}"
            self._learners.append(self._spawn(name, ["learner", str(config_file)], environment, is_on_terminal=rank == 0))
        for index in range(launch.num_actors):
            environment = {}
            if launch.actor_gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.actor_gpus[index]))
            name = f"actor-{index}"
            self._actors.append(
                self._spawn(name, ["actor", str(config_file), f'actor.name="{name}"'], environment, is_on_terminal=False)
            )

    def _spawn(self, name: str, arguments: list[str], environment: dict[str, str], *, is_on_terminal: bool) -> Child:
        command = [sys.executable, "-m", "deploy.cli", *arguments]
        log = None if is_on_terminal else self._folder / "logs" / f"{name}.log"
        return Child(name, command, environment, log, _popen(command, environment, log))

    def _watch(self) -> int:
        """Until the learner ended; its exit status.

        Waits for: the learner's end, looking every `LOOK_S`. Raises `LaunchError` when an actor cannot be kept running.
        """
        is_asked_to_stop = False
        while True:
            for learner in self._learners:
                status = learner.process.poll()
                if status is not None and (learner is self._learners[0] or status):
                    return status
            if self._stop and not is_asked_to_stop:
                is_asked_to_stop = True
                logger.info("%s: asking the learner to stop (again: end at once)", self._stop.reason)
                self._learners[0].process.terminate()
            if not is_asked_to_stop:
                for actor in self._actors:
                    self._keep_running(actor)
            time.sleep(LOOK_S)

    def _keep_running(self, actor: Child) -> None:
        now = time.monotonic()
        if actor.restart_at is not None:
            if now >= actor.restart_at:
                actor.restart_at = None
                actor.process = _popen(actor.command, actor.environment, actor.log)
            return
        status = actor.process.poll()
        if not status:
            return
        if status == USER_ERROR_STATUS or actor.num_restarts >= self._config.launch.max_restarts:
            raise LaunchError(f"{actor.name} ended with {_describe(status)}. The end of {actor.log}:\n{_tail(actor.log)}")
        actor.num_restarts += 1
        # Waits longer each time: what killed it (memory, a driver) may need time to go away.
        actor.restart_at = now + RESTART_WAIT_S * 2 ** (actor.num_restarts - 1)
        logger.warning(
            "%s ended with %s; restart %d of %d (log: %s)",
            actor.name,
            _describe(status),
            actor.num_restarts,
            self._config.launch.max_restarts,
            actor.log,
        )

    def _await_actors(self) -> None:
        """The learner told the actors to leave: give them time to."""
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline and any(actor.process.poll() is None for actor in self._actors):
            time.sleep(LOOK_S)

    def _end_all(self) -> None:
        """Kill what is left, whole process groups."""
        for child in [*self._learners, *self._actors]:
            try:
                os.killpg(child.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for child in [*self._learners, *self._actors]:
            child.process.wait()


def _popen(command: list[str], environment: dict[str, str], log: Path | None) -> subprocess.Popen:
    from deploy.cli import PARENT_VARIABLE

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
    address = f"{host}:{_free_port(host.removeprefix('tcp://'))}"
    return replace(config, hub=replace(config.hub, address=address))


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


def _describe(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _tail(log: Path | None, num_lines: int = 15) -> str:
    if log is None:
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
