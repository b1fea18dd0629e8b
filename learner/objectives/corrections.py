"""Off-policy corrections: constant weights and masks for the distance between the sampling policy and the ratio's anchor.

All functions take `log_rho = numerator - behavior_logprobs`, `[rows, tokens]`, where the numerator is pi_old if the anchor is
decoupled and pi_theta if not, and `completion_mask`, bool; `log_rho` may hold any value where the mask is False. They return
weights `[rows, tokens]` float32 that multiply the token losses: detached, 0 outside the mask, always finite (a weight is at
most e^`LOG_RATIO_BOUND`, even if `high` is larger). `rho` is the ratio of a token; `low` and `high` bound it, both included.
Masks compare logarithms, which do not overflow. A token or row of weight 0 has no gradient but still counts in the
aggregation's denominator, so dropping a part of a batch does not amplify the rest.
"""

import math

import torch
from torch import Tensor

from offbeat.learner.objectives.losses import LOG_RATIO_BOUND, bounded_ratio, log_sequence_ratio


def token_tis(log_rho: Tensor, completion_mask: Tensor, *, low: float, high: float) -> Tensor:
    """`clip(rho, low, high)` per token: truncated importance sampling.

    Truncation from above trades variance for bias as V-trace does, https://arxiv.org/abs/1802.01561, and LlamaRL's AIPO,
    https://arxiv.org/abs/2505.24034; both have no lower bound, which is `low` = 0.
    """
    log_rho = _masked(log_rho, completion_mask)
    return torch.where(completion_mask, bounded_ratio(log_rho).clamp(low, high), 0.0)


def geometric_tis(log_rho: Tensor, completion_mask: Tensor, *, low: float, high: float) -> Tensor:
    """`clip((prod_t rho_t)^(1/n), low, high)`, one weight for all n tokens of a row.

    ROLL's weight of the type `geometric`, AReaL's of the level `sequence`. It hardly varies where rows are long, and is no
    importance weight: its mean under mu is not 1.
    """
    log_mean = log_sequence_ratio(_masked(log_rho, completion_mask), completion_mask)
    return torch.where(completion_mask, bounded_ratio(log_mean).clamp(low, high), 0.0)


def sequence_tis(log_rho: Tensor, completion_mask: Tensor, *, low: float, high: float) -> Tensor:
    """`clip(prod_t rho_t, low, high)`, one weight for all tokens of a row: the exact importance weight, truncated.

    A lower bound above 0 keeps rows in the loss that the policy has left.
    """
    log_product = _masked(log_rho, completion_mask).sum(dim=-1, keepdim=True)
    return torch.where(completion_mask, bounded_ratio(log_product).clamp(low, high), 0.0)


def icepop(log_rho: Tensor, completion_mask: Tensor, *, low: float, high: float) -> Tensor:
    """`rho` if `low <= rho <= high`, else 0, per token: IcePop, https://arxiv.org/abs/2510.18855."""
    log_rho = _masked(log_rho, completion_mask)
    return torch.where(completion_mask & _within(log_rho, low, high), bounded_ratio(log_rho), 0.0)


def sequence_mask(log_rho: Tensor, completion_mask: Tensor, *, low: float, high: float) -> Tensor:
    """`prod_t rho_t` if that is within `low` and `high`, else 0, one weight for all tokens of a row.

    `sequence_tis` with rows beyond the bound dropped instead of truncated; with `low` = 0 TRL's `sequence_mask`.
    """
    log_product = _masked(log_rho, completion_mask).sum(dim=-1, keepdim=True)
    return torch.where(completion_mask & _within(log_product, low, high), bounded_ratio(log_product), 0.0)


def geometric_mask(log_rho: Tensor, completion_mask: Tensor, *, low: float, high: float) -> Tensor:
    """1 if `low <= exp(mean_t log rho_t) <= high`, else 0, for all tokens of a row.

    Unlike the product of `sequence_mask`, the mean does not grow with the length: long rows are not dropped for their length.
    """
    log_mean = log_sequence_ratio(_masked(log_rho, completion_mask), completion_mask)
    return (completion_mask & _within(log_mean, low, high)).float()


def segment_mask(log_rho: Tensor, completion_mask: Tensor, turns: Tensor, *, low: float, high: float) -> Tensor:
    """1 if `low <= exp(mean_t log rho_t) <= high`, else 0, the mean over a turn, for all tokens of the turn.

    `turns`: `[rows, tokens]` int64, the turn of each token, below the number of tokens. ROLL's filter of the type `segment`; in
    a completion of one turn it is `geometric_mask`.
    """
    log_rho = _masked(log_rho, completion_mask)
    sums = torch.zeros_like(log_rho).scatter_add(-1, turns, log_rho)
    counts = torch.zeros_like(log_rho).scatter_add(-1, turns, completion_mask.to(log_rho))
    log_mean = (sums / counts.clamp(min=1)).gather(-1, turns)
    return (completion_mask & _within(log_mean, low, high)).float()


def k2_mask(log_rho: Tensor, completion_mask: Tensor, *, high: float) -> Tensor:
    """1 if `mean_t (log rho_t)^2 / 2 <= high`, else 0, for all tokens of a row.

    The mean estimates KL(mu || pi_old) per token, cannot be negative, and grows with the noise of single tokens, which cancel
    in `geometric_mask`: verl's rejection by `seq_mean_k2`.
    """
    log_rho = _masked(log_rho, completion_mask)
    return (completion_mask & (log_sequence_ratio(0.5 * log_rho.square(), completion_mask) <= high)).float()


def k3_mask(log_rho: Tensor, completion_mask: Tensor, *, high: float) -> Tensor:
    """1 if `mean_t (rho_t - 1 - log rho_t) <= high`, else 0, for all tokens of a row.

    As `k2_mask`, by the estimate k3 of http://joschu.net/blog/kl-approx.html, whose mean under mu is KL(mu || pi_old) itself:
    verl's rejection by `seq_mean_k3`.
    """
    bounded = _masked(log_rho, completion_mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (completion_mask & (log_sequence_ratio(bounded.expm1() - bounded, completion_mask) <= high)).float()


def opsm(log_rho: Tensor, completion_mask: Tensor, advantages: Tensor, *, threshold: float) -> Tensor:
    """0 where the advantage is negative and `mean_t(-log rho_t) > threshold` in the row, else 1.

    Off-policy sequence masking of DeepSeek-V3.2, https://arxiv.org/abs/2512.02556: bad completions that the policy has already
    moved away from teach it nothing. `advantages`: `[rows, tokens]`, any value outside the mask.
    """
    distance = -log_sequence_ratio(_masked(log_rho, completion_mask), completion_mask)
    dropped = (advantages < 0) & (distance > threshold)
    return (completion_mask & ~dropped).float()


def _masked(log_rho: Tensor, completion_mask: Tensor) -> Tensor:
    return torch.where(completion_mask, log_rho.detach(), 0.0)


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    log_low = math.log(low) if low > 0 else -math.inf
    return (log_ratio >= log_low) & (log_ratio <= math.log(high))
