"""Comparisons with a baseline in pairs of one seed, corrected for as many tests at once.

Runs of one seed share prompts and random numbers as far as they can, which their difference is free of.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from offbeat.lab.sweep.estimates import Comparison, distributions, estimate

CONFIDENCE = 0.95
"""Confidence of the intervals of differences."""
SIGNIFICANT = 0.05
"""Corrected p-value below which a difference is marked."""

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class AgainstBaseline:
    """The difference of one value from the baseline."""

    compared: Comparison
    """The value minus the baseline, mean over the seeds that both have."""
    adjusted_p: float | None
    """Its p-value after Holm's correction for all values that are compared; None with fewer than two seeds."""

    @property
    def is_significant(self) -> bool:
        """True when chance alone would seldom bring any difference as large among those that are compared."""
        return self.adjusted_p is not None and self.adjusted_p < SIGNIFICANT


def compare_with_baseline(values: Mapping[Name, Mapping[int, float]], baseline: Name) -> dict[Name, AgainstBaseline]:
    """Return the comparison of each other value with the baseline, by numbers of each value's runs by seed.

    Values without a seed of the baseline's are left out.
    """
    own = values.get(baseline, {})
    every = {name: compare_pairs(own, numbers) for name, numbers in values.items() if name != baseline}
    compared = {name: one for name, one in every.items() if one is not None}
    tested = {name: one.p_value for name, one in compared.items() if one.p_value is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    return {name: AgainstBaseline(one, adjusted.get(name)) for name, one in compared.items()}


def compare_pairs(first: Mapping[int, float], second: Mapping[int, float], confidence: float = CONFIDENCE) -> Comparison | None:
    """Return the mean of `second` minus that of `first` over the seeds that both have, with Student's paired interval.

    None where no seed is in both. Where the differences do not spread, the interval has no width.
    """
    seeds = sorted(first.keys() & second.keys())
    differences = [second[seed] - first[seed] for seed in seeds]
    told = estimate(differences, confidence)
    if told is None:
        return None
    num_seeds = (len(seeds), len(seeds))
    if told.std is None:
        return Comparison(told.mean, None, None, None, num_seeds)
    if told.std == 0:
        return Comparison(told.mean, told.mean, told.mean, float(told.mean == 0), num_seeds)
    t = abs(told.mean) / (told.std / math.sqrt(len(seeds)))
    p_value = 2 * float(distributions().t.sf(t, len(seeds) - 1))
    return Comparison(told.mean, told.low, told.high, p_value, num_seeds)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for as many tests at once: Holm 1979, Scandinavian Journal of Statistics 6.

    The i-th smallest of m is multiplied by `m - i + 1`, is at least the one before it, and at most 1.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
