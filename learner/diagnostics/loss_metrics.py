"""Diagnostics: what the ratios, clips and corrections of an optimizer step were, over all of it and by policy lag.

A micro-batch becomes a table with a line per completion, made on the device without waiting for it. The lines of all
micro-batches and ranks, in any order, are the table of the step, and its metrics are taken from that.
"""

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.learner.diagnostics.noise_floor import NoiseFloor
from offbeat.learner.objectives.aggregation import Aggregation
from offbeat.learner.objectives.bands import Band, ClipBand, Correction
from offbeat.learner.objectives.losses import LOG_RATIO_BOUND

SEQUENCE_WEIGHT_CAP = 8.0
"""Where `ess/sequence_truncated` cuts sequence weights off, as VCPO does: https://arxiv.org/abs/2602.17616."""

LAG_BUCKETS = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9+": (9, math.inf)}
"""Lowest and highest policy lag of each bucket, by the bucket's name."""

_BY_LAG = (
    "ratio/log_mean",
    "ratio/log_std",
    "ratio/m2",
    "clip/fraction",
    "clip/noise",
    "clip/drift",
    "ess/sequence",
    "ess/token",
    "kl/behavior_policy_k1",
    "kl/behavior_policy_k3",
    "kl/behavior_proximal_k3",
    "kl/proximal_policy_k3",
    "correction/masked",
    "correction/truncated",
)
"""The metrics that each bucket has too."""


class Column(IntEnum):
    """What a table says of a completion. Sums and counts are over its loss tokens; pairs of policies are as in `kl/`."""

    POLICY_LAG = 0
    NUM_TOKENS = 1
    LOSS = 2
    """Sum of its token losses, times its weight."""
    NUM_CLIPPED = 3
    NUM_POSITIVE_ABOVE = 4
    """Advantage above 0 and ratio above `1 + clip_high`; nan in this and the next three without a band."""
    NUM_POSITIVE_BELOW = 5
    NUM_NEGATIVE_ABOVE = 6
    NUM_NEGATIVE_BELOW = 7
    LOG_SEQUENCE_RATIO = 8
    """`log s`: mean of `policy - anchor`, 0 without loss tokens."""
    LARGEST_LOG_TOKEN_RATIO = 9
    """Largest `|policy - anchor|`, 0 without loss tokens."""
    LOG_SEQUENCE_WEIGHT = 10
    """`log W`: sum of `policy - behavior`."""
    SQUARED_LOG_WEIGHT = 11
    TOKEN_WEIGHT = 12
    """Sum of `pi / mu`."""
    SQUARED_TOKEN_WEIGHT = 13
    BEHAVIOR_POLICY_K3 = 14
    BEHAVIOR_PROXIMAL_K1 = 15
    """nan in this and the next three without proximal log-probs."""
    BEHAVIOR_PROXIMAL_K3 = 16
    PROXIMAL_POLICY_K1 = 17
    PROXIMAL_POLICY_K3 = 18
    NUM_MASKED = 19
    """nan in this and the next three without a correction."""
    NUM_TRUNCATED = 20
    CORRECTION_LOG_RATIO = 21
    CORRECTION_WEIGHT = 22
    NUM_POSITIVE = 23
    """Advantage above 0, wherever the ratio is."""
    NUM_NEGATIVE = 24


class Noise(NamedTuple):
    """What is known of the engine's numerics, and what of it the objective sees."""

    floor: NoiseFloor
    band: ClipBand | None
    """Of an objective that clips a ratio to engine log-probs."""


