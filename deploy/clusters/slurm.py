"""A run on Slurm: one batch script for the learner, one for an array of actors, and a pool that starts more of that array.

Both scripts run the user's own TOML file, and name what differs on a cluster as settings behind it. The actors find the learner
by an address file in the run's folder, so it may be started on any node, and on another one after a requeue. Slurm's own queue
is the pool's only memory: a pool that is opened again knows the actors of the one before.
"""

import argparse
import logging
import os
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from offbeat.common.errors import SettingError
from offbeat.common.formats import write_private
from offbeat.common.settings.config import Config, actors_wanted
from offbeat.deploy.clusters import services
from offbeat.deploy.clusters.pool import Instance, PoolError
from offbeat.deploy.local.keygen import ALLOWED_KEYS, make_keys
from offbeat.deploy.local.starts import PROGRAM
from offbeat.protocols.addresses import is_loopback
from offbeat.protocols.text import as_name

logger = logging.getLogger(__name__)

LEARNER_SCRIPT = "learner.sbatch"
ACTORS_SCRIPT = "actors.sbatch"
"""The batch script of the array, in the folder that `offbeat deploy slurm` wrote."""
KEYS = "keys"
JOB_LOGS = "logs"
_TO_FILL_IN = (
    *("--partition=NAME", "--account=NAME", "--time=24:00:00", "--cpus-per-task=8", "--mem=64G", "--gpus-per-node=1"),
)
"""Options of sbatch that depend on the cluster, written as comments where the user gives none."""
COMMAND_S = 60.0
"""Longest time that one of Slurm's commands may take, in seconds."""
LEAVING = "offbeat: leaving"
"""Comment of jobs that were asked to leave: a second SIGTERM would hurry them."""
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+) sec", re.MULTILINE)


class ScriptPaths(NamedTuple):
    """The absolute paths that the scripts name."""

    config: Path
    """The user's TOML file."""
    out: Path
    run: Path
    """The run's folder."""

    @property
    def keys(self) -> Path:
        return self.out / KEYS


def write_scripts(
    config: Config,
    path: Path,
    overrides: Sequence[str],
    out: Path,
    learner_options: Sequence[str],
    actor_options: Sequence[str],
) -> str:
    """Write the scripts of a run, and its keys unless it has some, to `out`; return what the user does next.

    The options are lines of options of sbatch. Raises `SettingError` where the run's own keys have none for a fleet of actors.
    """
    places = ScriptPaths(path.absolute(), out.absolute(), Path(config.run.dir).absolute())
    (places.out / JOB_LOGS).mkdir(parents=True, exist_ok=True)
    settings = [*overrides, *_cluster_settings(config, places)]
    shared = [setting for setting in settings if not setting.startswith("hub.key=")]
    fleet_key = f"hub.key={services.find_fleet_key(config.hub.key or f'{places.keys}/{{name}}.key')}"
    # Private: settings may hold secrets.
    write_private(places.out / LEARNER_SCRIPT, learner_script(config, places, settings, learner_options))
    actors = actors_script(config, places, [*shared, fleet_key], actor_options)
    write_private(places.out / ACTORS_SCRIPT, actors)
    return f"""\
made {LEARNER_SCRIPT}, {ACTORS_SCRIPT} and the keys. To start the run:
  sbatch {shlex.quote(str(out / LEARNER_SCRIPT))}
  sbatch {shlex.quote(str(out / ACTORS_SCRIPT))}
To look at it, once the learner has started: offbeat status {shlex.quote(config.run.dir)} --watch"""


def learner_script(config: Config, places: ScriptPaths, settings: Iterable[str], options: Iterable[str]) -> str:
    """Return the text of `learner.sbatch`."""
    return f"""\
#!/bin/bash
# The learner of the run {places.run}, written by `offbeat deploy slurm`. Change it as you like.
#   start, and go on later:  sbatch {_word(places.out / LEARNER_SCRIPT)}
#   jobs one after another:  the same command several times, with --dependency=singleton, where jobs have a time limit
#   pause:                   scancel --batch --signal=TERM JOB    (it writes a checkpoint; the actors wait)
#   end, with a model:       scancel --batch --signal=INT JOB     (the actors leave)
# A job that is requeued, or submitted again, goes on from the newest checkpoint and the rollout log.
{_directives(places, "learner", "learner-%j.log", services.NOTICE_S, options)}
# exec: signals of Slurm reach the learner, not a shell that waits for it.
exec {_learner_program(config)} learner {shlex.join([str(places.config), *settings, *services.moving_settings(config)])}
"""


