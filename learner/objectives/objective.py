"""The configured objective: which of the functions in `losses` and `corrections` a run uses, and with what."""

from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from offbeat.common.config import LossSection
from offbeat.common.objectives import DEFAULTS
from offbeat.learner.objectives import corrections, losses
from offbeat.learner.objectives.bands import Band, ClipBand, Correction
from offbeat.learner.objectives.losses import TokenLosses, log_sequence_ratio, log_token_ratio


class PolicyLogprobs(NamedTuple):
    """What the policies of one micro-batch say of its tokens, each `[rows, tokens]` float32."""

    policy: Tensor
    """pi_theta: the one with a gradient."""
    behavior: Tensor
    """mu."""
    proximal: Tensor | None
    """pi_old, where the anchor is one."""

    @property
    def anchor(self) -> Tensor:
        """The denominator of the importance ratio."""
        return self.behavior if self.proximal is None else self.proximal

    @property
    def log_rho(self) -> Tensor:
        """What a correction is for: `log pi_old/mu`, or `log pi_theta/mu` without pi_old. Detached."""
        numerator = self.policy if self.proximal is None else self.proximal
        return numerator.detach() - self.behavior


def token_losses(loss: LossSection, logprobs: PolicyLogprobs, completion_mask: Tensor, advantages: Tensor) -> TokenLosses:
    """The losses of `loss.objective`, before any correction; `advantages`: `[rows, tokens]`."""
    inputs = (logprobs.policy, logprobs.anchor, completion_mask, advantages)
    match loss.objective:
        case "gspo":
            return losses.gspo(*inputs, **_clip(loss), dual_clip=loss.dual_clip)
        case "gspo_token":
            return losses.gspo_token(*inputs, **_clip(loss), dual_clip=loss.dual_clip)
        case "grpo" | "dr_grpo" | "dapo" | "ppo":
            return losses.ppo_clip(*inputs, **_clip(loss), dual_clip=loss.dual_clip)
        case "sapo":
            return losses.sapo(*inputs, tau_positive=loss.tau_positive, tau_negative=loss.tau_negative)
        case "cispo":
            return losses.cispo(*inputs, **_clip(loss))
        case "reinforce":
            return losses.reinforce(logprobs.policy, completion_mask, advantages)
        case _:
            assert_never(loss.objective)


def band(loss: LossSection, logprobs: PolicyLogprobs, completion_mask: Tensor) -> Band | None:
    """The ratio that the objective clips, and where; None if it does not."""
    if DEFAULTS[loss.objective].band is None:
        return None
    log_ratio = log_token_ratio(logprobs.policy.detach(), logprobs.anchor, completion_mask)
    if DEFAULTS[loss.objective].is_sequence_ratio:
        log_ratio = log_sequence_ratio(log_ratio, completion_mask).expand_as(log_ratio)
    return Band(log_ratio, **_clip(loss))


def engine_band(loss: LossSection) -> ClipBand | None:
    """Where the objective clips a ratio to engine log-probs, so that their noise is clipped too; None where it does not."""
    defaults = DEFAULTS[loss.objective]
    # CISPO's band bounds a weight: nothing loses its gradient.
    if defaults.band is None or loss.objective == "cispo" or loss.anchor != "behavior":
        return None
    assert loss.clip_low is not None and loss.clip_high is not None, "the config is not complete (common.objectives)"
    return ClipBand(loss.clip_low, loss.clip_high, defaults.is_sequence_ratio)


def correction(
    loss: LossSection, logprobs: PolicyLogprobs, completion_mask: Tensor, advantages: Tensor, *, m2po_cutoff: float
) -> Correction | None:
    """The weights of `loss.correction`; None for none. `m2po_cutoff` is over the whole step: `corrections.m2po_cutoff`."""
    if loss.correction == "none":
        return None
    log_rho = torch.where(completion_mask, logprobs.log_rho, 0.0)
    low, high = loss.correction_low, loss.correction_high
    assert high is not None, "the config is not complete (common.objectives)"
    truncated_at: tuple[float, ...] = ()
    match loss.correction:
        case "token_tis":
            assert low is not None
            weights, truncated_at = corrections.token_tis(log_rho, completion_mask, low=low, high=high), (low, high)
        case "sequence_tis":
            weights, truncated_at = corrections.sequence_tis(log_rho, completion_mask, high=high), (high,)
        case "icepop":
            assert low is not None
            weights = corrections.icepop(log_rho, completion_mask, low=low, high=high)
        case "sequence_mask":
            assert low is not None
            weights = corrections.sequence_mask(log_rho, completion_mask, low=low, high=high)
        case "geometric_mask":
            assert low is not None
            weights = corrections.geometric_mask(log_rho, completion_mask, low=low, high=high)
        case "opsm":
            weights = corrections.opsm(log_rho, completion_mask, advantages, threshold=high)
        case "m2po":
            weights = corrections.m2po(log_rho, completion_mask, advantages, cutoff=m2po_cutoff)
        case _:
            assert_never(loss.correction)
    return Correction(weights, log_rho, truncated_at)


def _clip(loss: LossSection) -> dict[str, float]:
    assert loss.clip_low is not None and loss.clip_high is not None, "the config is not complete (common.objectives)"
    return {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
