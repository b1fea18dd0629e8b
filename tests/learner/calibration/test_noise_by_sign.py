"""The noise floor by the sign of the advantage predicts what a clip takes where the noise goes with that sign."""

import math

import numpy as np
import pytest

from offbeat.learner.calibration.bound_noise import (
    LEAST_GROUPS,
    NoiseBySign,
    allowed_difference,
    expected_touched,
    fit_by_sign,
    group_error,
    independent_completions,
    measured_touched,
)
from offbeat.learner.calibration.noise_floor import Differences, fit
from offbeat.learner.objectives.bands import ClipBand
from offbeat.learner.objectives.correction_rules import CorrectionRule
from tests.learner.calibration.test_noise_floor import GSPO, alike, normal_floor, sample

SHIFT = 1.6e-3
"""Shift of `log s` where A > 0, against the sign: as on a processor whose kernels round as the learner's do not."""


def shifted(seed: int, shift: float = SHIFT) -> Differences:
    """Return 1,000 groups of eight completions of six tokens, a quarter with A > 0: decisive tokens move them apart."""
    noise = sample(8000, seed=seed, kl=5e-5, lengths=(6, 7))
    is_right = np.random.default_rng(seed).random(8000) < 0.25
    moves = np.where(is_right, -shift, shift / 3)
    return Differences(
        noise.lengths,
        noise.log_ratios + np.repeat(moves, noise.lengths),
        np.repeat(np.where(is_right, 1.0, -1.0), noise.lengths),
        np.arange(8000) // 8,
    )


def predicted(noise: NoiseBySign, band: ClipBand, others: Differences) -> float:
    return float(noise.expected_clip(band, others.lengths, others.positive, others.negative).mean())


@pytest.mark.parametrize(
    "band", [GSPO, ClipBand(2e-3, 2e-3, True), ClipBand(0.01, 0.01, False), ClipBand(2e-3, 2e-3, False, True)]
)
def test_clip_of_noise_that_goes_with_the_sign_is_predicted_for_other_groups(band: ClipBand) -> None:
    seen, unseen = shifted(0, 5 * SHIFT), shifted(1, 5 * SHIFT)
    measured = float(unseen.clipped(band).mean())
    assert predicted(fit_by_sign(seen), band, unseen) == pytest.approx(measured, abs=0.02)
    # One noise for both signs would say too much.
    assert predicted(alike(fit(seen)), band, unseen) > measured + 0.05


def test_each_sign_is_clipped_by_its_own_noise_on_its_own_side() -> None:
    quiet, loud = normal_floor(1e-9), normal_floor(6.4e-4)
    lengths, shares = np.array([1000]), (np.array([0.25]), np.array([0.5]))
    below, above = loud.beyond(GSPO, lengths)
    assert NoiseBySign(quiet, loud, quiet).expected_clip(GSPO, lengths, *shares) == pytest.approx(0.25 * above, abs=1e-6)
    assert NoiseBySign(quiet, quiet, loud).expected_clip(GSPO, lengths, *shares) == pytest.approx(0.5 * below, abs=1e-6)
    prefix = GSPO._replace(is_sequence_ratio=False, is_prefix_ratio=True)
    below, above = loud.beyond(prefix, lengths)
    of_negative = NoiseBySign(quiet, quiet, loud).expected_clip(prefix, lengths, *shares)
    assert of_negative == pytest.approx(0.5 * (below + above), abs=1e-6)
    both = ClipBand(1e-3, 2e-3, is_sequence_ratio=False, takes_both_sides=True)
    below, above = loud.beyond(both, lengths)
    for floors, share in (((loud, quiet), 0.25), ((quiet, loud), 0.5)):
        found = NoiseBySign(quiet, *floors).expected_clip(both, lengths, *shares)
        assert found == pytest.approx(share * (below + above), abs=1e-6)
    measured = shifted(0)
    assert measured.clipped(both).mean() == pytest.approx(
        sum(side[measured.positive + measured.negative > 0].sum() for side in measured.beyond(both)) / len(measured.lengths)
    )


