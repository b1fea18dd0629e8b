"""The canary's operating characteristic: noise of the published sizes does not quarantine, and wrong weights are caught."""

import numpy as np
import pytest

from tests.learner.dispatch.canary_trials import ENGINES, Case, Engine, Trial, cases

pytestmark = pytest.mark.slow

RIGHT = np.zeros(2 * 64 - 1)


@pytest.mark.parametrize(
    ("name", "num_updates"),
    [
        ("bfloat16", 10_000),
        ("float32, TF32 kernels", 10_000),
        ("bfloat16, mixture of experts", 4000),
        ("fp8 of bfloat16", 2000),
        ("float32", 1000),
    ],
)
def test_noise_quarantines_nobody(name: str, num_updates: int) -> None:
    trials = [Trial(ENGINES[name], seed, RIGHT) for seed in range(100, 120)]
    assert sum(trial.is_wrong(RIGHT, RIGHT) for trial in trials for _ in range(num_updates // len(trials))) == 0


@pytest.mark.parametrize("name", ENGINES)
def test_floor_of_a_first_update_serves_as_well(name: str) -> None:
    for seed in range(20):
        trial = Trial(ENGINES[name], seed, RIGHT, sends_floor=False)
        assert sum(trial.is_wrong(RIGHT, RIGHT) for _ in range(20)) == 0


@pytest.mark.parametrize("name", ["float32, TF32 kernels", "bfloat16", "bfloat16, mixture of experts"])
def test_a_constant_would_have_quarantined_them(name: str) -> None:
    """The noise is not a mild one: the rule before fails on it."""
    trial = Trial(ENGINES[name], 20260, RIGHT)
    assert sum(trial.would_be_wrong(RIGHT, RIGHT) for _ in range(1000)) > 10


def caught(engine: Engine, case: Case, num_comparisons: int) -> int:
    """Return how many of 20 actors are quarantined for wrong weights within so many comparisons."""
    return sum(Trial(engine, seed, case.files).is_caught(case, num_comparisons) for seed in range(20))


@pytest.mark.parametrize("name", ["float32", "float32, TF32 kernels"])
def test_wrong_weights_in_float32_are_caught_at_the_first_comparison(name: str) -> None:
    assert {case.name: caught(ENGINES[name], case, 1) for case in cases()} == {case.name: 20 for case in cases()}


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16, mixture of experts", "fp8 of bfloat16"])
def test_weights_that_are_wrong_beyond_the_noise_are_caught_at_the_first_comparison(name: str) -> None:
    far_off = [case for case in cases() if np.abs(case.right - case.wrong).mean() > 0.5]
    assert len(far_off) == 4
    assert [caught(ENGINES[name], case, 1) for case in far_off] == [20] * 4


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16, mixture of experts", "fp8 of bfloat16"])
def test_one_wrong_row_of_the_vocabulary_is_caught_at_the_second_comparison(name: str) -> None:
    rows = [case for case in cases() if case.name.startswith("two rows")]
    assert [caught(ENGINES[name], case, 2) for case in rows] == [20, 20]


def test_in_bfloat16_every_fault_is_caught_more_often_than_with_a_constant() -> None:
    engine = ENGINES["bfloat16"]
    for case in cases():
        trials = [Trial(engine, seed, case.files) for seed in range(20)]
        before = sum(trial.would_be_wrong(case.right, case.wrong) for trial in trials)
        assert caught(engine, case, 2) >= max(before, 12), case.name
