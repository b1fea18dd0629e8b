"""The band that an objective clips its ratio to, and the results of a clip and of a correction."""

import math
from typing import NamedTuple

from torch import Tensor


class ClipBand(NamedTuple):
    """The bounds of a clipped importance ratio."""

    low: float
    """The ratio is clipped below `1 - low`."""
    high: float
    """The ratio is clipped above `1 + high`."""
    is_sequence_ratio: bool
    """The ratio is that of a completion; False: each token's own, or `is_prefix_ratio`."""
    is_prefix_ratio: bool = False
    """The ratio is `exp(log R_t / sqrt(t))` of `losses.ctpo`, which takes the gradient above the band at any sign of A."""

    @property
    def log_low(self) -> float:
        """`log(1 - low)`."""
        return math.log1p(-self.low) if self.low < 1 else -math.inf

    @property
    def log_high(self) -> float:
        """`log(1 + high)`."""
        return math.log1p(self.high)


class ClippedRatio(NamedTuple):
    """The ratio that an objective clips on a micro-batch, and its bounds."""

    log_ratio: Tensor
    """Logarithm of the ratio, `[rows, tokens]`: the token's own, its prefix's, or its row's `log s` in every token."""
    clip_low: float
    clip_high: float


class Correction(NamedTuple):
    """The weights of the off-policy corrections on a micro-batch, each tensor `[rows, tokens]`."""

    weights: Tensor
    """Factors of the token losses, 0 where masked."""
    log_rho: Tensor
    """Logarithm of the token ratio that the weights are made of, before truncation and masking."""
    truncated: Tensor
    """Bool: tokens with a weight that was cut to a bound."""
