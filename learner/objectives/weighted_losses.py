"""Losses that are REINFORCE times a constant: `l = -sg[weight] A policy_logprobs`, with the gradient `-weight A`.

Tensors, padding and gradients are as in `losses`. Every weight is detached: a mask drops tokens, a ratio only weighs them. The
value is a weighted log-likelihood, not comparable with another objective's.
"""

import torch
from torch import Tensor

from offbeat.learner.objectives.losses import LOG_RATIO_BOUND, LossInputs, TokenLosses, bounded_ratio, log_token_ratio, nowhere


def reinforce(inputs: LossInputs) -> TokenLosses:
    """`l = -A policy_logprobs`: the policy gradient as if the policy itself had sampled; gradient `-A` in every token.

    Williams 1992, without an importance ratio: the baseline that shows the gain of an objective's ratio.
    """
    logprobs = torch.where(inputs.completion_mask, inputs.policy_logprobs, 0.0)
    token_losses = -torch.where(inputs.completion_mask, inputs.advantages, 0.0) * logprobs
    return TokenLosses(token_losses, nowhere(token_losses), None)


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> TokenLosses:
    """`l = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A policy_logprobs`, `r = exp(policy_logprobs - anchor_logprobs)`.

    CISPO, https://arxiv.org/abs/2506.13585, eq. 4 and 5: the clip bounds a weight, and `sg` stops its gradient. Gradient:
    `-clip(r) A` in every token, so `clipped` is all False. `clip_low` = 1 means no lower bound, as in the paper's experiments.
    Some implementations use `clip_high` as the bound itself; here the bound is `1 + clip_high`.
    """
    log_ratio = inputs.log_ratio.detach()
    weight = bounded_ratio(log_ratio).clamp(1 - clip_low, 1 + clip_high)
    token_losses = weight * reinforce(inputs).losses
    return TokenLosses(token_losses, nowhere(token_losses), log_ratio)


