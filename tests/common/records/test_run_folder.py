"""One learner at a time writes to a run's folder, and a folder without a step can be used again."""

import errno
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import EventRow, StepRow
from offbeat.common.records.run_folder import (
    LOCK_FILE,
    FolderFailedError,
    check_run_folder,
    decide_resume,
    has_checkpoint,
    has_steps,
    locked,
    naming_disk_errors,
    set_aside_failed_start,
)
from offbeat.common.records.writer import MetricsWriter
from offbeat.common.settings.config import Config, RunSection

HOLDER = """
import sys
from pathlib import Path
from offbeat.common.records.run_folder import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_by_another_process(folder: Path) -> Iterator[subprocess.Popen]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    try:
        yield holder
    finally:
        holder.kill()
        holder.wait()


def refusal(folder: Path) -> str:
    with pytest.raises(SettingError) as caught, locked(folder):
        pass
    assert caught.value.setting == "run.dir"
    return str(caught.value)


def write_rows(folder: Path, *rows: EventRow | StepRow) -> None:
    with MetricsWriter(folder) as metrics:
        for row in rows:
            metrics.write(row)


def test_second_process_is_refused_with_the_firsts_until_that_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    with held_by_another_process(run) as holder:
        assert f"(process {holder.pid} on {socket.gethostname()!r}) is at work" in refusal(run)
        assert [path.name for path in run.iterdir()] == [LOCK_FILE]
    with locked(run):
        pass


def test_owner_that_has_not_said_who_it_is_is_another_learner(tmp_path: Path) -> None:
    with held_by_another_process(tmp_path):
        (tmp_path / LOCK_FILE).write_bytes(b"\x1b[31m no owner")
        assert re.search(r": another learner is at work", refusal(tmp_path))


def test_folder_that_cannot_be_made_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in refusal(tmp_path / "file" / "run")


def test_folder_holds_a_run_from_its_first_step_or_checkpoint_on(tmp_path: Path) -> None:
    assert not has_steps(tmp_path / "absent")
    write_rows(tmp_path, EventRow(event="run_started", detail=""))
    (tmp_path / "checkpoints" / "step-00000001.partial").mkdir(parents=True)
    assert not has_steps(tmp_path)
    (tmp_path / "checkpoints" / "step-00000001").mkdir()
    assert has_checkpoint(tmp_path)
    assert has_steps(tmp_path)


def test_new_run_is_refused_where_steps_were_made(tmp_path: Path) -> None:
    write_rows(tmp_path, EventRow(event="run_started", detail=""), StepRow(policy_version=1, metrics={}))
    with pytest.raises(SettingError, match=r"already holds a run.*run\.resume=true"):
        check_run_folder(RunSection(dir=str(tmp_path)))
    check_run_folder(RunSection(dir=str(tmp_path), resume=True))


def test_new_run_is_refused_where_it_would_replace_a_model_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(SettingError, match=r"run\.dir = .* folder model"):
        check_run_folder(RunSection(dir=str(tmp_path)))
    # It is the run's own.
    write_rows(tmp_path, StepRow(policy_version=1, metrics={}))
    check_run_folder(RunSection(dir=str(tmp_path), resume=True))


def test_new_run_is_refused_where_it_would_replace_a_config_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("# my notes\n")
    with pytest.raises(SettingError, match=r"run\.dir = .* file config\.toml"):
        check_run_folder(RunSection(dir=str(tmp_path)))
    # A start that failed before its first step has left it.
    (tmp_path / "identity.json").touch()
    check_run_folder(RunSection(dir=str(tmp_path)))


def test_resume_is_refused_where_no_run_was_started(tmp_path: Path) -> None:
    resume = RunSection(dir=str(tmp_path), resume=True)
    with pytest.raises(SettingError, match="no run was ever started"):
        check_run_folder(resume)
    # `offbeat train` wrote it, and its learner died before it wrote anything.
    (tmp_path / "launch.toml").touch()
    check_run_folder(resume)


@pytest.mark.parametrize(
    ("made", "resumes"),
    [
        ((), False),
        (("identity.json", "config.toml", "log/lock"), False),
        (("log/00000001.log",), True),
        (("checkpoints/step-00000004/extra.bin",), True),
    ],
    ids=["nothing", "a start that did no work", "a log", "a checkpoint"],
)
def test_automatic_resume_goes_on_where_there_is_work_to_lose(made: tuple[str, ...], resumes: bool, tmp_path: Path) -> None:
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    config = Config(run=RunSection(dir=str(tmp_path), resume="auto"))
    assert decide_resume(config).run.resume is resumes
    for given in (True, False):
        given_config = Config(run=RunSection(dir=str(tmp_path), resume=given))
        assert decide_resume(given_config) is given_config


def test_start_without_a_step_is_set_aside_whole_and_the_next_one_beside_it(tmp_path: Path) -> None:
    for number in (1, 2):
        write_rows(tmp_path, EventRow(event="run_started", detail=f"start {number}"))
        (tmp_path / "log").mkdir()
        (tmp_path / "log" / "00000001.log").write_bytes(b"groups")
        check_run_folder(RunSection(dir=str(tmp_path)))
        aside = set_aside_failed_start(tmp_path)
        assert aside is not None
        assert aside == tmp_path / "failed-starts" / str(number)
        assert f"start {number}" in (aside / "metrics.jsonl").read_text()
        assert (aside / "log" / "00000001.log").read_bytes() == b"groups"
    assert [path.name for path in tmp_path.iterdir()] == ["failed-starts"]
    (tmp_path / "metrics.jsonl").touch()
    assert set_aside_failed_start(tmp_path) is None, "an empty file is worth nothing"


def test_failed_start_is_set_aside_where_the_user_has_deleted_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "failed-starts" / "3").mkdir(parents=True)
    (tmp_path / "failed-starts" / "notes.txt").touch()
    (tmp_path / "log").mkdir()
    assert set_aside_failed_start(tmp_path) == tmp_path / "failed-starts" / "4"


def test_error_of_a_file_of_the_run_names_setting_file_reason_and_cure(tmp_path: Path) -> None:
    file = tmp_path / "log" / "00000001.log"
    said = f"run.dir = {tmp_path}: {file}: Input/output error. Repair the disk, or remove what is in the way; then run.resume"
    with pytest.raises(FolderFailedError, match=re.escape(said)), naming_disk_errors(tmp_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
    elsewhere = OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path.parent / "data.jsonl"))
    for other in (elsewhere, OSError(errno.EPIPE, "Broken pipe"), TimeoutError()):
        with pytest.raises(OSError) as raised, naming_disk_errors(tmp_path):
            raise other
        assert raised.value is other, "an error that is not about the run's files is raised as it is"


def test_folder_that_was_moved_away_is_told_as_that(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = "the folder was moved or deleted while the run was writing to it"
    with pytest.raises(FolderFailedError, match=said), naming_disk_errors(folder):
        shutil.disk_usage(folder / "log")
