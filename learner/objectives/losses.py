"""Loss functions of the objectives: log-probs and advantages in, one loss per token out.

Losses whose ratio is a constant weight are in `weighted_losses`.

All tensors are `[rows, tokens]`, one row per completion, padded on the right: log-probs, advantages and values float32,
`completion_mask` bool. Where the mask is False the others may hold any value, -inf and nan included: loss and gradient are
exactly 0 there. `A` is the advantage of a token. It is the same for all tokens of a row unless a critic or a KL in the reward
makes it vary. Gradients below are those of `losses.sum()` with respect to the token's own `policy_logprobs`; `aggregation`
then multiplies losses and gradients by the tokens' weights.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to plus or minus this before `exp`, which overflows float32 at 88 (and its square at 44, in the
gradient norm). Beyond the bound the ratio is e^20 = 4.9e8 or e^-20 and has no gradient. A step leaves out completions with
a token above the bound before it gets here, and reports it (`learner.diagnostics.row_statistics.find_broken`)."""


class LossInputs(NamedTuple):
    """The tensors that a loss function takes of a micro-batch, each `[rows, tokens]`."""

    policy_logprobs: Tensor
    """Under pi_theta; the only tensor with a gradient."""
    anchor_logprobs: Tensor
    """Under the policy in the denominator of the importance ratio."""
    completion_mask: Tensor
    """Bool: the tokens that are trained on."""
    advantages: Tensor
    behavior_logprobs: Tensor
    """Under mu; the same as the anchor's with `loss.anchor = "behavior"`."""

    @property
    def log_ratio(self) -> Tensor:
        """`log r = policy_logprobs - anchor_logprobs` with its gradient; exactly 0 outside the mask."""
        return log_token_ratio(self.policy_logprobs, self.anchor_logprobs, self.completion_mask)


class TokenLosses(NamedTuple):
    """The losses of a micro-batch's tokens, each tensor `[rows, tokens]`."""

    losses: Tensor
    """Differentiable with respect to `policy_logprobs`; exactly 0 outside `completion_mask`."""
    clipped: Tensor
    """Bool, detached: tokens with an advantage whose gradient a clip (or `LOG_RATIO_BOUND`) made exactly 0."""
    log_ratio: Tensor | None
    """Logarithm of the ratio that the band applies to, detached, finite; None for a loss without a band."""


