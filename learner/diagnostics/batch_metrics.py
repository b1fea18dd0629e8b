"""Metrics of an optimizer step's batch: rewards, lags and lengths of its groups; ratios, clips and corrections of its tokens.

The metrics of the loss are also measured by policy lag.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offbeat.common.records.step_metrics import BY_LAG
from offbeat.common.settings.objectives import Aggregation
from offbeat.learner.calibration.bound_noise import NoiseBySign
from offbeat.learner.diagnostics.row_statistics import Column
from offbeat.learner.leases.groups import Group, Rollout
from offbeat.learner.objectives.bands import ClipBand
from offbeat.learner.objectives.losses import LOG_RATIO_BOUND

SEQUENCE_WEIGHT_CAP = 8.0
"""Bound of the sequence weights in `ess/sequence_truncated`, as in VCPO: https://arxiv.org/abs/2602.17616."""


_CLIPPED = {
    "fraction": Column.NUM_CLIPPED,
    "positive_above": Column.NUM_POSITIVE_ABOVE,
    "positive_below": Column.NUM_POSITIVE_BELOW,
    "negative_above": Column.NUM_NEGATIVE_ABOVE,
    "negative_below": Column.NUM_NEGATIVE_BELOW,
}
"""The counts of the metrics `clip` and `clip_tokens`."""
_PER_TOKEN = {
    **{f"clip_tokens/{name}": column for name, column in _CLIPPED.items()},
    "ratio/m2": Column.SQUARED_LOG_WEIGHT,
    "kl/behavior_policy_k3": Column.BEHAVIOR_POLICY_K3,
    "kl/behavior_proximal_k1": Column.BEHAVIOR_PROXIMAL_K1,
    "kl/behavior_proximal_k3": Column.BEHAVIOR_PROXIMAL_K3,
    "kl/proximal_policy_k1": Column.PROXIMAL_POLICY_K1,
    "kl/proximal_policy_k3": Column.PROXIMAL_POLICY_K3,
    "correction/masked": Column.NUM_MASKED,
    "correction/truncated": Column.NUM_TRUNCATED,
    "correction/log_mean": Column.CORRECTION_LOG_RATIO,
    "correction/weight_mean": Column.CORRECTION_WEIGHT,
}
"""The sums of metrics that are means per token; nan in the table of an objective that has no such quantity."""


class EngineNoise(NamedTuple):
    """The measured noise of the engine's log-probs, and the band that clips it."""

    by_sign: NoiseBySign
    band: ClipBand | None
    """`Objective.engine_band`; None where the objective clips no ratio to engine log-probs."""


