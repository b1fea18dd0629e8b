"""`offbeat chaos`: runs under faults, round after round, each audited; one table at the end.

    seed -> plan of faults -> round: `offbeat train` and a remote actor -> audit of the run's folder -> findings -> table

Everything lives in a temporary folder, in processes that carry a mark, behind a network that is made for it: all of it is taken
down whatever happens, and what is left nevertheless is a violation.
"""

import logging
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.table import Table

from offbeat.common.config import Config
from offbeat.common.settings import load, resolved_toml
from offbeat.common.shutdown import StopRequest
from offbeat.deploy.chaos.faults import Clock, open_disk
from offbeat.deploy.chaos.network import Network, open_network
from offbeat.deploy.chaos.round import LOCAL, REMOTE, Happened, StoppedError, run_round
from offbeat.deploy.chaos.schedule import KINDS, plan, round_seed
from offbeat.deploy.launch import processes
from offbeat.deploy.launch.keygen import ALLOWED_KEYS, make_keys
from offbeat.deploy.launch.launcher import free_port
from offbeat.deploy.quickstart.quickstart import expand
from offbeat.lab.audit import Check, add_claim, audit, check_learning, check_outcome
from offbeat.lab.terminal import stdout_console

logger = logging.getLogger(__name__)

MARK_VARIABLE = "OFFBEAT_CHAOS"
"""In the environment of every process that a chaos run has started, directly or not."""
DISK_BYTES = 512 << 20
LEFT_S = 10.0
"""How long processes may take to end after their round."""
LEAST_REWARD = 0.9
"""What the quick start must learn."""
NUM_PROMPTS = 1000
"""Of the quick start's, so that a round passes over its data several times."""

DEAD_AFTER_S = 5.0
SETTINGS = (
    "train.checkpoint_interval=10",
    f"hub.dead_after_s={DEAD_AFTER_S}",
    "hub.heartbeat_s=0.5",
    "weights.timeout_s=5",
    # Many segments, and all of them kept for the audit.
    "log.segment_mb=1",
    "log.retain_mb=100000",
    "log.min_free_mb=16",
    "launch.num_actors=1",
    "launch.max_restarts=1000",
)
QUICKSTART_SETTINGS = ("train.num_steps=150", "rollout.lease_timeout_s=30")


class RoundReport(NamedTuple):
    """A round as it is written to `chaos.json`."""

    seed: int
    wall_s: float
    happened: list[Happened]
    checks: list[Check]

    @property
    def is_good(self) -> bool:
        """Whether there is no violation."""
        return not any(check.violations for check in self.checks)


class ChaosReport(NamedTuple):
    """`chaos.json`: all that a chaos run has found."""

    seed: int
    network: str
    has_disk: bool
    rounds: list[RoundReport]
    left_over: list[str]
    """Of chaos itself, after everything was taken down."""

    @property
    def is_good(self) -> bool:
        """Whether there is no violation."""
        return not self.left_over and bool(self.rounds) and all(report.is_good for report in self.rounds)


