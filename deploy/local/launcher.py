"""The launcher starts learner and actors on one machine, watches them, restarts the dead, and leaves no process behind.

The learner writes to the terminal; each actor and each further learner rank writes to `run.dir/logs`. Every process leads its
own process group. So Ctrl-C reaches only the launcher, which then asks the learner to stop, and the children of a process
(reward workers, engine workers) end with it. A restarted learner continues from its newest checkpoint and its log, or begins
again where it had neither; the actors wait for it at the same address.

The learner says how many actors the run wants (`scale.actors`): the launcher starts more, or asks the newest to leave.
"""

import contextlib
import itertools
import logging
import random
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.formats import write_private
from offbeat.common.processes.shutdown import GAVE_UP_STATUS, INTERRUPTED_STATUS, PAUSED_STATUS, USER_ERROR_STATUS, StopRequest
from offbeat.common.records.logs import MAX_FILE_BYTES, bound_log
from offbeat.common.records.run_folder import LAUNCH_FILE, LAUNCHER_LOCK_FILE, PROGRAM_LOGS, has_checkpoint, has_steps, locked
from offbeat.common.records.writer import ROWS_FILE
from offbeat.common.settings.config import Config, actors_wanted
from offbeat.common.settings.loading import resolved_toml
from offbeat.deploy.clusters.pool import Instance, needed
from offbeat.deploy.local.ending import end_run
from offbeat.deploy.local.forks import Process, Starts
from offbeat.deploy.local.plan import DevicePlan, DeviceTurns
from offbeat.deploy.local.starts import ProcessStart
from offbeat.deploy.operating.link import StatusPoll
from offbeat.protocols.messages import StatusReport

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks at the processes."""
STOP_S = 60.0
"""Longest time that the learner has for its last checkpoint once an actor has been given up."""
TOLD_S = 3.0
"""Seconds after the learner's end in which actors leave by themselves; it has told those that it knew."""
LEAVE_S = 20.0
"""Seconds the actors may take to leave after the learner has ended."""
FIRST_WAIT_S = 1.0
"""Seconds before the first restart. Each further wait is twice as long: the cause (memory, a driver) may need time to pass."""
LONGEST_WAIT_S = 10.0
"""Longest wait before a restart; a service that worked for longer is restarted after the first wait again."""
RESTORING_S = 600.0
"""Seconds of work after which a service has all its restarts again."""

PORTS = range(20_000, 32_000)
"""Ports to choose from for port 0; kernels take source ports above them."""


class LaunchError(ServiceError):
    """A service cannot be kept running; the text names it and shows the end of its log."""


class RestartBudget:
    """The restarts that one service has left (`launch.max_restarts`), and the waits before them."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._num_waits = 0
        """Restarts since the service last worked for longer than `LONGEST_WAIT_S`."""
        self._started_at = 0.0

    def __str__(self) -> str:
        return f"{self._num_restarts} of {self._max_restarts}"

    def note_start(self, now: float) -> None:
        """Record that the service was started."""
        self._started_at = now

    def spend(self, now: float) -> float | None:
        """Record a death; return the seconds to wait before the restart, or None when no restart is left."""
        worked_s = now - self._started_at
        if worked_s >= RESTORING_S:
            self._num_restarts = 0
        if worked_s >= LONGEST_WAIT_S:
            self._num_waits = 0
        if self._num_restarts >= self._max_restarts:
            return None
        self._num_restarts += 1
        self._num_waits += 1
        return min(FIRST_WAIT_S * 2 ** (self._num_waits - 1), LONGEST_WAIT_S)


class Service:
    """A group of processes that start, work and end together: the learner's ranks, or one actor."""

    def __init__(self, name: str, budget: RestartBudget, starts: Starts) -> None:
        self.name = name
        self.budget = budget
        self.restart_at: float | None = None
        """Monotonic time of the next restart; None while no restart is pending."""
        self._starts = starts
        self._processes: list[Process] = []
        self._logs: list[Path | None] = []

    def start(self, starts: list[ProcessStart]) -> None:
        """Start all processes; the service ends when the first one does."""
        self.restart_at = None
        self.budget.note_start(time.monotonic())
        self._logs = [one.log for one in starts]
        self._processes = []
        for one in starts:
            self._processes.append(self._starts.start(one))

    @property
    def status(self) -> int | None:
        """Exit status of the process that failed, or 0 when the first one succeeded; None while the service works.

        0 also before the first start.
        """
        if not self._processes:
            return 0
        statuses = [process.status() for process in self._processes]
        return next((status for status in statuses if status), statuses[0])

    @property
    def is_there(self) -> bool:
        """True while the service works or will be started again."""
        return self.restart_at is not None or self.status is None

    def ask_to_stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal to the first process, which ends the others."""
        self.restart_at = None
        for process in self._processes[:1]:
            process.ask_to_stop(number)

    def kill(self) -> None:
        """Kill every process and its children, also the children of a process that is dead already."""
        for process in self._processes:
            process.kill()

    def bound_logs(self, max_bytes: int) -> None:
        """Bound each log file of the processes, as `bound_log`."""
        for log in self._logs:
            if log is not None:
                bound_log(log, max_bytes)

    @property
    def wrote_here(self) -> bool:
        """The first process that failed wrote to this terminal, not to a log."""
        failed = (log for process, log in zip(self._processes, self._logs, strict=True) if process.status())
        return next(failed, None) is None

    def last_words(self) -> str:
        """Return the end of the failed process's log, or a reference to the terminal if the process wrote there."""
        for process, log in zip(self._processes, self._logs, strict=True):
            if process.status() and log is not None:
                try:
                    lines = log.read_text(errors="replace").splitlines()[-15:]
                except FileNotFoundError:
                    return f"{log} was deleted or renamed."
                return "\n".join([f"The end of {log}:", *lines])
        return "Its output is above."