def loss_metrics(
    table: Tensor, *, aggregation: Aggregation, denominator: float, noise: EngineNoise | None = None
) -> dict[str, float]:
    """Compute the metrics of an optimizer step from the table of its completions, of which there is at least one.

    Let N be the number of completions, M the number of loss tokens, mu, pi_old, pi the behavior, proximal and current policy,
    `log s` the mean of `log pi/anchor` over a completion's tokens, W the product of its `pi/mu`. Means per completion are over
    completions with loss tokens, means per token over the M tokens.

    - `loss/policy`: `aggregate` over the step, divided by `denominator`.
    - `ratio/log_mean`, `_std`, `_min`, `_max`, `_p05`, `_p50`, `_p95`: of `log s`, one value per completion.
      `ratio/first`: mean of `|s - 1|`; the caller keeps it for the first step only, where nothing lags.
      `ratio/token_log_abs_max`: largest `|log pi/anchor|` of a token. `ratio/m2`: mean of `(log pi/mu)^2` per token, the
      second moment of M2PO (https://arxiv.org/abs/2510.01161).
    - `clip/fraction`: mean over all N completions, empty ones as 0, of the share of their tokens whose gradient a clip made 0.
      `clip/positive_above`, ...: the share of tokens by the sign of their advantage and the side of the band that their ratio
      is on, clipped there (`positive_above`, `negative_below`) or not. Tokens that `dual_clip` caps count in `fraction` and in
      the side of their ratio. `clip_tokens/...`: the same as a share of the M tokens.
    - `ess/sequence`: `(sum W)^2 / (N sum W^2) = exp(2 lse(log W) - lse(2 log W)) / N`, Kish's effective sample size per
      completion, W not normalized by length: 1 on-policy, 1/N where one completion outweighs all others.
      `ess/sequence_truncated`: of `min(W, SEQUENCE_WEIGHT_CAP)`. `ess/token`: `(sum r)^2 / (M sum r^2)` of the tokens'
      `r = pi/mu`; it stays near 1 long after training is unsafe.
    - `kl/p_q_k1`, `kl/p_q_k3`: mean per token of `log p/q`, and of `q/p - 1 - log q/p`, for (behavior, policy), (behavior,
      proximal), (proximal, policy). mu sampled the tokens, so these estimate KL(p || q) without bias where p is mu.
    - `correction/masked`, `correction/truncated`: share of the M tokens whose weight is 0, and whose weight is a bound.
      `correction/log_mean`: mean per token of `log_rho`, before masking and truncation. `correction/weight_mean`: mean weight,
      0 for masked tokens.
    - `clip/noise`: the part of `clip/fraction` that the noise floor alone is expected to clip at these lengths and signs of
      advantages. `clip/drift`: the rest, which may fall below 0 by chance. `kl/noise`, `kl/drift`: the floor's k3, and
      `kl/behavior_policy_k3` minus it.
    - `by_lag/<bucket>/count`: completions whose policy lag is in that bucket of `LAG_BUCKETS`; `by_lag/<bucket>/<name>` with
      `/` as `_`: some of the metrics above for these completions alone.

    Metrics are absent if the objective lacks their source (a band, proximal log-probs, a correction), if there is no noise
    floor, or if a bucket has no completions. If no completion has loss tokens, all count as s = W = 1.
    """
    rows = table.cpu().numpy()
    losses = rows[:, Column.LOSS]
    if aggregation == "seq-mean-token-mean":
        losses = losses / rows[:, Column.NUM_TOKENS].clip(min=1)
    metrics = {"loss/policy": float(losses.sum() / denominator), **_metrics_of(rows, noise)}
    for bucket, (lowest, highest) in LAG_BUCKETS.items():
        lags = rows[:, Column.POLICY_LAG]
        in_bucket = rows[(lags >= lowest) & (lags <= highest)]
        if len(in_bucket) == 0:
            continue
        of_bucket = _metrics_of(in_bucket, noise)
        metrics[f"by_lag/{bucket}/count"] = len(in_bucket)
        metrics |= {f"by_lag/{bucket}/{name.replace('/', '_')}": of_bucket[name] for name in BY_LAG if name in of_bucket}
    return metrics


def truncated_ess(table: Tensor) -> float:
    """Return the `ess/sequence_truncated` of a step's table."""
    return _effective_sizes(_measured(table.cpu().numpy()))["ess/sequence_truncated"]


