"""Claims about `lab.sweep.recommendation`: the rule is kept, and no sentence says more than the seeds do."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.lab.sweep.recommendation import Recommendation, ValueResult, recommend


def text_of(told: Recommendation) -> str:
    return " ".join([told.headline, *told.sentences])


SYNCHRONOUS = ValueResult("0", [0.96, 0.97, 0.98], [60.0, 62.0, 58.0])


def test_the_soonest_value_that_is_not_below_the_reference_is_recommended() -> None:
    four = ValueResult("4", [0.965, 0.975, 0.985], [30.0, 31.0, 29.0])
    two = ValueResult("2", [0.961, 0.972, 0.979], [40.0, 41.0, 39.0])
    told = recommend([SYNCHRONOUS, two, four], "0", 0.02)
    assert told.label == "4"
    assert "4: it comes soonest within 0.02 of the final reward of 0, in 0.50 of its time (90% interval 0.4" in told.headline
    assert "2 takes 1.33 times as long as 4" in text_of(told)


def test_a_faster_value_that_ends_below_is_not_recommended() -> None:
    sixteen = ValueResult("16", [0.90, 0.91, 0.92], [10.0, 10.0, 10.0])
    told = recommend([SYNCHRONOUS, sixteen], "0", 0.07)
    assert told.label == "0"
    assert "16 ends lower than 0: by 0.060, 90% interval -0.077 to -0.043." in told.sentences


def test_a_faster_value_may_end_below_by_what_does_not_matter() -> None:
    sixteen = ValueResult("16", [0.90, 0.91, 0.92], [10.0, 10.0, 10.0])
    told = recommend([SYNCHRONOUS, sixteen], "0", 0.08)
    assert told.label == "16"
    assert "is lower by 0.060 (90% interval -0.077 to -0.043), which leaves out a loss of more than 0.08" in told.headline


def test_a_value_of_which_a_seed_never_came_there_is_not_recommended() -> None:
    eight = ValueResult("8", [0.96, 0.97, 0.98], [10.0, None, 10.0])
    told = recommend([SYNCHRONOUS, eight], "0", 0.005)
    assert told.label == "0"
    assert "8: 2 of 3 seeds came within 0.005 of the final reward of 0." in told.sentences


def test_two_values_that_cannot_be_told_apart_are_called_so_with_difference_and_interval() -> None:
    # Both spread by 0.01: t(0.95, 4) = 2.131847, times 0.01 times the root of 2/3, is 0.0174.
    four, eight = ValueResult("4", [0.96, 0.97, 0.98], [30.0, 30.0, 30.0]), ValueResult("8", [0.963, 0.973, 0.983], [20.0] * 3)
    told = recommend([SYNCHRONOUS, four, eight], "0", 0.02)
    assert "4 and 8 cannot be distinguished with 3 seeds: difference +0.003, 90% interval -0.014 to +0.020." in told.sentences


def test_what_may_be_lost_is_said_where_it_is_more_than_the_margin() -> None:
    wide = ValueResult("4", [0.90, 0.97, 1.0], [30.0, 31.0, 29.0])
    assert re.search(r"leaves room for a loss of 0\.\d+, more than 0.02", recommend([SYNCHRONOUS, wide], "0", 0.02).headline)
    narrow = ValueResult("4", [0.97, 0.98, 0.99], [30.0, 31.0, 29.0])
    assert recommend([SYNCHRONOUS, narrow], "0", 0.02).headline.endswith("which leaves out a loss of more than 0.02.")


def test_a_time_that_may_be_chance_is_not_called_sooner() -> None:
    base = ValueResult("0", [0.96, 0.97, 0.98], [20.0, 60.0, 100.0])
    four = ValueResult("4", [0.96, 0.97, 0.98], [19.0, 50.0, 90.0])
    assert "which holds 1: that it is sooner at all is not shown" in recommend([base, four], "0", 0.02).headline


def test_equal_times_are_not_told_apart() -> None:
    four, eight = (ValueResult(label, [0.97, 0.98, 0.99], [30.0, 31.0, 29.0]) for label in ("4", "8"))
    told = recommend([SYNCHRONOUS, four, eight], "0", 0.02)
    assert told.label == "4", "the first of equals"
    assert "In time 8 and 4 cannot be distinguished: the ratio is 1.00" in text_of(told)


def test_one_seed_says_nothing_about_spread_and_nothing_is_recommended() -> None:
    told = recommend([ValueResult("0", [0.9], [60.0]), ValueResult("4", [0.97], [10.0])], "0", 0.02)
    assert told.label is None
    assert "one seed says nothing about the spread" in told.headline
    assert "distinguish" not in text_of(told)


def test_nothing_is_said_before_the_reference_has_run() -> None:
    told = recommend([ValueResult("0", [], []), ValueResult("4", [0.97, 0.98], [1.0, 1.0])], "0", 0.02)
    assert (told.label, told.sentences) == (None, [])
    assert "0, the reference, has no finished run" in told.headline


def test_reference_that_misses_its_own_reward_in_a_seed_leaves_nothing_to_recommend() -> None:
    base = ValueResult("0", [0.5, 0.9], [None, 10.0])
    told = recommend([base], "0", 0.02)
    assert told.label is None
    assert "of no value did every seed come within 0.02" in told.headline


def test_seeds_that_would_tell_the_margin_are_named() -> None:
    """With spreads of 0.01 a margin of 0.01 is an effect of 1: 14 seeds of each at 10% and a power of 80%."""
    told = recommend([SYNCHRONOUS, ValueResult("4", [0.961, 0.971, 0.981], [30.0, 30.0, 30.0])], "0", 0.01)
    assert "To tell a difference of 0.01 between 0 and 4 with a chance of 80% takes 14 seeds of each" in text_of(told)


def test_how_many_pairs_chance_alone_tells_apart_is_said() -> None:
    others = [ValueResult(label, [0.96, 0.97, 0.98], [30.0, 30.0, 30.0]) for label in ("2", "4")]
    assert "3 pairs are compared at 90% each: were all the same, about 0.3 of them would" in text_of(
        recommend([SYNCHRONOUS, *others], "0", 0.02)
    )


@given(
    rewards=st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=4), min_size=1, max_size=4),
    times=st.lists(st.floats(0.1, 1e4) | st.none(), min_size=16, max_size=16),
    margin=st.sampled_from([0.0, 0.02, 0.5]),
)
def test_every_sweep_gets_sentences_and_only_a_value_that_came_there_is_recommended(
    rewards: list[list[float]], times: list[float | None], margin: float
) -> None:
    results = [
        ValueResult(str(index), of_value, times[4 * index : 4 * index + len(of_value)])
        for index, of_value in enumerate(rewards)
    ]
    told = recommend(results, "0", margin)
    assert told.headline
    assert all(sentence.endswith(".") for sentence in told.sentences)
    if told.label is not None:
        assert None not in results[int(told.label)].times_s


@pytest.mark.parametrize("label", ["4", "8"])
def test_a_value_without_finished_runs_is_left_out(label: str) -> None:
    told = recommend([SYNCHRONOUS, ValueResult(label, [], [])], "0", 0.02)
    assert told.label == "0"
    assert told.sentences == []
