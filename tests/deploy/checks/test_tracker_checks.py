"""Trackers that could not take a run are found before it begins."""

import importlib.machinery
import sys
from types import ModuleType

import pytest

from offbeat.common.settings.loading import load
from offbeat.deploy.checks.findings import Finding
from offbeat.deploy.checks.remote_services import check_trackers


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (
        "MLFLOW_TRACKING_URI",
        "MLFLOW_ALLOW_FILE_STORE",
        "WANDB_API_KEY",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_MODE",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", "/dev/null")
    for name in ("wandb", "mlflow", "trackio", "sqlalchemy", "alembic"):
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)


def found(*settings: str) -> list[Finding]:
    return list(check_trackers(load(None, settings)))


def test_run_without_trackers_has_no_findings() -> None:
    assert found() == []


def test_trackers_that_are_installed_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    assert found("metrics.wandb_project=a", "metrics.mlflow_experiment=b", "metrics.trackio_project=c") == []


def test_each_missing_package_names_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "trackio", None)
    first, second = found("metrics.mlflow_experiment=b", "metrics.trackio_project=c")
    cure = 'Install it: pip install "offbeat[{}]"; or leave the setting empty.'
    assert first == Finding("mistake", f'metrics.mlflow_experiment = "b": mlflow is not installed. {cure.format("mlflow")}')
    assert second == Finding("mistake", f'metrics.trackio_project = "c": trackio is not installed. {cure.format("trackio")}')


@pytest.mark.parametrize(
    ("place", "is_refused"),
    [("", True), ("sqlite:////tmp/a.db", True), ("postgresql://me@host/a", True), ("https://mlflow.example", False)],
)
def test_mlflow_needs_sqlalchemy_for_a_database_only(place: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    assert [finding.kind for finding in found("metrics.mlflow_experiment=b")] == ["mistake"] * is_refused


@pytest.mark.parametrize("place", ["mlruns", "/data/mlruns", "file:///data/mlruns"])
def test_mlflow_in_a_folder_is_refused_unless_it_is_allowed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    (finding,) = found("metrics.mlflow_experiment=b")
    assert finding.kind == "mistake"
    assert finding.text.startswith(f'environment variable MLFLOW_TRACKING_URI = "{place}": MLflow keeps no runs in folders. ')
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert found("metrics.mlflow_experiment=b") == []


@pytest.mark.parametrize("place", ["databricks", "databricks://profile", "uc", "http://127.0.0.1:5000"])
def test_mlflow_on_a_server_is_fine(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    assert found("metrics.mlflow_experiment=b") == []


def test_unknown_login_of_wandb_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = found("metrics.wandb_project=a")
    assert finding.kind == "warning"
    assert "run `wandb login` first" in finding.text
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert found("metrics.wandb_project=a") == []