def _measured(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the completions with loss tokens; all of them where none has any."""
    measured = rows[rows[:, Column.NUM_TOKENS] > 0]
    return measured if len(measured) else rows


def _metrics_of(rows: NDArray[np.float64], noise: EngineNoise | None) -> dict[str, float]:
    measured = _measured(rows)
    per_token = {name: _per_token(rows, column) for name, column in _PER_TOKEN.items() if _is_measured(rows, column)}
    metrics = {**_ratios(measured), **_clips(rows), **_effective_sizes(measured), **per_token}
    metrics["kl/behavior_policy_k1"] = -_per_token(rows, Column.LOG_SEQUENCE_WEIGHT)
    return metrics if noise is None else metrics | _noise_and_drift(rows, noise, metrics)


def _ratios(measured: NDArray[np.float64]) -> dict[str, float]:
    log_ratio = measured[:, Column.LOG_SEQUENCE_RATIO]
    p05, p50, p95 = np.quantile(log_ratio, (0.05, 0.5, 0.95))
    return {
        "ratio/log_mean": float(log_ratio.mean()),
        "ratio/log_std": float(log_ratio.std()),
        "ratio/log_min": float(log_ratio.min()),
        "ratio/log_max": float(log_ratio.max()),
        "ratio/log_p05": float(p05),
        "ratio/log_p50": float(p50),
        "ratio/log_p95": float(p95),
        "ratio/first": float(np.abs(np.expm1(log_ratio.clip(max=LOG_RATIO_BOUND))).mean()),
        "ratio/token_log_abs_max": float(measured[:, Column.LARGEST_LOG_TOKEN_RATIO].max()),
    }


def _clips(rows: NDArray[np.float64]) -> dict[str, float]:
    num_tokens = rows[:, Column.NUM_TOKENS].clip(min=1)
    return {
        f"clip/{name}": float((rows[:, column] / num_tokens).mean())
        for name, column in _CLIPPED.items()
        if _is_measured(rows, column)
    }


def _effective_sizes(measured: NDArray[np.float64]) -> dict[str, float]:
    log_weights = measured[:, Column.LOG_SEQUENCE_WEIGHT]
    num_tokens = measured[:, Column.NUM_TOKENS].sum()
    weight, squared = measured[:, Column.TOKEN_WEIGHT].sum(), measured[:, Column.SQUARED_TOKEN_WEIGHT].sum()
    return {
        "ess/sequence": _effective_share(log_weights),
        "ess/sequence_truncated": _effective_share(log_weights.clip(max=math.log(SEQUENCE_WEIGHT_CAP))),
        "ess/token": float(weight**2 / (num_tokens * squared)) if num_tokens else 1.0,
    }


def _effective_share(log_weights: NDArray[np.float64]) -> float:
    # The share does not change with the scale: with the largest weight at 1 nothing overflows.
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def _noise_and_drift(rows: NDArray[np.float64], noise: EngineNoise, metrics: dict[str, float]) -> dict[str, float]:
    k3 = noise.by_sign.every.k3
    divided = {"kl/noise": k3, "kl/drift": metrics["kl/behavior_policy_k3"] - k3}
    if noise.band is None:
        return divided
    lengths = rows[:, Column.NUM_TOKENS].clip(min=1)
    positive, negative = rows[:, Column.NUM_POSITIVE] / lengths, rows[:, Column.NUM_NEGATIVE] / lengths
    expected = float(noise.by_sign.expected_clip(noise.band, lengths, positive, negative).mean())
    return divided | {"clip/noise": expected, "clip/drift": metrics["clip/fraction"] - expected}


def _is_measured(rows: NDArray[np.float64], column: Column) -> bool:
    return not np.isnan(rows[:, column]).any()


def _per_token(rows: NDArray[np.float64], column: Column) -> float:
    return float(rows[:, column].sum() / max(1.0, rows[:, Column.NUM_TOKENS].sum()))


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
    bucket's metrics in `learner.diagnostics.batch_metrics`.
    """
    rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
    every_reward = np.concatenate(rewards)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = np.array([len(rollout.token_ids) for rollout in rollouts])
    median, near_longest = np.percentile(lengths, (50, 95))
    lags = [group.policy_lag(policy_version) for group in groups]
    return {
        "reward/mean": float(every_reward.mean()),
        # Exactly 0 for equal rewards: the mean of many 0.1 is not 0.1.
        "reward/std": float(every_reward.std()) if np.ptp(every_reward) else 0.0,
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
        **_means("reward_part", (part for rollout in rollouts for part in rollout.reward_parts.items())),
        **_means("reward_by_task", ((group.task, one.reward) for group in groups if group.task for one in group.rollouts)),
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


def _means(prefix: str, named: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of the values of each name, such as a part of the reward or a task, as `prefix/name`."""
    values: dict[str, list[float]] = {}
    for name, value in named:
        values.setdefault(name, []).append(value)
    return {f"{prefix}/{name}": float(np.mean(of_name)) for name, of_name in sorted(values.items())}


def _metrics_by_lag(groups: Sequence[Group], lags: Sequence[int]) -> dict[str, float]:
    rollouts: dict[str, list[Rollout]] = {}
    for group, lag in zip(groups, lags, strict=True):
        rollouts.setdefault(lag_bucket(lag), []).extend(group.rollouts)
    metrics: dict[str, float] = {}
    for bucket, of_bucket in rollouts.items():
        metrics[f"by_lag/{bucket}/reward_mean"] = float(np.mean([rollout.reward for rollout in of_bucket]))
        metrics[f"by_lag/{bucket}/length_mean"] = float(np.mean([len(rollout.token_ids) for rollout in of_bucket]))
    return metrics
