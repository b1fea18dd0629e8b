"""The runs of a sweep, which differ in a few settings and in their seeds, each in a folder of its own below the sweep's.

    FOLDER/plan.json
    FOLDER/max_staleness=4/seed=1/run.toml, train.log, and what the run writes

Values and seeds may be added to a sweep; existing runs are never changed.
"""

import itertools
import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from offbeat.common.errors import SettingError
from offbeat.common.formats import write_private
from offbeat.common.processes import files
from offbeat.common.records.run_folder import decide_resume, writing
from offbeat.common.settings.checks import check
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import load, refuse_masked, resolved_toml
from offbeat.deploy.clusters.services import NOTICE_S, slurm_folder
from offbeat.deploy.experiments.jobs import alone_in
from offbeat.lab.run_summary import parse_settings
from offbeat.lab.sweep.plan import CONFIG_FILE, ENDED, PLAN_FILE, Plan, PlannedTrial, read_plan, read_run, state_of
from offbeat.protocols.addresses import address_file, is_loopback

logger = logging.getLogger(__name__)

PREPARE_S = 300.0
"""Longest wait for other shards, which write the same plan."""
_MAX_DIFFERENCES = 5
"""Number of differences between two sweeps that an error shows."""


class SweepTrial(NamedTuple):
    """One run of a sweep, with its folder and its settings."""

    name: str
    folder: Path
    config: Config

    @property
    def has_ended(self) -> bool:
        """The run is finished, or was stopped as hopeless: there is nothing left to do."""
        return state_of(self.folder, read_run(self.folder)) in ENDED


def make_trials(plan: Plan, config_file: Path, overrides: Sequence[str], folder: Path) -> list[SweepTrial]:
    """Return the runs of a plan with their settings checked; raise `SettingError` that names the run with an invalid one."""
    trials: list[SweepTrial] = []
    warnings: dict[str, None] = {}
    for planned in plan.trials:
        swept = [f"{setting}={value}" for setting, value in zip(plan.settings, planned.values, strict=True)]
        try:
            config = load(config_file, [*overrides, *swept])
            refuse_masked(config)
            config = _as_trial(config, planned, folder / planned.name)
            warnings |= dict.fromkeys(check(config))
        except SettingError as error:
            raise _of_trial(planned.name, error) from error
        trials.append(SweepTrial(planned.name, folder / planned.name, config))
    for warning in warnings:
        logger.warning(warning)
    return trials


def check_trials(trials: Sequence[SweepTrial], check_one: Callable[[Config], object], *, num_at_once: int = 1) -> None:
    """Apply a check to one seed of each value; a `SettingError` that it raises then names the run.

    Other seeds share all that is checked, and each run looks again when it starts. Runs beside each other need ports of their
    own (`check_ports_apart`).
    """
    if num_at_once > 1:
        check_ports_apart(trials)
    # Only the folder's name tells the values: `max_staleness=4/seed=1`.
    one_of_each = {trial.folder.parent: trial for trial in reversed(trials)}
    for trial in reversed(one_of_each.values()):
        # Files that a run has already written are no error: a sweep continues it.
        config = decide_resume(replace(trial.config, run=replace(trial.config.run, resume="auto")))
        try:
            check_one(config)
        except SettingError as error:
            raise _of_trial(trial.name, error) from error


def check_ports_apart(trials: Sequence[SweepTrial]) -> None:
    """Raise `SettingError` where two of the runs, made beside each other, would listen at the same port."""
    taken: set[str] = set()
    for trial in trials:
        hub, weights, metrics = trial.config.hub, trial.config.weights, trial.config.metrics
        listeners: dict[str, str | int] = {
            "hub.bind" if hub.bind else "hub.address": hub.bind or hub.address,
            "weights.port": weights.port,
            "weights.pull_port": weights.pull_port,
            "metrics.bind": metrics.bind,
            "metrics.actor_bind": metrics.actor_bind,
        }
        ports = {setting: str(value).rpartition(":")[2] for setting, value in listeners.items()}
        for setting, port in ports.items():
            if port in taken:
                problem = "runs beside each other (--jobs) cannot share the port"
                raise SettingError(setting, listeners[setting], problem, "Give port 0 for any free one, or leave out --jobs.")
        taken |= {*ports.values()} - {"", "0"}


def prepare(plan: Plan, trials: Sequence[SweepTrial], folder: Path) -> None:
    """Write the plan and the runs' settings into the sweep's folder.

    Waits for: other shards that do the same. Raises `SettingError` when the folder holds another sweep: one with runs that this
    plan lacks or has with other settings; and when the folder cannot be written.
    """
    with alone_in(folder, wait_s=PREPARE_S):
        if (folder / PLAN_FILE).exists():
            _check_same(read_plan(folder), plan, trials, folder)
        with writing(folder, "--out"):
            for trial in trials:
                _write_config(trial)
            # Written last: every run that a plan file names has its settings.
            files.replace(folder / PLAN_FILE, msgspec.json.format(msgspec.json.encode(plan)) + b"\n")


