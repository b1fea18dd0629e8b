"""Statistics of each completion of a micro-batch, from which the metrics of the optimizer step are computed.

A micro-batch becomes a table with a line per completion, made on the device without waiting for it. The lines of all
micro-batches and ranks, in any order, are the table of the step.

A step leaves out completions with broken log-probs: they have no loss and no gradient, and are counted by reason. Their rows
still count in the denominators of the step, like completions that a correction drops: the others weigh what they would weigh
beside them.
"""

import math
from enum import IntEnum

import torch
from torch import Tensor

from offbeat.learner.objectives.bands import ClippedRatio, Correction
from offbeat.learner.objectives.losses import LOG_RATIO_BOUND, bounded_ratio
from offbeat.learner.objectives.objective import Evaluation, PolicyLogprobs


class Column(IntEnum):
    """A column of the table. Sums and counts are over a completion's loss tokens; pairs of policies are those of `kl/`."""

    POLICY_LAG = 0
    NUM_TOKENS = 1
    LOSS = 2
    """Sum of the token losses, times the completion's weight."""
    NUM_CLIPPED = 3
    NUM_POSITIVE_ABOVE = 4
    """Advantage above 0 and ratio above `1 + clip_high`. This and the next three are nan without a band."""
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
    """This and the next three are nan without proximal log-probs."""
    BEHAVIOR_PROXIMAL_K3 = 16
    PROXIMAL_POLICY_K1 = 17
    PROXIMAL_POLICY_K3 = 18
    NUM_MASKED = 19
    """This and the next three are nan without a correction."""
    NUM_TRUNCATED = 20
    CORRECTION_LOG_RATIO = 21
    CORRECTION_WEIGHT = 22
    NUM_POSITIVE = 23
    """Advantage above 0, at any ratio."""
    NUM_NEGATIVE = 24
    K3_OF_TURN_1 = 25
    """`BEHAVIOR_POLICY_K3` of the tokens of the first turn; the next four are of the other buckets of turns."""
    K3_OF_TURN_2 = 26
    K3_OF_TURNS_3_TO_4 = 27
    K3_OF_TURNS_5_TO_8 = 28
    K3_OF_TURNS_FROM_9 = 29
    GROUP = 30
    """Index of the completion's group in the step."""
    BROKEN = 31
    """The completion's `Broken`; a completion that is broken has no loss tokens in the other columns."""


K3_OF_TURNS = (
    Column.K3_OF_TURN_1,
    Column.K3_OF_TURN_2,
    Column.K3_OF_TURNS_3_TO_4,
    Column.K3_OF_TURNS_5_TO_8,
    Column.K3_OF_TURNS_FROM_9,
)
"""The columns of `TURN_BUCKETS`, in their order."""

TURN_BUCKETS = {"1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9+": (9, math.inf)}
"""First and last turn of each bucket, counted from 1 in the order in which they were asked for, by the bucket's name."""


class Broken(IntEnum):
    """The reason why a completion is left out."""

    NOT_AT_ALL = 0
    NOT_FINITE = 1
    """A log-prob of a loss token is nan or infinite, under any of the policies."""
    RATIO = 2
    """A loss token is more than e^`LOG_RATIO_BOUND` times as likely under the policy as under the anchor. Below the bound the
    gradient of such a token dominates a step, where A < 0 and nothing clips it; above, it would vanish without a word."""


def find_broken(logprobs: PolicyLogprobs, completion_mask: Tensor) -> Tensor:
    """Return the `Broken` of each row, `[rows]` int64; log-probs may hold any value outside the mask."""
    policy, anchor = logprobs.policy.detach(), logprobs.anchor
    finite = policy.isfinite() & logprobs.behavior.isfinite() & anchor.isfinite()
    is_finite = (finite | ~completion_mask).all(dim=-1)
    is_bounded = ~(completion_mask & (policy - anchor > LOG_RATIO_BOUND)).any(dim=-1)
    reasons = torch.where(is_bounded, Broken.NOT_AT_ALL.value, Broken.RATIO.value)
    return torch.where(is_finite, reasons, Broken.NOT_FINITE.value)


