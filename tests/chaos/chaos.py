"""`python -m tests.chaos`: runs under faults, round after round, each audited; one table at the end.

    seed -> plan of faults -> round: `offbeat train` and a remote actor -> audit of the run's folder -> findings -> table

A chaos run works in a temporary folder, marks its processes, and makes a separate network. All of that is taken down in any
case; a remainder is a violation.
"""

import logging
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from offbeat.common.formats import write_private
from offbeat.common.processes import process_table as processes
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.rows import EventRow
from offbeat.common.records.run_folder import CHECKPOINTS, LOG, MODEL
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.common.settings.config import Config, environment_of
from offbeat.common.settings.loading import load, resolved_toml
from offbeat.common.user_code.environment_function import load_environment
from offbeat.deploy.local.keygen import ALLOWED_KEYS, make_keys
from offbeat.deploy.local.launcher import free_port
from offbeat.deploy.local.quickstart.prepared import expand
from offbeat.lab.audit import Check, audit, claim_table
from offbeat.lab.terminal import FittedTable, stdout_console, table
from offbeat.learner.leases.events import Accepted
from offbeat.learner.leases.log_reading import read_log
from tests.chaos.environment import EARNED, ENVIRONMENT, FOLDER_VARIABLE, FUNCTION_VARIABLE, OUTSIDE
from tests.chaos.faults import MORE_DATA
from tests.chaos.judge import REWARD, URL_VARIABLE, Judge
from tests.chaos.machine import Clock, open_disk
from tests.chaos.network import Network, open_network
from tests.chaos.outcome import check_learning, check_outcome
from tests.chaos.round import LOCAL, REMOTE, Happened, Site, StoppedError, run_round
from tests.chaos.schedule import KINDS, OF_ENVIRONMENTS, OF_REWARDS, plan, round_seed
from tests.chaos.tools import Tools
from tests.process_ends import is_mapped, kill_and_wait

logger = logging.getLogger(f"offbeat.{__name__}")

MARK_VARIABLE = "CHAOS_MARK"
"""Environment variable that marks every process of a chaos run; children inherit it."""
DISK_BYTES = 512 << 20
"""Size of the file system that holds the run's folder."""
LEFT_S = 10.0
"""Seconds the processes of a round may take to end after it."""
MOMENT_S = 0.5
"""Seconds after which a semaphore that another process was just making is in use, or gone."""
LEAST_REWARD = 0.9
"""Mean reward that the quick start must reach."""
NUM_PROMPTS = 1000
"""Number of the quick start's prompts that a round uses: few, so that it passes over them several times."""

NUM_MORE = 200
"""Number of prompts that a fault adds to them."""

SETTINGS = (
    "train.checkpoint_interval=10",
    "hub.dead_after_s=5.0",
    "weights.timeout_s=5",
    # Nothing is deleted: the audit reads the whole log.
    "log.retain_mb=100000",
    "log.min_free_mb=16",
    "data.appended_data=allow",
    # Less than the notice of a preemption.
    "actor.leave_within_s=2",
    "launch.num_actors=1",
    "launch.max_restarts=1000",
)
"""Settings of every round; the user's overrides come after them."""
ENVIRONMENT_SETTINGS = ("environment.workers=2", "environment.turn_timeout_s=4", "train.num_steps=60")
"""Settings of runs with an environment: a blocked process is replaced soon, and the run is long enough for every fault."""
QUICKSTART_SETTINGS = ("train.num_steps=150", "rollout.lease_timeout_s=30")


class RoundReport(NamedTuple):
    """A round as it is written to `chaos.json`."""

    seed: int
    wall_s: float
    happened: list[Happened]
    checks: list[Check]

    @property
    def is_good(self) -> bool:
        """True when there is no violation."""
        return not any(check.violations for check in self.checks)


