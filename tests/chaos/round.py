"""One round of chaos: a run under `offbeat train`, a remote actor, and the faults of a plan.

plan -> wait for the step -> commit the fault -> ... -> the run's end -> recovery times from its metrics
"""

import logging
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from offbeat.common.processes import process_table as processes
from offbeat.common.processes.shutdown import PARENT_VARIABLE, StopRequest
from offbeat.common.records.rows import ActorRow, EventRow, StepRow, decode_row
from offbeat.common.records.writer import ROWS_FILE
from offbeat.common.settings.config import Config
from offbeat.deploy.local.starts import PROGRAM
from offbeat.learner.leases.events import LeaseEvent
from tests.chaos import effects
from tests.chaos.faults import MAX_FILES, Attempt, Committed, Scene, commit
from tests.chaos.judge import Judge
from tests.chaos.machine import Clock, Disk
from tests.chaos.network import Network
from tests.chaos.schedule import IN_CHECKPOINT, Fault, Target
from tests.chaos.tools import Tools

logger = logging.getLogger(f"offbeat.{__name__}")

LOOK_S = 0.02
STUCK_S = 180.0
"""Seconds without an optimizer step after which a round is stuck."""
APPEAR_S = 60.0
"""Seconds a killed service may take to run again."""
LEAVE_S = 60.0
"""Seconds the remote actor may take to leave when the run is over."""
RESTART_WAIT_S = 1.0
"""Seconds before a dead remote actor is started again."""
REMOTE = "remote"
"""Name of the remote actor."""
TRIED = "tried-learner"
"""Log of the learners that the run's folder must refuse."""
AHEAD_STEPS = 2
"""Steps that a run may make beyond that of the next fault before its judge is slow."""
LOCAL = "actor-0"
"""The launcher's name for its first actor."""


class StuckError(RuntimeError):
    """Raised when a round makes no progress."""


class RunEndedError(RuntimeError):
    """The run has ended, so nothing is left to harm."""


class StoppedError(RuntimeError):
    """Raised when the user asks chaos to stop."""


class Happened(NamedTuple):
    """A fault and its recovery, as `chaos.json` holds them."""

    fault: Fault
    at_s: float
    """Seconds from the round's start to the fault."""
    detail: str
    """The fault in words; empty when it could not be committed."""
    recovery_s: float | None
    """Seconds from the fault's end to the next optimizer step, or to the next group of the actor that was hit.

    None when the run ended before.
    """
    has_hit: bool | None = None
    """True if the fault has had its effect; None where only the recovery tells."""


class RoundResult(NamedTuple):
    """The observations made while a round ran; the audit of its folder is separate."""

    wall_s: float
    happened: list[Happened]
    lost: list[LeaseEvent]
    """Events that were destroyed in the rollout log."""
    violations: list[str]


class Site(NamedTuple):
    """The files of a round, and the parts of the machine that its faults act on."""

    run: Path
    """The run's folder."""
    config: Config
    config_file: Path
    """`config` as the services read it."""
    logs: Path
    """Folder for the output of the services."""
    hub_port: int
    network: Network
    clock: Clock
    disk: Disk | None
    """The file system that holds `run`; None when this process may not mount one."""
    judge: Judge | None
    """The judge that rewards ask; None where the run has a reward of its own."""
    tools: Tools | None
    """The tools of the environment; None where the run has none."""
    environment: Mapping[str, str]
    """Environment variables of the services, in addition to those of chaos."""


SeenRow = TypeVar("SeenRow", StepRow, ActorRow, EventRow)


class Sight(NamedTuple, Generic[SeenRow]):
    """A row of the metrics, and the monotonic time at which it was read."""

    at: float
    row: SeenRow


