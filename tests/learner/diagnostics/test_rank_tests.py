"""Rank statistics against numbers worked by hand, and against scipy's."""

import math
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from offbeat.learner.diagnostics.length_bias import average_ranks, mann_whitney, rank_correlation

SAMPLES = st.lists(st.integers(0, 6), min_size=1, max_size=12).map(lambda values: np.array(values, dtype=np.float64))


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    assert average_ranks(np.array([30.0, 10.0, 30.0, 20.0, 30.0])).tolist() == [4.0, 1.0, 4.0, 2.0, 4.0]


def test_effect_and_p_value_of_a_tied_pair_are_those_worked_by_hand() -> None:
    # Pairs of {2, 3} and {1, 2}: 2 > 1, 2 = 2, 3 > 1, 3 > 2, so U = 3.5 of 4; one tie of two values.
    found = mann_whitney(np.array([2.0, 3.0]), np.array([1.0, 2.0]))
    deviation = math.sqrt(4 / 12 * (5 - 6 / 12))
    assert found.effect == 0.75
    assert found.p_value == pytest.approx(math.erfc((3.5 - 2 - 0.5) / deviation / math.sqrt(2)))


@given(SAMPLES, SAMPLES)
@settings(max_examples=60)
def test_mann_whitney_is_scipys(first: np.ndarray, second: np.ndarray) -> None:
    assume(np.ptp(np.concatenate([first, second])) > 0)
    expected = stats.mannwhitneyu(first, second, method="asymptotic")
    found = mann_whitney(first, second)
    assert found.effect == 2 * float(expected.statistic) / (len(first) * len(second)) - 1
    assert found.p_value == pytest.approx(float(expected.pvalue), rel=1e-12)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
@settings(max_examples=60)
def test_rank_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    first, second = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])
    if len({*first}) < 2 or len({*second}) < 2:
        assert rank_correlation(first, second) == 0.0
    else:
        assert rank_correlation(first, second) == pytest.approx(
            float(cast(Any, stats.spearmanr(first, second)).statistic), abs=1e-12
        )
