"""Bands that objectives clip ratios to, and the weights of corrections."""

import math
from typing import NamedTuple

from torch import Tensor


class ClipBand(NamedTuple):
    """Where an objective clips, and what: see `losses`."""

    low: float
    """Clipped below `1 - low`."""
    high: float
    """Clipped above `1 + high`."""
    is_sequence_ratio: bool
    """The ratio is that of a completion, else each token's own."""

    @property
    def log_low(self) -> float:
        """`log(1 - low)`."""
        return math.log1p(-self.low) if self.low < 1 else -math.inf

    @property
    def log_high(self) -> float:
        """`log(1 + high)`."""
        return math.log1p(self.high)


class Band(NamedTuple):
    """The clip of an objective that has one."""

    log_ratio: Tensor
    """Log of the ratio that is clipped, `[rows, tokens]`: the token's own, or its row's `log s` in every token."""
    clip_low: float
    clip_high: float


class Correction(NamedTuple):
    """What an off-policy correction did to a micro-batch."""

    weights: Tensor
    """What the losses were multiplied by, `[rows, tokens]`, 0 where masked."""
    log_rho: Tensor
    """Log of the token ratio that the weights were made of, before anything was cut off, `[rows, tokens]`."""
    truncated_at: tuple[float, ...] = ()
    """The values that weights beyond them were set to; empty for a mask."""