class Watch:
    """Reads a run's metrics as they are written; rows are timed by when they are read, on a clock that no fault moves."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0
        self._torn = b""
        self.steps: list[Sight[StepRow]] = []
        self.actors: list[Sight[ActorRow]] = []
        self.events: list[Sight[EventRow]] = []
        self.members: set[str] = set()
        """Names of the actors that are connected to the learner."""

    @property
    def newest_step(self) -> int:
        """The highest policy version so far, 0 before the first step."""
        return max((sight.row.policy_version for sight in self.steps), default=0)

    def look(self) -> None:
        """Read the rows written since the last call."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        now = time.monotonic()
        self._offset += len(new)
        *lines, self._torn = (self._torn + new).split(b"\n")
        for line in lines:
            # A torn line, which a killed learner may leave, is no row.
            match decode_row(line):
                case StepRow() as row:
                    self.steps.append(Sight(now, row))
                case ActorRow() as row:
                    self.actors.append(Sight(now, row))
                case EventRow() as row:
                    self.events.append(Sight(now, row))
                    self._follow_members(row)

    def _follow_members(self, row: EventRow) -> None:
        match row.event, row.actor:
            case "run_started", _:
                self.members.clear()
            case "actor_joined", str(actor):
                self.members.add(actor)
            case "actor_left" | "actor_lost", str(actor):
                self.members.discard(actor)

    def next_step_s(self, since: float) -> float | None:
        """Return the seconds from `since` to the next optimizer step, None before there is one."""
        return next((sight.at - since for sight in self.steps if sight.at > since), None)

    def next_group_s(self, actor: str, since: float) -> float | None:
        """Return the seconds from `since` to this actor's next heartbeat that reports a new group, None before there is one."""
        own = [sight for sight in self.actors if sight.row.actor == actor]
        num_before = max((sight.row.num_groups_sent for sight in own if sight.at <= since), default=0)
        for sight in own:
            if sight.at <= since:
                continue
            num_sent = sight.row.num_groups_sent
            if num_sent > num_before:
                return sight.at - since
            # A restarted actor counts from zero.
            num_before = min(num_before, num_sent)
        return None