class Launcher:
    """The processes of `offbeat train`; the module's docstring describes their rules."""

    def __init__(self, config: Config, stop: StopRequest, starts: Starts, plan: DevicePlan | None = None) -> None:
        """`plan` places the processes on GPUs; None: they compute on the CPU."""
        self._config, self._reserved = _with_free_port(config)
        self._devices = DeviceTurns(plan, Path(config.run.dir) / PROGRAM_LOGS)
        if self._devices.needs_gloo and config.weights.backend == "auto":
            self._config = replace(self._config, weights=replace(config.weights, backend="gloo"))
        self._stop = stop
        self._folder = Path(config.run.dir)
        self._config_file = self._folder / LAUNCH_FILE
        self._starts = starts
        self._learner = Service("learner", RestartBudget(config.launch.max_restarts), starts)
        self._num_first = actors_wanted(config)
        """Number of actors that the run begins with. The run ends when one of them cannot be kept running."""
        self._actors: dict[int, Service] = {}
        """The actors by the number in their name, oldest first."""
        self._leaving: dict[int, Service] = {}
        """Actors that were asked to leave, by the number in their name."""
        self._given_up: tuple[int, int] = (0, 0)
        """The number of actors that was wanted when some could not be had, and how many those were."""

    def run(self) -> int:
        """Run to the end, write the report if the run has metrics, and return the exit status.

        Raises `SettingError`, and changes nothing, where a learner or another launcher is at work in the run's folder.
        """
        # Learners come and go, and take seconds to lock the folder themselves.
        with locked(self._folder, LAUNCHER_LOCK_FILE):
            with locked(self._folder):
                (self._folder / PROGRAM_LOGS).mkdir(exist_ok=True)
            return self._run()

    def _run(self) -> int:
        write_private(self._config_file, resolved_toml(self._config, with_secrets=True))
        is_refused = False
        num_bytes_before = self._num_row_bytes()
        try:
            self._start_learner()
            for index in itertools.islice(self._free_numbers(()), self._num_first):
                self._add_actor(index)
            with contextlib.closing(StatusPoll(self._config)) as questions:
                status = self._watch(questions)
            # A learner that a mistake kept from beginning has said all there is.
            is_refused = status == USER_ERROR_STATUS and self._num_row_bytes() == num_bytes_before
            # Before the first step the actors of a stopped run have nothing to hand over.
            if status == 0 and not (self._stop and not has_steps(self._folder)):
                self._part_with_actors()
        finally:
            for service in self._services():
                service.kill()
                self._devices.forget(service.name)
            self._starts.close()
            self._reserved.close()
            if not is_refused:
                end_run(self._folder, "train", self._stop)
        return INTERRUPTED_STATUS if self._stop and status != PAUSED_STATUS else status

    def _num_row_bytes(self) -> int:
        rows = self._folder / ROWS_FILE
        return rows.stat().st_size if rows.exists() else 0

    def _start_learner(self, *settings: str) -> None:
        launch = self._config.launch
        shared = {"WORLD_SIZE": str(launch.learner_processes)}
        if launch.learner_processes > 1:
            # A new port at each start: the port of killed ranks may not be free yet.
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
        self._learner.start(
            [
                ProcessStart(
                    ["learner", str(self._config_file), "--no-preflight", *settings],
                    {**shared, **self._devices.learner_variables(rank), "LOCAL_RANK": str(rank), "RANK": str(rank)},
                    self._log(f"learner-{rank}") if rank else None,
                )
                for rank in range(launch.learner_processes)
            ]
        )

    def _services(self) -> list[Service]:
        return [self._learner, *self._actors.values(), *self._leaving.values()]

    def _add_actor(self, index: int) -> None:
        self._actors.pop(index, None)
        self._actors[index] = Service(f"actor-{index}", RestartBudget(self._config.launch.max_restarts), self._starts)
        self._start_actor(index)

    def _start_actor(self, index: int) -> None:
        """Start an actor, unless another process must take its memory of the GPU first: then it is tried again."""
        actor = self._actors[index]
        everybody = [*self._actors.items(), *self._leaving.items()]
        starting = {number for number, other in everybody if other.restart_at is None and other.status is None}
        if not self._devices.may_start(index, starting):
            actor.restart_at = actor.restart_at or time.monotonic()
            return
        arguments = ["actor", str(self._config_file), "--no-preflight", f'actor.name="{actor.name}"']
        arguments += self._devices.actor_settings(index)
        actor.start([ProcessStart(arguments, self._devices.actor_variables(index), self._log(actor.name))])

    def _log(self, name: str) -> Path:
        return self._folder / PROGRAM_LOGS / f"{name}.log"

    def _watch(self, questions: StatusPoll) -> int:
        """Keep all services running until the learner ends; return its exit status.

        Waits for: the end of any service, looking every `LOOK_S`; the learner's answers to `questions`.
        Unblocked by: the learner's end, or a signal. Raises `LaunchError` when a service cannot be kept running.
        """
        while not self._stop:
            status = self._keep_running(self._learner, self._restart_learner)
            if status is not None:
                return status
            for index in list(self._actors):
                self._keep_actor(index)
            if (report := questions.answer()) is not None:
                self._follow(report)
            for service in self._services():
                service.bound_logs(MAX_FILE_BYTES)
            time.sleep(LOOK_S)
        if self._learner.restart_at is not None:
            for actor in self._actors.values():
                actor.ask_to_stop()
            return 0
        logger.info("%s: asking the learner to stop", self._stop.reason)
        # The learner records its signal as the reason of its end. Only SIGTERM pauses a run that has `run.grace_s`.
        is_users = self._stop.reason in ("SIGINT", "SIGHUP") and self._config.run.grace_s is None
        self._learner.ask_to_stop(signal.Signals[str(self._stop.reason)] if is_users else signal.SIGTERM)
        while (status := self._learner.status) is None:
            time.sleep(LOOK_S)
        return status

    def _keep_actor(self, index: int) -> None:
        """Keep an actor running; give up one that came later than the first ones and cannot be kept."""
        try:
            self._keep_running(self._actors[index], lambda: self._start_actor(index))
        except LaunchError as error:
            if index < self._num_first:
                # Otherwise it is killed without its last checkpoint and its final row.
                self._learner.ask_to_stop()
                self._await_end([self._learner], STOP_S)
                raise
            logger.error("%s The run continues without it until scale.actors changes", error)
            del self._actors[index]
            wanted, num_lost = self._given_up
            self._given_up = (wanted, num_lost + 1)

    def _follow(self, report: StatusReport) -> None:
        """Start more actors, or ask the newest to leave, as the learner's report wants."""
        self._forget_left()
        wanted = report.actors_wanted
        if wanted != self._given_up[0]:
            self._given_up = (wanted, 0)
            if self._devices.num_places is not None and wanted > self._devices.num_places:
                logger.warning("%d actors are wanted, and the plan has places for %d", wanted, self._devices.num_places)
        instances = [Instance(actor.name, "working") for actor in self._actors.values() if actor.is_there]
        working = {member.name for member in report.members if member.state == "working"}
        start, release = needed(instances, wanted - self._given_up[1], working)
        for index in itertools.islice(self._free_numbers({member.name for member in report.members}), start):
            logger.info("%d actors are wanted: actor-%d starts", wanted, index)
            self._add_actor(index)
        for index, actor in list(self._actors.items()):
            if actor.name in release:
                logger.info("%d actors are wanted: %s is asked to leave", wanted, actor.name)
                actor.ask_to_stop()
                self._leaving[index] = self._actors.pop(index)

    def _forget_left(self) -> None:
        """Clean up after the actors that were asked to leave and have ended."""
        for index, actor in list(self._leaving.items()):
            if actor.status is not None:
                logger.info("%s has left with %s", actor.name, _describe(actor.status))
                actor.kill()
                self._devices.forget(actor.name)
                del self._leaving[index]

    def _free_numbers(self, taken: Collection[str]) -> Iterator[int]:
        """Yield the numbers under which actors can be started, lowest first; `taken` are names of actors of the run."""
        there = {index for index, actor in self._actors.items() if actor.is_there}
        for index in itertools.count() if self._devices.num_places is None else range(self._devices.num_places):
            if index not in there and index not in self._leaving and f"actor-{index}" not in taken:
                yield index

    def _keep_running(self, service: Service, start_again: Callable[[], None]) -> int | None:
        """Restart a service that has died, once its wait is over; return the exit status of one that needs no restart."""
        now = time.monotonic()
        if service.restart_at is not None:
            if now >= service.restart_at:
                start_again()
            return None
        status = service.status
        # A learner may be paused by a signal that it alone was sent.
        if not status or (service is self._learner and status == PAUSED_STATUS):
            return status
        problem = f"{service.name} ended with {_describe(status)}"
        # Read before the service's other processes are killed, which counts as a failure too.
        wrote_here, last_words = service.wrote_here, service.last_words()
        service.kill()
        self._devices.forget(service.name)
        if service is self._learner and status == USER_ERROR_STATUS:
            if not wrote_here:
                logger.error("%s. %s", problem, last_words)
            return status
        # A restart would fail in the same way. Only an actor that gave up may find its learner the next time.
        is_final = status == USER_ERROR_STATUS or (service is self._learner and status == GAVE_UP_STATUS)
        wait_s = None if is_final else service.budget.spend(now)
        if wait_s is None:
            tried = "" if is_final else f" after {service.budget} restarts (launch.max_restarts)"
            raise LaunchError(f"{problem}{tried}. {last_words}")
        logger.warning("%s; restart %s in %g s", problem, service.budget, wait_s)
        service.restart_at = now + wait_s
        return None

    def _restart_learner(self) -> None:
        # Without log and checkpoint the run begins again, under another run id, and actors of the former one are refused.
        begins_again = not self._config.log.enabled and not has_checkpoint(self._folder)
        self._start_learner("run.resume=true")
        for index, actor in list(self._actors.items()):
            if begins_again:
                actor.kill()
            # The learner may have dismissed the actors when it ended.
            if begins_again or (actor.restart_at is None and actor.status == 0):
                self._start_actor(index)

    def _part_with_actors(self) -> None:
        """Wait for the end of the actors, whom the learner has told to leave; those that still start know of no learner."""
        actors = self._services()[1:]
        self._await_end(actors, TOLD_S)
        for actor in actors:
            if actor.status is None:
                actor.ask_to_stop()
        self._await_end(actors, LEAVE_S)

    def _await_end(self, services: Sequence[Service], longest_s: float) -> None:
        """Wait for the end of services that were asked to stop, or told to leave."""
        deadline = time.monotonic() + longest_s
        while time.monotonic() < deadline and any(service.status is None for service in services):
            time.sleep(LOOK_S)