def minirl(inputs: LossInputs, *, clip_low: float, clip_high: float, weight_cap: float) -> TokenLosses:
    """`l = -sg[min(pi/mu, weight_cap)] A policy_logprobs`, and 0 where `ppo_clip` would clip `r = pi / anchor`.

    MiniRL, https://arxiv.org/abs/2512.01374, eq. 7: PPO's clip decides by `pi / pi_old` which tokens are trained on, and what
    is trained on has its whole importance weight `pi / mu`. The mask is the one that MiniMax-M1 proposes beside CISPO,
    https://arxiv.org/abs/2506.13585, eq. 6 and 7. Gradient: `-min(pi/mu, weight_cap) A`, and exactly 0 where
    (A > 0, r > 1 + clip_high) or (A < 0, r < 1 - clip_low). With mu as the anchor and no cap it is that of `ppo_clip`.
    """
    log_ratio = inputs.log_ratio.detach()
    ratio = bounded_ratio(log_ratio)
    beyond = torch.where(inputs.advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
    return _weigh_kept(inputs, beyond, _capped_weight(inputs, weight_cap), log_ratio)


def sao(inputs: LossInputs, *, clip_low: float, clip_high: float) -> TokenLosses:
    """`l = -sg[r] A policy_logprobs` where `1 - clip_low < r < 1 + clip_high`, and 0 elsewhere, `r = pi / anchor`.

    The loss of SAO, https://arxiv.org/abs/2607.07508, eq. 1 to 3: a token whose ratio to the stored log-probs is outside the
    band is left out, whatever the sign of its advantage, where `ppo_clip` keeps the two sides that A pushes back. It still
    counts in the denominator. Gradient: `-r A`, or exactly 0. The paper does not say that the ratio is a constant; with its
    gradient the loss of `ppo_clip` has the same gradient in the band.
    """
    log_ratio = inputs.log_ratio.detach()
    ratio = bounded_ratio(log_ratio)
    outside = (ratio <= 1 - clip_low) | (ratio >= 1 + clip_high) | (log_ratio.abs() > LOG_RATIO_BOUND)
    return _weigh_kept(inputs, outside, ratio, log_ratio)


def dppo_tv(inputs: LossInputs, *, clip_low: float, clip_high: float, weight_cap: float) -> TokenLosses:
    """`l = -sg[min(pi/mu, weight_cap)] A policy_logprobs`; 0 where the token's probability has moved too far from the anchor's.

    DPPO-Binary-TV, https://arxiv.org/abs/2602.04879. With p and q the token's probability under pi and the anchor, the binary
    total variation is `|p - q|`: dropped are A > 0 with `p - q > clip_high`, and A < 0 with `q - p > clip_low`. A rare token
    may so become many times as likely, and a likely one may not lose much. Gradient: `-min(pi/mu, weight_cap) A`, or exactly 0.
    """
    probability, of_anchor = _probabilities(inputs)
    beyond = torch.where(inputs.advantages > 0, probability - of_anchor > clip_high, of_anchor - probability > clip_low)
    return _weigh_kept(inputs, beyond, _capped_weight(inputs, weight_cap))


def dppo_kl(inputs: LossInputs, *, clip_low: float, clip_high: float, weight_cap: float) -> TokenLosses:
    """Return the losses of `dppo_tv` with its trust region measured by the binary divergence.

    `D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))`. DPPO-Binary-KL, https://arxiv.org/abs/2602.04879: dropped are A > 0
    with p > q and `D > clip_high`, and A < 0 with p < q and `D > clip_low`. As in the authors' code 1e-8 is added to `1 - p`
    and `1 - q`.
    """
    probability, of_anchor = _probabilities(inputs)
    others, others_of_anchor = (1 - probability).clamp(min=0) + 1e-8, (1 - of_anchor).clamp(min=0) + 1e-8
    log_ratio = inputs.log_ratio.detach()
    divergence = (others_of_anchor / others).log() * (1 - of_anchor) - of_anchor * log_ratio
    above = (probability > of_anchor) & (divergence > clip_high)
    below = (probability < of_anchor) & (divergence > clip_low)
    beyond = torch.where(inputs.advantages > 0, above, below)
    return _weigh_kept(inputs, beyond, _capped_weight(inputs, weight_cap))


def aspo(inputs: LossInputs, *, clip_low: float, clip_high: float, weight_cap: float) -> TokenLosses:
    """`l = -sg[min(w, weight_cap)] A policy_logprobs`, `w = 1/r` where A > 0 and `r` elsewhere; 0 where `ppo_clip` would clip.

    ASPO, https://arxiv.org/abs/2510.06062: with a positive advantage the ratio is turned over, so that tokens that have become
    unlikely are pushed up the most. The cap is its soft dual clip, which keeps the gradient. Gradient:
    `-min(w, weight_cap) A`, and exactly 0 where (A > 0, r > 1 + clip_high) or (A < 0, r < 1 - clip_low). The authors' code has
    another band for tokens of high entropy, which is part of Archer and not of this.
    """
    log_ratio = inputs.log_ratio.detach()
    ratio = bounded_ratio(log_ratio)
    positive = inputs.advantages > 0
    beyond = torch.where(positive, ratio > 1 + clip_high, ratio < 1 - clip_low)
    return _weigh_kept(inputs, beyond, torch.where(positive, 1 / ratio, ratio).clamp(max=weight_cap), log_ratio)


def topr(inputs: LossInputs) -> TokenLosses:
    """`l = -sg[min(W, 1)] A policy_logprobs` where A < 0, and `-A policy_logprobs` elsewhere, `W = prod_t r_t` of the row.

    TOPR, https://arxiv.org/abs/2503.14286, eq. 8, with advantages for its rewards: good completions are imitated however far
    the policy has left them, and bad ones lose their weight with their likelihood. Gradient: `-A` or `-min(W, 1) A`. The
    paper's objective is the aggregation `seq-mean-token-sum`. ROLL truncates the ratio of each token in the place of W.
    """
    log_weight = _log_product(inputs)
    weight = torch.where(inputs.advantages < 0, bounded_ratio(log_weight.clamp(max=0)), 1.0)
    token_losses = weight * reinforce(inputs).losses
    return TokenLosses(token_losses, nowhere(token_losses), None)


def vespo(
    inputs: LossInputs, *, k_positive: float, lambda_positive: float, k_negative: float, lambda_negative: float
) -> TokenLosses:
    """`l = -sg[phi(W)] A policy_logprobs` with `phi(W) = W^k exp(lambda (1 - W))` and `W = prod_t r_t` of the row.

    VESPO, https://arxiv.org/abs/2602.10693: a soft bound of the whole importance weight, not normalized by length. phi(1) is 1,
    and phi falls to 0 on both sides of its peak at `k / lambda`. k and lambda are those of the sign of A.
    Gradient: `-phi(W) A`; `clipped` where phi is too small for the number type, and so 0.
    """
    log_weight = _log_product(inputs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    of_positive = (k_positive * log_weight - lambda_positive * log_weight.expm1()).exp()
    of_negative = (k_negative * log_weight - lambda_negative * log_weight.expm1()).exp()
    weight = torch.where(inputs.advantages > 0, of_positive, of_negative)
    token_losses = weight * reinforce(inputs).losses
    return TokenLosses(token_losses, inputs.completion_mask & (inputs.advantages != 0) & (weight == 0), None)


def _log_product(inputs: LossInputs) -> Tensor:
    """Return `log W`, the sum of the loss tokens' log-ratios, detached, `[rows, 1]`."""
    return inputs.log_ratio.detach().sum(dim=-1, keepdim=True)


def _probabilities(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return the tokens' probabilities under policy and anchor, detached; 1 outside the mask."""
    logprobs = inputs.policy_logprobs, inputs.anchor_logprobs
    policy, anchor = (torch.where(inputs.completion_mask, one.detach(), 0.0) for one in logprobs)
    return policy.exp(), anchor.exp()


def _capped_weight(inputs: LossInputs, weight_cap: float) -> Tensor:
    """Return `min(pi/mu, weight_cap)` of each token, detached."""
    log_weight = log_token_ratio(inputs.policy_logprobs.detach(), inputs.behavior_logprobs, inputs.completion_mask)
    return bounded_ratio(log_weight).clamp(max=weight_cap)


def _weigh_kept(inputs: LossInputs, beyond: Tensor, weight: Tensor, log_ratio: Tensor | None = None) -> TokenLosses:
    """`l = -sg[weight] A policy_logprobs`, and 0 for the tokens of `beyond` with an advantage, which are the clipped ones."""
    dropped = beyond & inputs.completion_mask & (inputs.advantages != 0)
    token_losses = torch.where(dropped, 0.0, weight) * reinforce(inputs).losses
    return TokenLosses(token_losses, dropped, log_ratio)
