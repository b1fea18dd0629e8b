"""Trackers run beside the learner: it never waits for them, and tells them only what they may know."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbeat.common.records import row_process
from offbeat.common.records.rows import EvalRow, EventRow, Row
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import load
from offbeat.learner.reporting.tracking import settings_to_show, tracking
from tests.learner.reporting.standins import write_trackio
from tests.learner.reporting.test_tracker_worker import final, step
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Config:
    """Return the settings of a run that trackio, a stand-in, tracks; its notes are in the working directory."""
    caplog.set_level(logging.INFO, logger="offbeat")
    monkeypatch.chdir(tmp_path)
    write_trackio(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3] / 'src'}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return load(None, ["run.dir=runs/a", "metrics.trackio_project=mine"])


def notes() -> list[dict[str, object]]:
    return [json.loads(line) for line in Path("notes").read_text().splitlines()] if Path("notes").exists() else []


def test_tracker_gets_the_numbers_of_steps_and_evaluations_and_goes_on_where_the_run_does(config: Config) -> None:
    evaluation = EvalRow(time=1.0, policy_version=1, reward=0.75, length=None, num_completions=8, num_failed=0)
    recorded: list[Row] = []
    for rows in ([step(1), evaluation, final("stopped")], [step(2), final("finished")]):
        with tracking(config, recorded.append) as add:
            for row in rows:
                add(row)
    names = [note.get("name") for note in notes() if note["call"] == "init"]
    assert [note["resume"] for note in notes() if note["call"] == "init"] == ["allow"] * 2
    assert [note["call"] for note in notes()] == ["init", "log", "log", "finish", "init", "log", "finish"]
    assert names == [Path("runs/a/trackio_run_id.txt").read_text()] * 2
    assert str(names[0]).startswith("a-")
    logged = [(note["step"], note["metrics"]) for note in notes() if note["call"] == "log"]
    assert logged == [
        (1, {"reward/mean": 0.5}),
        (1, {"eval/reward": 0.75, "eval/num_completions": 8, "eval/num_failed": 0}),
        (2, {"reward/mean": 0.5}),
    ]
    assert recorded == []


def test_tracker_that_hangs_is_killed_at_the_deadline_and_never_waited_for(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("hangs", "1")
    monkeypatch.setattr(row_process, "CLOSE_S", 1.0)
    with tracking(config, lambda row: None) as add:
        add(step(1))
        wait_for(lambda: any(note["call"] == "log" for note in notes()))
        # Nobody waits for it.
        for version in range(2, 100):
            add(step(version))
    assert "metrics.trackio_project: it had not handled the last rows after 1 s; its process is killed" in caplog.text
    assert [note["call"] for note in notes()] == ["init", "log"]


def test_failing_tracker_costs_a_warning_and_an_event(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Path("trackio.py").write_text("raise ImportError('it is broken')")
    monkeypatch.setattr(row_process, "CLOSE_S", 0.1)
    recorded: list[Row] = []
    with tracking(config, recorded.append) as add:
        add(step(1))
        wait_for(lambda: bool(recorded))
    detail = 'metrics.trackio_project = "mine": ImportError: it is broken'
    assert [(row.event, row.detail) for row in recorded if isinstance(row, EventRow)] == [("tracker_failed", detail)]
    assert f"{detail}; training continues" in caplog.text
    assert "ImportError" in Path("runs/a/logs/trackio.log").read_text()


def test_rows_that_no_tracker_keeps_do_not_crowd_out_the_others(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Row] = []
    process = SimpleNamespace(add=handed.append, ask_to_end=lambda: None, close=lambda: 0)
    monkeypatch.setattr("offbeat.learner.reporting.tracking.RowProcess", lambda *_, **__: process)
    with tracking(config, lambda row: None) as add:
        for row in (step(1), EventRow(time=1.0, event="resumed", detail=""), final("finished")):
            add(row)
    assert handed == [step(1), final("finished")]


def test_settings_are_shown_without_secrets() -> None:
    config = load(
        None, ["actor.engine_options.hf_token=hidden", "judge.url=https://me:hidden@host/v1", "train.learning_rate=0.5"]
    )
    shown = settings_to_show(config)
    assert "hidden" not in str(shown)
    assert shown["judge.url"] == '"https://********@host/v1"'
    assert shown["train.learning_rate"] == "0.5"
    assert "scale.actors" not in shown, "it is none"


def test_run_without_trackers_starts_nothing(tmp_path: Path) -> None:
    with tracking(load(None, [f"run.dir={tmp_path}"]), lambda row: None) as add:
        add(step(1))
    assert list(tmp_path.iterdir()) == []
