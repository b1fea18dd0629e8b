"""Losses that are REINFORCE times a constant: `l = -sg[weight] A policy_logprobs`, with the gradient `-weight A`.

Tensors, padding and gradients are as in `losses`. Every weight is detached: a mask drops tokens, a ratio only weighs them. The
value is a weighted log-likelihood, not comparable with another objective's.
"""

import torch
from torch import Tensor

from offbeat.learner.objectives.losses import TokenLosses, bounded_ratio, log_token_ratio, nowhere


def reinforce(policy_logprobs: Tensor, completion_mask: Tensor, advantages: Tensor) -> TokenLosses:
    """`l = -A policy_logprobs`: the policy gradient as if the policy itself had sampled; gradient `-A` in every token.

    Williams 1992, without an importance ratio: the baseline that shows the gain of an objective's ratio.
    """
    logprobs = torch.where(completion_mask, policy_logprobs, 0.0)
    token_losses = -torch.where(completion_mask, advantages, 0.0) * logprobs
    return TokenLosses(token_losses, nowhere(token_losses), None)


def cispo(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """`l = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A policy_logprobs`, `r = exp(policy_logprobs - anchor_logprobs)`.

    CISPO, https://arxiv.org/abs/2506.13585, eq. 4 and 5: the clip bounds a weight, and `sg` stops its gradient. Gradient:
    `-clip(r) A` in every token, so `clipped` is all False. `clip_low` = 1 means no lower bound, as in the paper's experiments.
    Some implementations use `clip_high` as the bound itself; here the bound is `1 + clip_high`.
    """
    log_ratio = log_token_ratio(policy_logprobs.detach(), anchor_logprobs, completion_mask)
    weight = bounded_ratio(log_ratio).clamp(1 - clip_low, 1 + clip_high)
    token_losses = weight * reinforce(policy_logprobs, completion_mask, advantages).losses
    return TokenLosses(token_losses, nowhere(token_losses), log_ratio)


def minirl(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weight_cap: float,
) -> TokenLosses:
    """`l = -sg[min(pi/mu, weight_cap)] A policy_logprobs`, and 0 where `ppo_clip` would clip `r = pi / anchor`.

    MiniRL, https://arxiv.org/abs/2512.01374, eq. 7: PPO's clip decides by `pi / pi_old` which tokens are trained on, and what
    is trained on has its whole importance weight `pi / mu`. The mask is the one that MiniMax-M1 proposes beside CISPO,
    https://arxiv.org/abs/2506.13585, eq. 6 and 7. Gradient: `-min(pi/mu, weight_cap) A`, and exactly 0 where
    (A > 0, r > 1 + clip_high) or (A < 0, r < 1 - clip_low). With mu as the anchor and no cap it is that of `ppo_clip`.
    """
    log_ratio = log_token_ratio(policy_logprobs.detach(), anchor_logprobs, completion_mask)
    ratio = bounded_ratio(log_ratio)
    beyond = torch.where(advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
    found = _weigh_kept(policy_logprobs, behavior_logprobs, completion_mask, advantages, beyond, weight_cap)
    return found._replace(log_ratio=log_ratio)


def dppo_tv(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weight_cap: float,
) -> TokenLosses:
    """`l = -sg[min(pi/mu, weight_cap)] A policy_logprobs`; 0 where the token's probability has moved too far from the anchor's.

    DPPO-Binary-TV, https://arxiv.org/abs/2602.04879. With p and q the token's probability under pi and the anchor, the binary
    total variation is `|p - q|`: dropped are A > 0 with `p - q > clip_high`, and A < 0 with `q - p > clip_low`. A rare token
    may so become many times as likely, and a likely one may not lose much. Gradient: `-min(pi/mu, weight_cap) A`, or exactly 0.
    """
    probability, of_anchor = _probabilities(policy_logprobs, anchor_logprobs, completion_mask)
    beyond = torch.where(advantages > 0, probability - of_anchor > clip_high, of_anchor - probability > clip_low)
    return _weigh_kept(policy_logprobs, behavior_logprobs, completion_mask, advantages, beyond, weight_cap)


def dppo_kl(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weight_cap: float,
) -> TokenLosses:
    """As `dppo_tv`, by the binary divergence `D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))`.

    DPPO-Binary-KL, https://arxiv.org/abs/2602.04879: dropped are A > 0 with p > q and `D > clip_high`, and A < 0 with p < q and
    `D > clip_low`. As in the authors' code 1e-8 is added to `1 - p` and `1 - q`.
    """
    probability, of_anchor = _probabilities(policy_logprobs, anchor_logprobs, completion_mask)
    others, others_of_anchor = (1 - probability).clamp(min=0) + 1e-8, (1 - of_anchor).clamp(min=0) + 1e-8
    log_ratio = log_token_ratio(policy_logprobs.detach(), anchor_logprobs, completion_mask)
    divergence = (others_of_anchor / others).log() * (1 - of_anchor) - of_anchor * log_ratio
    above = (probability > of_anchor) & (divergence > clip_high)
    below = (probability < of_anchor) & (divergence > clip_low)
    beyond = torch.where(advantages > 0, above, below)
    return _weigh_kept(policy_logprobs, behavior_logprobs, completion_mask, advantages, beyond, weight_cap)


def _probabilities(policy_logprobs: Tensor, anchor_logprobs: Tensor, completion_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens' probabilities under both policies, detached; 1 outside the mask."""
    policy, anchor = (torch.where(completion_mask, one.detach(), 0.0) for one in (policy_logprobs, anchor_logprobs))
    return policy.exp(), anchor.exp()


def _weigh_kept(
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    beyond: Tensor,
    weight_cap: float,
) -> TokenLosses:
    """`l = -sg[min(pi/mu, weight_cap)] A policy_logprobs`, and 0 for the tokens of `beyond`, which are the clipped ones."""
    dropped = beyond & completion_mask & (advantages != 0)
    weight = bounded_ratio(log_token_ratio(policy_logprobs.detach(), behavior_logprobs, completion_mask)).clamp(max=weight_cap)
    token_losses = torch.where(dropped, 0.0, weight) * reinforce(policy_logprobs, completion_mask, advantages).losses
    return TokenLosses(token_losses, dropped, None)
