"""The configured objective: its loss function, correction and aggregation, with every value decided."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, assert_never

import torch
from torch import Tensor

from offbeat.common.settings.learning_sections import LossSection
from offbeat.common.settings.objectives import (
    DEFAULTS,
    RECOMPUTED,
    Aggregation,
    resolve_aggregation,
    resolve_clip,
    resolve_weight_cap,
)
from offbeat.learner.objectives import losses, weighted_losses
from offbeat.learner.objectives.aggregation import denominator
from offbeat.learner.objectives.bands import ClipBand, ClippedRatio, Correction
from offbeat.learner.objectives.correction_rules import AnyCorrection, correct, resolve_corrections
from offbeat.learner.objectives.losses import TokenLosses
from offbeat.learner.objectives.own_functions import OwnLoss, load_loss


class PolicyLogprobs(NamedTuple):
    """Log-probs of a micro-batch's tokens under each policy, each `[rows, tokens]` float32."""

    policy: Tensor
    """Under pi_theta; the only one with a gradient."""
    behavior: Tensor
    """Under mu."""
    proximal: Tensor | None
    """Under pi_old, recomputed or interpolated; None with the anchors `behavior` and `group`."""
    group: Tensor | None = None
    """`group_likelihood.group_logprob` for every token; None but with the anchor `group`."""

    @property
    def anchor(self) -> Tensor:
        """The denominator of the importance ratio."""
        if self.group is not None:
            return self.group
        return self.behavior if self.proximal is None else self.proximal

    @property
    def log_rho(self) -> Tensor:
        """The ratio that a correction bounds: `log pi_old/mu`, or `log pi_theta/mu` without pi_old. Detached."""
        numerator = self.policy if self.proximal is None else self.proximal
        return numerator.detach() - self.behavior


class ClippedLoss(Protocol):
    """A loss function with a clip band and a dual clip: `losses.gspo`, `losses.gspo_token` or `losses.ppo_clip`."""

    def __call__(
        self,
        policy_logprobs: Tensor,
        anchor_logprobs: Tensor,
        completion_mask: Tensor,
        advantages: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None,
    ) -> TokenLosses: ...


@dataclass(frozen=True)
class ClippedSurrogate:
    """A loss whose clip takes the gradient of tokens or rows beyond the band."""

    function: ClippedLoss
    band: ClipBand
    dual_clip: float | None
    """Bound of the ratio where the advantage is negative; None for no bound."""


class BandedLoss(Protocol):
    """A loss function with a clip band and no dual clip: `losses.gmpo` or `losses.ctpo`."""

    def __call__(
        self,
        policy_logprobs: Tensor,
        anchor_logprobs: Tensor,
        completion_mask: Tensor,
        advantages: Tensor,
        *,
        clip_low: float,
        clip_high: float,
    ) -> TokenLosses: ...


@dataclass(frozen=True)
class Banded:
    """A loss whose clip takes the gradient of single tokens beyond the band."""

    function: BandedLoss
    band: ClipBand


@dataclass(frozen=True)
class CeGppo:
    """`losses.ce_gppo`, whose band leaves a part of the gradient."""

    band: ClipBand
    dual_clip: float | None
    preserved: tuple[float, float]


@dataclass(frozen=True)
class Cispo:
    """`weighted_losses.cispo`, whose band bounds a weight: no token loses its gradient."""

    band: ClipBand


@dataclass(frozen=True)
class MiniRl:
    """`weighted_losses.minirl`, whose band takes gradients and whose weight is pi / mu."""

    band: ClipBand
    weight_cap: float


@dataclass(frozen=True)
class Aspo:
    """`weighted_losses.aspo`, whose band takes gradients and whose weight is the ratio or its inverse."""

    band: ClipBand
    weight_cap: float


class DivergenceLoss(Protocol):
    """A loss function that drops tokens by a divergence: `weighted_losses.dppo_tv` or `weighted_losses.dppo_kl`."""

    def __call__(
        self,
        policy_logprobs: Tensor,
        anchor_logprobs: Tensor,
        behavior_logprobs: Tensor,
        completion_mask: Tensor,
        advantages: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        weight_cap: float,
    ) -> TokenLosses: ...


