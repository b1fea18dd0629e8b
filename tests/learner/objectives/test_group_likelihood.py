"""The likelihood of a group, against its printed formula and against the authors' arithmetic on hand-made numbers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.learner.objectives.objective import group_logprob

COMPLETIONS = st.lists(st.lists(st.floats(-8.0, 0.0, width=32), min_size=1, max_size=6), min_size=1, max_size=8)


def arrays(completions: list[list[float]]) -> list[np.ndarray]:
    return [np.array(logprobs, dtype=np.float32) for logprobs in completions]


def test_it_is_the_mean_of_the_likelihoods_per_token_weighed_by_themselves() -> None:
    # Likelihoods per token: sqrt(0.5 * 0.5) = 0.5, and 0.25.
    group = arrays([[math.log(0.5), math.log(0.5)], [math.log(0.25)]])
    assert math.exp(group_logprob(group)) == pytest.approx((0.5**2 + 0.25**2) / (0.5 + 0.25))


@given(COMPLETIONS)
def test_it_is_the_printed_formula(completions: list[list[float]]) -> None:
    likelihoods = [math.exp(sum(logprobs) / len(logprobs)) for logprobs in completions]
    expected = sum(q * q for q in likelihoods) / sum(likelihoods)
    assert group_logprob(arrays(completions)) == pytest.approx(math.log(expected), abs=1e-5)


@given(COMPLETIONS, st.randoms())
def test_it_lies_among_the_likelihoods_and_knows_no_order(completions: list[list[float]], random) -> None:
    means = [float(np.mean(logprobs)) for logprobs in arrays(completions)]
    found = group_logprob(arrays(completions))
    assert min(means) - 1e-6 <= found <= max(means) + 1e-6
    random.shuffle(completions)
    assert group_logprob(arrays(completions)) == pytest.approx(found, abs=1e-9)


def test_very_unlikely_groups_do_not_vanish_and_empty_completions_do_not_count() -> None:
    unlikely = arrays([[-900.0], [-901.0]])
    expected = -900.0 + math.log((1 + math.exp(-2)) / (1 + math.exp(-1)))
    assert group_logprob([*unlikely, np.zeros(0, dtype=np.float32)]) == pytest.approx(expected)
    assert group_logprob([np.zeros(0, dtype=np.float32)]) == 0.0
