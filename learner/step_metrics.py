"""The numbers of one optimizer step: what its groups were, and what the loss did with them."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from learner.groups import Group
from learner.losses import RatioStatistics

Metrics = dict[str, float | dict[str, int]]
"""Numbers by `area/name`; only `lag/counts` is a mapping."""


def group_metrics(groups: Sequence[Group], policy_version: int) -> Metrics:
    """Rewards, lags, lengths and tokens of the groups of one optimizer step, taken from `policy_version`."""
    rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
    every_reward = np.concatenate(rewards)
    lengths = np.array([len(rollout.token_ids) for group in groups for rollout in group.rollouts])
    lags = [group.policy_lag(policy_version) for group in groups]
    return {
        "reward/mean": float(every_reward.mean()),
        "reward/std": float(every_reward.std()),
        "reward/zero_variance_groups": sum(min(of_group) == max(of_group) for of_group in rewards),
        "lag/mean": float(np.mean(lags)),
        "lag/max": max(lags),
        "lag/counts": {str(lag): count for lag, count in sorted(Counter(lags).items())},
        "length/mean": float(lengths.mean()),
        "length/max": int(lengths.max()),
        "tokens/trained": int(lengths.sum()),
        "tokens/prompt": sum(len(group.prompt_token_ids) * len(group.rollouts) for group in groups),
    }


class LossTally:
    """Adds up loss and ratios over the micro-batches of a step, on the device, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(9, dtype=torch.float64, device=device)
        self._maxima = torch.full((3,), -torch.inf, dtype=torch.float64, device=device)

    def add(self, loss_sum: Tensor, statistics: RatioStatistics) -> None:
        """Count one micro-batch."""
        measured = statistics.has_loss_tokens
        log_ratio = statistics.log_sequence_ratio.double()
        per_row = (
            log_ratio,
            log_ratio.square(),
            log_ratio.expm1().abs(),
            statistics.positive_above,
            statistics.positive_below,
            statistics.negative_above,
            statistics.negative_below,
        )
        sums = [torch.where(measured, values, 0).sum(dtype=torch.float64) for values in per_row]
        self._sums += torch.stack([loss_sum.detach().double(), measured.sum(dtype=torch.float64), *sums])
        extremes = (log_ratio, -log_ratio, statistics.largest_token_log_ratio.double())
        maxima = torch.stack([torch.where(measured, values, -torch.inf).max() for values in extremes])
        self._maxima = torch.maximum(self._maxima, maxima)

    def packed(self) -> Tensor:
        """All that was counted, `[12]` float64, for `loss_metrics`."""
        return torch.cat([self._sums, self._maxima])


def loss_metrics(packed: Tensor, *, num_completions: int) -> dict[str, float]:
    """Loss, ratios and clipping of one step from every rank's `LossTally.packed()`, `[world_size, 12]`.

    `num_completions`: of all ranks, what loss and clip fractions are divided by. Ratios are those of completions with
    tokens. `ratio/first` is the mean of `|s - 1|`, which the caller keeps of the first step only.
    """
    loss_sum, num_rows, total, squares, deviation, *clips = packed[:, :9].sum(dim=0).tolist()
    highest, negated_lowest, largest_token = packed[:, 9:].amax(dim=0).tolist()
    if num_rows == 0:
        highest = negated_lowest = largest_token = 0.0
    mean = total / max(1.0, num_rows)
    positive_above, positive_below, negative_above, negative_below = (count / num_completions for count in clips)
    return {
        "loss/policy": loss_sum / num_completions,
        "ratio/log_mean": mean,
        "ratio/log_std": max(0.0, squares / max(1.0, num_rows) - mean * mean) ** 0.5,
        "ratio/log_min": -negated_lowest,
        "ratio/log_max": highest,
        "ratio/first": deviation / max(1.0, num_rows),
        "ratio/token_log_abs_max": largest_token,
        "clip/fraction": positive_above + negative_below,
        "clip/positive_above": positive_above,
        "clip/positive_below": positive_below,
        "clip/negative_above": negative_above,
        "clip/negative_below": negative_below,
    }
