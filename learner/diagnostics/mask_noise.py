"""The share of tokens that a correction masks for the noise of engine log-probs alone, with nothing stale."""

import math

import msgspec
import numpy as np

from offbeat.learner.diagnostics.noise_floor import Differences, Floats, NoiseFloor
from offbeat.learner.objectives.objective import CorrectionRule


class MaskCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The share of tokens that a correction gives the weight 0 at lag 0, predicted and measured.

    Shares are means over completions of the share of their tokens. Predictions are of models fitted to one half of the groups,
    for the other half.
    """

    name: str
    """`loss.correction`."""
    low: float
    high: float
    predicted: float
    measured: float


def expected_masked(floor: NoiseFloor, rule: CorrectionRule, others: Differences) -> Floats:
    """Return the share of each completion's tokens that noise is expected to mask, `[completions]`.

    Takes only the lengths and the signs of the advantages of `others`. Corrections that truncate mask nothing.
    """
    low, high = _log_bounds(rule)
    lengths = others.lengths
    match rule.name:
        case "geometric_mask":
            return floor.sequences_below(low, lengths) + 1 - floor.sequences_below(high, lengths)
        case "sequence_mask":
            below, under = ((bound - lengths * floor.mean) / (lengths * floor.spread(lengths)) for bound in (low, high))
            return floor.standardized_below(below) + 1 - floor.standardized_below(under)
        case "opsm":
            return others.negative * floor.sequences_below(-rule.high, lengths)
        case "icepop":
            return np.full(len(lengths), floor.tokens_below(low) + 1 - floor.tokens_below(high))
        case _:
            return np.zeros(len(lengths))


def measured_masked(differences: Differences, rule: CorrectionRule) -> Floats:
    """Return the share of each completion's tokens that the correction masks, `[completions]`."""
    low, high = _log_bounds(rule)
    means = differences.log_sequence_ratios
    match rule.name:
        case "geometric_mask":
            return ((means < low) | (means > high)).astype(np.float64)
        case "sequence_mask":
            sums = means * differences.lengths
            return ((sums < low) | (sums > high)).astype(np.float64)
        case "opsm":
            return differences.negative * (means < -rule.high)
        case "icepop":
            ratios = differences.log_ratios
            return differences.means((ratios < low) | (ratios > high))
        case _:
            return np.zeros(len(means))


def _log_bounds(rule: CorrectionRule) -> tuple[float, float]:
    return (math.log(rule.low) if rule.low > 0 else -math.inf), math.log(rule.high)
