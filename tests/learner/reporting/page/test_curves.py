"""Curves keep a bounded number of points, each the mean of the values it stands for."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.learner.reporting.page import live_page as curves
from offbeat.learner.reporting.page.live_page import MOST_POINTS, Curve


@given(values=st.lists(st.floats(-1e6, 1e6), max_size=200), most=st.sampled_from([2, 4, 8]))
def test_points_are_means_of_equally_many_values_but_for_the_last(values: list[float], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "MOST_POINTS", most)
        curve = Curve()
        for index, value in enumerate(values):
            curve.add(index, value)
    xs, ys = curve.points()
    assert len(xs) == len(ys) <= most
    stride = 1
    while len(values) > stride * most:
        stride *= 2
    parts = [values[start : start + stride] for start in range(0, len(values), stride)]
    assert ys == pytest.approx([statistics.fmean(part) for part in parts], abs=1e-6)
    assert xs == sorted(xs)


def test_steps_that_a_resumed_run_makes_again_are_replaced() -> None:
    curve = Curve()
    for version in (1, 2, 3, 4):
        curve.add(version, version)
    curve.add(3, 30.0)
    curve.add(4, 40.0)
    assert curve.points() == ([1, 2, 3, 4], [1, 2, 30, 40])


def test_a_long_run_keeps_its_shape() -> None:
    curve = Curve()
    for version in range(100_000):
        curve.add(version, float(version >= 50_000))
    xs, ys = curve.points()
    assert MOST_POINTS / 2 <= len(xs) <= MOST_POINTS
    assert ys[0] == 0
    assert ys[-1] == 1
    assert next(x for x, y in zip(xs, ys, strict=True) if y > 0.5) == pytest.approx(50_000, abs=200)
