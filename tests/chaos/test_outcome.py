"""A run that stopped early, left no model or did not learn is seen."""

from pathlib import Path

import msgspec

from offbeat.common.records.rows import EvalRow, EventRow, LedgerSums, StepRow
from tests.chaos.outcome import check_learning, check_outcome
from tests.lab.test_audit import final_row, rows


def test_run_that_did_not_finish_is_seen(tmp_path: Path) -> None:
    final = final_row(10, LedgerSums(0, 0, {}, 0, 0))
    (tmp_path / "model").mkdir()
    assert check_outcome(tmp_path, 10).violations == ["none at step 0 of 10", "there is no trained model"]
    (tmp_path / "model" / "model.safetensors").touch()
    assert check_outcome(rows(tmp_path, final), 10).violations == []
    assert check_outcome(tmp_path, 11).violations == ["finished at step 10 of 11"]
    # A learner that was started again has not said how it ended.
    rows(tmp_path, EventRow(event="run_started", detail=""))
    assert check_outcome(tmp_path, 10).violations == ["none at step 0 of 10"]


def test_run_that_did_not_learn_is_seen(tmp_path: Path) -> None:
    steps = [StepRow(policy_version=version, metrics={"reward/mean": 0.5 + version / 20}) for version in range(11)]
    evaluation = EvalRow(policy_version=10, reward=0.95, length=1.0, num_completions=1, num_failed=0)
    assert check_learning(rows(tmp_path, *steps, evaluation), 0.7).violations == []
    assert check_learning(tmp_path, 0.9).violations == ["last 10 steps: 0.775"]
    # A step that was done again after a restart counts as last done.
    rows(tmp_path, StepRow(policy_version=10, metrics={"reward/mean": 0.0}), msgspec.structs.replace(evaluation, reward=0.2))
    assert check_learning(tmp_path, 0.7).violations == ["last 10 steps: 0.675", "held out: 0.200"]