def test_mask_of_negative_advantages_is_predicted_by_their_noise() -> None:
    seen, unseen = shifted(0), shifted(1)
    rule = CorrectionRule("opsm", 0.0, 1e-3)
    measured = float(measured_touched(unseen, rule).mean())
    assert expected_touched(fit_by_sign(seen), rule, unseen).mean() == pytest.approx(measured, abs=0.015)
    assert expected_touched(alike(fit(seen)), rule, unseen).mean() > measured + 0.03


def test_sign_of_too_few_groups_has_the_noise_of_all_completions() -> None:
    differences = shifted(0)
    for num_groups, is_known in ((LEAST_GROUPS - 1, False), (LEAST_GROUPS, True)):
        rare = differences.take((differences.negative > 0) | (differences.groups < num_groups))
        assert len(np.unique(rare.groups[rare.positive > 0])) <= num_groups
        some = differences.take(differences.groups < 100)
        first = np.unique(some.groups[some.positive > 0])[:num_groups]
        noise = fit_by_sign(some.take((some.negative > 0) | np.isin(some.groups, first)))
        assert (noise.positive != noise.every) == is_known
        assert noise.negative != noise.every


def test_completion_of_both_signs_counts_to_that_of_most_tokens() -> None:
    differences = shifted(0)
    first_tokens = np.cumsum(differences.lengths) - differences.lengths
    mixed = differences.advantages.copy()
    mixed[first_tokens] *= -1
    assert fit_by_sign(differences._replace(advantages=mixed)) == fit_by_sign(differences)


def test_error_is_that_of_whole_groups_in_whatever_order_their_completions_come() -> None:
    lengths, groups = np.ones(6, dtype=np.int64), np.array([7, 3, 7, 3, 5, 5])
    differences = Differences(lengths, np.zeros(6), np.ones(6), groups)
    shares = np.array([1.0, 0.0, 1.0, 0.5, 0.0, 0.5])
    # Means of groups 3, 5 and 7: 0.25, 0.25, 1.
    assert differences.group_means(shares) == pytest.approx([0.25, 0.25, 1.0])
    assert group_error(shares, differences) == pytest.approx(math.sqrt(0.1875 / 3))


def test_groups_of_joined_parts_stay_apart() -> None:
    part = Differences(np.ones(3, dtype=np.int64), np.zeros(3), np.ones(3), np.array([0, 0, 2]))
    joined = Differences.join([part, part, part])
    assert joined.groups.tolist() == [0, 0, 2, 3, 3, 5, 6, 6, 8]
    assert Differences.join([part._replace(groups=part.groups + 1)]).group_means(np.ones(3)).tolist() == [1, 1]


def test_number_of_independent_completions_lies_between_groups_and_completions() -> None:
    assert independent_completions(0.3, 0.0229, num_groups=128, num_completions=1024) == pytest.approx(400.4, abs=0.1)
    assert independent_completions(0.3, 0.001, num_groups=128, num_completions=1024) == 1024
    assert independent_completions(0.0, 0.0, num_groups=128, num_completions=1024) == 128


def test_allowed_difference_is_that_of_two_samples_of_one_share() -> None:
    random = np.random.default_rng(0)
    for share, calibrated, measured in ((0.3, 400, 100), (0.02, 400, 100), (0.5, 128, 32)):
        first, second = (random.binomial(size, share, 20_000) / size for size in (calibrated, measured))
        allowed = np.array([allowed_difference(value, calibrated=calibrated, measured=measured) for value in first[:2000]])
        beyond = float((np.abs(first[:2000] - second[:2000]) > allowed).mean())
        assert beyond < 0.015
    # None clipped of 128 does not allow only the model's error.
    assert allowed_difference(0.0, calibrated=128, measured=32) > 0.03
