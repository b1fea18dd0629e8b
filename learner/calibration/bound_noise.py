"""The share of tokens that bounds of the objective touch for the noise of engine log-probs alone, with nothing stale.

A bound touches a token where a clip takes its gradient, a mask drops it, a truncation cuts its weight, or M2PO leaves it out.
Every share is a mean over completions of the share of their tokens.

A clip acts on the side that the sign of A chooses, and the noise goes with that sign. Reduced precision has errors that are the
same in every prompt, such as those of the rotary angles, and the reward depends on a few decisive tokens. Where such an error
makes the right choice likelier by a factor e^x, a choice of probability p moves by (1 - p) x, and its alternatives by -p x: the
completions with A > 0 and those with A < 0 move apart. An engine with other kernels shares only a part of the errors.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, assert_never

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from offbeat.common.settings.corrections import CORRECTIONS, CorrectionChoice
from offbeat.learner.calibration.noise_floor import (
    NOISE_CLIP_SHARE,
    Differences,
    Floats,
    NoiseFloor,
    fit,
    inverse,
    round_up,
    sample_noise,
)
from offbeat.learner.objectives.bands import ClipBand
from offbeat.learner.objectives.correction_rules import AnyCorrection, CorrectionRule, apply_correction
from offbeat.learner.objectives.losses import LOG_RATIO_BOUND, m2po_cutoff

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


_ROWS_AT_ONCE = 64
"""Completions that a correction is called with at once."""
_SAMPLED_TOKENS = 200_000
"""Tokens of noise that are sampled for a correction whose share has no closed form, unless `_MOST_COPIES` are fewer."""
_MOST_COPIES = 100
"""Samples of each given length, at most."""
_NUM_QUANTILES = 20_001
"""Tokens that stand for the distribution of a token's noise."""


class BoundCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The share of tokens that a correction, or M2PO's threshold, touches at lag 0, predicted and measured.

    Predictions are of models fitted to one half of the groups, for the other half.
    """

    setting: str
    """`loss.correction`, or `loss.objective` for m2po."""
    value: str
    """The correction with its bounds, or the objective with its threshold."""
    predicted: float
    measured: float
    recommended: str | None
    """The narrowest bounds above the noise (`recommend_bounds`, `recommend_m2_threshold`); None where none can be told."""


class _Bounded(NamedTuple):
    """The quantity that a correction bounds, under the noise."""

    below: Callable[[float], Floats]
    """Returns the probability of each completion, or of each of its tokens, that the quantity is below a value."""
    low: float
    """The quantity's lower bound, -inf for none."""
    high: float
    """The quantity's upper bound, inf for none."""


def expected_touched(noise: NoiseBySign, rule: AnyCorrection, others: Differences) -> Floats:
    """Return the share of each completion's tokens that noise is expected to mask or to truncate, `[completions]`.

    Takes only the lengths and the advantages of `others`. `opsm` masks where A < 0, with the noise of that sign; the others
    act at any sign, with that of all. The user's own correction is called with sampled noise.
    """
    is_opsm = isinstance(rule, CorrectionRule) and rule.name == "opsm"
    floor = noise.negative if is_opsm else noise.every
    if not isinstance(rule, CorrectionRule):
        return measured_touched(sample_noise(floor, others, np.random.default_rng(0)), rule)
    bounded = _bounded(floor, rule, others.lengths)
    below = bounded.below(bounded.low) if bounded.low > -math.inf else np.zeros(len(others.lengths))
    above = 1 - bounded.below(bounded.high) if bounded.high < math.inf else np.zeros(len(others.lengths))
    return (below + above) * (others.negative if is_opsm else 1.0)


def measured_touched(differences: Differences, rule: AnyCorrection) -> Floats:
    """Return the share of each completion's tokens that the correction masks or truncates, `[completions]`."""
    touched: list[NDArray[np.float64]] = []
    for log_rho, mask, advantages in _padded(differences):
        weights = apply_correction(rule, log_rho, mask, advantages)
        at_bound = weights == 0
        if isinstance(rule, CorrectionRule) and rule.truncates:
            at_bound = (weights == rule.low) | (weights == rule.high)
        touched.append(((at_bound & mask).sum(dim=-1) / mask.sum(dim=-1)).double().numpy())
    return np.concatenate(touched)


def recommend_bounds(floor: NoiseFloor, rule: AnyCorrection, lengths: NDArray[np.int64]) -> CorrectionChoice | None:
    """Return the narrowest bounds beyond either of which noise alone puts at most `NOISE_CLIP_SHARE` of these completions.

    The bounds are never narrower than the correction's own, and rounded outward to two digits. None for the user's own
    correction, and for `segment_mask`: the lengths of turns are not known.
    """
    if not isinstance(rule, CorrectionRule) or rule.name == "segment_mask":
        return None
    own = CORRECTIONS[rule.name]
    below = _bounded(floor, rule, lengths).below

    def share(value: float) -> float:
        return float(below(value).mean())

    lowest, highest = inverse(share, NOISE_CLIP_SHARE)[0], inverse(share, 1 - NOISE_CLIP_SHARE)[1]
    match rule.name:
        case "k2_mask" | "k3_mask":
            return CorrectionChoice(rule.name, None, max(own.high, round_up(highest)))
        case "opsm":
            return CorrectionChoice(rule.name, None, max(own.high, round_up(-lowest)))
        case _:
            assert own.low is not None, "a correction that bounds a ratio has a lower bound"
            low, high = 1 - round_up(-math.expm1(lowest)), 1 + round_up(math.expm1(highest))
            return CorrectionChoice(rule.name, min(own.low, round(max(0.0, low), 9)), max(own.high, round(high, 9)))