class Services:
    """The processes of a round: `offbeat train`, and the remote actor, which is started again whenever it dies."""

    def __init__(self, site: Site, watch: Watch, stop: StopRequest) -> None:
        """Start `offbeat train` and the remote actor."""
        self._logs = site.logs
        self._config_file = site.config_file
        self._remote_command = [
            *site.network.prefix,
            *PROGRAM,
            "actor",
            str(site.config_file),
            f'actor.name="{REMOTE}"',
            f'hub.address="{site.network.hub_address(site.hub_port)}"',
        ]
        self._environment = {**os.environ, **site.environment, PARENT_VARIABLE: str(os.getpid())}
        self._watch = watch
        self._stop = stop
        self._moved_at = time.monotonic()
        self._restart_at: float | None = None
        self._train = self._popen([*PROGRAM, "train", str(site.config_file)], "train")
        # The launcher starts its services seconds later, and they inherit the limit.
        resource.prlimit(self._train.pid, resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
        self._remote = self._popen(self._remote_command, REMOTE)

    @property
    def status(self) -> int | None:
        """Exit status of `offbeat train`; None while it runs."""
        return self._train.poll()

    @property
    def remote_status(self) -> int | None:
        """Exit status of the remote actor; None while it runs."""
        return self._remote.poll()

    def find(self, target: Target) -> int:
        """Return the process id of a service.

        Raise `RunEndedError` when the run ends before it appears, and `StuckError` when it does not within `APPEAR_S`.
        """
        if target == "launcher":
            return self._train.pid
        if target == "remote actor" and self._remote.poll() == 0 and self._restart_at is None:
            # It left as it was asked to; otherwise `_keep_remote` starts it.
            self._restart_at = time.monotonic() + RESTART_WAIT_S
        deadline = time.monotonic() + APPEAR_S
        while time.monotonic() < deadline and self.status is None:
            for pid in [self._remote.pid] if target == "remote actor" else processes.children(self._train.pid):
                # Until the process runs our command it may be a fork of the launcher, or `ip netns exec`.
                if not processes.has_ended(pid) and _is_service(pid, target):
                    return pid
            self.pause(LOOK_S)
        if self.status is not None:
            raise RunEndedError
        raise StuckError(f"no {target} appeared within {APPEAR_S:g} s")

    def pause(self, seconds: float) -> None:
        """Wait, while reading metrics and restarting the remote actor. Raises `StoppedError` and `StuckError`."""
        deadline = time.monotonic() + seconds
        while True:
            if self._stop:
                raise StoppedError
            self._watch.look()
            self._keep_remote()
            self._check_progress()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, LOOK_S))

    def try_learner(self, *settings: str) -> Attempt:
        """Start a learner on the run's folder, which must refuse it; kill one that goes on for `APPEAR_S`."""
        command = [*PROGRAM, "learner", str(self._config_file), "--no-preflight", "run.resume=true", *settings]
        log = self._logs / f"{TRIED}.log"
        num_before = log.stat().st_size if log.exists() else 0
        process = self._popen(command, TRIED)
        deadline = time.monotonic() + APPEAR_S
        try:
            while process.poll() is None and time.monotonic() < deadline:
                self.pause(LOOK_S)
        finally:
            processes.kill_group(process.pid)
            status = process.wait()
        return Attempt(status, log.read_bytes()[num_before:].decode(errors="replace"))

    def ask_remote_to_leave(self) -> None:
        """Send SIGTERM to the remote actor, as its user would."""
        self._remote.terminate()

    def close(self) -> None:
        """Kill `offbeat train`, the remote actor, and every process that they started."""
        for process in (self._train, self._remote):
            processes.kill_group(process.pid)
            process.wait()

    def _popen(self, command: list[str], log: str) -> subprocess.Popen:
        with (self._logs / f"{log}.log").open("ab") as stream:
            return subprocess.Popen(command, env=self._environment, process_group=0, stdout=stream, stderr=subprocess.STDOUT)

    def _keep_remote(self) -> None:
        now = time.monotonic()
        if self._restart_at is not None and now >= self._restart_at:
            self._restart_at = None
            self._remote = self._popen(self._remote_command, REMOTE)
        elif self._restart_at is None and self._remote.poll() and self.status is None:
            # The children of a dead actor are not killed here: they must end by themselves, as without a supervisor.
            self._restart_at = now + RESTART_WAIT_S

    def _check_progress(self) -> None:
        if self._watch.steps:
            self._moved_at = max(self._moved_at, self._watch.steps[-1].at)
        if self.status is None and time.monotonic() - self._moved_at > STUCK_S:
            raise StuckError(f"no optimizer step for {STUCK_S:g} s, the last was {self._watch.newest_step}")


class Strike(NamedTuple):
    """A committed fault."""

    fault: Fault
    began: float
    """Monotonic time."""
    ended: float
    """Monotonic time."""
    outcome: Committed


def run_round(plan: list[Fault], site: Site, stop: StopRequest) -> RoundResult:
    """Commit the plan's faults on a run, and follow the run to its end.

    A round that fails returns violations. Raises `StoppedError` when the user asks to stop.
    """
    started = time.monotonic()
    watch = Watch(site.run / ROWS_FILE)
    services = Services(site, watch, stop)
    data = Path(site.config.data.train_data)
    scene = Scene(services, site.network, site.clock, site.disk, site.judge, site.run, data, site.hub_port, site.tools)
    strikes: list[Strike] = []
    violations: list[str] = []
    if site.judge is not None:
        # Steps go on during most faults: a quick machine would end the run before the last of them.
        site.judge.is_slow = lambda: is_ahead(plan[len(strikes) :], watch.newest_step)
    try:
        for fault in plan:
            _await_fault(fault, services, watch)
            if services.status is not None:
                break
            try:
                strikes.append(_strike(fault, scene, watch))
            except RunEndedError:
                # The learner made its last step between the look at the run and the fault.
                break
        violations += _await_end(services, watch)
    except StuckError as error:
        violations.append(str(error))
    finally:
        services.close()
        for orphan in [orphan for one in strikes for orphan in one.outcome.orphans]:
            orphan.unlink(missing_ok=True)
    watch.look()
    happened = [_happened(one, watch, started, site.run) for one in strikes]
    violations += missed(happened)
    happened += [Happened(fault, 0.0, "", None) for fault in plan[len(strikes) :]]
    violations += [violation for one in strikes for violation in one.outcome.violations]
    lost = [event for one in strikes for event in one.outcome.lost]
    return RoundResult(time.monotonic() - started, happened, lost, violations)