@dataclass(frozen=True)
class Dppo:
    """A loss that drops tokens by a divergence in place of a band of ratios."""

    function: DivergenceLoss
    threshold_low: float
    """Largest divergence where the advantage is negative."""
    threshold_high: float
    """Largest divergence where the advantage is positive."""
    weight_cap: float


class GatedLoss(Protocol):
    """A loss function with a soft gate: `losses.sapo` or `losses.sapo_sequence`."""

    def __call__(
        self,
        policy_logprobs: Tensor,
        anchor_logprobs: Tensor,
        completion_mask: Tensor,
        advantages: Tensor,
        *,
        tau_positive: float,
        tau_negative: float,
    ) -> TokenLosses: ...


@dataclass(frozen=True)
class Sapo:
    """A loss with a soft gate in the place of a band."""

    function: GatedLoss
    tau_positive: float
    tau_negative: float


@dataclass(frozen=True)
class Topr:
    """`weighted_losses.topr`, which bounds the weight of a completion by 1."""


@dataclass(frozen=True)
class Vespo:
    """`weighted_losses.vespo`, which bounds the weight of a completion softly."""

    positive: tuple[float, float]
    """k and lambda where the advantage is positive."""
    negative: tuple[float, float]


@dataclass(frozen=True)
class M2po:
    """`losses.m2po`, which drops tokens by a cutoff of the whole optimizer step in place of a band."""

    threshold: float
    """Largest mean of `(log r)^2` over the kept candidates."""


@dataclass(frozen=True)
class Reinforce:
    """`weighted_losses.reinforce`, which has no ratio."""


@dataclass(frozen=True)
class Own:
    """The user's own loss, which has no band."""

    function: OwnLoss


TokenLoss = ClippedSurrogate | Banded | CeGppo | Cispo | MiniRl | Aspo | Dppo | Sapo | Topr | Vespo | M2po | Reinforce | Own
"""A loss function with its parameters."""
_TakesGradient = ClippedSurrogate | Banded | MiniRl | Aspo
"""Losses whose band takes gradients."""


class StepConstants(NamedTuple):
    """Numbers of the whole optimizer step, over all micro-batches and ranks, that enter the loss of each micro-batch."""

    m2po_cutoff: float = math.inf
    """`losses.m2po_cutoff`; objectives other than m2po ignore it."""
    mean_weight: float = 1.0
    """Divisor of the correction's weights: their mean with `loss.normalize_correction`, else 1."""


NO_CONSTANTS = StepConstants()
"""The constants of an objective that has none."""


class Evaluation(NamedTuple):
    """The objective on a micro-batch."""

    losses: Tensor
    """Token losses times the correction's weights, `[rows, tokens]`, with a gradient; 0 outside the mask."""
    clipped: Tensor
    """`TokenLosses.clipped`."""
    clipped_ratio: ClippedRatio | None
    """The ratio that the objective clips; None for an objective that does not clip."""
    correction: Correction | None


