"""The automatic bound: moves `staleness.max_staleness` by the drift that the optimizer steps measure.

Drift is the part of the distance between the policy that sampled (mu) and the one in training (pi) that staleness causes:

    drift = measured - noise floor    of KL(mu || pi) per token (k3), and of the share of the step that the objective clips

The noise floor is that of `loss.noise_floor` where it is set, else the measurement of the newest groups of lag 0; before the
first of these the bound does not move. Means over `WINDOW_STEPS` steps decide:

    narrow, to half of the lag in use   either drift is above its limit
    widen, by half, at least 1          both are below a quarter of it, the learner waited for rollouts, and staleness alone
                                        kept actors from generating them; otherwise a wider bound would make nothing faster

Twice the lag lets the policy move twice as far, and KL grows at most with the square of the distance. So a widening from below
a quarter of the limit does not exceed the limit. Steps count only if all their groups were leased under the present bound.
"""

import math
from collections import deque
from typing import NamedTuple

import msgspec

from offbeat.common.records.rows import StepRow
from offbeat.common.settings.config import StalenessSection

MAX_KL_DRIFT = 0.02
"""Limit of the KL's drift, in nats per token. M2PO stays stable 256 steps behind with the mean squared log-ratio held to 0.04,
which is twice the KL where ratios are near 1: https://arxiv.org/abs/2510.01161."""
MAX_CLIP_DRIFT = 0.2
"""Limit of the clip fraction's drift, at which a fifth of the completions teach nothing because they are late. The GSPO paper
clips 0.15 of its tokens, and its policy still learns."""
SMALL = 0.25
"""Share of the limits below which drift is small; see the module's docstring."""
MIN_LOST_SHARE = 0.05
"""Smallest lost share of the steps' time that widens the bound. A wider bound cannot win back more than that share."""
WINDOW_STEPS = 8
"""Steps that are averaged: the KL of one step is often half or twice that of the next."""
NOISE_MEMORY = 8
"""Approximate number of steps with lag 0 over which the noise, which changes with the policy, is averaged."""


class Noise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Divergence and clipping measured on groups of lag 0, which staleness does not cause."""

    kl: float
    clip: float


class BoundDecision(NamedTuple):
    """A move of the bound."""

    max_staleness: int
    reason: str


class Measured(NamedTuple):
    """Measurements of one optimizer step, or their means over several."""

    largest_lag: float
    kl: float
    """Drift of the KL, in nats per token."""
    clip: float
    """Drift of the clip fraction."""
    lost: float
    """Share of the step's time: the learner's wait for rollouts or, where that is less, the time in which staleness alone kept
    actors from generating. The two need not coincide: the learner waits later for rollouts that were not generated."""


class AutoBound:
    """Decides on the bound from the rows of all steps, in order."""

    def __init__(self, least: int, noise: Noise | None = None) -> None:
        """`least` is the smallest bound that the run's steps allow; `noise` is the last learner process's measurement."""
        self._least = least
        self.noise = noise
        """Noise floor; None before the first group of lag 0."""
        self._bound: int | None = None
        self._num_to_skip = 0
        self._window: deque[Measured] = deque(maxlen=WINDOW_STEPS)
        self._num_steps = 0
        """Steps since the last move."""
        self._wait_steps = 0
        """Steps to wait before the next widening."""
        self._has_widened = False
        """The last move was a widening."""

    def observe(self, step: StepRow, bounds: StalenessSection) -> BoundDecision | None:
        """Add a step's row of metrics and return a move of the bound, within `least` and `hard_max_staleness`, or None."""
        self._learn_noise(step)
        measured = self._measure(step)
        if not bounds.auto or bounds.hard_max_staleness is None or measured is None:
            self._window.clear()
            return None
        self._follow(bounds.max_staleness)
        self._num_steps += 1
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        self._window.append(measured)
        if len(self._window) < WINDOW_STEPS:
            return None
        mean = Measured(*(math.fsum(column) / WINDOW_STEPS for column in zip(*self._window, strict=True)))
        largest_lag = max(of_step.largest_lag for of_step in self._window)
        return self._narrow(mean, largest_lag, bounds.max_staleness) or self._widen(
            mean, bounds.max_staleness, bounds.hard_max_staleness
        )

    def _follow(self, bound: int) -> None:
        """Start anew at another bound, and skip the steps on groups leased under the old one."""
        if bound == self._bound:
            return
        self._num_to_skip = max(bound, self._bound or 0)
        self._bound = bound
        self._num_steps = 0
        self._window.clear()

    def _narrow(self, mean: Measured, largest_lag: float, bound: int) -> BoundDecision | None:
        causes: list[str] = []
        if mean.kl > MAX_KL_DRIFT:
            causes.append(f"KL per token drifts by {mean.kl:.2g}, more than {MAX_KL_DRIFT:g}")
        if mean.clip > MAX_CLIP_DRIFT:
            causes.append(f"the clip fraction drifts by {mean.clip:.2g}, more than {MAX_CLIP_DRIFT:g}")
        in_use = int(min(bound, largest_lag))
        # Where no group lags by more than the least possible bound, a narrower bound changes nothing.
        if not causes or in_use <= self._least:
            return None
        # A widening that was taken back is tried again later, each time after twice the wait.
        self._wait_steps = 2 * max(self._wait_steps, WINDOW_STEPS) if self._has_widened else self._wait_steps
        self._has_widened = False
        reason = f"{' and '.join(causes)} (mean of {WINDOW_STEPS} steps; largest lag {largest_lag:g})"
        return BoundDecision(max(self._least, in_use // 2), reason)

    def _widen(self, mean: Measured, bound: int, hard_max_staleness: int) -> BoundDecision | None:
        is_small = mean.kl < SMALL * MAX_KL_DRIFT and mean.clip < SMALL * MAX_CLIP_DRIFT
        wider = min(hard_max_staleness, bound + max(1, bound // 2))
        if not is_small or mean.lost <= MIN_LOST_SHARE or wider <= bound or self._num_steps < self._wait_steps:
            return None
        if self._has_widened:
            self._wait_steps = 0
        self._has_widened = True
        return BoundDecision(
            wider,
            f"drift is small (KL {mean.kl:.2g} per token, clip fraction {mean.clip:.2g}; mean of {WINDOW_STEPS} steps), and "
            f"for {mean.lost:.0%} of the time the learner waited for what the bound kept actors from generating",
        )

    def _learn_noise(self, step: StepRow) -> None:
        if "by_lag/0/count" not in step.metrics:
            return
        kl, clip = step.measured("by_lag/0/kl_behavior_policy_k3"), step.measured("by_lag/0/clip_fraction")
        known = self.noise or Noise(kl, clip)
        self.noise = Noise(known.kl + (kl - known.kl) / NOISE_MEMORY, known.clip + (clip - known.clip) / NOISE_MEMORY)

    def _measure(self, step: StepRow) -> Measured | None:
        if "kl/drift" in step.metrics:
            # Where the clipped ratio is not to engine log-probs, noise clips nothing, and all clipping is drift.
            kl = step.measured("kl/drift")
            clip = step.measured("clip/drift" if "clip/drift" in step.metrics else "clip/fraction")
        elif self.noise is not None:
            kl = step.measured("kl/behavior_policy_k3") - self.noise.kl
            clip = step.measured("clip/fraction") - self.noise.clip
        else:
            return None
        lost_s = min(step.measured("time/wait_rollouts_s"), step.measured("time/held_back_s"))
        return Measured(step.measured("lag/max"), kl, clip, lost_s / step.measured("time/step_s"))