class ChaosReport(NamedTuple):
    """`chaos.json`: the findings of a chaos run."""

    seed: int
    network: str
    has_disk: bool
    rounds: list[RoundReport]
    left_over: list[str]
    """Files, mounts, interfaces and processes of chaos itself that exist after it has cleaned up."""

    @property
    def is_good(self) -> bool:
        """True when there is no violation."""
        return not self.left_over and bool(self.rounds) and all(report.is_good for report in self.rounds)


def run_chaos(
    path: Path, overrides: Sequence[str], *, is_quickstart: bool, seed: int, minutes: float, folder: Path, stop: StopRequest
) -> ChaosReport:
    """Run rounds until the minutes are over, and write the report, logs, and the whole run of a bad round to `folder`.

    Raises `SettingError` for an environment that cannot be imported.
    """
    more = QUICKSTART_SETTINGS if is_quickstart else ENVIRONMENT_SETTINGS if load(path, overrides).task.environment else ()
    config = expand(load(path, [*SETTINGS, *more, *overrides]))
    if config.task.environment:
        # A round's own check sees only the environment that wraps it.
        load_environment(config.task.environment)
    folder.mkdir(parents=True)
    mark = f"{os.getpid()}-{time.time_ns()}"
    rounds: list[RoundReport] = []
    semaphores = _semaphores()
    deadline = time.monotonic() + 60 * minutes
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-chaos-", ignore_cleanup_errors=True)))
        network = stack.enter_context(closing(open_network()))
        judge = stack.enter_context(closing(Judge(network.learner_host))) if is_quickstart else None
        description = network.description
        has_disk = False
        logger.info("chaos with seed %d in %s; %s", seed, folder, description)
        try:
            while not rounds or time.monotonic() < deadline:
                name, one_seed = f"round-{len(rounds)}", round_seed(seed, len(rounds))
                with ExitStack() as round_stack:
                    site = _open_site(config, work / name, folder / name, network, judge, mark, round_stack)
                    site = _write_config(site, one_seed, is_quickstart=is_quickstart)
                    has_disk = site.disk is not None
                    rounds.append(_run_audited(site, one_seed, mark, stop, is_quickstart=is_quickstart))
                shutil.rmtree(work / name)
                _log_round(len(rounds) - 1, rounds[-1])
        except StoppedError:
            logger.info("%s: stopped after %d rounds", stop.reason, len(rounds))
    report = ChaosReport(seed, description, has_disk, rounds, _left_over(work, mark, semaphores))
    (folder / "chaos.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return report


def _open_site(
    config: Config, work: Path, keep: Path, network: Network, judge: Judge | None, mark: str, stack: ExitStack
) -> Site:
    """Make the folders, keys, clock and disk of a round below `work`, to be taken down by `stack`; logs go to `keep`."""
    run = work / "run"
    run.mkdir(parents=True)
    disk = open_disk(run, DISK_BYTES)
    if disk is not None:
        stack.enter_context(closing(disk))
    clock = Clock(work)
    temporary = work / "tmp"
    temporary.mkdir()
    make_keys(work / "keys", [LOCAL, REMOTE])
    keep.mkdir()
    own = config.task.environment
    tools = Tools(work / "tools", config.environment) if own else None
    return Site(
        run=run,
        config=config,
        config_file=work / "run.toml",
        logs=keep,
        hub_port=free_port(network.learner_host),
        network=network,
        clock=clock,
        disk=disk,
        judge=judge,
        tools=tools,
        # Temporary files of killed processes are deleted with the round.
        environment={
            **clock.environment(),
            **({} if judge is None else {URL_VARIABLE: judge.url}),
            **({} if tools is None else {FUNCTION_VARIABLE: own, FOLDER_VARIABLE: str(work / "tools")}),
            MARK_VARIABLE: mark,
            "TMPDIR": str(temporary),
        },
    )


def _write_config(site: Site, seed: int, *, is_quickstart: bool) -> Site:
    """Write the round's config file; return the site with that config."""
    config, work = site.config, site.config_file.parent
    hub = replace(
        config.hub,
        address=f"tcp://{site.network.learner_host}:{site.hub_port}",
        key=f"{work}/keys/{{name}}.key",
        learner_key=f"{work}/keys/learner.pub",
        allowed_keys=f"{work}/keys/{ALLOWED_KEYS}",
    )
    data_settings, task = config.data, config.task
    if is_quickstart:
        data = work / "train.jsonl"
        rows = Path(config.data.train_data).read_text().splitlines(keepends=True)
        data.write_text("".join(rows[:NUM_PROMPTS]))
        data.with_name(MORE_DATA).write_text("".join(rows[NUM_PROMPTS : NUM_PROMPTS + NUM_MORE]))
        data_settings, task = replace(config.data, train_data=str(data)), replace(task, reward=REWARD)
    if site.tools is not None:
        task = replace(task, environment=OUTSIDE if environment_of(config).is_external else ENVIRONMENT)
    config = replace(config, run=replace(config.run, dir=str(site.run), seed=seed), hub=hub, data=data_settings, task=task)
    write_private(site.config_file, resolved_toml(config, with_secrets=True))
    return site._replace(config=config)


def _run_audited(site: Site, seed: int, mark: str, stop: StopRequest, *, is_quickstart: bool) -> RoundReport:
    """Run a round and audit its folder; copy the folder to the logs, whole when the round is bad."""
    num_steps = site.config.train.num_steps
    has_environment = site.tools is not None
    faults = plan(seed, num_steps=num_steps, dead_after_s=site.config.hub.dead_after_s, has_environment=has_environment)
    result = run_round(faults, site, stop)
    checks = [
        Check("the services keep going, and leave when it is over", result.violations, f"{result.wall_s:.0f} s"),
        check_outcome(site.run, num_steps),
        *([check_learning(site.run, LEAST_REWARD)] if is_quickstart else []),
        _check_rewards(site.run),
        *([_check_earned(site.run)] if has_environment else []),
        *audit(site.run, site.config, result.lost),
        Check("no process is left", _end_processes(mark), "none"),
    ]
    report = RoundReport(seed, result.wall_s, result.happened, checks)
    large = shutil.ignore_patterns(CHECKPOINTS, MODEL, LOG, "tensorboard", "report.html")
    shutil.copytree(site.run, site.logs / "run", ignore=large if report.is_good else None)
    return report


def _check_rewards(run: Path) -> Check:
    """Check that no group was given up because its reward could not be had."""
    rows = [row for row in read_rows(run / ROWS_FILE) if isinstance(row, EventRow)]
    lost = ("reward_unavailable", "reward_timeout", "environment_unavailable", "environment_error")
    # Faults may kill the process of one episode more often than `environment.max_retries` lets it begin.
    events = [row for row in rows if row.event in lost and not row.detail.startswith("its worker has died")]
    violations = [f"lease {row.lease_id}: {row.event}: {row.detail}" for row in events]
    return Check("groups wait for a judge or a tool that is down", violations, "none given up")


def _check_earned(run: Path) -> Check:
    """Check that every reward in the rollout log is the one that the environment gave."""
    groups = [record.event for record in read_log(run / LOG) if isinstance(record.event, Accepted)]
    num_episodes = sum(len(group.completions) for group in groups)
    return Check("no reward is made up", made_up(groups), f"{num_episodes} episodes")


def made_up(groups: Iterable[Accepted]) -> list[str]:
    """Return a line about each reward that the environment of chaos has not given."""
    return [
        f"lease {group.lease_id}: a reward of {completion.reward:g} that no episode earned"
        for group in groups
        for completion in group.completions
        if completion.reward_parts.get(EARNED) != completion.reward + 1.0
    ]


def print_chaos(report: ChaosReport) -> None:
    """Print a table of the faults and a table of the claims."""
    console = stdout_console()
    console.print(_fault_table(report))
    console.print(_check_table(report))


def _fault_table(report: ChaosReport) -> FittedTable:
    head = ("fault", "times", "hit", "recovery: median", "longest", "")
    rows: list[tuple[str, ...]] = []
    everything = [happened for one in report.rounds for happened in one.happened]
    for kind in KINDS:
        happened = [one for one in everything if one.fault.kind == kind]
        if not happened and kind in (*OF_ENVIRONMENTS, *OF_REWARDS):
            continue
        done = [one for one in happened if one.detail]
        recoveries = [one.recovery_s for one in done if one.recovery_s is not None]
        remarks = [f"{len(happened) - len(done)} not possible"] if len(done) < len(happened) else []
        if kind.startswith("fill disk") and not report.has_disk:
            remarks = ["SKIPPED: it needs root, to mount a small disk"]
        median = f"{statistics.median(recoveries):.1f} s" if recoveries else "-"
        longest = f"{max(recoveries):.1f} s" if recoveries else "-"
        known = [one.has_hit for one in done if one.has_hit is not None]
        hit = f"{sum(known)} of {len(known)}" if known else "-"
        rows.append((kind, str(len(done)), hit, median, longest, ", ".join(remarks)))
    return table(head, rows, texts=("fault", ""), title=f"{len(report.rounds)} rounds, seed {report.seed}; {report.network}")


def _check_table(report: ChaosReport) -> FittedTable:
    found: list[Check] = []
    claims = dict.fromkeys(check.claim for one in report.rounds for check in one.checks)
    for claim in claims:
        checks = [(index, check) for index, one in enumerate(report.rounds) for check in one.checks if check.claim == claim]
        violations = [f"round {index}: {text}" for index, check in checks for text in check.violations]
        found.append(Check(claim, violations, f"{len(checks)} rounds; the last: {checks[-1][1].seen}"))
    found.append(Check("nothing is left of chaos itself", report.left_over, "network, mounts, files, processes"))
    return claim_table(found)


def _log_round(index: int, report: RoundReport) -> None:
    num_faults = sum(bool(happened.detail) for happened in report.happened)
    violations = [f"{check.claim}: {text}" for check in report.checks for text in check.violations]
    logger.info("round %d: %d faults in %.0f s; %s", index, num_faults, report.wall_s, "; ".join(violations) or "no violation")


def _end_processes(mark: str) -> list[str]:
    """Kill the marked processes that have not ended by themselves within `LEFT_S`; return a line about each."""
    deadline = time.monotonic() + LEFT_S
    while (left := processes.marked(MARK_VARIABLE, mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    said = [f"process {pid}: {' '.join(processes.arguments(pid))}" for pid in left]
    for pid in left:
        kill_and_wait(pid)
    return said


def _left_over(work: Path, mark: str, semaphores: set[Path]) -> list[str]:
    """Return the files, mounts, interfaces and processes that a finished chaos run has left behind.

    `semaphores` are those that were there before it.
    """
    left = _end_processes(mark)
    left += [str(work)] if work.exists() else []
    left += [str(path) for path in sorted(_unused_semaphores(semaphores))]
    left += [line for line in Path("/proc/mounts").read_text().splitlines() if str(work) in line]
    left += [line for line in Path("/proc/net/dev").read_text().splitlines() if f" ob{os.getpid()}a:" in line]
    if shutil.which("ip"):
        listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
        left += [line for line in listing.splitlines() if line.split()[0] == f"offbeat{os.getpid()}"]
    return left


def _unused_semaphores(before: set[Path]) -> set[Path]:
    """Return the semaphores that no process uses. Those of others on this machine exist for a moment before they are used."""
    unused = {path for path in _semaphores() - before if not is_mapped(path)}
    if unused:
        time.sleep(MOMENT_S)
    return {path for path in unused & _semaphores() if not is_mapped(path)}


def _semaphores() -> set[Path]:
    """Return the semaphores and the shared memory that Python's multiprocessing has made for this user."""
    owned = set()
    for path in [path for pattern in ("sem.mp-*", "psm_*") for path in Path("/dev/shm").glob(pattern)]:
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                owned.add(path)
    return owned
