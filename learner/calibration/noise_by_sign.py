"""The noise floor by the sign of the advantage, and the error of the clip fractions that it predicts.

A clip acts on the side that the sign of A chooses, and the noise goes with that sign. Reduced precision has errors that are the
same in every prompt, such as those of the rotary angles, and the reward depends on a few decisive tokens. Where such an error
makes the right choice likelier by a factor e^x, a choice of probability p moves by (1 - p) x, and its alternatives by -p x: the
completions with A > 0 and those with A < 0 move apart. An engine with other kernels shares only a part of the errors.
"""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.learner.calibration.noise_floor import Differences, Floats, NoiseFloor, fit
from offbeat.learner.objectives.bands import ClipBand

LEAST_GROUPS = 10
"""Smallest number of groups with completions of a sign that their noise is fitted to."""
MODEL_ERROR = 0.01
"""Error of a predicted clip fraction besides that of sampling: what a smooth model of a few hundred completions is off by."""
SAMPLING_ERRORS = 2.58
"""Half-width of a 99% interval, in standard errors."""


class NoiseBySign(msgspec.Struct, frozen=True):
    """The noise floors of all completions, and of those whose advantage is above 0, and below 0."""

    every: NoiseFloor
    positive: NoiseFloor
    negative: NoiseFloor

    def expected_clip(self, band: ClipBand, lengths: NDArray[np.int64], positive: Floats, negative: Floats) -> Floats:
        """Return the share of each completion's tokens that noise alone is expected to clip, `[completions]`.

        `positive` and `negative` are the shares of its tokens with an advantage above and below 0. Tokens below the band are
        clipped where A < 0, tokens above it where A > 0, and at a prefix ratio where A < 0, too; at either sign where the
        objective takes both sides.
        """
        below, above = self.positive.beyond(band, lengths)
        negative_below, negative_above = self.negative.beyond(band, lengths)
        of_positive = above + band.takes_both_sides * below
        return positive * of_positive + negative * (
            negative_below + (band.is_prefix_ratio or band.takes_both_sides) * negative_above
        )


def fit_by_sign(differences: Differences) -> NoiseBySign:
    """Fit the noise floors; where fewer than `LEAST_GROUPS` groups have a sign, that of all completions stands for it.

    A completion whose tokens differ in sign counts to the sign of most of them. Raises `ValueError` as `fit` does.
    """
    every = fit(differences)
    balance = differences.positive - differences.negative
    positive, negative = (
        fit(differences.take(chosen)) if len(np.unique(differences.groups[chosen])) >= LEAST_GROUPS else every
        for chosen in (balance > 0, balance < 0)
    )
    return NoiseBySign(every, positive, negative)


def group_error(of_completions: Floats, differences: Differences) -> float:
    """Return the standard error of the mean of these, over groups; at least two groups."""
    of_groups = differences.group_means(of_completions)
    return float(of_groups.std(ddof=1) / math.sqrt(len(of_groups)))


def independent_completions(share: float, error: float, *, num_groups: int, num_completions: int) -> float:
    """Return how many independent completions would measure a clipped share with this standard error: `p (1 - p) / error^2`.

    These are at most all completions, and as many as groups where the error says nothing.
    """
    return min(num_completions, share * (1 - share) / error**2) if error else num_groups


def allowed_difference(predicted: float, *, calibrated: float, measured: float) -> float:
    """Return the largest difference between a predicted and a measured clip fraction that sampling explains, at 99%.

    `calibrated` and `measured` are the numbers of independent completions that either rests on. A share of 0 or 1 among n of
    them is taken for `(n p + 1) / (n + 2)` (Laplace): that none was clipped does not say that none ever is.
    """
    share = (predicted * calibrated + 1) / (calibrated + 2)
    return SAMPLING_ERRORS * math.sqrt(share * (1 - share) * (1 / calibrated + 1 / measured)) + MODEL_ERROR
