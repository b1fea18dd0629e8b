"""A pool of actors on a real Slurm, with a script in the place of the actors."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.deploy.clusters.slurm import ACTORS_SCRIPT, SlurmPool
from tests.deploy.slurm_cluster import START_S, Slurm, missing_programs, slurm_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_programs()), reason=f"Slurm is not installed: {', '.join(missing_programs())}"),
]
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=actors-a
#SBATCH --partition=spot
#SBATCH --output=/dev/null
#SBATCH --requeue
stay=yes
trap 'stay=' TERM
touch {folder}/up-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID
while [ "$stay" ] || [ -e {folder}/hold ]; do sleep 0.1; done
"""


def wait_for(slurm: Slurm, claim: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_S
    while not claim():
        if time.monotonic() > deadline:
            raise AssertionError(f"not so: {what}\n{slurm.run('squeue', '--array')}{slurm.run('sinfo', '-R')}{slurm.logs()}")
        time.sleep(0.1)


def test_actors_start_wait_for_nodes_and_leave_when_they_are_released(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / ACTORS_SCRIPT
    script.write_text(SCRIPT.format(folder=tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(cluster / "slurm.conf"))
    with slurm_in(cluster, kill_wait_s=30) as slurm:
        pool = SlurmPool(script)
        assert pool.running() == []
        pool.start(2)
        pool.start(2)
        wait_for(slurm, lambda: len(list(tmp_path.glob("up-*"))) == 3, "three nodes have an actor")
        there = pool.running()
        names = [instance.name for instance in there]
        assert [instance.state for instance in there] == ["working", "working", "working", "starting"]
        assert names[:2] == ["actor-1-0", "actor-1-1"]

        (tmp_path / "hold").touch()
        pool.release([names[0], names[3], "actor-77-0"])
        wait_for(slurm, lambda: len(pool.running()) == 3, "the actor that waited is cancelled")
        assert [instance.state for instance in pool.running()] == ["leaving", "working", "working"]
        assert [instance.state for instance in SlurmPool(script).running()] == ["leaving", "working", "working"]
        (tmp_path / "hold").unlink()
        wait_for(slurm, lambda: [instance.name for instance in pool.running()] == names[1:3], "the released actor has left")
