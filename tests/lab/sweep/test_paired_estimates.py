"""Claims about `lab.sweep.estimates`: Scipy's paired test, hand-computed corrections, and what is compared with what."""

import pytest
from scipy import stats

from offbeat.lab.sweep.estimates import compare_pairs, compare_with_baseline, holm


def test_pairs_of_one_seed_are_compared_by_their_differences() -> None:
    first, second = {0: 0.1, 1: 0.5, 2: 0.9, 7: 0.0}, {2: 1.0, 1: 0.7, 0: 0.2, 8: 1.0}
    comparison = compare_pairs(first, second)
    theirs = stats.ttest_rel([0.2, 0.7, 1.0], [0.1, 0.5, 0.9])
    assert comparison is not None
    assert (comparison.difference, comparison.num_seeds) == (pytest.approx(0.4 / 3), (3, 3))
    assert comparison.p_value == pytest.approx(theirs.pvalue)  # pyright: ignore[reportAttributeAccessIssue]
    interval = theirs.confidence_interval(0.95)  # pyright: ignore[reportAttributeAccessIssue]
    assert (comparison.low, comparison.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    one = compare_pairs({0: 0.25}, {0: 0.5})
    assert one is not None
    assert (one.difference, one.low, one.p_value) == (0.25, None, None)
    assert compare_pairs({0: 0.1}, {1: 0.2}) is None
    same, other = compare_pairs({0: 0.0, 1: 0.5}, {0: 0.0, 1: 0.5}), compare_pairs({0: 0.0, 1: 0.5}, {0: 0.25, 1: 0.75})
    assert same is not None
    assert other is not None
    assert (same.p_value, other.p_value, other.low) == (1.0, 0.0, 0.25)


def test_holm_multiplies_the_smallest_most_and_keeps_their_order() -> None:
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.02, 0.3, 0.9]) == pytest.approx([0.06, 0.6, 0.9])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_values_are_compared_with_the_baseline_and_corrected_for_as_many_tests() -> None:
    rewards = {
        "base": {0: 0.8, 1: 0.6, 2: 0.5},
        "more": {0: 0.9, 1: 0.8},
        "less": {0: 0.7, 1: 0.2},
        "alone": {0: 0.9},
        "other": {7: 0.9},
    }
    found = compare_with_baseline(rewards, "base")
    assert list(found) == ["more", "less", "alone"], "without a common seed there is no difference"
    more, less, alone = found.values()
    # Differences 0.1 and 0.2: t(1) = 0.15 / 0.05 = 3, p = 1 - 2 atan(3) / pi = 0.2048; -0.1 and -0.4: p = 0.3440.
    assert more.compared.difference == pytest.approx(0.15)
    assert less.compared.difference == pytest.approx(-0.25)
    # Two tests: the smaller p doubles, and the larger is at least that. One pair is no test.
    assert more.adjusted_p == pytest.approx(0.40967, abs=1e-5)
    assert less.adjusted_p == pytest.approx(0.40967, abs=1e-5)
    assert alone.adjusted_p is None
    assert not any(one.is_significant for one in found.values())


def test_difference_is_significant_after_the_correction_alone() -> None:
    base = {0: 0.0, 1: 0.0, 2: 0.0}
    # t(2) = 6.93, p = 0.0202: significant by itself, and of two, but not of three such tests.
    good = {0: 0.15, 1: 0.2, 2: 0.25}
    two = compare_with_baseline({"base": base, "a": good, "b": good}, "base")
    assert two["a"].compared.p_value == pytest.approx(0.0202, abs=1e-4)
    assert two["a"].is_significant
    three = compare_with_baseline({"base": base, "a": good, "b": good, "c": good}, "base")
    assert not three["a"].is_significant
    assert compare_with_baseline({"a": good}, "base") == {}
