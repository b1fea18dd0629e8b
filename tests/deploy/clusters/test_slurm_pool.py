"""Claims about the commands of Slurm that a pool of actors runs, and what it reads from them."""

import re
from pathlib import Path
from typing import Literal

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import ActorSection, Config
from offbeat.deploy.clusters.pool import Instance, PoolError
from offbeat.deploy.clusters.slurm import ACTORS_SCRIPT, SlurmPool, notice_warning, open_pool, parse_queue

QUEUE = """\
12 3 PENDING (null)
9 0 RUNNING (null)
12 1 RUNNING offbeat: leaving
9 10 COMPLETING (null)
9 2 CONFIGURING a comment of the user's
31 N/A RUNNING (null)
"""


def test_queue_lists_the_tasks_of_arrays_oldest_first_with_their_states() -> None:
    assert parse_queue(QUEUE) == [
        Instance("actor-9-0", "working"),
        Instance("actor-9-2", "starting"),
        Instance("actor-9-10", "working"),
        Instance("actor-12-1", "leaving"),
        Instance("actor-12-3", "starting"),
    ]
    assert parse_queue("") == []


def test_a_shorter_notice_than_an_actor_needs_is_told() -> None:
    config = "KeepAliveTime           = SYSTEM_DEFAULT\nKillOnBadExit           = 0\nKillWait                = 30 sec\n"
    assert notice_warning(config, 30) is None
    warning = notice_warning(config, 35)
    assert warning is not None
    assert "30 s after SIGTERM (KillWait)" in warning
    assert "35 s" in warning
    assert notice_warning("", 35) is None


def test_folder_without_the_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"no actors\.sbatch.*--on slurm:DIR"):
        SlurmPool(tmp_path / ACTORS_SCRIPT)
    (tmp_path / ACTORS_SCRIPT).write_text("#!/bin/bash\n")
    with pytest.raises(SettingError, match="--job-name=NAME"):
        SlurmPool(tmp_path / ACTORS_SCRIPT)


@pytest.mark.parametrize("option", ["--job-name=mine", "--partition=spot --job-name mine", "-J mine", '--job-name="mine"'])
def test_jobs_are_known_by_the_name_that_the_user_gave_them_last(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / ACTORS_SCRIPT
    script.write_text(f"#!/bin/bash\n#SBATCH --job-name=actors-a\n#SBATCH {option}\n##SBATCH --job-name=comment\n")
    fake(tmp_path, "squeue", f'echo "$*" > {tmp_path}/seen', monkeypatch)
    SlurmPool(script).running()
    assert " --name=mine " in (tmp_path / "seen").read_text()


@pytest.fixture
def pool(tmp_path: Path) -> SlurmPool:
    """A pool whose jobs are named `actors-a`."""
    script = tmp_path / ACTORS_SCRIPT
    script.write_text("#!/bin/bash\n#SBATCH --job-name=actors-a\n")
    return SlurmPool(script)


def fake(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of this name first on the PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_command_that_fails_or_hangs_is_an_error_with_its_words(
    pool: SlurmPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, "sbatch", "echo 'sbatch: error: invalid partition specified: spot' >&2; exit 1", monkeypatch)
    with pytest.raises(PoolError, match=r"`sbatch --array=0-2 .*actors\.sbatch` failed: .*invalid partition"):
        pool.start(3)
    monkeypatch.setattr("offbeat.deploy.clusters.slurm.COMMAND_S", 0.2)
    fake(tmp_path, "squeue", "exec sleep 60", monkeypatch)
    with pytest.raises(PoolError, match=r"squeue .* has not ended within 0\.2 s"):
        pool.running()


@pytest.mark.parametrize(("leave", "is_short"), [("finish", True), ("return", False)])
def test_only_actors_that_finish_their_work_need_more_notice_than_slurm_gives_by_default(
    leave: Literal["finish", "return"],
    is_short: bool,
    pool: SlurmPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake(tmp_path, "scontrol", "echo 'KillWait                = 30 sec'", monkeypatch)
    open_pool(Config(actor=ActorSection(leave=leave)), str(tmp_path))
    assert ("35 s to leave" in caplog.text) == is_short


def test_machine_without_slurm_is_told_so(pool: SlurmPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingError, match=r"no program squeue on the PATH.*login node"):
        pool.running()


def test_job_started_from_a_job_inherits_nothing_of_it(
    pool: SlurmPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/mine.conf")
    fake(tmp_path, "sbatch", f"env > {tmp_path}/seen", monkeypatch)
    pool.start(1)
    assert re.findall(r"^SLURM_.*", (tmp_path / "seen").read_text(), re.MULTILINE) == ["SLURM_CONF=/etc/mine.conf"]
