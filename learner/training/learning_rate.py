"""The learning rate of a step: its schedule, and its scale by the effective sample size."""

import math
from typing import Literal


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup_steps: int,
    num_steps: int,
) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0: linear warm-up to `peak`, then the schedule.

    Step `warmup_steps` is the first at `peak`; `linear` and `cosine` fall from there to 0 at `num_steps`, the first step that
    is not taken.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if schedule == "linear":
        return peak * max(0.0, 1 - progress)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def ess_scale(ess: float, *, on_policy_ess: float) -> float:
    """`min(1, sqrt(ess / on_policy_ess))`: the factor of the learning rate of a step with this effective sample size.

    Both are shares of the step's completions, of sequence weights pi / mu up to 8: VCPO,
    https://arxiv.org/abs/2602.17616. The variance of a weighted mean is inverse to its effective sample size, and a learning
    rate goes with the square root of the batch. The bound of 1 is ours: above it the share is larger by chance.
    """
    return min(1.0, math.sqrt(ess / on_policy_ess))
