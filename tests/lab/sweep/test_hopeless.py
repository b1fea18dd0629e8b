"""Claims about `lab.sweep.plan`, by hand-computed numbers."""

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from offbeat.lab.history import fold_rows
from offbeat.lab.sweep import plan
from offbeat.lab.sweep.estimates import Curve
from offbeat.lab.sweep.plan import Hopeless, evaluations_of, mark_hopeless, read_hopeless, why_hopeless
from tests.common.records.row_lines import rows_from


def evaluated(*rewards: float, interval: int = 5) -> Curve:
    return Curve([float(interval * index) for index in range(len(rewards))], list(rewards))


def test_a_run_below_its_start_is_hopeless_once_its_lag_is_over() -> None:
    fallen = evaluated(0.2, *[0.5] * 4, *[0.1] * 4)
    assert fallen.xs[-1] == plan.HOPELESS_AFTER
    assert why_hopeless(fallen, lag=0) == Hopeless(40, 0.1, 0.2)
    assert why_hopeless(fallen, lag=1) is None
    assert why_hopeless(evaluated(0.2, *[0.5] * 4, *[0.16] * 4), lag=0) is None, "within the margin"
    assert why_hopeless(evaluated(0.2, *[0.5] * 4, 0.7, 0.1, 0.1, 0.1), lag=0) is None, "the mean of the last ones counts"
    assert why_hopeless(evaluated(0.2, 0.0, 0.0, 0.0, interval=20), lag=0) is None, "too few evaluations"


def test_nothing_is_said_without_an_evaluation_before_the_first_step() -> None:
    fallen = evaluated(0.9, *[0.5] * 4, *[0.1] * 8)
    assert why_hopeless(fallen, lag=0) is not None
    assert why_hopeless(Curve(fallen.xs[1:], fallen.ys[1:]), lag=0) is None
    assert why_hopeless(Curve([], []), lag=0) is None


@given(rewards=st.lists(st.floats(0, 1), min_size=1, max_size=30), lag=st.integers(0, 64))
def test_a_run_that_is_never_below_its_start_is_never_hopeless(rewards: list[float], lag: int) -> None:
    assert why_hopeless(evaluated(min(rewards), *rewards), lag=lag) is None


def step_rows(*rewards: float) -> list[dict[str, Any]]:
    return [
        {"kind": "step", "time": 1.0, "policy_version": index, "reward/mean": reward}
        for index, reward in enumerate(rewards, start=1)
    ]


def evaluation(version: int, reward: float | None) -> dict[str, Any]:
    numbers = {"length": 1.0, "num_completions": 8, "num_failed": 0}
    return {"kind": "eval", "time": 1.0, "policy_version": version, "reward": reward, **numbers}


def test_steps_stand_for_evaluations_where_a_run_has_none() -> None:
    curve = evaluations_of(fold_rows(rows_from(step_rows(0.5, 0.1, 0.2, 0.3, 0.4, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0))))
    # The first step's rollouts are of the first weights. The eleventh step begins a block of five.
    assert (curve.xs, curve.ys) == ([0.0, 5.0, 10.0], [0.5, 0.3, 0.9])
    later = evaluations_of(fold_rows(rows_from(step_rows(0.5, 0.1)[1:])))
    assert (later.xs, later.ys) == ([1.0], [0.1]), "without the first step nothing is known of the first weights"
    assert evaluations_of(fold_rows([])) == Curve([], [])


def test_evaluations_are_taken_by_version_and_those_that_failed_are_not() -> None:
    rows = [evaluation(20, 0.4), *step_rows(0.9), evaluation(0, 0.2), evaluation(40, None)]
    curve = evaluations_of(fold_rows(rows_from(rows)))
    assert (curve.xs, curve.ys) == ([0.0, 20.0], [0.2, 0.4])


def test_mark_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_hopeless(tmp_path) is None
    mark_hopeless(tmp_path, Hopeless(40, 0.1, 0.2))
    assert read_hopeless(tmp_path) == Hopeless(40, 0.1, 0.2)
    assert str(read_hopeless(tmp_path)) == "reward 0.1 at step 40, 0.2 before the first"
