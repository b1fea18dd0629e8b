"""Metrics of an optimizer step by turn of the episodes: the age of each turn's tokens, and their drift."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offbeat.learner.diagnostics.row_statistics import K3_OF_TURNS
from offbeat.learner.leases.groups import Group, Rollout

TURN_BUCKETS = {"1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9+": (9, math.inf)}
"""First and last turn of each bucket, counted from 1 in the order in which they were asked for, by the bucket's name."""

_FIRST_TURNS = np.array([first for first, _ in TURN_BUCKETS.values()])


def turn_buckets(rollout: Rollout) -> NDArray[np.int64]:
    """Return the index in `TURN_BUCKETS` of each sampled token's turn, `[num_tokens]`."""
    turns = np.arange(1, 1 + rollout.num_turns)
    return np.repeat(np.searchsorted(_FIRST_TURNS, turns, side="right") - 1, rollout.turn_lengths)


def turn_metrics(groups: Sequence[Group], policy_version: int, table: Tensor) -> dict[str, float]:
    """Compute the metrics of a step's tokens by turn; none for a step whose completions all have one turn.

    `policy_version` is the learner's before the step, `table` the step's `row_statistics`. For the tokens of each bucket:
    `by_turn/<bucket>/tokens` is their number, `lag_mean` their mean lag in optimizer steps, each token's by its own version,
    and `kl_behavior_policy_k3` their mean k3.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if all(rollout.num_turns == 1 for rollout in rollouts):
        return {}
    buckets = np.concatenate([turn_buckets(rollout) for rollout in rollouts])
    lags = np.concatenate([token_lags(rollout, policy_version) for rollout in rollouts])
    num_tokens = np.bincount(buckets, minlength=len(TURN_BUCKETS))
    lag_sums = np.bincount(buckets, weights=lags, minlength=len(TURN_BUCKETS))
    k3_sums = table[:, list(K3_OF_TURNS)].sum(dim=0).tolist()
    metrics: dict[str, float] = {}
    for name, tokens, lag_sum, k3_sum in zip(TURN_BUCKETS, num_tokens.tolist(), lag_sums.tolist(), k3_sums, strict=True):
        if tokens:
            metrics[f"by_turn/{name}/tokens"] = tokens
            metrics[f"by_turn/{name}/lag_mean"] = lag_sum / tokens
            metrics[f"by_turn/{name}/kl_behavior_policy_k3"] = k3_sum / tokens
    return metrics


def token_lags(rollout: Rollout, policy_version: int) -> NDArray[np.int64]:
    """Return the optimizer steps from each token's policy version to `policy_version`, at least 0, `[num_tokens]`."""
    starts = [segment.first_token for segment in rollout.segments]
    lags = [max(0, policy_version - segment.policy_version) for segment in rollout.segments]
    return np.repeat(lags, np.diff([*starts, len(rollout.token_ids)]))
