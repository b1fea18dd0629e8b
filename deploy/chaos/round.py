"""One round of chaos: a run under `offbeat train`, an actor of its own far away, and the faults of a plan.

plan -> wait for the step -> commit the fault -> ... -> the run's end -> recovery times from its metrics
"""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from offbeat.common.metrics import ROWS_FILE
from offbeat.common.shutdown import PARENT_VARIABLE, StopRequest
from offbeat.deploy.chaos.faults import Clock, Committed, Disk, Scene, commit
from offbeat.deploy.chaos.network import Network
from offbeat.deploy.chaos.schedule import Fault, Target
from offbeat.deploy.launch import processes
from offbeat.deploy.launch.launcher import PROGRAM
from offbeat.learner.leases.events import LeaseEvent

logger = logging.getLogger(__name__)

LOOK_S = 0.02
STUCK_S = 180.0
"""A round in which no optimizer step is made for so long is stuck."""
APPEAR_S = 60.0
"""How long a service that was killed may take to be there again."""
LEAVE_S = 60.0
"""How long the remote actor may take to leave when the run is over."""
RESTART_WAIT_S = 1.0
REMOTE = "remote"
"""Name of the remote actor."""
LOCAL = "actor-0"
"""The launcher's name for its first actor."""


class StuckError(RuntimeError):
    """The round does not go on."""


class StoppedError(RuntimeError):
    """The user asked chaos to stop."""


class Happened(NamedTuple):
    """A fault, and what followed."""

    fault: Fault
    at_s: float
    """Seconds since the round's start."""
    detail: str
    """Empty when it could not be committed."""
    recovery_s: float | None
    """From its end to the next optimizer step, or the next group of the actor it hit; None when the run ended before."""


class Round(NamedTuple):
    """What a round has shown by itself; the audit of its folder comes on top."""

    wall_s: float
    happened: list[Happened]
    lost: list[LeaseEvent]
    """Events that were destroyed in the rollout log."""
    violations: list[str]


class Sight(NamedTuple):
    """Something in the metrics, and when it was seen (monotonic)."""

    at: float
    row: dict[str, Any]


