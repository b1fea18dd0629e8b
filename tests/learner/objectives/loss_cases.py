"""The objectives with test parameters, their printed formulas, and batches that the tests of losses share."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.learner.objectives.losses import (
    LossInputs,
    TokenLosses,
    ce_gppo,
    ctpo,
    gmpo,
    gspo,
    gspo_token,
    m2po,
    ppo_clip,
    sapo,
    sapo_sequence,
)
from offbeat.learner.objectives.weighted_losses import aspo, cispo, dppo_kl, dppo_tv, minirl, reinforce, sao, topr, vespo

BAND = {"clip_low": 0.1, "clip_high": 0.2}
TAU = {"tau_positive": 1.0, "tau_negative": 1.5}
DUAL_CLIP = 1.6
M2PO_CUTOFF = 0.1
WEIGHT_CAP = 1.3
PRESERVED = {"preserved_below": 0.75, "preserved_above": 0.9}
VESPO = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}
KL_BOUNDS = {"clip_low": 0.02, "clip_high": 0.04}
SEQUENCE_DUAL_CLIP = 1.05
"""A cap that mean ratios of `random_batch` reach, some of them inside the band."""

Objective = Callable[[Tensor, Tensor, Tensor, Tensor], TokenLosses]


def inputs_of(policy: Tensor, anchor: Tensor, mask: Tensor, advantages: Tensor, behavior: Tensor | None = None) -> LossInputs:
    """Return the inputs of a loss; mu is the anchor, unless it is given."""
    return LossInputs(policy, anchor, mask, advantages, anchor if behavior is None else behavior)


OBJECTIVES: dict[str, Objective] = {
    "gspo": lambda *tensors: gspo(inputs_of(*tensors), **BAND),
    "gspo_token": lambda *tensors: gspo_token(inputs_of(*tensors), **BAND),
    "ppo_clip": lambda *tensors: ppo_clip(inputs_of(*tensors), **BAND),
    "dual_clip": lambda *tensors: ppo_clip(inputs_of(*tensors), **BAND, dual_clip=DUAL_CLIP),
    "gspo_dual_clip": lambda *tensors: gspo(inputs_of(*tensors), **BAND, dual_clip=SEQUENCE_DUAL_CLIP),
    "gspo_token_dual_clip": lambda *tensors: gspo_token(inputs_of(*tensors), **BAND, dual_clip=SEQUENCE_DUAL_CLIP),
    "gmpo": lambda *tensors: gmpo(inputs_of(*tensors), **BAND),
    "ctpo": lambda *tensors: ctpo(inputs_of(*tensors), **BAND),
    "ce_gppo": lambda *tensors: ce_gppo(inputs_of(*tensors), **BAND, dual_clip=None, **PRESERVED),
    "ce_gppo_dual_clip": lambda *tensors: ce_gppo(inputs_of(*tensors), **BAND, dual_clip=DUAL_CLIP, **PRESERVED),
    "sapo": lambda *tensors: sapo(inputs_of(*tensors), **TAU),
    "sapo_sequence": lambda *tensors: sapo_sequence(inputs_of(*tensors), **TAU),
    "cispo": lambda *tensors: cispo(inputs_of(*tensors), **BAND),
    "minirl": lambda *tensors: minirl(inputs_of(*tensors), **BAND, weight_cap=WEIGHT_CAP),
    "dppo_tv": lambda *tensors: dppo_tv(inputs_of(*tensors), **BAND, weight_cap=WEIGHT_CAP),
    "dppo_kl": lambda *tensors: dppo_kl(inputs_of(*tensors), **KL_BOUNDS, weight_cap=WEIGHT_CAP),
    "aspo": lambda *tensors: aspo(inputs_of(*tensors), **BAND, weight_cap=WEIGHT_CAP),
    "sao": lambda *tensors: sao(inputs_of(*tensors), **BAND),
    "topr": lambda *tensors: topr(inputs_of(*tensors)),
    "vespo": lambda *tensors: vespo(inputs_of(*tensors), **VESPO),
    "m2po": lambda *tensors: m2po(inputs_of(*tensors), cutoff=M2PO_CUTOFF),
    "reinforce": lambda *tensors: reinforce(inputs_of(*tensors)),
}
WITHOUT_CLIP = ("ce_gppo", "sapo", "sapo_sequence", "cispo", "topr", "vespo", "reinforce")
"""Objectives that take no token's gradient."""


# The papers' formulas as they are printed, for the loss tokens of one row: likelihoods, roots, min and clip.


def printed_min(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - 0.1, 1 + 0.2) * advantages)


