"""The statistics of a sweep: means over seeds with their uncertainty, comparisons of two values, curves over seeds.

The runs of one value are independent and differ in their seeds only. Intervals are Student's, at `CONFIDENCE`. Two values are
compared by Welch's t-test (1947, Biometrika 34), which does not assume that they spread alike.

Runs of one seed share prompts and random numbers as far as they can, which their difference is free of: a comparison with a
baseline is made in pairs of one seed, corrected for as many tests at once. Distributions are Scipy's.
"""

import bisect
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TypeVar

import numpy as np

CONFIDENCE = 0.9
"""Confidence of the other intervals. Two values are told apart when the interval of their difference excludes 0."""
PAIRED_CONFIDENCE = 0.95
"""Confidence of the intervals of differences in pairs of one seed."""
SIGNIFICANT = 0.05
"""Corrected p-value below which a difference is marked."""
POWER = 0.8
"""Chance of telling two values apart that `seeds_needed` aims at."""
MAX_SEEDS = 1000
"""Largest number of seeds that `seeds_needed` considers."""
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    std: float | None
    """Standard deviation between seeds, with n - 1; None for one seed."""
    low: float | None
    """Lower end of the mean's interval; None for one seed."""
    high: float | None
    """Upper end; None for one seed."""
    num_seeds: int


@dataclass(frozen=True)
class Comparison:
    """The difference of two values: the second minus the first, or their ratio (`compare_ratio`)."""

    difference: float
    low: float | None
    """Lower end of the difference's interval; None where either value has fewer than two seeds."""
    high: float | None
    p_value: float | None
    """Result of Welch's two-sided test; None where either value has fewer than two seeds."""
    num_seeds: tuple[int, int]

    def text(self, form: str = "+.3f") -> str:
        """Return the difference, and in brackets its interval where it has one."""
        interval = "" if self.low is None or self.high is None else f" ({self.low:{form}} to {self.high:{form}})"
        return f"{self.difference:{form}}{interval}"

    def wider_than(self, least_width: float) -> "Comparison":
        """Return the comparison itself, or without interval and p-value where the interval is not wider than `least_width`."""
        if self.low is None or self.high is None or self.high - self.low > least_width:
            return self
        return replace(self, low=None, high=None, p_value=None)

    @property
    def is_told_apart(self) -> bool:
        """True when the interval excludes 0."""
        return self.is_told_apart_from(0)

    def is_told_apart_from(self, value: float) -> bool:
        """Return True when there is an interval and it excludes `value`."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


@dataclass(frozen=True)
class Curve:
    """A measurement along a run; `xs` grow."""

    xs: list[float]
    ys: list[float]


@dataclass(frozen=True)
class Band:
    """The mean of a curve over seeds, with its interval at each point."""

    xs: list[float]
    means: list[float]
    lows: list[float]
    """Lower ends; equal to the means for one seed."""
    highs: list[float]
    num_seeds: int


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate | None:
    """Return the mean and its interval `mean ± t(n - 1) s / sqrt(n)`; None without values."""
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None, None, 1)
    std = statistics.stdev(values)
    half = _critical_t(confidence, len(values) - 1) * std / math.sqrt(len(values))
    return Estimate(mean, std, mean - half, mean + half, len(values))


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison | None:
    """Return the mean of `second` minus that of `first`, with Welch's interval and p-value; None where either is empty.

    The test is undefined where neither spreads. The result is then its limit, an interval of no width.
    """
    if not first or not second:
        return None
    difference = statistics.fmean(second) - statistics.fmean(first)
    num_seeds = (len(first), len(second))
    if min(num_seeds) < 2:
        return Comparison(difference, None, None, None, num_seeds)
    squared_errors = [statistics.variance(values) / len(values) for values in (first, second)]
    error = math.sqrt(sum(squared_errors))
    if error == 0:
        difference = second[0] - first[0]
        return Comparison(difference, difference, difference, float(difference == 0), num_seeds)
    degrees = _welch_degrees(squared_errors[0] / sum(squared_errors), num_seeds)
    half = _critical_t(CONFIDENCE, degrees) * error
    p_value = 2 * float(distributions().t.sf(abs(difference) / error, degrees))
    return Comparison(difference, difference - half, difference + half, p_value, num_seeds)


def compare_ratio(first: Sequence[float], second: Sequence[float]) -> Comparison | None:
    """Return the ratio of the geometric means of positive numbers, `second / first`, with Welch's interval of the logs.

    None where either is empty.
    """
    logs = compare([math.log(value) for value in first], [math.log(value) for value in second])
    if logs is None:
        return None
    low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
    return Comparison(math.exp(logs.difference), low, high, logs.p_value, logs.num_seeds)


def seeds_needed(std_first: float, std_second: float, difference: float, *, confidence: float = CONFIDENCE) -> int | None:
    """Return the seeds per value with which Welch's test detects a true `difference` of two means with a chance of `POWER`.

    Uses the noncentral t distribution and takes the standard deviations between seeds as the true ones. None when more than
    `MAX_SEEDS` are needed, or the difference is 0.
    """
    variances = (std_first**2, std_second**2)
    if difference == 0:
        return None
    if sum(variances) == 0:
        return 2
    share = variances[0] / sum(variances)

    def is_enough(num_seeds: int) -> bool:
        degrees = _welch_degrees(share, (num_seeds, num_seeds))
        critical = _critical_t(confidence, degrees)
        shift = abs(difference) / math.sqrt(sum(variances) / num_seeds)
        # One tail only: the other detects a difference of the wrong sign.
        return bool(distributions().nct.sf(critical, degrees, shift) >= POWER)

    numbers = range(2, MAX_SEEDS + 1)
    index = bisect.bisect_left(numbers, True, key=is_enough)
    return numbers[index] if index < len(numbers) else None


def average_curves(curves: Sequence[Curve], num_points: int = 200) -> Band | None:
    """Return mean and interval over seeds at `num_points` points of the range that all curves have in common.

    Between its points a curve is a straight line. None where the curves have no common range.
    """
    if not curves or not all(curve.xs for curve in curves):
        return None
    start, end = max(curve.xs[0] for curve in curves), min(curve.xs[-1] for curve in curves)
    if start > end:
        return None
    xs = np.linspace(start, end, num_points if end > start else 1)
    values = np.stack([np.interp(xs, curve.xs, curve.ys) for curve in curves])
    means, half = values.mean(axis=0), np.zeros(len(xs))
    if len(curves) > 1:
        half = _critical_t(CONFIDENCE, len(curves) - 1) * values.std(axis=0, ddof=1) / math.sqrt(len(curves))
    return Band(xs.tolist(), means.tolist(), (means - half).tolist(), (means + half).tolist(), len(curves))


def trailing_mean(curve: Curve, window: int) -> Curve:
    """Return the mean of the last `window` values at each point that has them; of a shorter curve, one point with its mean."""
    window = max(1, min(window, len(curve.ys)))
    means = [statistics.fmean(curve.ys[end - window : end]) for end in range(window, len(curve.ys) + 1)]
    return Curve(curve.xs[window - 1 :], means)


def first_reach(curve: Curve, target: float) -> float | None:
    """Return the first x at which the curve is at `target` or above; None where it never is."""
    return next((x for x, y in zip(curve.xs, curve.ys, strict=True) if y >= target), None)


def _welch_degrees(share: float, num_seeds: tuple[int, int]) -> float:
    """Return the Welch-Satterthwaite degrees of freedom; `share` is the first value's part of the squared error."""
    return 1 / (share**2 / (num_seeds[0] - 1) + (1 - share) ** 2 / (num_seeds[1] - 1))