class Watch:
    """Reads a run's metrics as they are written; the time of a row is when it was read, no clock that faults may move."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0
        self._torn = b""
        self.steps: list[Sight] = []
        self.actors: list[Sight] = []
        self.members: set[str] = set()
        """The actors that the learner knows."""

    @property
    def newest_step(self) -> int:
        """The highest policy version that was made."""
        return max((sight.row["policy_version"] for sight in self.steps), default=0)

    def look(self) -> None:
        """Take in what is new."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        now = time.monotonic()
        self._offset += len(new)
        *lines, self._torn = (self._torn + new).split(b"\n")
        for line in lines:
            try:
                row = msgspec.json.decode(line, type=dict[str, Any])
            # Torn by a death, in the middle of a character perhaps.
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if row["kind"] == "step":
                self.steps.append(Sight(now, row))
            elif row["kind"] == "actor":
                self.actors.append(Sight(now, row))
            elif row["kind"] == "event":
                self._follow_members(row)

    def _follow_members(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "run_started":
                self.members.clear()
            case "actor_joined":
                self.members.add(event["actor"])
            case "actor_left" | "actor_lost":
                self.members.discard(event["actor"])

    def next_step_s(self, since: float) -> float | None:
        """Seconds from then to the next optimizer step."""
        return next((sight.at - since for sight in self.steps if sight.at > since), None)

    def next_group_s(self, actor: str, since: float) -> float | None:
        """Seconds from then to the next heartbeat of this actor that tells of a new group."""
        own = [sight for sight in self.actors if sight.row["actor"] == actor]
        num_before = max((sight.row["num_groups_sent"] for sight in own if sight.at <= since), default=0)
        for sight in own:
            if sight.at <= since:
                continue
            num_sent = sight.row["num_groups_sent"]
            if num_sent > num_before:
                return sight.at - since
            # Another process under the same name counts from zero.
            num_before = min(num_before, num_sent)
        return None


class Services:
    """`offbeat train` and the remote actor, which is started again whenever it dies."""

    def __init__(
        self, config: Path, log: Path, remote: list[str], environment: Mapping[str, str], watch: Watch, stop: StopRequest
    ) -> None:
        """`remote` is the remote actor's command; what the services say goes to files in the folder `log`."""
        self._config = config
        self._log = log
        self._remote_command = remote
        self._environment = {**os.environ, **environment, PARENT_VARIABLE: str(os.getpid())}
        self._watch = watch
        self._stop = stop
        self._moved_at = time.monotonic()
        self._restart_at: float | None = None
        self._train = self._popen([*PROGRAM, "train", str(config)], "train")
        self._remote = self._popen(remote, REMOTE)

    @property
    def status(self) -> int | None:
        """Of `offbeat train`; None while it runs."""
        return self._train.poll()

    @property
    def remote_status(self) -> int | None:
        """Of the remote actor; None while it runs."""
        return self._remote.poll()

    def find(self, target: Target) -> int:
        """See `chaos_faults.Victims`; `StuckError` when it does not appear."""
        deadline = time.monotonic() + APPEAR_S
        while time.monotonic() < deadline and self.status is None:
            for pid in [self._remote.pid] if target == "remote actor" else processes.children(self._train.pid):
                # Until it runs our command it may be a fork of the launcher, or `ip netns exec`.
                if not processes.has_ended(pid) and _is_service(pid, target):
                    return pid
            self.pause(LOOK_S)
        raise StuckError(f"no {target} appeared within {APPEAR_S:g} s")

    def pause(self, seconds: float) -> None:
        """See `chaos_faults.Victims`. Raises `StoppedError` and `StuckError`."""
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

    def ask_remote_to_leave(self) -> None:
        """As its user would."""
        self._remote.terminate()

    def close(self) -> None:
        """End both, with all they started."""
        for process in (self._train, self._remote):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _popen(self, command: list[str], log: str) -> subprocess.Popen:
        with (self._log / f"{log}.log").open("ab") as stream:
            return subprocess.Popen(command, env=self._environment, process_group=0, stdout=stream, stderr=subprocess.STDOUT)

    def _keep_remote(self) -> None:
        now = time.monotonic()
        if self._restart_at is not None and now >= self._restart_at:
            self._restart_at = None
            self._remote = self._popen(self._remote_command, REMOTE)
        elif self._restart_at is None and self._remote.poll() and self.status is None:
            # What a dead actor leaves ends by itself, as it must where nobody supervises it.
            self._restart_at = now + RESTART_WAIT_S

    def _check_progress(self) -> None:
        if self._watch.steps:
            self._moved_at = max(self._moved_at, self._watch.steps[-1].at)
        if self.status is None and time.monotonic() - self._moved_at > STUCK_S:
            raise StuckError(f"no optimizer step for {STUCK_S:g} s, the last was {self._watch.newest_step}")


def run_round(
    plan: list[Fault],
    *,
    run: Path,
    config: Path,
    log: Path,
    hub_port: int,
    network: Network,
    clock: Clock,
    disk: Disk | None,
    environment: Mapping[str, str],
    stop: StopRequest,
) -> Round:
    """Run it to the end, however it ends; raises `StoppedError` alone."""
    started = time.monotonic()
    watch = Watch(run / ROWS_FILE)
    remote = [
        *network.prefix,
        *PROGRAM,
        "actor",
        str(config),
        f'actor.name="{REMOTE}"',
        f'hub.address="{network.hub_address(hub_port)}"',
    ]
    services = Services(config, log, remote, environment, watch, stop)
    scene = Scene(services, network, clock, disk, run)
    committed: list[tuple[Fault, float, float, Committed]] = []
    violations: list[str] = []
    try:
        for fault in plan:
            while services.status is None and watch.newest_step < fault.at_step:
                services.pause(LOOK_S)
            services.pause(fault.delay_s)
            if services.status is not None:
                break
            began = time.monotonic()
            outcome = commit(fault, scene)
            # Steps that were made before its end, and not read yet, are no recovery.
            watch.look()
            committed.append((fault, began, time.monotonic(), outcome))
            logger.info("step %d: %s", watch.newest_step, outcome.detail or f"not possible here: {fault.kind}")
        violations += _await_end(services, watch)
    except StuckError as error:
        violations.append(str(error))
    finally:
        services.close()
    watch.look()
    happened = [
        Happened(fault, began - started, outcome.detail, _recovery_s(watch, fault, ended))
        for fault, began, ended, outcome in committed
    ]
    happened += [Happened(fault, 0.0, "", None) for fault in plan[len(committed) :]]
    lost = [event for *_, outcome in committed for event in outcome.lost]
    return Round(time.monotonic() - started, happened, lost, violations)


def _await_end(services: Services, watch: Watch) -> list[str]:
    while services.status is None:
        services.pause(LOOK_S)
    violations = [] if services.status == 0 else [f"offbeat train ended with exit status {services.status}"]
    watch.look()
    fair = {0}
    if services.remote_status is None and REMOTE not in watch.members:
        # Cut off, or just started, when the run ended: the learner had nobody to tell, and it would wait for the next one.
        services.ask_remote_to_leave()
        # Of one that has not got as far as to handle signals.
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
    """The fault's own measure of being over."""
    if fault.target == "learner":
        return watch.next_step_s(ended)
    return watch.next_group_s(LOCAL if fault.target == "local actor" else REMOTE, ended)
