"""A run in MLflow has the settings as parameters, is the same run after a restart, and its names are accepted."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.common.records.rows import EventRow
from offbeat.learner.reporting.trackers import MlflowTracker, Opening, accepted_name
from tests.learner.reporting.test_tracker_worker import step


class Server:
    """A stand-in for MLflow's client and server, which notes what it is asked for."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.calls: list[tuple[str, Any]] = []

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = f"experiment {name}"
        return self.experiments[name]

    def create_run(self, experiment_id: str, run_name: str) -> SimpleNamespace:
        self.calls.append(("create", (experiment_id, run_name)))
        return SimpleNamespace(info=SimpleNamespace(run_id="run 1"))

    def update_run(self, run_id: str, status: str) -> None:
        self.calls.append(("update", (run_id, status)))

    def log_batch(self, run_id: str, metrics: list[Any] | None = None, params: list[Any] | None = None) -> None:
        assert run_id == "run 1"
        self.calls.append(("metrics", metrics) if params is None else ("params", params))

    def set_terminated(self, run_id: str, status: str) -> None:
        self.calls.append(("end", (run_id, status)))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    for name, module in {
        "mlflow": SimpleNamespace(MlflowClient=lambda: made),
        "mlflow.entities": SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)  # pyright: ignore[reportArgumentType]
    return made


def test_restart_goes_on_with_the_run_and_does_not_change_its_parameters(tmp_path: Path, server: Server) -> None:
    settings = {f"train.setting_{number}": str(number) for number in range(150)}
    for outcome in ("paused", "finished"):
        tracker = MlflowTracker(Opening("mlflow", "mine", str(tmp_path), settings))
        tracker.add(step(4))
        tracker.add(EventRow(time=1.0, event="resumed", detail=""))
        tracker.close(outcome)
    metrics = ("metrics", [("reward/mean", 0.5, 1500, 4)])
    kinds = [kind for kind, _ in server.calls]
    assert kinds == ["create", "params", "params", "metrics", "end", "update", "metrics", "end"]
    assert server.calls[0][1] == ("experiment mine", tmp_path.name)
    assert [*server.calls[1][1], *server.calls[2][1]] == list(settings.items())
    assert len(server.calls[1][1]) == 100, "MLflow takes no more at once"
    assert server.calls[3:] == [
        metrics,
        ("end", ("run 1", "SCHEDULED")),
        ("update", ("run 1", "RUNNING")),
        metrics,
        ("end", ("run 1", "FINISHED")),
    ]


@pytest.mark.parametrize(("outcome", "state"), [("stopped", "KILLED"), ("failed", "FAILED"), (None, "FAILED")])
def test_outcome_is_the_state_of_the_run(outcome: str | None, state: str, tmp_path: Path, server: Server) -> None:
    server.experiments["mine"] = "experiment that is there"
    MlflowTracker(Opening("mlflow", "mine", str(tmp_path), {})).close(outcome)
    assert server.calls == [
        ("create", ("experiment that is there", tmp_path.name)),
        ("end", ("run 1", state)),
    ]


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("reward/mean", "reward/mean"),
        ("eval/reward/a+b (c)", "eval/reward/a_b _c_"),
        ("eval/reward/../up", "eval/reward/__/up"),
        ("eval/reward//x/", "eval/reward/x"),
        ("eval/reward/größe", "eval/reward/größe"),
        ("x" * 300, "x" * 250),
        ("x" * 249 + "/y", "x" * 249),
    ],
)
def test_names_are_those_that_mlflow_accepts(name: str, accepted: str) -> None:
    assert accepted_name(name) == accepted
