"""Claims about `lab.report.figures`: long curves are drawn in buckets without loss, and axes fit their values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.records.rows import StepRow
from offbeat.lab.history import fold_rows
from offbeat.lab.report.figures import MAX_POINTS, bucket, log_layout, running_mean, series, step_layout
from offbeat.lab.report.run_plots import reward_by_task, share_by_task


@given(st.integers(0, 5 * MAX_POINTS))
def test_every_value_is_in_one_bucket_and_in_order(num_values: int) -> None:
    counts, firsts, lasts = (bucket(range(num_values), how) for how in (len, min, max))
    if num_values <= MAX_POINTS:
        assert lasts == list(range(num_values))
        return
    assert len(counts) == MAX_POINTS
    assert sum(counts) == num_values
    assert (firsts[0], lasts[-1]) == (0, num_values - 1)
    assert firsts[1:] == [last + 1 for last in lasts[:-1]]


def test_last_step_of_a_long_run_is_in_its_curve() -> None:
    rows = [StepRow(policy_version=version, metrics={"lag/max": version}) for version in range(1, 2 * MAX_POINTS + 1)]
    versions, largest = series(rows, "lag/max", max)
    assert (versions[0], versions[-1]) == (1.5, 2 * MAX_POINTS - 0.5)
    assert largest[-1] == 2 * MAX_POINTS


def test_series_leaves_out_steps_without_the_metric() -> None:
    rows = [StepRow(policy_version=1, metrics={"lag/max": 3}), StepRow(policy_version=2, metrics={})]
    assert series(rows, "lag/max") == ([1], [3])


def test_running_mean_looks_both_ways() -> None:
    assert running_mean([0.0, 3.0, 6.0, 0.0], 3) == [1.5, 3.0, 3.0, 3.0]


@pytest.mark.parametrize(("steps", "dtick"), [([1, 9], 1), ([1, 10], None), ([], None)])
def test_short_run_has_no_ticks_between_its_steps(steps: list[float], dtick: int | None) -> None:
    assert step_layout("step", steps, "reward")["xaxis"].get("dtick") == dtick


@pytest.mark.parametrize(("values", "dtick"), [([1.0, 300.0], "D2"), ([1.0, 1e4], 1), ([1e-9, 1.0], 2)])
def test_log_axis_has_few_ticks(values: list[float], dtick: object) -> None:
    layout = log_layout([{"x": [0, 1], "y": values}], "seconds", "~g")
    assert layout["yaxis"]["dtick"] == dtick


def test_each_task_has_a_line_where_the_run_tells_tasks_apart() -> None:
    metrics = ({"reward_by_task/sums": 0.25, "reward/mean": 0.5}, {"reward_by_task/sums": 0.75, "reward_by_task/letters": 1.0})
    rows = [StepRow(policy_version=version, metrics=of_step, time=1.0) for version, of_step in enumerate(metrics, start=1)]
    (plot,) = reward_by_task(fold_rows(rows))
    assert [(trace["name"], trace["x"], trace["y"]) for trace in plot.traces] == [
        ("letters", [2], [1.0]),
        ("sums", [1, 2], [0.25, 0.75]),
    ]
    assert reward_by_task(fold_rows([StepRow(policy_version=1, metrics={"reward/mean": 0.5}, time=1.0)])) == []


def test_each_task_has_a_line_of_its_share_where_the_run_had_a_curriculum() -> None:
    metrics = ({"curriculum/easy": 1.0, "curriculum/hard": 0.0}, {"curriculum/easy": 0.5, "curriculum/hard": 1.0})
    rows = [StepRow(policy_version=version, metrics=of_step, time=1.0) for version, of_step in enumerate(metrics, start=1)]
    (plot,) = share_by_task(fold_rows(rows))
    assert [(trace["name"], trace["x"], trace["y"]) for trace in plot.traces] == [
        ("easy", [1, 2], [1.0, 0.5]),
        ("hard", [1, 2], [0.0, 1.0]),
    ]
    assert share_by_task(fold_rows([StepRow(policy_version=1, metrics={"reward_by_task/easy": 0.5}, time=1.0)])) == []