def _with_free_port(config: Config) -> tuple[Config, contextlib.ExitStack]:
    """Replace port 0 in `hub.address` by a free port, which the actors then know; it is reserved until the stack is closed."""
    host, _, port = config.hub.address.rpartition(":")
    reserved = contextlib.ExitStack()
    if port != "0":
        return config, reserved
    own = reserved.enter_context(reserve_port(host.removeprefix("tcp://")))
    return replace(config, hub=replace(config.hub, address=f"{host}:{own.getsockname()[1]}")), reserved


def reserve_port(host: str) -> socket.socket:
    """Return a socket that keeps a free port from other runs of this machine, which start seconds before they use theirs.

    The learner can bind the port beside it, and again after a restart. Binding port 0 would give a port from the range of
    source ports: an actor that reconnects could be given that port, connect to itself, and keep the port from the learner.
    Raises `SettingError` when `host`, an IPv6 address with or without brackets or any other, has no free port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.sample(PORTS, len(PORTS)):
        reserved = socket.socket(family)
        try:
            # Without SO_REUSEADDR: fails where anybody has the port, listening or not.
            reserved.bind((host.strip("[]"), port))
        except OSError:
            reserved.close()
            continue
        # Whoever sets it too, as ZeroMQ does, may have the port beside this socket, because it never listens.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return reserved
    raise SettingError("hub.address", f"{host}:0", "no port is free at this address", "Name an address of this machine.")


def free_port(host: str) -> int:
    """Return a port that is free now, as `reserve_port`, without keeping it."""
    with reserve_port(host) as reserved:
        return reserved.getsockname()[1]


def _describe(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