def row_statistics(
    *,
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    completion_mask: Tensor,
    advantages: Tensor,
    token_losses: Tensor,
    clipped: Tensor,
    row_weights: Tensor,
    policy_lags: Tensor,
    band: Band | None,
    correction: Correction | None,
) -> Tensor:
    """The table of a micro-batch, `[rows, len(Column)]` float64, detached; by name only: most inputs look alike.

    `policy_lags` and `row_weights`: `[rows]`; all others `[rows, tokens]`, bool for `completion_mask` and `clipped`. They
    may be anything outside the mask. `token_losses` are after the correction, `row_weights` and `clipped` as `aggregate` and
    the objective have them. Differences are taken in float64: a log-ratio of 1e-4 beside log-probs of size 10 keeps its
    digits, also squared. Logs are clamped to `LOG_RATIO_BOUND` before `exp`, as the objectives' are.
    """

    def total(values: Tensor) -> Tensor:
        return torch.where(completion_mask, values, 0).sum(dim=-1, dtype=torch.float64)

    def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
        return torch.where(completion_mask, numerator.detach().double() - denominator.detach().double(), 0.0)

    num_tokens = completion_mask.sum(dim=-1)
    log_token_ratio = log_ratio(policy_logprobs, anchor_logprobs)
    log_weight = log_ratio(policy_logprobs, behavior_logprobs)
    token_weight = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    columns = {
        Column.POLICY_LAG: policy_lags,
        Column.NUM_TOKENS: num_tokens,
        Column.LOSS: row_weights * total(token_losses.detach()),
        Column.NUM_CLIPPED: total(clipped),
        Column.LOG_SEQUENCE_RATIO: log_token_ratio.sum(dim=-1) / num_tokens.clamp(min=1),
        Column.LARGEST_LOG_TOKEN_RATIO: log_token_ratio.abs().amax(dim=-1),
        Column.LOG_SEQUENCE_WEIGHT: log_weight.sum(dim=-1),
        Column.SQUARED_LOG_WEIGHT: log_weight.square().sum(dim=-1),
        Column.TOKEN_WEIGHT: total(token_weight),
        Column.SQUARED_TOKEN_WEIGHT: total(token_weight.square()),
        Column.BEHAVIOR_POLICY_K3: _k3(log_weight).sum(dim=-1),
        Column.NUM_POSITIVE: total(advantages > 0),
        Column.NUM_NEGATIVE: total(advantages < 0),
    }
    if band is not None:
        positive, negative = advantages > 0, advantages < 0
        # In the ratio's own precision, so that it falls on the same side of a bound as in the objective.
        ratio = band.log_ratio.detach().exp()
        above, below = ratio > 1 + band.clip_high, ratio < 1 - band.clip_low
        columns[Column.NUM_POSITIVE_ABOVE] = total(positive & above)
        columns[Column.NUM_POSITIVE_BELOW] = total(positive & below)
        columns[Column.NUM_NEGATIVE_ABOVE] = total(negative & above)
        columns[Column.NUM_NEGATIVE_BELOW] = total(negative & below)
    if proximal_logprobs is not None:
        log_before = log_ratio(proximal_logprobs, behavior_logprobs)
        log_since = log_ratio(policy_logprobs, proximal_logprobs)
        columns[Column.BEHAVIOR_PROXIMAL_K1] = -log_before.sum(dim=-1)
        columns[Column.BEHAVIOR_PROXIMAL_K3] = _k3(log_before).sum(dim=-1)
        columns[Column.PROXIMAL_POLICY_K1] = -log_since.sum(dim=-1)
        columns[Column.PROXIMAL_POLICY_K3] = _k3(log_since).sum(dim=-1)
    if correction is not None:
        weights = correction.weights.detach()
        columns[Column.NUM_MASKED] = total(weights == 0)
        columns[Column.NUM_TRUNCATED] = sum(
            (total(weights == bound) for bound in correction.truncated_at if bound > 0), torch.zeros_like(columns[Column.LOSS])
        )
        columns[Column.CORRECTION_LOG_RATIO] = total(correction.log_rho.detach())
        columns[Column.CORRECTION_WEIGHT] = total(weights)
    missing = torch.full_like(columns[Column.LOSS], math.nan)
    return torch.stack([columns.get(column, missing).double() for column in Column], dim=-1)


