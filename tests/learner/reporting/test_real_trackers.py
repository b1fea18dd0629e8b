"""Runs as the real MLflow, trackio and Weights & Biases keep them on this machine, read back by their own clients."""

from pathlib import Path

import pytest

from offbeat.common.records.rows import EvalRow
from offbeat.common.settings.loading import load
from offbeat.learner.reporting.tracking import settings_to_show, tracking
from tests.learner.reporting.test_tracker_worker import final, step

pytestmark = pytest.mark.extras

EVALUATION = EvalRow(
    time=3.0, policy_version=2, reward=0.75, length=None, num_completions=8, num_failed=0, sets={"hard (b)/..": 0.25}
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "a"


def run_twice(setting: str) -> list[object]:
    """Track a run that stops after its first step and is resumed; return the events that were recorded."""
    config = load(None, ["run.dir=runs/a", setting, "actor.engine_options.hf_token=hidden"])
    recorded: list[object] = []
    for rows in ([step(1), final("stopped")], [step(2), EVALUATION, final("finished")]):
        with tracking(config, recorded.append) as add:
            for row in rows:
                add(row)
    return recorded


def test_mlflow_has_one_run_with_its_history_and_parameters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder.parents[1]}/mlflow.db")
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    # The database is made here: it takes longer than a run's end waits.
    client = MlflowClient()
    client.create_experiment("other")
    assert run_twice("metrics.mlflow_experiment=mine") == []
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (folder / "mlflow_run_id.txt").read_text()
    assert (run.info.run_name, run.info.status) == ("a", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, point.value, point.timestamp) for point in history] == [(1, 0.5, 1500), (2, 0.5, 1500)]
    assert run.data.metrics["eval/reward"] == 0.75
    assert run.data.metrics["eval/reward/hard _b_/__"] == 0.25
    assert run.data.params["metrics.mlflow_experiment"] == '"mine"'
    assert run.data.params.keys() == settings_to_show(load(None, [])).keys()
    assert "hidden" not in str(run.data.params)


def test_trackio_has_one_run_with_its_numbers_and_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(folder.parents[1] / "trackio"))
    import trackio.utils  # pyright: ignore[reportMissingImports]
    from trackio import sqlite_storage  # pyright: ignore[reportMissingImports]

    # It was read when the package was imported.
    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", folder.parents[1] / "trackio")
    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", folder.parents[1] / "trackio")
    assert run_twice("metrics.trackio_project=mine") == []
    storage = sqlite_storage.SQLiteStorage
    (run,) = storage.get_run_records("mine")
    assert run["name"] == (folder / "trackio_run_id.txt").read_text()
    logs = storage.get_logs("mine", run["name"])
    assert [(log["step"], log.get("reward/mean"), log.get("eval/reward/hard (b)/..")) for log in logs] == [
        (1, 0.5, None),
        (2, 0.5, None),
        (2, None, 0.25),
    ]
    settings = storage.get_run_config("mine", run["name"])
    assert settings["metrics.trackio_project"] == '"mine"'
    assert "hidden" not in str(settings)


def test_wandb_keeps_both_parts_under_one_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert run_twice("metrics.wandb_project=mine") == []
    run_id = (folder / "wandb_run_id.txt").read_text()
    files = sorted(folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2
    assert all(b"reward/mean" in file.read_bytes() and b"hidden" not in file.read_bytes() for file in files)
