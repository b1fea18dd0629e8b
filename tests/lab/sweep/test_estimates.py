"""Claims about `lab.sweep.estimates`: textbook numbers, and properties that hold for any numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from offbeat.lab.sweep.estimates import (
    Curve,
    average_curves,
    compare,
    compare_ratio,
    estimate,
    first_reach,
    seeds_needed,
    trailing_mean,
)

REWARDS = st.lists(st.floats(-10, 10).map(lambda value: round(value, 3)), min_size=2, max_size=6)


def test_interval_of_a_mean_is_students() -> None:
    told = estimate([1.0, 2.0, 3.0])
    assert told is not None
    assert (told.mean, told.std, told.num_seeds) == (2.0, 1.0, 3)
    # t(0.95, 2 degrees of freedom) = 2.919986, over the root of 3.
    assert (told.low, told.high) == (pytest.approx(2 - 1.685855, abs=1e-6), pytest.approx(2 + 1.685855, abs=1e-6))


def test_one_seed_has_a_mean_and_no_spread() -> None:
    told = estimate([0.5])
    assert told is not None
    assert (told.mean, told.std, told.low, told.high, told.num_seeds) == (0.5, None, None, None, 1)
    assert estimate([]) is None


def test_two_values_are_compared_by_welch() -> None:
    comparison = compare([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert comparison is not None
    # Squared errors 1/3 and 4/3; degrees of freedom (5/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 50/17.
    error, degrees = math.sqrt(5 / 3), 50 / 17
    half = stats.t.ppf(0.95, degrees) * error
    assert comparison.difference == 2.0
    assert (comparison.low, comparison.high) == (pytest.approx(2 - half), pytest.approx(2 + half))
    assert comparison.p_value == pytest.approx(2 * stats.t.sf(2 / error, degrees))
    assert comparison.num_seeds == (3, 3)
    assert not comparison.is_told_apart


def test_welch_is_scipys_where_numbers_of_seeds_differ() -> None:
    first, second = [0.91, 0.93, 0.90], [0.95, 0.99, 0.97, 0.96, 0.98]
    comparison, theirs = compare(first, second), stats.ttest_ind(second, first, equal_var=False)
    assert comparison is not None
    assert comparison.p_value == pytest.approx(theirs.pvalue)  # pyright: ignore[reportAttributeAccessIssue]
    interval = theirs.confidence_interval(0.9)
    assert (comparison.low, comparison.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert comparison.is_told_apart


def test_a_single_seed_tells_nothing_apart() -> None:
    comparison = compare([0.1], [0.9, 0.9, 0.9])
    assert comparison is not None
    assert (comparison.difference, comparison.low, comparison.p_value) == (pytest.approx(0.8), None, None)
    assert not comparison.is_told_apart
    assert not comparison.is_told_apart_from(100.0)


def test_runs_without_any_spread_are_told_apart_unless_they_are_equal() -> None:
    same, other = compare([1.0, 1.0], [1.0, 1.0, 1.0]), compare([1.0, 1.0], [0.5, 0.5])
    assert same is not None
    assert (same.difference, same.p_value, same.is_told_apart) == (0.0, 1.0, False)
    assert other is not None
    assert (other.difference, other.p_value, other.is_told_apart) == (-0.5, 0.0, True)


def test_ratio_is_of_geometric_means() -> None:
    ratio = compare_ratio([10.0, 1000.0], [10.0, 40.0])
    assert ratio is not None
    assert ratio.difference == pytest.approx(0.2)
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low * ratio.high == pytest.approx(0.2**2), "symmetric in logs"
    assert not ratio.is_told_apart_from(1)


@pytest.mark.parametrize(("effect", "num_seeds"), [(1.0, 17), (0.8, 26), (0.5, 64), (0.2, 394)])
def test_seeds_needed_are_those_of_the_power_tables(effect: float, num_seeds: int) -> None:
    """Cohen 1988: two-sided, at 5%, with a power of 80%."""
    assert seeds_needed(3.0, 3.0, 3.0 * effect, confidence=0.95) == num_seeds


def test_seeds_needed_without_spread_or_without_end() -> None:
    assert seeds_needed(0.0, 0.0, 0.02) == 2
    assert seeds_needed(1.0, 1.0, 0.001) is None
    assert seeds_needed(1.0, 1.0, 0.0) is None


def test_one_sided_spread_needs_as_many_seeds_as_welch_says() -> None:
    """With one spread alone Welch has n - 1 degrees of freedom, with two equal ones 2(n - 1)."""
    alone, both = seeds_needed(1.0, 0.0, 1.0), seeds_needed(math.sqrt(0.5), math.sqrt(0.5), 1.0)
    assert alone is not None
    assert both is not None
    assert alone > both


def test_curves_are_averaged_where_all_of_them_are() -> None:
    band = average_curves([Curve([0.0, 10.0], [0.0, 1.0]), Curve([2.0, 4.0, 8.0], [1.0, 1.0, 0.0])], num_points=4)
    assert band is not None
    assert band.xs == pytest.approx([2.0, 4.0, 6.0, 8.0])
    assert band.means == pytest.approx([0.6, 0.7, 0.55, 0.4])
    # Half of the interval of two numbers: t(0.95, 1) = 6.313752 times half their distance.
    assert [high - mean for high, mean in zip(band.highs, band.means, strict=True)] == pytest.approx(
        [6.313752 * distance / 2 for distance in (0.8, 0.6, 0.1, 0.8)], rel=1e-6
    )
    assert [mean - low for low, mean in zip(band.lows, band.means, strict=True)] == pytest.approx(
        [high - mean for high, mean in zip(band.highs, band.means, strict=True)]
    )


def test_curve_of_one_seed_has_a_band_without_width() -> None:
    band = average_curves([Curve([1.0, 2.0], [0.0, 1.0])], num_points=3)
    assert band is not None
    assert band.lows == band.means == band.highs == pytest.approx([0.0, 0.5, 1.0])


def test_curves_without_a_common_range_have_no_mean() -> None:
    assert average_curves([Curve([0.0, 1.0], [0.0, 0.0]), Curve([2.0, 3.0], [0.0, 0.0])]) is None
    assert average_curves([Curve([], []), Curve([2.0], [0.0])]) is None
    assert average_curves([]) is None


def test_trailing_mean_begins_with_the_first_full_window() -> None:
    curve = trailing_mean(Curve([1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 1.0, 4.0]), 2)
    assert (curve.xs, curve.ys) == ([2.0, 3.0, 4.0], [0.5, 1.0, 2.5])
    short = trailing_mean(Curve([1.0, 2.0], [0.0, 1.0]), 10)
    assert (short.xs, short.ys) == ([2.0], [0.5])
    assert trailing_mean(Curve([], []), 10) == Curve([], [])


def test_target_is_reached_at_the_first_point_that_is_as_high() -> None:
    curve = Curve([1.0, 2.0, 3.0], [0.2, 0.5, 0.4])
    assert first_reach(curve, 0.5) == 2.0
    assert first_reach(curve, 0.51) is None


@given(first=REWARDS, second=REWARDS, shift=st.floats(-5, 5), scale=st.floats(0.5, 4))
def test_comparison_does_not_depend_on_order_origin_or_unit(
    first: list[float], second: list[float], shift: float, scale: float
) -> None:
    there, back = compare(first, second), compare(second, first)
    moved = compare([scale * (value + shift) for value in first], [scale * (value + shift) for value in second])
    assert there is not None
    assert back is not None
    assert moved is not None
    assert there.low is not None
    assert there.high is not None
    assert there.low <= there.difference <= there.high
    assert (back.low, back.high) == (pytest.approx(-there.high), pytest.approx(-there.low))
    assert moved.low == pytest.approx(scale * there.low, abs=1e-6)
    assert back.is_told_apart == there.is_told_apart


@given(first=REWARDS, second=REWARDS)
def test_told_apart_is_a_p_value_below_a_tenth(first: list[float], second: list[float]) -> None:
    comparison = compare(first, second)
    assert comparison is not None
    assert comparison.p_value is not None
    if abs(comparison.p_value - 0.1) > 1e-9:
        assert comparison.is_told_apart == (comparison.p_value < 0.1)