@dataclass(frozen=True)
class Objective:
    """A run's objective. Its settings are those of `[loss]`, with the objective's own values where they are left open."""

    token_loss: TokenLoss
    anchor: Literal["behavior", "group", "interpolated", "proximal", "decoupled"]
    """The policy in the denominator of the importance ratio."""
    corrections: tuple[AnyCorrection, ...]
    normalize_correction: bool
    """Divide the corrections' weights by their mean over the step."""
    aggregation: Aggregation
    aggregation_length: int
    """The constant L that `seq-mean-token-sum-norm` divides by; other aggregations ignore it."""
    entropy_coef: float
    """Factor of the entropy bonus; 0 for none."""

    @property
    def needs_proximal(self) -> bool:
        """The policy's log-probs before the update enter the loss."""
        return self.anchor in RECOMPUTED

    @property
    def band(self) -> ClipBand | None:
        """The band that the ratio is clipped to; None for an objective that does not clip."""
        return self.token_loss.band if isinstance(self.token_loss, _TakesGradient | CeGppo | Cispo) else None

    @property
    def engine_band(self) -> ClipBand | None:
        """The band beyond which tokens lose their gradient for the noise of engine log-probs.

        None where the ratio's denominator is not mu, and where the clip takes no gradient.
        """
        if isinstance(self.token_loss, _TakesGradient) and self.anchor == "behavior":
            return self.token_loss.band
        return None

    def evaluate(
        self, logprobs: PolicyLogprobs, completion_mask: Tensor, advantages: Tensor, constants: StepConstants = NO_CONSTANTS
    ) -> Evaluation:
        """Return the corrected token losses of a micro-batch, and what the clip and the correction did to them.

        `completion_mask` and `advantages`: `[rows, tokens]`. `constants` are those of the whole optimizer step.
        """
        token_losses, clipped, log_ratio = self._token_losses(logprobs, completion_mask, advantages, constants.m2po_cutoff)
        correction: Correction | None = None
        if self.corrections:
            correction = correct(
                self.corrections, logprobs.log_rho, completion_mask, advantages, mean_weight=constants.mean_weight
            )
            token_losses = token_losses * correction.weights
        clipped_ratio = None
        if self.band is not None and log_ratio is not None:
            clipped_ratio = ClippedRatio(log_ratio, self.band.low, self.band.high)
        return Evaluation(token_losses, clipped, clipped_ratio, correction)

    def denominator(self, *, num_groups: int, num_rows: int, num_tokens: int) -> float:
        """Return the divisor of an optimizer step's summed loss: see `aggregation.denominator`."""
        return denominator(
            self.aggregation,
            num_groups=num_groups,
            num_rows=num_rows,
            num_tokens=num_tokens,
            length=self.aggregation_length,
        )

    def _token_losses(
        self, logprobs: PolicyLogprobs, completion_mask: Tensor, advantages: Tensor, m2po_cutoff: float
    ) -> TokenLosses:
        inputs = (logprobs.policy, logprobs.anchor, completion_mask, advantages)
        with_behavior = (logprobs.policy, logprobs.anchor, logprobs.behavior, completion_mask, advantages)
        match self.token_loss:
            case ClippedSurrogate(function, band, dual_clip):
                return function(*inputs, clip_low=band.low, clip_high=band.high, dual_clip=dual_clip)
            case Banded(function, band):
                return function(*inputs, clip_low=band.low, clip_high=band.high)
            case CeGppo(band, dual_clip, preserved):
                return losses.ce_gppo(*inputs, clip_low=band.low, clip_high=band.high, dual_clip=dual_clip, preserved=preserved)
            case Cispo(band):
                return weighted_losses.cispo(*inputs, clip_low=band.low, clip_high=band.high)
            case MiniRl(band, cap):
                return weighted_losses.minirl(*with_behavior, clip_low=band.low, clip_high=band.high, weight_cap=cap)
            case Aspo(band, cap):
                return weighted_losses.aspo(*inputs, clip_low=band.low, clip_high=band.high, weight_cap=cap)
            case Dppo(function, low, high, cap):
                return function(*with_behavior, clip_low=low, clip_high=high, weight_cap=cap)
            case Sapo(function, tau_positive, tau_negative):
                return function(*inputs, tau_positive=tau_positive, tau_negative=tau_negative)
            case Topr():
                return weighted_losses.topr(*inputs)
            case Vespo(positive, negative):
                return weighted_losses.vespo(*inputs, positive=positive, negative=negative)
            case M2po():
                return losses.m2po(*inputs, cutoff=m2po_cutoff)
            case Reinforce():
                return weighted_losses.reinforce(logprobs.policy, completion_mask, advantages)
            case Own(function):
                return _own_losses(function, *inputs)
            case _:
                assert_never(self.token_loss)