def is_ahead(left: Sequence[Fault], newest_step: int) -> bool:
    """Return whether the run has made more steps than the plan has for the next of the faults that are left.

    A fault that waits for the step with the next checkpoint is never late.
    """
    return bool(left) and left[0].kind not in IN_CHECKPOINT and newest_step > left[0].at_step + AHEAD_STEPS


def missed(happened: Iterable[Happened]) -> list[str]:
    """Return a line about each fault that was committed, cannot miss, and had no effect."""
    return [
        f"{one.fault.kind}: it had no effect ({one.detail})"
        for one in happened
        if one.detail and one.has_hit is False and one.fault.kind in effects.CERTAIN
    ]


def _happened(strike: Strike, watch: Watch, started: float, run: Path) -> Happened:
    fault, outcome = strike.fault, strike.outcome
    events = {sight.row.event for sight in watch.events if sight.at >= strike.began}
    has_hit = outcome.has_hit if outcome.has_hit is not None else effects.has_hit(fault.kind, events, run)
    recovery_s = _recovery_s(watch, fault, strike.ended)
    return Happened(fault, strike.began - started, outcome.detail or "", recovery_s, has_hit)


def _await_fault(fault: Fault, services: Services, watch: Watch) -> None:
    """Wait for the fault's optimizer step and then its delay, or for the end of the run."""
    while services.status is None and watch.newest_step < fault.at_step:
        services.pause(LOOK_S)
    services.pause(fault.delay_s)


def _strike(fault: Fault, scene: Scene, watch: Watch) -> Strike:
    began = time.monotonic()
    outcome = commit(fault, scene)
    # Read the steps made during the fault now: they must not count as recovery from it.
    watch.look()
    logger.info("step %d: %s", watch.newest_step, outcome.detail or f"not possible here: {fault.kind}")
    return Strike(fault, began, time.monotonic(), outcome)


def _await_end(services: Services, watch: Watch) -> list[str]:
    """Wait until both services have ended; return the violations."""
    while services.status is None:
        services.pause(LOOK_S)
    violations = [] if services.status == 0 else [f"offbeat train ended with exit status {services.status}"]
    watch.look()
    fair = {0}
    if services.remote_status is None and REMOTE not in watch.members:
        # The actor was cut off or just started when the run ended, so the learner could not dismiss it.
        services.ask_remote_to_leave()
        # An actor that has just started does not handle signals yet.
        fair.add(-signal.SIGTERM)
    deadline = time.monotonic() + LEAVE_S
    while services.remote_status is None and time.monotonic() < deadline:
        services.pause(LOOK_S)
    if services.remote_status not in fair:
        ended = "did not leave" if services.remote_status is None else f"ended with status {services.remote_status}"
        violations.append(f"the remote actor {ended} when the run was over")
    return violations


def _is_service(pid: int, target: Target) -> bool:
    words = processes.arguments(pid)
    return ("learner" if target == "learner" else "actor") in words and "ip" not in words


def _recovery_s(watch: Watch, fault: Fault, ended: float) -> float | None:
    """Return the seconds from the fault's end until the service that it hit works again, None when the run ended before."""
    if fault.target == "learner":
        return watch.next_step_s(ended)
    return watch.next_group_s(LOCAL if fault.target == "local actor" else REMOTE, ended)