def printed_gspo(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    return printed_min((policy.exp().prod() / anchor.exp().prod()) ** (1 / len(policy)), advantages)


def printed_gspo_token(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    sequence_ratio = (policy.exp().prod() / anchor.exp().prod()) ** (1 / len(policy))
    return printed_min(sequence_ratio.detach() * policy.exp() / policy.exp().detach(), advantages)


def printed_ppo_clip(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    return printed_min(policy.exp() / anchor.exp(), advantages)


def printed_cap(losses: Tensor, advantages: Tensor, dual_clip: float) -> Tensor:
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


def printed_dual_clip(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    return printed_cap(printed_ppo_clip(policy, anchor, advantages), advantages, DUAL_CLIP)


def printed_gspo_dual_clip(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    return printed_cap(printed_gspo(policy, anchor, advantages), advantages, SEQUENCE_DUAL_CLIP)


def printed_gspo_token_dual_clip(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    return printed_cap(printed_gspo_token(policy, anchor, advantages), advantages, SEQUENCE_DUAL_CLIP)


def printed_sapo(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    ratio = policy.exp() / anchor.exp()
    positive = 4 / 1.0 / (1 + torch.exp(-1.0 * (ratio - 1)))
    negative = 4 / 1.5 / (1 + torch.exp(-1.5 * (ratio - 1)))
    return -torch.where(advantages > 0, positive, negative) * advantages


def printed_sapo_sequence(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    ratio = (policy.exp().prod() / anchor.exp().prod()) ** (1 / len(policy))
    positive = 4 / 1.0 / (1 + torch.exp(-1.0 * (ratio - 1)))
    negative = 4 / 1.5 / (1 + torch.exp(-1.5 * (ratio - 1)))
    return -torch.where(advantages > 0, positive, negative) * advantages


def printed_gmpo(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    sign, log_ratio = advantages.sign(), policy - anchor
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(math.log(1 - 0.1), math.log(1 + 0.2)))
    return -(torch.where(sign != 0, clipped, log_ratio).exp().prod() ** (1 / len(policy))) * advantages


def printed_ctpo(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    product = (policy.exp() / anchor.exp()).cumprod(dim=0).detach() * policy.exp() / policy.exp().detach()
    root = torch.arange(1, len(policy) + 1, dtype=torch.float64).sqrt()
    low, high = (1 - 0.1) ** root, (1 + 0.2) ** root
    losses = -torch.minimum(product * advantages, product.clamp(low, high) * advantages)
    return torch.where(advantages < 0, torch.minimum(losses, -high * advantages), losses)


def printed_ce_gppo(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    ratio = policy.exp() / anchor.exp()
    below, above = (ratio < 1 - 0.1) & (advantages < 0), (ratio > 1 + 0.2) & (advantages > 0)
    straight = ratio / ratio.detach()
    ratio = torch.where(below, PRESERVED["preserved_below"] * (1 - 0.1) * straight, ratio)
    return -torch.where(above, PRESERVED["preserved_above"] * (1 + 0.2) * straight, ratio) * advantages


def printed_ce_gppo_dual_clip(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    return printed_cap(printed_ce_gppo(policy, anchor, advantages), advantages, DUAL_CLIP)


def printed_cispo(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    return -(policy.exp() / anchor.exp()).clamp(1 - 0.1, 1 + 0.2).detach() * advantages * policy


def printed_weight(policy: Tensor, anchor: Tensor, kept: Tensor, advantages: Tensor) -> Tensor:
    return -(kept * (policy.exp() / anchor.exp()).clamp(max=WEIGHT_CAP)).detach() * advantages * policy


def printed_minirl(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    ratio = policy.exp() / anchor.exp()
    return printed_weight(policy, anchor, torch.where(advantages > 0, ratio <= 1 + 0.2, ratio >= 1 - 0.1), advantages)


def printed_dppo_tv(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    moved = policy.exp() - anchor.exp()
    return printed_weight(policy, anchor, torch.where(advantages > 0, moved <= 0.2, moved >= -0.1), advantages)


def printed_dppo_kl(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    p, q = policy.exp(), anchor.exp()
    # The random log-probs may lie above 0.
    others, others_of_anchor = (1 - p).clamp(min=0) + 1e-8, (1 - q).clamp(min=0) + 1e-8
    divergence = q * (q / p).log() + (1 - q) * (others_of_anchor / others).log()
    kept = torch.where(advantages > 0, (divergence <= 0.04) | (p <= q), (divergence <= 0.02) | (p >= q))
    return printed_weight(policy, anchor, kept, advantages)


def printed_aspo(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    ratio = (policy.exp() / anchor.exp()).detach()
    kept = torch.where(advantages > 0, ratio <= 1 + 0.2, ratio >= 1 - 0.1)
    weight = torch.minimum(torch.where(advantages > 0, 1 / ratio, ratio), torch.tensor(WEIGHT_CAP, dtype=torch.float64))
    return -(kept * weight) * advantages * policy


def printed_sao(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    ratio = policy.exp() / anchor.exp()
    f = torch.where((ratio > 1 - 0.1) & (ratio < 1 + 0.2), ratio, 0.0).detach()
    return -f * advantages * policy


def printed_topr(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    product = (policy.exp().prod() / anchor.exp().prod()).detach()
    return -torch.where(advantages >= 0, 1.0, product.clamp(0, 1)) * advantages * policy


def printed_vespo(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    product = (policy.exp().prod() / anchor.exp().prod()).detach()
    positive = math.exp(3) * product**2 * (-3 * product).exp()
    negative = math.exp(2) * product**3 * (-2 * product).exp()
    return -torch.where(advantages > 0, positive, negative) * advantages * policy


def printed_m2po(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    ratio = policy.exp() / anchor.exp()
    in_trust_region = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
    mask = ~(in_trust_region & (ratio.log().square() >= M2PO_CUTOFF))
    return -(mask * ratio * advantages)


def printed_reinforce(policy: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    return -advantages * policy


PRINTED = {
    "gspo": printed_gspo,
    "gspo_token": printed_gspo_token,
    "ppo_clip": printed_ppo_clip,
    "dual_clip": printed_dual_clip,
    "gspo_dual_clip": printed_gspo_dual_clip,
    "gspo_token_dual_clip": printed_gspo_token_dual_clip,
    "sapo": printed_sapo,
    "cispo": printed_cispo,
    "minirl": printed_minirl,
    "dppo_tv": printed_dppo_tv,
    "dppo_kl": printed_dppo_kl,
    "gmpo": printed_gmpo,
    "ctpo": printed_ctpo,
    "ce_gppo": printed_ce_gppo,
    "ce_gppo_dual_clip": printed_ce_gppo_dual_clip,
    "sapo_sequence": printed_sapo_sequence,
    "aspo": printed_aspo,
    "sao": printed_sao,
    "topr": printed_topr,
    "vespo": printed_vespo,
    "m2po": printed_m2po,
    "reinforce": printed_reinforce,
}


class Batch(NamedTuple):
    policy_logprobs: Tensor
    anchor_logprobs: Tensor
    completion_mask: Tensor
    advantages: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(*(function(tensor) for tensor in self))


def random_batch(seed: int, *, vary_advantages: bool = False, spread: float = 0.4, rows: int = 24, tokens: int = 7) -> Batch:
    """Return rows of length 0, 1 and more with gaps, some without advantage, and garbage outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    anchor = -2 * torch.rand(rows, tokens, generator=generator, dtype=torch.float64)
    policy = anchor + spread * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    mask[0] = False
    mask[1] = torch.arange(tokens) == 0
    mask[2] = torch.arange(tokens) == tokens - 1
    shape = (rows, tokens if vary_advantages else 1)
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64).repeat(1, tokens // shape[1])
    advantages[3] = 0.0
    rubbish = torch.tensor([math.nan, -math.inf, math.inf], dtype=torch.float64).repeat(rows * tokens)[: rows * tokens]
    return Batch(
        torch.where(mask, policy, rubbish.view(rows, tokens)),
        torch.where(mask, anchor, rubbish.roll(1).view(rows, tokens)),
        mask,
        torch.where(mask, advantages, rubbish.roll(2).view(rows, tokens)),
    )


def run(objective: Objective, batch: Batch, cotangent: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, clipped, and the gradient of the losses' sum (weighted by `cotangent`)."""
    policy_logprobs = batch.policy_logprobs.clone().requires_grad_()
    losses, clipped, _ = objective(policy_logprobs, *batch[1:])
    (gradient,) = torch.autograd.grad((losses if cotangent is None else losses * cotangent).sum(), policy_logprobs)
    return losses.detach(), clipped, gradient


def one_token(log_ratio: float, advantage: float, *, anchor: float = 0.0, dtype: torch.dtype = torch.float64) -> Batch:
    return Batch(
        torch.tensor([[anchor + log_ratio]], dtype=dtype),
        torch.tensor([[anchor]], dtype=dtype),
        torch.ones(1, 1, dtype=torch.bool),
        torch.tensor([[advantage]], dtype=dtype),
    )