def _as_trial(config: Config, planned: PlannedTrial, folder: Path) -> Config:
    address, bind = config.hub.address, config.hub.bind
    if is_loopback(address):
        # A free port for each run: jobs of a cluster may share a machine. The learner binds it too.
        address, bind = f"{address.rpartition(':')[0]}:0", ""
    elif (file := address_file(address)) is not None:
        address = f"file:{folder / file.name}"
    mirror = config.run.mirror and f"{config.run.mirror.rstrip('/')}/{planned.name}"
    return replace(
        config,
        run=replace(config.run, dir=str(folder), seed=planned.seed, resume=False, mirror=mirror),
        hub=replace(config.hub, address=address, bind=bind),
    )


def _of_trial(name: str, error: SettingError) -> SettingError:
    return SettingError("run of the sweep", name, str(error).removesuffix("."), "Nothing was started.")


def _check_same(old: Plan, new: Plan, trials: Sequence[SweepTrial], folder: Path) -> None:
    missing = {trial.name for trial in old.trials} - {trial.name for trial in new.trials}
    differences: dict[str, None] = {}
    if missing:
        differences = dict.fromkeys(_plan_differences(old, new))
    for trial in trials:
        file = trial.folder / CONFIG_FILE
        if trial.name in {planned.name for planned in old.trials} and file.exists():
            there, here = (parse_settings(resolved_toml(config)).flat() for config in (load(file), trial.config))
            differences |= dict.fromkeys(_config_differences(there, here))
    if differences:
        shown = [*differences][:_MAX_DIFFERENCES]
        more = f"; and {len(differences) - len(shown)} more" if len(differences) > len(shown) else ""
        raise SettingError(
            "--out",
            str(folder),
            f"it holds another sweep: {'; '.join(shown)}{more}",
            "Give the same settings (values and seeds may be added), or another folder.",
        )


def _plan_differences(old: Plan, new: Plan) -> Iterator[str]:
    for setting in {**old.settings, **new.settings}:
        there, here = (plan.settings.get(setting) for plan in (old, new))
        if there is None or here is None or not set(there) <= set(here):
            yield f"{setting} is {_listed(there)} there and {_listed(here)} here"
    if not set(old.seeds) <= set(new.seeds):
        yield f"run.seed is {_listed(map(str, old.seeds))} there and {_listed(map(str, new.seeds))} here"
    if list(old.settings) != list(new.settings):
        yield f"the settings are varied in the order {_listed(old.settings)} there and {_listed(new.settings)} here"


def _listed(values: Iterable[str] | None) -> str:
    return "not varied" if values is None else ", ".join(values)


def _config_differences(there: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    for setting in {**there, **here}:
        old, new = (settings.get(setting, "not set") for settings in (there, here))
        # The same folder may be written in another way, and a mirror may be moved.
        if setting not in ("run.dir", "run.mirror") and _without_folder(setting, old) != _without_folder(setting, new):
            yield f"{setting} is {old} there and {new} here"


def _without_folder(setting: str, value: str) -> str:
    """Return the value of a setting without the run's folder, which may be written in another way."""
    file = address_file(value) if setting == "hub.address" else None
    return value if file is None else file.name


def _write_config(trial: SweepTrial) -> None:
    trial.folder.mkdir(parents=True, exist_ok=True)
    # Replaced whole: the run of another shard may be reading it.
    partial = trial.folder / f"{CONFIG_FILE}.partial"
    write_private(partial, resolved_toml(trial.config, with_secrets=True))
    partial.rename(trial.folder / CONFIG_FILE)


def render_job_array(trials: Sequence[SweepTrial], folder: Path, command: Sequence[str]) -> str:
    """Return the script for the runs that have not ended; `command` is the `offbeat sweep` that has all runs of `trials`.

    Raises `SettingError` when all have ended.
    """
    left = [index for index, trial in enumerate(trials) if not trial.has_ended]
    if not left:
        cure = f"Make the report: offbeat sweep --report --out {shlex.quote(str(folder))}"
        raise SettingError("--out", str(folder), "every run of the sweep has ended, so the array has no task", cure)
    return f"""\
#!/bin/bash
# Each task of the array makes one run of a sweep. A task that is requeued, or submitted again, goes on with its run.
#SBATCH --job-name=offbeat-sweep
#SBATCH --array={_ranges(left)}
#SBATCH --output={shlex.quote(str(slurm_folder(folder)))}/slurm-%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@{NOTICE_S}
# Add what your cluster needs: --partition, --time, --gres, --cpus-per-task, --mem.
# exec: signals of Slurm reach the sweep, not a shell that waits for it.
exec {shlex.join(command)} --shard "$SLURM_ARRAY_TASK_ID/{len(trials)}"
"""


def _ranges(numbers: Iterable[int]) -> str:
    """Return rising numbers as Slurm writes them: `0-3,7`."""
    parts: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        own = [number for _, number in run]
        parts.append(f"{own[0]}-{own[-1]}" if len(own) > 1 else f"{own[0]}")
    return ",".join(parts)
