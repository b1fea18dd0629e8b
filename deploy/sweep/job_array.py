"""The job array of a sweep on Slurm: a script whose tasks are shards of one run each."""

import itertools
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from offbeat.deploy.clusters.moving_learner import NOTICE_S
from offbeat.deploy.sweep.cells import Cell


def render_job_array(cells: Sequence[Cell], folder: Path, command: Sequence[str]) -> str:
    """Return the script for the runs that have not ended; `command` is the `offbeat sweep` that has all runs of `cells`."""
    left = [index for index, cell in enumerate(cells) if not cell.has_ended]
    return f"""\
#!/bin/bash
# Each task of the array makes one run of a sweep. A task that is requeued, or submitted again, goes on with its run.
#SBATCH --job-name=offbeat-sweep
#SBATCH --array={_ranges(left)}
#SBATCH --output={shlex.quote(str(folder))}/slurm-%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@{NOTICE_S}
# Add what your cluster needs: --partition, --time, --gres, --cpus-per-task, --mem.
# exec: signals of Slurm reach the sweep, not a shell that waits for it.
exec {shlex.join(command)} --shard "$SLURM_ARRAY_TASK_ID/{len(cells)}"
"""


def _ranges(numbers: Iterable[int]) -> str:
    """Return rising numbers as Slurm writes them: `0-3,7`."""
    parts: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        own = [number for _, number in run]
        parts.append(f"{own[0]}-{own[-1]}" if len(own) > 1 else f"{own[0]}")
    return ",".join(parts)
