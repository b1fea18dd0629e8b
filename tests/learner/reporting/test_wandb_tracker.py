"""A run in Weights & Biases has its samples as a table, and is the same run after a restart."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from offbeat.common.records.rows import SampleRow
from offbeat.learner.reporting.trackers import Opening, WandbTracker
from tests.learner.reporting.test_tracker_worker import step

SAMPLE = SampleRow(
    policy_version=1,
    lease_id=2,
    prompt_id=3,
    policy_lag=0,
    reward=1.0,
    above_mean=0.5,
    finish_reason="stop",
    num_tokens=4,
    prompt="p",
    completion="c",
)


class Noted:
    """A stand-in for wandb and its run."""

    Table = dict

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str]] = []
        self.logged: list[dict[str, Any]] = []
        self.statuses: list[int] = []

    def init(self, **values: Any) -> SimpleNamespace:
        self.begun.append(values)
        return SimpleNamespace(
            log=self.logged.append,
            define_metric=lambda name, step_metric: self.axes.append((name, step_metric)),
            finish=lambda exit_code: self.statuses.append(exit_code),
        )


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Noted:
    noted = Noted()
    monkeypatch.setitem(sys.modules, "wandb", noted)  # pyright: ignore[reportArgumentType]
    return noted


def test_run_keeps_its_id_over_a_restart(tmp_path: Path, wandb: Noted) -> None:
    opening = Opening("wandb", "mine", str(tmp_path), {"train.num_steps": "3"})
    for _ in range(2):
        WandbTracker(opening)
    first, second = wandb.begun
    assert first == second
    assert first["id"] == (tmp_path / "wandb_run_id.txt").read_text()
    assert (first["project"], first["name"], first["resume"]) == ("mine", tmp_path.name, "allow")
    assert first["config"] == {"offbeat": {"train.num_steps": "3"}}
    assert wandb.axes[0] == ("*", "policy_version")


def test_run_of_a_sweep_is_called_by_its_values_and_seed(tmp_path: Path, wandb: Noted) -> None:
    folder = tmp_path / "max_staleness=4" / "groups_per_step=8" / "seed=1"
    folder.mkdir(parents=True)
    WandbTracker(Opening("wandb", "mine", str(folder), {}))
    assert wandb.begun[0]["name"] == "max_staleness=4 groups_per_step=8 seed=1"


def test_samples_are_a_growing_table_beside_the_numbers(tmp_path: Path, wandb: Noted) -> None:
    tracker = WandbTracker(Opening("wandb", "mine", str(tmp_path), {}))
    tracker.add(step(7))
    tracker.add(SAMPLE)
    tracker.add(msgspec.structs.replace(SAMPLE, policy_version=2))
    numbers, *tables = wandb.logged
    assert numbers == {"policy_version": 7, "reward/mean": 0.5}
    assert [row["policy_version"] for row in tables] == [1, 2]
    assert [len(row["samples"]["data"]) for row in tables] == [1, 2]
    names = ["policy_version", "lease_id", "prompt_id", "policy_lag", "reward", "above_mean", "finish_reason", "num_tokens"]
    assert tables[1]["samples"]["columns"] == [*names, "prompt", "completion"]
    assert tables[1]["samples"]["data"][1] == [2, 2, 3, 0, 1.0, 0.5, "stop", 4, "p", "c"]


@pytest.mark.parametrize(("outcome", "status"), [("finished", 0), ("stopped", 0), ("paused", 0), ("failed", 1), (None, 1)])
def test_run_that_failed_is_said_to_have_failed(outcome: str | None, status: int, tmp_path: Path, wandb: Noted) -> None:
    WandbTracker(Opening("wandb", "mine", str(tmp_path), {})).close(outcome)
    assert wandb.statuses == [status]
