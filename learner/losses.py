"""The objective: GSPO's clipped sequence ratio, as a sum over rows."""

from typing import NamedTuple

import torch
from torch import Tensor


class RatioStatistics(NamedTuple):
    """What the ratios of some rows were, all `[rows]` and detached."""

    log_sequence_ratio: Tensor
    """`log s`, float32; 0 for a row without loss tokens."""
    largest_token_log_ratio: Tensor
    """Largest `|log token ratio|` in the row, float32."""
    has_loss_tokens: Tensor
    """False for a row whose completion is empty: it has a ratio only by convention."""
    positive_above: Tensor
    """Advantage above 0 and ratio above `1 + clip_high`: clipped, no gradient."""
    positive_below: Tensor
    """Advantage above 0 and ratio below `1 - clip_low`: not clipped, the gradient pulls the row back."""
    negative_above: Tensor
    """Advantage below 0 and ratio above `1 + clip_high`: not clipped, the gradient pulls the row back."""
    negative_below: Tensor
    """Advantage below 0 and ratio below `1 - clip_low`: clipped, no gradient."""


class SequenceLoss(NamedTuple):
    """A loss summed over rows, and what it was made of."""

    loss_sum: Tensor
    """Scalar, differentiable with respect to `policy_logprobs`."""
    statistics: RatioStatistics


def gspo_loss(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> SequenceLoss:
    """`sum_i -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)` with `s_i = exp(mean_t log r_it)`.

    `log r_it = policy_logprobs - anchor_logprobs` and the mean runs over the loss tokens of row i: GSPO, eq. 5 and 7 of
    https://arxiv.org/abs/2507.18071, negated and not yet averaged. Its gradient with respect to a loss token's
    log-prob is `-s_i A_i / |y_i|`, and exactly 0 where the row is clipped, which it is only on the side that its
    advantage would push it further out to: (A > 0, s > 1 + clip_high) or (A < 0, s < 1 - clip_low).

    `policy_logprobs`, `anchor_logprobs`: `[rows, tokens]` float32; `completion_mask`: `[rows, tokens]` bool;
    `advantages`: `[rows]`. Where the mask is False the log-probs may be anything, -inf and nan included.

    The caller divides by the number of completions of the whole global batch, over all micro-batches and ranks, rows
    without loss tokens included: such a row has the ratio 1, adds `-A` to the sum and nothing to the gradient.
    """
    # Neutralize padding before exp(): masking only afterwards leaves 0 * nan in the backward pass.
    log_token_ratio = torch.where(completion_mask, policy_logprobs - anchor_logprobs, 0.0)
    num_tokens = completion_mask.sum(dim=-1)
    log_sequence_ratio = log_token_ratio.sum(dim=-1) / num_tokens.clamp(min=1)
    sequence_ratio = log_sequence_ratio.exp()

    above = sequence_ratio.detach() > 1 + clip_high
    below = sequence_ratio.detach() < 1 - clip_low
    positive, negative = advantages > 0, advantages < 0
    clipped = (positive & above) | (negative & below)
    # min() of the clipped and the unclipped product, spelled out: torch.minimum() splits the gradient where both are equal.
    pessimistic_ratio = torch.where(clipped, sequence_ratio.clamp(1 - clip_low, 1 + clip_high), sequence_ratio)

    return SequenceLoss(
        loss_sum=-(pessimistic_ratio * advantages).sum(),
        statistics=RatioStatistics(
            log_sequence_ratio=log_sequence_ratio.detach(),
            largest_token_log_ratio=log_token_ratio.detach().abs().amax(dim=-1),
            has_loss_tokens=num_tokens > 0,
            positive_above=positive & above,
            positive_below=positive & below,
            negative_above=negative & above,
            negative_below=negative & below,
        ),
    )