def gspo(
    inputs: LossInputs, *, clip_low: float | Tensor, clip_high: float | Tensor, dual_clip: float | None = None
) -> TokenLosses:
    """`l_it = -min(s_i A_it, clip(s_i, 1 - clip_low, 1 + clip_high) A_it)` with `s_i = exp(mean_t log r_it)`.

    `log r_it = policy_logprobs - anchor_logprobs`; the mean runs over the loss tokens of row i: the sequence ratio of GSPO,
    https://arxiv.org/abs/2507.18071, eq. 5 and 7. All tokens of a row have the same ratio, so the paper's objective is the
    aggregation `seq-mean-token-mean`, under which the gradient with respect to a loss token's log-prob is
    `-s_i A_i / (N |y_i|)`. The gradient is exactly 0 where the row is clipped: (A > 0, s > 1 + clip_high) or
    (A < 0, s < 1 - clip_low), the sides that the advantage pushes the ratio to. The bounds are numbers, or `[rows, 1]`: one for
    each completion (`bands.NoiseOfLength`).

    With `dual_clip` c > 1 the loss of a negative advantage is also at most `c |A|`, where s > c, and the row has no gradient
    there: the bound of `ppo_clip`, on the sequence ratio.

    The ratio carries the gradient of its whole row. Where advantages or a correction's weights vary within a row, every
    token gets the row's mean; use `gspo_token` where each token must have its own.
    """
    log_ratio = log_sequence_ratio(inputs.log_ratio, inputs.completion_mask).expand_as(inputs.policy_logprobs)
    return _clipped_losses(inputs, log_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def gspo_token(
    inputs: LossInputs, *, clip_low: float | Tensor, clip_high: float | Tensor, dual_clip: float | None = None
) -> TokenLosses:
    """`l_it = -min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it)` with `s_it = sg[s_i] pi_it / sg[pi_it]`.

    `sg` stops the gradient, so `s_it` has the value of the sequence ratio `s_i` of `gspo` and the gradient `s_i` with
    respect to the token's own log-prob: GSPO-token, https://arxiv.org/abs/2507.18071, eq. 13 to 17. The gradient of a loss
    token is `-s_i A_it`, and 0 where the sign of the token's own advantage clips it. With equal advantages in a row, loss,
    gradient and clipping equal those of `gspo` under every aggregation that weighs the tokens of a row alike. `dual_clip`
    works as in `gspo`, by the sign of the token's own advantage.
    """
    log_of_tokens = inputs.log_ratio
    # The difference is exactly 0; adding log s to it last keeps 3e-4 from being rounded beside log-probs of size 10.
    log_ratio = (log_of_tokens - log_of_tokens.detach()) + log_sequence_ratio(log_of_tokens.detach(), inputs.completion_mask)
    return _clipped_losses(inputs, log_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def ppo_clip(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> TokenLosses:
    """`l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` per token, `r = exp(policy_logprobs - anchor_logprobs)`.

    The clipped surrogate of PPO, https://arxiv.org/abs/1707.06347, eq. 7. GRPO (https://arxiv.org/abs/2402.03300), DAPO
    (https://arxiv.org/abs/2503.14476) and Dr. GRPO (https://arxiv.org/abs/2503.20783) use this loss with other bounds,
    advantages and aggregations. Gradient: `-r A`, and exactly 0 where (A > 0, r > 1 + clip_high) or (A < 0, r < 1 - clip_low).

    With `dual_clip` c > 1 the loss of a negative advantage is also at most `c |A|`, where r > c, and has no gradient there:
    https://arxiv.org/abs/1912.09729. Other implementations cap r for both signs, or set c = 1 + 2 `clip_high`.
    """
    return _clipped_losses(inputs, inputs.log_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def sapo(inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> TokenLosses:
    """`l = -(4 / tau) sigmoid(tau (r - 1)) A`, `r = exp(policy_logprobs - anchor_logprobs)`, tau by the sign of A.

    SAPO, https://arxiv.org/abs/2511.20347. Gradient: `-w r A` with `w = sech^2(tau (r - 1) / 2)`: on-policy it equals that of
    `ppo_clip`, and it falls smoothly to 0. Only the gradient is normalized this way: the value at r = 1 is `-2 A / tau`.
    Nothing is clipped: `clipped` is all False. (Popular pseudo-code multiplies the gate by r again, which doubles the ratio.)
    """
    return _gated_losses(inputs, inputs.log_ratio, tau_positive=tau_positive, tau_negative=tau_negative)


def sapo_sequence(inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> TokenLosses:
    """`sapo` of the sequence ratio `s_i` of `gspo` in the place of r: TRL's `sapo` at the level `sequence`.

    `l_it = -(4 / tau) sigmoid(tau (s_i - 1)) A_it`. Under `seq-mean-token-mean` the gradient with respect to a loss token's
    log-prob is `-sech^2(tau (s_i - 1) / 2) s_i A_i / (N |y_i|)`. As in `gspo` every token gets the row's mean advantage.
    """
    log_ratio = log_sequence_ratio(inputs.log_ratio, inputs.completion_mask)
    return _gated_losses(inputs, log_ratio, tau_positive=tau_positive, tau_negative=tau_negative)


def gmpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> TokenLosses:
    """`l_it = -exp(mean_t clip(log r_it)) A_it`: the geometric mean of token ratios that are clipped one by one.

    GMPO, https://arxiv.org/abs/2507.20673. A token's ratio is clipped to `1 - clip_low` and `1 + clip_high` on the side that
    its advantage pushes it to, as in `ppo_clip`; the paper's bounds of e^-0.4 and e^0.4 are 0.33 and 0.49 here. The
    paper's objective is the aggregation `seq-mean-token-mean`, under which the gradient with respect to a loss token's log-prob
    is `-s_i A_i / (N |y_i|)` with the mean ratio `s_i` of the clipped tokens, and exactly 0 for a clipped token. As in `gspo`
    every token gets the row's mean advantage.

    `clipped` has the tokens that lose their gradient. verl's clip fraction of GMPO is larger: it counts tokens outside the
    band on either side, whatever the sign of A, also those that its minimum leaves as they are.
    """
    log_of_tokens = inputs.log_ratio
    advantages = torch.where(inputs.completion_mask, inputs.advantages, 0.0)
    apart = log_of_tokens.detach()
    limit = apart.clamp(math.log1p(-clip_low) if clip_low < 1 else -math.inf, math.log1p(clip_high))
    clipped = ((advantages > 0) & (apart > limit)) | ((advantages < 0) & (apart < limit))
    log_mean = log_sequence_ratio(torch.where(clipped, limit, log_of_tokens), inputs.completion_mask)
    out_of_bounds = (advantages != 0) & (log_mean.detach().abs() > LOG_RATIO_BOUND)
    return TokenLosses(-bounded_ratio(log_mean) * advantages, clipped | out_of_bounds, apart)


def ctpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> TokenLosses:
    """`l_it = -min(R_it A, clip(R_it) A)` with the prefix ratio `R_it = sg[prod_{k < t} r_ik] r_it`, clipped to a growing band.

    CTPO, https://arxiv.org/abs/2605.07331: the product of the ratios up to a token corrects the distribution of its prefix, and
    the logarithm of the band grows with the root of the position t, counted in loss tokens from 1: `R_it` is clipped to
    `(1 - clip_low)^sqrt(t)` and `(1 + clip_high)^sqrt(t)`. The authors' bases e^-0.025 and e^0.05 are 0.0247 and 0.0513 here.
    Gradient: `-R_it A`, and exactly 0 above the band, and below it where A < 0: their code's dual clip is the upper bound, so
    that a product far above 1 cannot push a bad token down without limit. `log_ratio` is `log R_it / sqrt(t)`.
    """
    log_of_tokens = inputs.log_ratio
    advantages = torch.where(inputs.completion_mask, inputs.advantages, 0.0)
    root = inputs.completion_mask.cumsum(dim=-1).clamp(min=1).to(log_of_tokens).sqrt()
    log_prefix = log_of_tokens.detach().cumsum(dim=-1)
    apart = log_prefix / root
    ratio_apart = bounded_ratio(apart)
    above, below = ratio_apart > 1 + clip_high, ratio_apart < 1 - clip_low
    log_low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    limit = bounded_ratio(torch.where(above, root * math.log1p(clip_high), root * log_low))
    clipped = (advantages != 0) & (above | (below & (advantages < 0)))
    ratio = bounded_ratio(log_prefix + (log_of_tokens - log_of_tokens.detach()))
    out_of_bounds = (advantages != 0) & (log_prefix.abs() > LOG_RATIO_BOUND)
    apart = torch.where(inputs.completion_mask, apart, 0.0)
    return TokenLosses(-torch.where(clipped, limit, ratio) * advantages, clipped | out_of_bounds, apart)


def ce_gppo(
    inputs: LossInputs,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    preserved_below: float,
    preserved_above: float,
) -> TokenLosses:
    """Return the losses of `ppo_clip` whose clipped tokens keep a part of their gradient.

    There `l = -preserved sg[clip(r)] (r / sg[r]) A`. CE-GPPO, https://arxiv.org/abs/2509.20712: `preserved_below` is its
    beta_1, for the tokens below the band, whose A is negative, and `preserved_above` its beta_2, for those above it, whose A is
    positive. Gradient there: `-preserved_below (1 - clip_low) A` and `-preserved_above (1 + clip_high) A`; `-r A` elsewhere.
    With 0 for both it is that of `ppo_clip`. `dual_clip` is as there, and takes the gradient.
    """
    advantages = torch.where(inputs.completion_mask, inputs.advantages, 0.0)
    log_ratio = inputs.log_ratio
    ratio = bounded_ratio(log_ratio.detach())
    above, below = (advantages > 0) & (ratio > 1 + clip_high), (advantages < 0) & (ratio < 1 - clip_low)
    capped = nowhere(ratio) if dual_clip is None else (advantages < 0) & (ratio > dual_clip)
    value = torch.where(above, preserved_above * (1 + clip_high), torch.where(below, preserved_below * (1 - clip_low), ratio))
    held = capped | (log_ratio.abs() > LOG_RATIO_BOUND) & ~above & ~below
    # 1, with the gradient of log r.
    straight = 1 + torch.where(held, 0.0, log_ratio - log_ratio.detach())
    value = value if dual_clip is None else torch.where(capped, dual_clip, value)
    gone = held | (above & (preserved_above == 0)) | (below & (preserved_below == 0))
    return TokenLosses(-value * straight * advantages, gone & (advantages != 0), log_ratio.detach())


def m2po(inputs: LossInputs, *, cutoff: float) -> TokenLosses:
    """`l = -r A`, and 0 for the tokens of `m2po_candidates` with `(log r)^2 >= cutoff`; `r` as in `ppo_clip`, without its clip.

    M2PO, https://arxiv.org/abs/2510.01161, algorithm 1, where the mask holds the second moment of `log r` over the candidates
    of a batch (`m2po_cutoff`) and replaces the clip. Gradient: `-r A` in every kept token, however far its ratio is from 1,
    and exactly 0 in the dropped ones. Equal candidates are dropped together.
    """
    log_ratio = inputs.log_ratio
    apart = log_ratio.detach()
    dropped = _is_pushed_outward(apart, inputs.completion_mask, inputs.advantages) & (apart.square() >= cutoff)
    advantages = torch.where(inputs.completion_mask, inputs.advantages, 0.0)
    token_losses = -torch.where(dropped, 0.0, bounded_ratio(log_ratio)) * advantages
    return TokenLosses(token_losses, dropped | ((advantages != 0) & (apart.abs() > LOG_RATIO_BOUND)), None)


def m2po_candidates(log_ratio: Tensor, completion_mask: Tensor, advantages: Tensor) -> Tensor:
    """Return `(log r)^2` of the tokens that `m2po` may drop, 1-D: those with A > 0 and r > 1, or A < 0 and r < 1.

    A clip could act on these tokens: their ratio is already beyond 1 on the side that their advantage pushes it to. The caller
    concatenates the result over the global batch for `m2po_cutoff`. `log_ratio`, `advantages`: `[rows, tokens]`.
    """
    return log_ratio.detach()[_is_pushed_outward(log_ratio, completion_mask, advantages)].square()


def m2po_cutoff(squared_log_ratios: Tensor, *, threshold: float) -> float:
    """Return the smallest `(log r)^2` to drop so that the mean of the kept ones is at most `threshold`; inf to drop none.

    `squared_log_ratios`: 1-D, the candidates of the whole global batch. The paper's loop drops the largest until the mean of
    the others is within the threshold (0.04 there). The authors' code drops more: for each micro-batch it takes the bound at
    which the mean of `min((log r)^2, bound)` over all candidates is within it; AReaL averages over all tokens.
    """
    ascending = squared_log_ratios.double().sort().values
    running_mean = ascending.cumsum(dim=0) / torch.arange(1, len(ascending) + 1, device=ascending.device)
    # The means of growing prefixes of an ascending sequence never fall, so those within the threshold come first.
    num_kept = int((running_mean <= threshold).sum())
    return ascending[num_kept].item() if num_kept < len(ascending) else math.inf


def value_loss(
    values: Tensor, frozen_values: Tensor, returns: Tensor, completion_mask: Tensor, *, value_clip: float | None
) -> Tensor:
    """`1/2 max((V - R)^2, (clip(V, V_0 - value_clip, V_0 + value_clip) - R)^2)` per token, `[rows, tokens]`.

    `values` are the critic's V, `frozen_values` V_0 the critic's before the update, `returns` the targets R. `value_clip` None
    leaves the second square out. Gradient with respect to V: `V - R`, and exactly 0 where the clipped square is the larger.
    Exactly 0 outside `completion_mask`. The clip is in PPO's code, not in its paper (https://arxiv.org/abs/1707.06347, eq. 9).
    """
    values = torch.where(completion_mask, values, 0.0)
    returns = torch.where(completion_mask, returns, 0.0)
    error = values - returns
    if value_clip is not None:
        frozen_values = torch.where(completion_mask, frozen_values, 0.0)
        clipped_error = values.detach().clamp(frozen_values - value_clip, frozen_values + value_clip) - returns
        error = torch.where(clipped_error.abs() > error.detach().abs(), clipped_error, error)
    return 0.5 * error.square()


def log_token_ratio(policy_logprobs: Tensor, anchor_logprobs: Tensor, completion_mask: Tensor) -> Tensor:
    """Return `log r_it`, `[rows, tokens]`; 0 outside the mask."""
    # Neutralize padding before exp(): masking only afterwards leaves 0 * nan in the backward pass.
    return torch.where(completion_mask, policy_logprobs - anchor_logprobs, 0.0)


def log_sequence_ratio(log_of_tokens: Tensor, completion_mask: Tensor) -> Tensor:
    """Return `log s_i`, the mean of `log_token_ratio` over the loss tokens, `[rows, 1]`; 0 for a row without loss tokens."""
    return log_of_tokens.sum(dim=-1, keepdim=True) / completion_mask.sum(dim=-1, keepdim=True).clamp(min=1)


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Return `exp(log_ratio)`, from e^-20 to e^20, without a gradient beyond `LOG_RATIO_BOUND`."""
    return _bounded(log_ratio).exp()


def nowhere(token_losses: Tensor) -> Tensor:
    """Return `clipped` of a loss that takes no token's gradient: False, in the shape of `token_losses`."""
    return torch.zeros_like(token_losses, dtype=torch.bool)


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _is_pushed_outward(log_ratio: Tensor, completion_mask: Tensor, advantages: Tensor) -> Tensor:
    outward = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    return completion_mask & outward


def _gated_losses(inputs: LossInputs, log_ratio: Tensor, *, tau_positive: float, tau_negative: float) -> TokenLosses:
    """`-(4 / tau) sigmoid(tau (ratio - 1)) A` for the ratio of a token or of a row."""
    # expm1 keeps the distance of a ratio near 1 from 1, which exp() - 1 rounds.
    distance = _bounded(log_ratio).expm1()
    tau = torch.full_like(inputs.advantages, tau_negative).masked_fill(inputs.advantages > 0, tau_positive)
    gate = (4 / tau) * torch.sigmoid(tau * distance)
    token_losses = -gate * torch.where(inputs.completion_mask, inputs.advantages, 0.0)
    return TokenLosses(token_losses, nowhere(token_losses), None)


def _clipped_losses(
    inputs: LossInputs, log_ratio: Tensor, *, clip_low: float | Tensor, clip_high: float | Tensor, dual_clip: float | None
) -> TokenLosses:
    """`-min(ratio A, clip(ratio) A)` for the ratio of a token or of a row; `log_ratio` is finite everywhere."""
    advantages = torch.where(inputs.completion_mask, inputs.advantages, 0.0)
    positive, negative = advantages > 0, advantages < 0
    ratio = bounded_ratio(log_ratio)
    # min() spelled out: torch.minimum() splits the gradient where both are equal.
    beyond, below = positive & (ratio > 1 + clip_high), negative & (ratio < 1 - clip_low)
    # The value of a clipped ratio.
    limit = torch.where(below, 1 - clip_low, torch.where(beyond, 1 + clip_high, ratio.detach()))
    clipped = beyond | below
    if dual_clip is not None:
        above = negative & (ratio > dual_clip)
        limit = torch.where(above, dual_clip, limit)
        clipped = clipped | above
    token_losses = -torch.where(clipped, limit, ratio) * advantages
    out_of_bounds = (positive | negative) & (log_ratio.abs() > LOG_RATIO_BOUND)
    return TokenLosses(token_losses, clipped | out_of_bounds, log_ratio.detach())
