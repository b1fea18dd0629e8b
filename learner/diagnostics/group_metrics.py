"""Metrics of the groups of an optimizer step: rewards, lags, lengths and tokens."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from offbeat.learner.leases.groups import Group, Rollout

Metrics = dict[str, float | dict[str, int]]
"""Numbers by `area/name`; only `lag/counts` and `broken/leases` are mappings."""

LAG_BUCKETS = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9+": (9, math.inf)}
"""Lowest and highest policy lag of each bucket, by the bucket's name."""


def lag_bucket(policy_lag: int) -> str:
    """Return the name of the bucket that holds a policy lag of at least 0."""
    return next(name for name, (lowest, highest) in LAG_BUCKETS.items() if lowest <= policy_lag <= highest)


def group_metrics(groups: Sequence[Group], policy_version: int) -> Metrics:
    """Compute the metrics of an optimizer step's groups; `policy_version` is the learner's before the step.

    Rewards are as the task gave them. `by_lag/<bucket>/reward_mean` and `_length_mean` cover the same completions as the
    bucket's metrics in `learner.diagnostics.loss_metrics`.
    """
    rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
    every_reward = np.concatenate(rewards)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = np.array([len(rollout.token_ids) for rollout in rollouts])
    median, near_longest = np.percentile(lengths, (50, 95))
    lags = [group.policy_lag(policy_version) for group in groups]
    return {
        "reward/mean": float(every_reward.mean()),
        "reward/std": float(every_reward.std()),
        "reward/zero_variance_groups": sum(min(of_group) == max(of_group) for of_group in rewards),
        "lag/mean": float(np.mean(lags)),
        "lag/max": max(lags),
        "lag/counts": {str(lag): count for lag, count in sorted(Counter(lags).items())},
        "length/mean": float(lengths.mean()),
        "length/min": int(lengths.min()),
        "length/p50": float(median),
        "length/p95": float(near_longest),
        "length/max": int(lengths.max()),
        "length/cut": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
        "group/seconds_mean": float(np.mean([group.generate_s for group in groups])),
        "group/seconds_max": max(group.generate_s for group in groups),
        "tokens/trained": int(lengths.sum()),
        "tokens/prompt": sum(len(group.prompt_token_ids) * len(group.rollouts) for group in groups),
        **(_episode_metrics(rollouts) if any(group.has_environment for group in groups) else {}),
        **_part_means(rollouts),
        **_task_means(groups),
        **_metrics_by_lag(groups, lags),
    }


def _episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    turns = [rollout.num_turns for rollout in rollouts]
    seconds = [rollout.environment_s for rollout in rollouts]
    return {
        "turns/mean": float(np.mean(turns)),
        "turns/max": max(turns),
        "length/context": float(np.mean([len(rollout.context_ids) for rollout in rollouts])),
        "environment/seconds_mean": float(np.mean(seconds)),
        "environment/seconds_max": max(seconds),
    }


def _part_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each named part of the rewards, over the completions that have it."""
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            values.setdefault(name, []).append(value)
    return {f"reward_part/{name}": float(np.mean(of_part)) for name, of_part in sorted(values.items())}


def _task_means(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean reward of each task's completions."""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        if group.task:
            rewards.setdefault(group.task, []).extend(rollout.reward for rollout in group.rollouts)
    return {f"reward_by_task/{task}": float(np.mean(of_task)) for task, of_task in sorted(rewards.items())}


def _metrics_by_lag(groups: Sequence[Group], lags: Sequence[int]) -> dict[str, float]:
    rollouts: dict[str, list[Rollout]] = {}
    for group, lag in zip(groups, lags, strict=True):
        rollouts.setdefault(lag_bucket(lag), []).extend(group.rollouts)
    metrics: dict[str, float] = {}
    for bucket, of_bucket in rollouts.items():
        metrics[f"by_lag/{bucket}/reward_mean"] = float(np.mean([rollout.reward for rollout in of_bucket]))
        metrics[f"by_lag/{bucket}/length_mean"] = float(np.mean([len(rollout.token_ids) for rollout in of_bucket]))
    return metrics