def row_statistics(
    logprobs: PolicyLogprobs,
    evaluation: Evaluation,
    *,
    completion_mask: Tensor,
    advantages: Tensor,
    row_weights: Tensor,
    policy_lags: Tensor,
    turns: Tensor,
) -> Tensor:
    """Return the table of a micro-batch, `[rows, len(Column)]` float64, detached.

    `policy_lags` and `row_weights`: `[rows]`; all others `[rows, tokens]`, with any value outside the mask. `row_weights` are
    those of `aggregate`; `turns` count from 0. Differences are taken in float64: a log-ratio of 1e-4
    beside log-probs of size 10 keeps its digits, also squared. Logs are clamped to `LOG_RATIO_BOUND` before `exp`, as in the
    objectives.
    """
    num_tokens = completion_mask.sum(dim=-1)
    log_token_ratio = _log_ratio(logprobs.policy, logprobs.anchor, completion_mask)
    log_weight = _log_ratio(logprobs.policy, logprobs.behavior, completion_mask)
    token_weight = bounded_ratio(log_weight)
    k3 = _k3(log_weight)
    columns = {
        Column.POLICY_LAG: policy_lags.clamp(min=0),
        Column.NUM_TOKENS: num_tokens,
        Column.LOSS: row_weights * _total(evaluation.losses.detach(), completion_mask),
        Column.NUM_CLIPPED: _total(evaluation.clipped, completion_mask),
        Column.LOG_SEQUENCE_RATIO: log_token_ratio.sum(dim=-1) / num_tokens.clamp(min=1),
        Column.LARGEST_LOG_TOKEN_RATIO: log_token_ratio.abs().amax(dim=-1),
        Column.LOG_SEQUENCE_WEIGHT: log_weight.sum(dim=-1),
        Column.SQUARED_LOG_WEIGHT: log_weight.square().sum(dim=-1),
        Column.TOKEN_WEIGHT: _total(token_weight, completion_mask),
        Column.SQUARED_TOKEN_WEIGHT: _total(token_weight.square(), completion_mask),
        Column.BEHAVIOR_POLICY_K3: k3.sum(dim=-1),
        Column.NUM_POSITIVE: _total(advantages > 0, completion_mask),
        Column.NUM_NEGATIVE: _total(advantages < 0, completion_mask),
        # For the caller to fill: it knows the groups, and the mask has no broken completions any more.
        Column.GROUP: torch.zeros_like(num_tokens),
        Column.BROKEN: torch.zeros_like(num_tokens),
        **{
            column: _total(k3 * ((turns >= first - 1) & (turns < last)), completion_mask)
            for column, (first, last) in zip(K3_OF_TURNS, TURN_BUCKETS.values(), strict=True)
        },
    }
    if evaluation.clipped_ratio is not None:
        columns |= _clip_columns(evaluation.clipped_ratio, completion_mask, advantages)
    if logprobs.proximal is not None:
        columns |= _proximal_columns(logprobs.policy, logprobs.behavior, logprobs.proximal, completion_mask)
    if evaluation.correction is not None:
        columns |= _correction_columns(evaluation.correction, completion_mask)
    missing = torch.full_like(columns[Column.LOSS], math.nan)
    return torch.stack([columns.get(column, missing).double() for column in Column], dim=-1)


def _clip_columns(clipped: ClippedRatio, completion_mask: Tensor, advantages: Tensor) -> dict[Column, Tensor]:
    positive, negative = advantages > 0, advantages < 0
    # In the ratio's own precision, so that it falls on the same side of a bound as in the objective.
    ratio = clipped.log_ratio.detach().exp()
    above, below = ratio > 1 + clipped.clip_high, ratio < 1 - clipped.clip_low
    return {
        Column.NUM_POSITIVE_ABOVE: _total(positive & above, completion_mask),
        Column.NUM_POSITIVE_BELOW: _total(positive & below, completion_mask),
        Column.NUM_NEGATIVE_ABOVE: _total(negative & above, completion_mask),
        Column.NUM_NEGATIVE_BELOW: _total(negative & below, completion_mask),
    }


def _proximal_columns(policy: Tensor, behavior: Tensor, proximal: Tensor, completion_mask: Tensor) -> dict[Column, Tensor]:
    log_before = _log_ratio(proximal, behavior, completion_mask)
    log_since = _log_ratio(policy, proximal, completion_mask)
    return {
        Column.BEHAVIOR_PROXIMAL_K1: -log_before.sum(dim=-1),
        Column.BEHAVIOR_PROXIMAL_K3: _k3(log_before).sum(dim=-1),
        Column.PROXIMAL_POLICY_K1: -log_since.sum(dim=-1),
        Column.PROXIMAL_POLICY_K3: _k3(log_since).sum(dim=-1),
    }


def _correction_columns(correction: Correction, completion_mask: Tensor) -> dict[Column, Tensor]:
    weights = correction.weights.detach()
    return {
        Column.NUM_MASKED: _total(weights == 0, completion_mask),
        Column.NUM_TRUNCATED: _total(correction.truncated & (weights != 0), completion_mask),
        Column.CORRECTION_LOG_RATIO: _total(correction.log_rho.detach(), completion_mask),
        Column.CORRECTION_WEIGHT: _total(weights, completion_mask),
    }


def _total(values: Tensor, completion_mask: Tensor) -> Tensor:
    """Return the sum of each row's loss tokens, `[rows]` float64."""
    return torch.where(completion_mask, values, 0).sum(dim=-1, dtype=torch.float64)


def _log_ratio(numerator: Tensor, denominator: Tensor, completion_mask: Tensor) -> Tensor:
    """Return the difference of log-probs in float64, detached; 0 outside the mask."""
    return torch.where(completion_mask, numerator.detach().double() - denominator.detach().double(), 0.0)


def _k3(log_ratio: Tensor) -> Tensor:
    """Return `q/p - 1 - log(q/p)` of `log q/p`; both terms are clamped, so the result is never negative."""
    log_ratio = log_ratio.clamp(max=LOG_RATIO_BOUND)
    return log_ratio.expm1() - log_ratio