def expected_dropped(floor: NoiseFloor, threshold: float) -> float:
    """Return the share of the tokens with an advantage that M2PO drops for noise alone, signs of advantages being even.

    Half of the tokens are pushed away from 1 by their advantage, and these have the distribution of all tokens.
    """
    squared = torch.from_numpy(np.square(_token_sample(floor)))
    return 0.5 * float((squared >= m2po_cutoff(squared, threshold=threshold)).double().mean())


def measured_dropped(differences: Differences, threshold: float) -> float:
    """Return the share of the tokens that M2PO drops in one step of all completions."""
    ratios, advantages = differences.log_ratios, differences.advantages
    squared = np.where(((advantages > 0) & (ratios > 0)) | ((advantages < 0) & (ratios < 0)), np.square(ratios), -1.0)
    cutoff = m2po_cutoff(torch.from_numpy(squared[squared >= 0]), threshold=threshold)
    return float((squared >= cutoff).mean())


def recommend_m2_threshold(floor: NoiseFloor, own: float) -> float:
    """Return the smallest threshold at which M2PO drops no token for noise alone, at least `own`, rounded up to two digits."""
    return max(own, round_up(float(np.square(_token_sample(floor)).mean())))


def _bounded(floor: NoiseFloor, rule: CorrectionRule, lengths: NDArray[np.int64]) -> _Bounded:
    log_low, log_high = (math.log(rule.low) if rule.low > 0 else -math.inf), math.log(rule.high)

    def of_tokens(value: float) -> Floats:
        return np.full(len(lengths), floor.tokens_below(value))

    def of_means(value: float) -> Floats:
        return floor.sequences_below(value, lengths)

    def of_products(value: float) -> Floats:
        return floor.sequences_below(value / lengths, lengths)

    match rule.name:
        case "token_tis" | "icepop":
            return _Bounded(of_tokens, log_low, log_high)
        case "geometric_tis" | "geometric_mask" | "segment_mask":
            return _Bounded(of_means, log_low, log_high)
        case "sequence_tis" | "sequence_mask":
            return _Bounded(of_products, log_low, log_high)
        case "opsm":
            return _Bounded(of_means, -rule.high, math.inf)
        case "k2_mask" | "k3_mask":
            return _Bounded(_sampled_divergences(floor, rule.name, lengths), -math.inf, rule.high)
        case _:
            assert_never(rule.name)


def _sampled_divergences(
    floor: NoiseFloor, name: Literal["k2_mask", "k3_mask"], lengths: NDArray[np.int64]
) -> Callable[[float], Floats]:
    """Return the distribution of a completion's mean k2 or k3, by sampled noise: it has no closed form."""
    copies = max(1, _SAMPLED_TOKENS // int(lengths.sum()))
    lengths_sampled = np.tile(lengths, min(copies, _MOST_COPIES))
    none = np.zeros(lengths_sampled.sum())
    groups = np.arange(len(lengths_sampled))
    noise = sample_noise(floor, Differences(lengths_sampled, none, none, groups), np.random.default_rng(0))
    bounded = noise.log_ratios.clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    estimates = np.square(noise.log_ratios) / 2 if name == "k2_mask" else np.expm1(bounded) - bounded
    means = np.sort(noise.means(estimates))

    def below(value: float) -> Floats:
        return np.full(len(lengths), np.searchsorted(means, value) / len(means))

    return below


def _padded(differences: Differences) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield log-ratios, mask and advantages of some completions at a time, `[rows, tokens]`, padded with zeros."""
    ends = np.cumsum(differences.lengths)
    for first in range(0, len(ends), _ROWS_AT_ONCE):
        lengths = differences.lengths[first : first + _ROWS_AT_ONCE]
        tokens = slice(ends[first] - lengths[0], ends[first + len(lengths) - 1])
        log_rho, advantages = (
            pad_sequence([*torch.from_numpy(values[tokens]).float().split(lengths.tolist())], batch_first=True)
            for values in (differences.log_ratios, differences.advantages)
        )
        yield log_rho, torch.arange(log_rho.shape[1]) < torch.from_numpy(lengths)[:, None], advantages


def _token_sample(floor: NoiseFloor) -> Floats:
    """Return evenly spaced quantiles of the tokens' d."""
    return floor.token_quantile((np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES)