def actors_script(config: Config, places: ScriptPaths, settings: Iterable[str], options: Iterable[str]) -> str:
    """Return the text of `actors.sbatch`."""
    words = shlex.join([str(places.config), *settings])
    return f"""\
#!/bin/bash
# The actors of the run {places.run}, written by `offbeat deploy slurm`. Each task of the array is one actor.
#   start them:   sbatch {_word(places.out / ACTORS_SCRIPT)}
#   start more:   sbatch --array=0-7 {_word(places.out / ACTORS_SCRIPT)}
#   end one:      scancel --batch --signal=TERM JOB_TASK    (without --signal it is killed after KillWait, done or not)
# They may start before the learner, and be preempted: a requeued actor joins again.
#SBATCH --array=0-{actors_wanted(config) - 1}
{_directives(places, "actors", "actor-%A-%a.log", services.notice_s(config), options)}
# exec: signals of Slurm reach the actor, not a shell that waits for it.
exec {shlex.join(PROGRAM)} actor {words} "actor.name={services.FLEET}-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID"
"""


def _directives(places: ScriptPaths, kind: str, log: str, before_end_s: int, options: Iterable[str]) -> str:
    # Jobs are recognized by their names, and another project may have a run of this name.
    path = zlib.crc32(os.fsencode(places.run))
    own = [
        f"--job-name={as_name(f'{kind}-{places.run.name}-{path:08x}')}",
        f"--chdir={_word(Path.cwd())}",
        f"--output={_word(services.slurm_folder(places.out / JOB_LOGS) / log)}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:TERM@{before_end_s}",
        "--nodes=1",
        "--ntasks=1",
    ]
    # The user's come last, and win.
    given = list(options)
    open_lines = [line for line in _TO_FILL_IN if not any(line.partition("=")[0] in option for option in given)]
    return "\n".join(
        [
            *(f"#SBATCH {option}" for option in (*own, *given)),
            "# What most clusters want to know; remove one # and correct the value:" if open_lines else "#",
            *(f"##SBATCH {line}" for line in open_lines),
        ]
    )


def _cluster_settings(config: Config, places: ScriptPaths) -> list[str]:
    """Return the settings that differ between one machine and a cluster."""
    settings = [f"run.dir={places.run}"]
    if is_loopback(config.hub.address):
        settings += [f"hub.address=file:{places.run}/hub.address", "hub.bind=tcp://0.0.0.0:0"]
    if not config.hub.key:
        if not (places.keys / f"{services.FLEET}.key").exists():
            make_keys(places.keys, [f"{services.FLEET}-*"])
        settings += [
            f"hub.key={places.keys}/{{name}}.key",
            f"hub.learner_key={places.keys}/learner.pub",
            f"hub.allowed_keys={places.keys / ALLOWED_KEYS}",
        ]
    return settings


def _learner_program(config: Config) -> str:
    if config.launch.learner_processes == 1:
        return shlex.join(PROGRAM)
    return shlex.join([sys.executable, "-m", "torch.distributed.run", *services.torchrun_options(config), "-m", PROGRAM[2]])


def _word(path: Path) -> str:
    return shlex.quote(str(path))


# The pool


