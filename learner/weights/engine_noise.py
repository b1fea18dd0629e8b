"""The difference between an engine's log-probs and the learner's: its size, and the size that numerics alone explain.

Engines compute the same weights in another order and partly in a lower precision. The noise that follows has heavy tails, and
its scale depends on model, dtype, kernels and quantization. So it is measured for each actor (its floor), and a difference is
wrong when it is `FACTOR` times as large, within bounds that no measurement moves (`LEAST`, `MOST`).
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HIGH = 0.95
"""Share of the tokens whose difference is at most `Difference.high`."""
FACTOR = 4.0
"""Multiple of the floor from which on a difference is wrong."""


class Difference(NamedTuple):
    """Statistics of the differences `d_t` of tokens `t`, in nats; also their floor and their limits."""

    mean: float
    """`sum d_t / num_tokens`. Large where all tokens are off, as with other weights."""
    high: float
    """The 95% quantile: the smallest `d` that `HIGH` of the tokens do not exceed. Large where some tokens are off."""
    largest: float
    """`max d_t`. Large where a single token is off, as with one wrong row of the vocabulary."""


LEAST = {"float32": Difference(5e-5, 2e-4, 1e-3), "bfloat16": Difference(0.01, 0.05, 0.6)}
"""Limits of an engine without noise, by the dtype of the weights. A small or lucky floor does not lower them."""
MOST = {"float32": Difference(3e-3, 8e-3, 3e-2), "bfloat16": Difference(0.2, 0.5, 4.0)}
"""Limits that no floor raises, by the dtype of the weights. They hold for quantized engines and mixtures of experts too."""


def measure(differences: NDArray[np.floating]) -> Difference:
    """Return the statistics of finite differences `[tokens]`, at least one, none of them negative."""
    ordered = np.sort(differences)
    high = ordered[math.ceil(HIGH * len(ordered)) - 1]
    return Difference(float(ordered.mean()), float(high), float(ordered[-1]))


def limits_of(floor: Difference, dtype: str) -> Difference:
    """Return `min(MOST, max(LEAST, FACTOR * floor))`, statistic by statistic."""
    bounds = zip(floor, LEAST[dtype], MOST[dtype], strict=True)
    return Difference(*(min(most, max(least, FACTOR * measured)) for measured, least, most in bounds))


def excess_of(difference: Difference, limits: Difference) -> float:
    """Return the largest ratio of a statistic to its limit: above 1, numerics do not explain the difference."""
    return max(measured / limit for measured, limit in zip(difference, limits, strict=True))
