"""A pool of actors on Slurm: tasks of job arrays, all of which the script `actors.sbatch` starts.

Slurm's own queue is the pool's only memory: a pool that is opened again knows the actors of the one before.
"""

import logging
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.deploy.clusters.fleet import FLEET, leave_s
from offbeat.deploy.clusters.pool import Instance, PoolError

logger = logging.getLogger(__name__)

ACTORS_SCRIPT = "actors.sbatch"
"""The batch script of the array, in the folder that `offbeat deploy slurm` wrote."""
COMMAND_S = 60.0
"""Longest time that one of Slurm's commands may take, in seconds."""
LEAVING = "offbeat: leaving"
"""Comment of jobs that were asked to leave: a second SIGTERM would hurry them."""
_JOB_NAME = re.compile(r"^#SBATCH --job-name=(\S+)", re.MULTILINE)
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+) sec", re.MULTILINE)


class SlurmPool:
    """The actors of one run on Slurm."""

    def __init__(self, script: Path) -> None:
        """`script` is the batch script of the array; the name of its jobs tells them from the user's other ones."""
        if not script.is_file():
            cure = "Name the folder that `offbeat deploy slurm` wrote: --on slurm:DIR."
            raise SettingError("--on", str(script.parent), f"it has no {script.name}", cure)
        found = _JOB_NAME.search(script.read_text())
        if found is None:
            cure = "Name the jobs: a pool recognizes its own by it."
            raise SettingError("--on", str(script), "the script has no line `#SBATCH --job-name=NAME`", cure)
        self._script = script
        self._job_name = found[1]

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
    warning = notice_warning(_run("scontrol", "show", "config"), leave_s(config))
    if warning is not None:
        logger.warning(warning)
    return pool


def parse_queue(text: str) -> list[Instance]:
    """Return the actors in the output of squeue, whose lines are array, task, state and comment; oldest first."""
    rows = sorted((int(job), int(task), state, comment) for job, task, state, comment in _tasks(text))
    return [Instance(f"{FLEET}-{job}-{task}", _state(state, comment)) for job, task, state, comment in rows]


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


def _tasks(text: str) -> list[tuple[str, str, str, str]]:
    """Return the columns of each line; a comment may have blanks, and a job outside of an array has no task."""
    rows = [line.split(maxsplit=3) for line in text.splitlines()]
    return [(job, task, state, comment) for job, task, state, comment in rows if task.isdigit()]


def _state(state: str, comment: str) -> Literal["starting", "working", "leaving"]:
    if comment == LEAVING:
        return "leaving"
    # A preempted job is COMPLETING for a moment and then waits again: it is not replaced.
    return "working" if state in ("RUNNING", "COMPLETING", "SUSPENDED") else "starting"


def _job(name: str) -> str:
    """Return Slurm's name of an actor: `12_3` for `actor-12-3`."""
    return name.removeprefix(f"{FLEET}-").replace("-", "_")


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