class SlurmPool:
    """The actors of one run on Slurm."""

    def __init__(self, script: Path) -> None:
        """`script` is the batch script of the array; the name of its jobs tells them from the user's other ones."""
        if not script.is_file():
            cure = "Name the folder that `offbeat deploy slurm` wrote: --on slurm:DIR."
            raise SettingError("--on", str(script.parent), f"it has no {script.name}", cure)
        name = _job_name(script.read_text())
        if name is None:
            cure = "Name the jobs: a pool recognizes its own by it."
            raise SettingError("--on", str(script), "the script has no line `#SBATCH --job-name=NAME`", cure)
        self._script = script
        self._job_name = name

    def running(self) -> list[Instance]:
        """Return the tasks of all arrays that are not over, oldest first."""
        columns = "--format=%F %K %T %k"
        text = _run("squeue", "--me", "--array", "--noheader", f"--name={self._job_name}", columns)
        return parse_queue(text)

    def start(self, count: int) -> None:
        """Submit one more array."""
        _run("sbatch", f"--array=0-{count - 1}", str(self._script))

    def release(self, names: Sequence[str]) -> None:
        """Send SIGTERM to actors that run, and cancel those that wait in the queue."""
        there = {instance.name: instance.state for instance in self.running()}
        waiting = [_job(name) for name in names if there.get(name) == "starting"]
        running = [_job(name) for name in names if there.get(name) == "working"]
        if waiting:
            # One that has started since gets no signal here, and is released the next time.
            _run("scancel", "--state=PENDING", *waiting)
        for job in running:
            # The batch step is the actor alone, without its children: it needs its reward processes to finish.
            _run("scancel", "--batch", "--signal=TERM", job)
            _run("scontrol", "update", f"JobId={job}", f"Comment={LEAVING}")


def open_pool(config: Config, place: str) -> SlurmPool:
    """Return the pool of the run whose scripts are in the folder `place`; warn where Slurm's notice is short."""
    pool = SlurmPool(Path(place) / ACTORS_SCRIPT)
    warning = notice_warning(_run("scontrol", "show", "config"), services.leave_s(config))
    if warning is not None:
        logger.warning(warning)
    return pool


def parse_queue(text: str) -> list[Instance]:
    """Return the actors in the output of squeue, whose lines are array, task, state and comment; oldest first."""
    # A comment may have blanks, and a job outside of an array has no task.
    lines = [line.split(maxsplit=3) for line in text.splitlines()]
    rows = sorted((int(job), int(task), state, comment) for job, task, state, comment in lines if task.isdigit())
    return [Instance(f"{services.FLEET}-{job}-{task}", _state(state, comment)) for job, task, state, comment in rows]


def notice_warning(slurm_config: str, needed_s: float) -> str | None:
    """Return a warning where `scontrol show config` tells of a shorter notice than an actor needs to leave; else None.

    The notice is KillWait: a batch job gets SIGTERM at the end of a partition's GraceTime, and SIGKILL after KillWait.
    """
    found = _KILL_WAIT.search(slurm_config)
    if found is None or int(found[1]) >= needed_s:
        return None
    return (
        f"Slurm kills a preempted job {found[1]} s after SIGTERM (KillWait), and an actor may take {needed_s:g} s to leave "
        f"(actor.leave_within_s, then the learner's answer): what it has not handed over by then is generated again. Set "
        f"actor.leave_within_s or hub.dead_after_s lower, or ask for a longer KillWait."
    )


def _state(state: str, comment: str) -> Literal["starting", "working", "leaving"]:
    if comment == LEAVING:
        return "leaving"
    # A preempted job is COMPLETING for a moment and then waits again: it is not replaced.
    return "working" if state in ("RUNNING", "COMPLETING", "SUSPENDED") else "starting"


def _job_name(script: str) -> str | None:
    """Return the name that a batch script gives its jobs, None for none. The user may have added one, and the last counts."""
    lines = [line.removeprefix("#SBATCH") for line in script.splitlines() if line.startswith("#SBATCH ")]
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("-J", "--job-name")
    return options.parse_known_args(shlex.split("\n".join(lines), comments=True))[0].job_name


def _job(name: str) -> str:
    """Return Slurm's name of an actor: `12_3` for `actor-12-3`."""
    return name.removeprefix(f"{services.FLEET}-").replace("-", "_")


def _run(*command: str) -> str:
    """Return the output of one of Slurm's commands; raise `PoolError` with its words where it fails or does not end."""
    # Inside a job, sbatch would pass on what the job was given (memory, tasks, restarts) to the new one.
    environment = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith("SLURM_")}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except FileNotFoundError as error:
        cure = "Start this where Slurm's commands are: on a login node, or in the learner's job."
        raise SettingError("--on", "slurm", f"there is no program {command[0]} on the PATH", cure) from error
    except subprocess.TimeoutExpired as error:
        raise PoolError(f"`{shlex.join(command)}` has not ended within {COMMAND_S:g} s") from error
    if done.returncode:
        raise PoolError(f"`{shlex.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