def _critical_t(confidence: float, degrees: float) -> float:
    """Return the t that Student's distribution exceeds, in either direction, with a chance of `1 - confidence`."""
    return float(distributions().t.ppf((1 + confidence) / 2, degrees))


def distributions() -> ModuleType:
    """Import Scipy's distributions: a second of CPU time, which a command's `--help` need not spend."""
    from scipy import stats

    return stats


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


def compare_with_baseline(
    values: Mapping[Name, Mapping[int, float]], baseline: Name, *, least_width: float = -1.0
) -> dict[Name, AgainstBaseline]:
    """Return the comparison of each other value with the baseline, by numbers of each value's runs by seed.

    Values without a seed of the baseline's are left out. Those with one seed, or an interval that is not wider than
    `least_width`, have no p-value and are not among those that Holm's correction counts.
    """
    own = values.get(baseline, {})
    every = {name: compare_pairs(own, numbers) for name, numbers in values.items() if name != baseline}
    compared = {name: one.wider_than(least_width) for name, one in every.items() if one is not None}
    tested = {name: one.p_value for name, one in compared.items() if one.p_value is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    return {name: AgainstBaseline(one, adjusted.get(name)) for name, one in compared.items()}


def compare_pairs(first: Mapping[int, float], second: Mapping[int, float]) -> Comparison | None:
    """Return the mean of `second` minus that of `first` over the seeds that both have, with Student's paired interval.

    None where no seed is in both. Where the differences do not spread, the interval has no width.
    """
    seeds = sorted(first.keys() & second.keys())
    differences = [second[seed] - first[seed] for seed in seeds]
    told = estimate(differences, PAIRED_CONFIDENCE)
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