def resolve_objective(loss: LossSection, *, max_new_tokens: int) -> Objective:
    """Return the objective of these settings. Settings left open take the values of `common.settings.objectives`."""
    return Objective(
        token_loss=_resolve_token_loss(loss, max_new_tokens),
        anchor=loss.anchor,
        corrections=resolve_corrections(loss.correction),
        normalize_correction=loss.normalize_correction,
        aggregation=resolve_aggregation(loss),
        aggregation_length=loss.aggregation_length or max_new_tokens,
        entropy_coef=loss.entropy_coef,
    )


def _own_losses(
    function: OwnLoss, policy_logprobs: Tensor, anchor_logprobs: Tensor, completion_mask: Tensor, advantages: Tensor
) -> TokenLosses:
    # Neutralize padding on both sides of the user's code: 0 * nan is nan, in the backward pass too.
    policy, anchor, advantages = (
        torch.where(completion_mask, tensor, 0.0) for tensor in (policy_logprobs, anchor_logprobs, advantages)
    )
    token_losses = torch.where(completion_mask, function(policy, anchor, completion_mask, advantages), 0.0)
    return TokenLosses(token_losses, torch.zeros_like(completion_mask), None)


def _resolve_token_loss(loss: LossSection, max_new_tokens: int) -> TokenLoss:
    if loss.function:
        return Own(load_loss(loss.function))
    match loss.objective:
        case "gspo" | "luspo":
            return ClippedSurrogate(losses.gspo, _resolve_band(loss, max_new_tokens), loss.dual_clip)
        case "gspo_token":
            return ClippedSurrogate(losses.gspo_token, _resolve_band(loss, max_new_tokens), loss.dual_clip)
        case "grpo" | "dr_grpo" | "dapo" | "ppo":
            return ClippedSurrogate(losses.ppo_clip, _resolve_band(loss, max_new_tokens), loss.dual_clip)
        case "gmpo":
            return Banded(losses.gmpo, _resolve_band(loss, max_new_tokens))
        case "ctpo":
            return Banded(losses.ctpo, _resolve_band(loss, max_new_tokens))
        case "ce_gppo":
            return CeGppo(_resolve_band(loss, max_new_tokens), loss.dual_clip, loss.clipped_gradients)
        case "sapo":
            return Sapo(losses.sapo, loss.tau_positive, loss.tau_negative)
        case "sapo_sequence":
            return Sapo(losses.sapo_sequence, loss.tau_positive, loss.tau_negative)
        case "cispo":
            return Cispo(_resolve_band(loss, max_new_tokens))
        case "minirl":
            return MiniRl(_resolve_band(loss, max_new_tokens), _resolve_cap(loss))
        case "aspo":
            return Aspo(_resolve_band(loss, max_new_tokens), _resolve_cap(loss))
        case "topr":
            return Topr()
        case "vespo":
            return Vespo(loss.vespo_positive, loss.vespo_negative)
        case "dppo_tv":
            return Dppo(weighted_losses.dppo_tv, *_resolve_band(loss, max_new_tokens)[:2], _resolve_cap(loss))
        case "dppo_kl":
            return Dppo(weighted_losses.dppo_kl, *_resolve_band(loss, max_new_tokens)[:2], _resolve_cap(loss))
        case "m2po":
            return M2po(loss.m2_threshold)
        case "reinforce":
            return Reinforce()
        case _:
            assert_never(loss.objective)


def _resolve_band(loss: LossSection, max_new_tokens: int) -> ClipBand:
    bounds = resolve_clip(loss, max_new_tokens)
    assert bounds is not None, f"common.objectives.DEFAULTS has no clip band for {loss.objective}"
    defaults = DEFAULTS[loss.objective]
    return ClipBand(bounds.low, bounds.high, defaults.is_sequence_ratio, defaults.is_prefix_ratio)


def _resolve_cap(loss: LossSection) -> float:
    cap = resolve_weight_cap(loss)
    assert cap is not None, f"common.objectives.DEFAULTS has no cap of weights for {loss.objective}"
    return cap
