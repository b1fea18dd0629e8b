"""Chaos: a round whose run is ahead of its plan, or ends before it."""

import sys
from pathlib import Path

import pytest

from offbeat.common.settings.config import Config, DataSection, ModelSection
from tests.chaos import round as chaos_round
from tests.chaos.machine import Clock
from tests.chaos.network import Proxy
from tests.chaos.round import AHEAD_STEPS, Site, is_ahead, run_round
from tests.chaos.schedule import IN_CHECKPOINT, Fault, plan


def test_run_is_ahead_of_a_plan_when_its_next_fault_is_late_and_never_when_none_is_left() -> None:
    left = plan(7, num_steps=60, dead_after_s=3.0)[-2:]
    due = left[0].at_step + AHEAD_STEPS
    assert [is_ahead(left, step) for step in (0, due, due + 1)] == [False, False, True]
    assert not is_ahead([], 60)
    awaiting = [left[0]._replace(kind=kind) for kind in IN_CHECKPOINT]
    assert not any(is_ahead([fault], 60) for fault in awaiting), "a slow run would not come to its checkpoint"


@pytest.mark.slow
def test_fault_that_comes_when_the_learner_has_ended_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services that end by themselves, and no learner among them."""
    monkeypatch.setattr(chaos_round, "PROGRAM", (sys.executable, "-c", "import time; time.sleep(0.5)"))
    config = Config(model=ModelSection(path="model"), data=DataSection(train_data=str(tmp_path / "train.jsonl")))
    network = Proxy()
    (tmp_path / "run").mkdir()
    site = Site(tmp_path / "run", config, tmp_path / "run.toml", tmp_path, 0, network, Clock(tmp_path), None, None, None, {})
    late = Fault("kill learner", "learner", at_step=0, delay_s=0.0, duration_s=0.0, seed=0)
    try:
        result = run_round([late], site, stop=chaos_round.StopRequest())
    finally:
        network.close()
    assert result.violations == []
    assert [one.detail for one in result.happened] == [""]
