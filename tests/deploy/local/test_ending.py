"""The summary at the end of a run: outcome, paths, and the command that goes on."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.rows import FinalRow, LedgerSums, StepRow
from offbeat.common.records.writer import MetricsWriter
from offbeat.deploy.local.ending import end_run, go_on, summary


def final(outcome: str, detail: str = "") -> FinalRow:
    return FinalRow(policy_version=7, wall_s=12.4, ledger=LedgerSums(7, 7, {}, 0, 0), outcome=outcome, detail=detail)


def run_in(folder: Path, *, outcome: str = "finished", detail: str = "") -> Path:
    folder.mkdir()
    (folder / "config.toml").touch()
    steps = ("step-00000005", "step-00000007", "step-00000009.partial", "step-00000008.damaged")
    for name in ("model", "logs", "log", *(f"checkpoints/{step}" for step in steps)):
        (folder / name).mkdir(parents=True)
    with MetricsWriter(folder) as metrics:
        metrics.write(StepRow(policy_version=7, metrics={}))
        metrics.write(final(outcome, detail))
    return folder


def test_finished_run_has_its_outcome_and_its_paths(tmp_path: Path) -> None:
    run = run_in(tmp_path / "my run")
    assert summary(run, "train") == [
        "the run finished at step 7 after 12 s",
        f"model: {run}/model",
        f"metrics: {run}/metrics.jsonl",
        f"rollout log: {run}/log",
        f"checkpoints: {run}/checkpoints (newest: step-00000007)",
        f"program logs: {run}/logs",
        f"what the model wrote: offbeat samples '{run}'",
    ]


def test_stopped_run_has_the_command_that_goes_on(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", outcome="stopped", detail="SIGINT")
    first, *_, last = summary(run, "train")
    assert first == "the run stopped at step 7 after 12 s (SIGINT)"
    assert last.startswith("all steps up to the newest checkpoint")
    assert last.endswith(f"to go on: offbeat train {run}/config.toml run.resume=true")
    shutil.rmtree(run / "checkpoints")
    assert go_on(run, "train").startswith("there is no checkpoint (train.checkpoint_interval)")


def test_run_without_a_step_is_started_again_by_the_same_command(tmp_path: Path) -> None:
    assert go_on(tmp_path, "learner") == "no step was made, so nothing is lost; to start again: the same command"
    (tmp_path / "launch.toml").touch()
    assert go_on(tmp_path, "train").endswith(f"to start again: offbeat train {tmp_path}/launch.toml")
    assert summary(tmp_path, "train")[0] == ("the run ended without a final row: its learner never began, and its log says why")


def test_end_of_a_run_that_was_resumed_and_killed_is_not_its_earlier_one(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", outcome="stopped")
    with MetricsWriter(run) as metrics:
        metrics.write(StepRow(policy_version=8, metrics={}))
    assert summary(run, "train")[0] == (
        "the run ended without a final row: its learner was killed, could not start again, or found no room for the row"
    )


@pytest.mark.slow
def test_report_that_cannot_be_written_costs_no_summary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path / "run")

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fail)
    caplog.set_level(logging.INFO)
    end_run(run, "train", StopRequest())
    assert f"{run}/report.html cannot be written (No space left on device). Make room there, or choose" in caplog.text
    assert f"To write it: offbeat report {run}" in caplog.text
    assert "the run finished at step 7" in caplog.text
    assert not list(run.glob("report.html*"))


def test_report_is_written_and_the_summary_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_in(tmp_path / "run")
    with caplog.at_level(logging.INFO):
        end_run(run, "learner", StopRequest())
    assert (run / "report.html").exists()
    assert "writing the report ..." in caplog.messages
    assert caplog.messages[-1] == f"what the model wrote: offbeat samples {run}"