def _k3(log_ratio: Tensor) -> Tensor:
    """`q/p - 1 - log(q/p)` of `log q/p`; both terms are clamped, so that it stays above 0."""
    log_ratio = log_ratio.clamp(max=LOG_RATIO_BOUND)
    return log_ratio.expm1() - log_ratio


def loss_metrics(
    table: Tensor, *, aggregation: Aggregation, denominator: float, noise: Noise | None = None
) -> dict[str, float]:
    """The metrics of an optimizer step from the table of all its completions, at least one.

    Let N be the number of completions, M that of loss tokens, mu, pi_old, pi the behavior, proximal and current policy,
    `log s` the mean over a completion's tokens of `log pi/anchor`, W the product of its `pi/mu`. A *mean* of something per
    completion is over those with loss tokens, something per token over the M tokens.

    - `loss/policy`: `aggregate` over the step, divided by `denominator`.
    - `ratio/log_mean`, `_std`, `_min`, `_max`, `_p05`, `_p50`, `_p95`: of `log s`, a completion one value.
      `ratio/first`: mean of `|s - 1|`, which the caller keeps of the first step only, where nothing lags.
      `ratio/token_log_abs_max`: largest `|log pi/anchor|` of a token. `ratio/m2`: mean of `(log pi/mu)^2`, the second
      moment of M2PO (https://arxiv.org/abs/2510.01161), per token.
    - `clip/fraction`: mean over all N completions, empty ones as 0, of the share of their tokens whose gradient a clip made 0.
      `clip/positive_above`, ...: the same for tokens by the sign of their advantage and the side of the band that their ratio
      is on, clipped there (`positive_above`, `negative_below`) or not. What `dual_clip` capped is in `fraction` beside those
      two, and in no side of its own. `clip_tokens/...`: the share of the M tokens.
    - `ess/sequence`: `(sum W)^2 / (N sum W^2) = exp(2 lse(log W) - lse(2 log W)) / N`, Kish's effective sample size per
      completion, W not normalized by length: 1 on-policy, 1/N where one completion outweighs all others.
      `ess/sequence_truncated`: of `min(W, SEQUENCE_WEIGHT_CAP)`. `ess/token`: `(sum r)^2 / (M sum r^2)` of the tokens'
      `r = pi/mu`; it stays near 1 long after training is unsafe.
    - `kl/p_q_k1`, `kl/p_q_k3`: mean per token of `log p/q`, and of `q/p - 1 - log q/p`, for (behavior, policy), (behavior,
      proximal), (proximal, policy). mu has sampled, so that these estimate KL(p || q) without bias where p is mu.
    - `correction/masked`, `correction/truncated`: share of the M tokens whose weight is 0, and is a bound.
      `correction/log_mean`: mean per token of `log_rho`, before either. `correction/weight_mean`: mean weight, masked as 0.
    - `clip/noise`: of `clip/fraction`, what the noise floor alone is expected to clip at these lengths and signs of advantages;
      `clip/drift`: the rest, below 0 by chance where there is none. `kl/noise`, `kl/drift`: the floor's k3, and what
      `kl/behavior_policy_k3` is above it.
    - `by_lag/<bucket>/count`: completions whose policy lag is in that bucket of `LAG_BUCKETS`; `by_lag/<bucket>/<name>` with
      `/` as `_`: some of the above for them alone.

    Absent: what the objective does not have (a band, proximal log-probs, a correction), what needs a noise floor that is not
    there, and buckets without completions.
    Completions without loss tokens count as s = W = 1 where there are no others.
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
        metrics |= {f"by_lag/{bucket}/{name.replace('/', '_')}": of_bucket[name] for name in _BY_LAG if name in of_bucket}
    return metrics


def lag_bucket(policy_lag: int) -> str:
    """The name of the bucket that a policy lag, at least 0, is in."""
    return next(name for name, (lowest, highest) in LAG_BUCKETS.items() if lowest <= policy_lag <= highest)


def _metrics_of(rows: NDArray[np.float64], noise: Noise | None) -> dict[str, float]:
    measured = rows[rows[:, Column.NUM_TOKENS] > 0]
    if len(measured) == 0:
        measured = rows
    metrics = {**_ratios(measured), **_clips(rows), **_effective_sizes(measured), **_divergences(rows), **_corrections(rows)}
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
        "ratio/m2": _per_token(measured, Column.SQUARED_LOG_WEIGHT),
    }


def _clips(rows: NDArray[np.float64]) -> dict[str, float]:
    categories = {"fraction": Column.NUM_CLIPPED}
    if _is_measured(rows, Column.NUM_POSITIVE_ABOVE):
        categories |= {
            "positive_above": Column.NUM_POSITIVE_ABOVE,
            "positive_below": Column.NUM_POSITIVE_BELOW,
            "negative_above": Column.NUM_NEGATIVE_ABOVE,
            "negative_below": Column.NUM_NEGATIVE_BELOW,
        }
    num_tokens = rows[:, Column.NUM_TOKENS].clip(min=1)
    of_completions = {f"clip/{name}": float((rows[:, column] / num_tokens).mean()) for name, column in categories.items()}
    return of_completions | {f"clip_tokens/{name}": _per_token(rows, column) for name, column in categories.items()}


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


def _divergences(rows: NDArray[np.float64]) -> dict[str, float]:
    divergences = {
        "kl/behavior_policy_k1": -_per_token(rows, Column.LOG_SEQUENCE_WEIGHT),
        "kl/behavior_policy_k3": _per_token(rows, Column.BEHAVIOR_POLICY_K3),
    }
    if _is_measured(rows, Column.BEHAVIOR_PROXIMAL_K1):
        divergences |= {
            "kl/behavior_proximal_k1": _per_token(rows, Column.BEHAVIOR_PROXIMAL_K1),
            "kl/behavior_proximal_k3": _per_token(rows, Column.BEHAVIOR_PROXIMAL_K3),
            "kl/proximal_policy_k1": _per_token(rows, Column.PROXIMAL_POLICY_K1),
            "kl/proximal_policy_k3": _per_token(rows, Column.PROXIMAL_POLICY_K3),
        }
    return divergences


def _corrections(rows: NDArray[np.float64]) -> dict[str, float]:
    if not _is_measured(rows, Column.NUM_MASKED):
        return {}
    return {
        "correction/masked": _per_token(rows, Column.NUM_MASKED),
        "correction/truncated": _per_token(rows, Column.NUM_TRUNCATED),
        "correction/log_mean": _per_token(rows, Column.CORRECTION_LOG_RATIO),
        "correction/weight_mean": _per_token(rows, Column.CORRECTION_WEIGHT),
    }


def _noise_and_drift(rows: NDArray[np.float64], noise: Noise, metrics: dict[str, float]) -> dict[str, float]:
    divided = {"kl/noise": noise.floor.k3, "kl/drift": metrics["kl/behavior_policy_k3"] - noise.floor.k3}
    if noise.band is None:
        return divided
    lengths = rows[:, Column.NUM_TOKENS].clip(min=1)
    positive, negative = rows[:, Column.NUM_POSITIVE] / lengths, rows[:, Column.NUM_NEGATIVE] / lengths
    expected = float(noise.floor.expected_clip(noise.band, lengths, positive, negative).mean())
    return divided | {"clip/noise": expected, "clip/drift": metrics["clip/fraction"] - expected}


def _is_measured(rows: NDArray[np.float64], column: Column) -> bool:
    return not np.isnan(rows[:, column]).any()


def _per_token(rows: NDArray[np.float64], column: Column) -> float:
    return float(rows[:, column].sum() / max(1.0, rows[:, Column.NUM_TOKENS].sum()))
