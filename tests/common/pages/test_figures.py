"""Claims about `common.pages.figures`: long curves are drawn in buckets without loss, and axes fit their values."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.pages.figures import (
    MAX_POINTS,
    Plot,
    bucket,
    figure_json,
    log_layout,
    plot_layout,
    running_mean,
    series,
    step_layout,
)
from offbeat.common.records.rows import StepRow


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


def layout_of(*ys: list[float | None], y: dict[str, Any] | None = None, **trace: Any) -> dict[str, Any]:
    """Return the layout of the figure that draws these curves, as the page gets it."""
    traces = [{"type": "scatter", "x": list(range(len(one))), "y": one, **trace} for one in ys]
    return json.loads(figure_json(Plot("", "", traces, plot_layout("", "", y=y), missing="")))["layout"]


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, [0.0, 1.0]), (4.0, [0.0, 5.0]), (-4.0, [-5.0, 0.0]), (2e-7, [0.0, 2.5e-7])]
)
def test_axis_of_a_constant_begins_at_zero(value: float, expected: list[float]) -> None:
    layout = layout_of([value, value], [value, None])
    assert layout["yaxis"]["range"] == pytest.approx(expected)
    assert [text["text"] for text in layout["annotations"]] == ([] if value else ["all zero"])


def test_axes_of_other_curves_are_left_to_plotly() -> None:
    assert "range" not in layout_of([1.0, 2.0])["yaxis"]
    assert "range" not in layout_of([1.0], [2.0])["yaxis"]
    assert "range" not in layout_of([])["yaxis"]
    assert "range" not in layout_of([1.0], error_y={"array": [0.5]})["yaxis"]
    assert "range" not in layout_of([3.0, 3.0], y={"type": "log"})["yaxis"]
    assert "range" not in layout_of([3.0, 3.0], stackgroup="areas")["yaxis"], "they reach their sum"
    assert layout_of([0.0, 0.0], stackgroup="areas")["yaxis"]["range"] == [0.0, 1.0]
    assert layout_of([3.0, 3.0], y={"range": [0, 9]})["yaxis"]["range"] == [0, 9]
