"""The band that an objective clips its ratio to, and the results of a clip and of a correction."""

from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offbeat.common.settings.completion import COMPLETION_DRIFT, TOKEN_NOISE

Lengths = TypeVar("Lengths", Tensor, NDArray[Any])

NOISE_SPREADS = 2.0
"""Least distance of a bound from the mean noise, in standard deviations. Noise alone is beyond it in 2.3% of completions."""


class NoiseOfLength(NamedTuple):
    """The engine's noise in `log s` of a completion of n tokens: its mean, and the variance `variance + token_variance / n`."""

    mean: float
    """Below 0: the engine chose the tokens, so the mean of `log pi/mu` over them is -KL(mu || pi) per token."""
    variance: float
    token_variance: float

    def bounds(self, lengths: Lengths, *, low: float, high: float) -> tuple[Lengths, Lengths]:
        """Return how far below and above 1 the sequence ratios of completions of these lengths, each at least 1, are clipped.

        A bound is `COMPLETION_DRIFT / n`, at most `low` or `high`, and at least `NOISE_SPREADS` standard deviations of the
        noise from its mean. For the noise of independent tokens it is a band of the summed log-ratio that grows with the root
        of the length, as in FSPO, https://arxiv.org/abs/2509.09177.
        """
        spread = NOISE_SPREADS * (self.variance + self.token_variance / lengths) ** 0.5
        drift: Any = COMPLETION_DRIFT / lengths
        below, above = spread + max(0.0, -self.mean), spread + max(0.0, self.mean)
        return drift.clip(max=low).clip(min=below), drift.clip(max=high).clip(min=above)


USUAL_NOISE = NoiseOfLength(mean=-(TOKEN_NOISE**2) / 2, variance=0.0, token_variance=TOKEN_NOISE**2)
"""Noise of an engine that was not calibrated: tokens are independent, each normal with `TOKEN_NOISE` and `E[pi/mu] = 1`."""


class ClipBand(NamedTuple):
    """The bounds of a clipped importance ratio."""

    low: float
    """The ratio is clipped below `1 - low`; with `by_length` it is the widest bound that staleness alone asks for."""
    high: float
    """The ratio is clipped above `1 + high`; with `by_length` as `low`."""
    is_sequence_ratio: bool
    """The ratio is that of a completion; False: each token's own, or `is_prefix_ratio`."""
    is_prefix_ratio: bool = False
    """The ratio is `exp(log R_t / sqrt(t))` of `losses.ctpo`, which takes the gradient above the band at any sign of A."""
    takes_both_sides: bool = False
    """Tokens on either side lose their gradient, at any sign of A: `weighted_losses.sao`."""
    by_length: NoiseOfLength | None = None
    """Each completion has bounds of its own, `NoiseOfLength.bounds`; None: `low` and `high` for all."""

    def bounds_of(self, lengths: Lengths) -> tuple[float | Lengths, float | Lengths]:
        """Return the distances below and above 1 at which completions of these lengths are clipped."""
        if self.by_length is None:
            return self.low, self.high
        return self.by_length.bounds(lengths, low=self.low, high=self.high)

    def log_bounds_of(self, lengths: NDArray[Any]) -> tuple[float | NDArray[Any], float | NDArray[Any]]:
        """Return `log(1 - low)`, -inf without a lower bound, and `log(1 + high)` for completions of these lengths."""
        low, high = self.bounds_of(lengths)
        with np.errstate(divide="ignore"):
            return np.log1p(-np.minimum(low, 1.0)), np.log1p(high)


class ClippedRatio(NamedTuple):
    """The ratio that an objective clips on a micro-batch, and its bounds."""

    log_ratio: Tensor
    """Logarithm of the ratio, `[rows, tokens]`: the token's own, its prefix's, or its row's `log s` in every token."""
    clip_low: float | Tensor
    """Distance below 1 at which a ratio is clipped: one number for all completions, or `[rows, 1]`."""
    clip_high: float | Tensor


class Correction(NamedTuple):
    """The weights of the off-policy corrections on a micro-batch, each tensor `[rows, tokens]`."""

    weights: Tensor
    """Factors of the token losses, 0 where masked."""
    log_rho: Tensor
    """Logarithm of the token ratio that the weights are made of, before truncation and masking."""
    truncated: Tensor
    """Bool: tokens with a weight that was cut to a bound."""