def run_chaos(
    path: Path, overrides: Sequence[str], *, is_quickstart: bool, seed: int, minutes: float, folder: Path, stop: StopRequest
) -> ChaosReport:
    """Rounds until the minutes are over; what they leave (the report, logs, a broken round's whole run) goes to `folder`."""
    # Made once, and by one: the rounds find it.
    expand(load(path, []))
    folder.mkdir(parents=True)
    mark = f"{os.getpid()}-{time.time_ns()}"
    rounds: list[RoundReport] = []
    deadline = time.monotonic() + 60 * minutes
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-chaos-", ignore_cleanup_errors=True)))
        network = stack.enter_context(closing(open_network()))
        description = network.description
        has_disk = False
        logger.info("chaos with seed %d in %s; %s", seed, folder, description)
        try:
            while not rounds or time.monotonic() < deadline:
                index = len(rounds)
                room = work / f"round-{index}"
                room.mkdir()
                with ExitStack() as round_stack:
                    one = _Round(room, folder / room.name, round_seed(seed, index), mark, network, round_stack)
                    has_disk = one.has_disk
                    rounds.append(one.run(path, overrides, is_quickstart=is_quickstart, stop=stop))
                shutil.rmtree(room)
                _say(index, rounds[-1])
        except StoppedError:
            logger.info("%s: stopped after %d rounds", stop.reason, len(rounds))
    report = ChaosReport(seed, description, has_disk, rounds, _left_over(work, mark))
    (folder / "chaos.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return report


class _Round:
    """The surroundings of one round."""

    def __init__(self, room: Path, keep: Path, seed: int, mark: str, network: Network, stack: ExitStack) -> None:
        """What must be taken down is put on `stack`."""
        self._seed = seed
        self._keep = keep
        self._mark = mark
        self._network = network
        self._config_file = room / "run.toml"
        self._run = room / "run"
        self._run.mkdir()
        self._disk = open_disk(self._run, DISK_BYTES)
        if self._disk is not None:
            stack.enter_context(closing(self._disk))
        self._clock = Clock(room)
        self._temporary = room / "tmp"
        self._temporary.mkdir()
        self._keys = room / "keys"
        make_keys(self._keys, [LOCAL, REMOTE])
        keep.mkdir()

    @property
    def has_disk(self) -> bool:
        """Whether the run's folder is a file system of its own, which can be filled."""
        return self._disk is not None

    def run(self, path: Path, overrides: Sequence[str], *, is_quickstart: bool, stop: StopRequest) -> RoundReport:
        """The round and its audit."""
        hub_port = free_port(self._network.learner_host)
        config = self._write_config(path, overrides, hub_port, is_quickstart=is_quickstart)
        num_steps = config.train.num_steps
        result = run_round(
            plan(self._seed, num_steps=num_steps, dead_after_s=config.hub.dead_after_s),
            run=self._run,
            config=self._config_file,
            log=self._keep,
            hub_port=hub_port,
            network=self._network,
            clock=self._clock,
            disk=self._disk,
            environment=self._environment(),
            stop=stop,
        )
        checks = [
            Check("the services keep going, and leave when it is over", result.violations, f"{result.wall_s:.0f} s"),
            check_outcome(self._run, num_steps),
            *([check_learning(self._run, LEAST_REWARD)] if is_quickstart else []),
            *audit(self._run, config, result.lost),
            self._check_processes(),
        ]
        report = RoundReport(self._seed, result.wall_s, result.happened, checks)
        kept = (
            None if not report.is_good else shutil.ignore_patterns("checkpoints", "model", "log", "tensorboard", "report.html")
        )
        shutil.copytree(self._run, self._keep / "run", ignore=kept)
        return report

    def _write_config(self, path: Path, overrides: Sequence[str], hub_port: int, *, is_quickstart: bool) -> Config:
        settings = [*SETTINGS, *(QUICKSTART_SETTINGS if is_quickstart else ()), *overrides]
        settings += [
            f'run.dir="{self._run}"',
            f"run.seed={self._seed}",
            f'hub.address="tcp://{self._network.learner_host}:{hub_port}"',
            f'hub.key="{self._keys}/{{name}}.key"',
            f'hub.learner_key="{self._keys}/learner.pub"',
            f'hub.allowed_keys="{self._keys}/{ALLOWED_KEYS}"',
        ]
        config = expand(load(path, settings))
        if is_quickstart:
            data = self._config_file.with_name("train.jsonl")
            rows = Path(config.task.train_data).read_text().splitlines(keepends=True)
            data.write_text("".join(rows[:NUM_PROMPTS]))
            task = msgspec.structs.replace(config.task, train_data=str(data))
            config = msgspec.structs.replace(config, task=task)
        self._config_file.write_text(resolved_toml(config))
        return config

    def _environment(self) -> Mapping[str, str]:
        # What a killed process leaves in the folder for temporary files goes with the round.
        return {**self._clock.environment(), MARK_VARIABLE: self._mark, "TMPDIR": str(self._temporary)}

    def _check_processes(self) -> Check:
        return Check("no process is left", _end_processes(self._mark), "none")


def show(report: ChaosReport) -> None:
    """Print the table."""
    console = stdout_console()
    console.print(_fault_table(report))
    console.print(_check_table(report))


def _fault_table(report: ChaosReport) -> Table:
    table = Table(title=f"{len(report.rounds)} rounds, seed {report.seed}; {report.network}", title_justify="left")
    table.add_column("fault")
    for column in ("times", "recovery: median", "longest"):
        table.add_column(column, justify="right")
    table.add_column("")
    everything = [happened for one in report.rounds for happened in one.happened]
    for kind in KINDS:
        happened = [one for one in everything if one.fault.kind == kind]
        done = [one for one in happened if one.detail]
        recoveries = [one.recovery_s for one in done if one.recovery_s is not None]
        remarks = [f"{len(happened) - len(done)} not possible"] if len(done) < len(happened) else []
        if kind == "fill disk" and not report.has_disk:
            remarks = ["SKIPPED: it needs root, to mount a small disk"]
        median = f"{statistics.median(recoveries):.1f} s" if recoveries else "-"
        longest = f"{max(recoveries):.1f} s" if recoveries else "-"
        table.add_row(kind, str(len(done)), median, longest, ", ".join(remarks))
    return table


def _check_table(report: ChaosReport) -> Table:
    table = Table()
    for column in ("claim", "", "detail"):
        table.add_column(column)
    claims = dict.fromkeys(check.claim for one in report.rounds for check in one.checks)
    for claim in claims:
        checks = [(index, check) for index, one in enumerate(report.rounds) for check in one.checks if check.claim == claim]
        violations = [f"round {index}: {text}" for index, check in checks for text in check.violations]
        add_claim(table, claim, violations, f"{len(checks)} rounds; the last: {checks[-1][1].seen}")
    add_claim(table, "nothing is left of chaos itself", report.left_over, "network, mounts, files, processes")
    return table


def _say(index: int, report: RoundReport) -> None:
    num_faults = sum(bool(happened.detail) for happened in report.happened)
    violations = [f"{check.claim}: {text}" for check in report.checks for text in check.violations]
    logger.info("round %d: %d faults in %.0f s; %s", index, num_faults, report.wall_s, "; ".join(violations) or "no violation")


def _end_processes(mark: str) -> list[str]:
    """Processes that had not ended by themselves; they are killed."""
    deadline = time.monotonic() + LEFT_S
    while (left := processes.marked(MARK_VARIABLE, mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    said = [f"process {pid}: {' '.join(processes.arguments(pid))}" for pid in left]
    for pid in left:
        processes.kill(pid)
    return said


def _left_over(work: Path, mark: str) -> list[str]:
    """What chaos itself has not taken away."""
    left = _end_processes(mark)
    left += [str(work)] if work.exists() else []
    left += [line for line in Path("/proc/mounts").read_text().splitlines() if str(work) in line]
    left += [line for line in Path("/proc/net/dev").read_text().splitlines() if f" ob{os.getpid()}a:" in line]
    if shutil.which("ip"):
        listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
        left += [line for line in listing.splitlines() if line.split()[0] == f"offbeat{os.getpid()}"]
    return left
