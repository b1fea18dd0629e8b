"""Rank statistics: the Mann-Whitney U test and Spearman's correlation. Importing scipy's costs a second of CPU time."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class MannWhitney(NamedTuple):
    """The result of a Mann-Whitney U test of two samples."""

    effect: float
    """Rank-biserial correlation `2 U / (n m) - 1`, -1 to 1; above 0 where the first sample tends to be larger."""
    p_value: float
    """Two-sided; from the normal approximation, corrected for ties and continuity."""


def average_ranks(values: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return the rank of each value, from 1; equal values share the mean of their ranks."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[group]


def mann_whitney(first: NDArray[np.float64], second: NDArray[np.float64]) -> MannWhitney:
    """Test if one sample tends to be larger than the other. Both have values, which are not all equal.

    `U` counts the pairs whose larger value is from `first`, ties as one half. Without a difference it has the mean `n m / 2`
    and the variance `n m / 12 (n + m + 1 - sum_k (t_k^3 - t_k) / ((n + m)(n + m - 1)))` for ties of sizes `t_k`.
    """
    n, m = len(first), len(second)
    pooled = np.concatenate([first, second])
    u = float(average_ranks(pooled)[:n].sum()) - n * (n + 1) / 2
    sizes = np.unique(pooled, return_counts=True)[1].astype(np.float64)
    tie_term = float((sizes**3 - sizes).sum()) / ((n + m) * (n + m - 1))
    deviation = math.sqrt(n * m / 12 * (n + m + 1 - tie_term))
    z = (max(u, n * m - u) - n * m / 2 - 0.5) / deviation
    return MannWhitney(2 * u / (n * m) - 1, min(1.0, math.erfc(z / math.sqrt(2))))


def rank_correlation(first: NDArray[np.generic], second: NDArray[np.generic]) -> float:
    """Return Spearman's correlation of pairs; 0 where all values of a side are equal."""
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(average_ranks(first), average_ranks(second))[0, 1])
