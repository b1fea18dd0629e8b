"""The learning rate schedule."""

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
