"""The configured objective: its loss function, correction and aggregation.

`OBJECTIVES` is the table of loss functions. A new objective is a function, a row here, and a row of the paper's values in
`common.settings.objectives.DEFAULTS`. Settings that are left open are filled in before, when a config is loaded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.common.settings.learning_sections import LossSection
from offbeat.common.settings.objectives import RECOMPUTED, Aggregation, defaults_of, objective_parameters, parse_objective
from offbeat.learner.objectives import losses, weighted_losses
from offbeat.learner.objectives.aggregation import denominator
from offbeat.learner.objectives.bands import USUAL_NOISE, ClipBand, ClippedRatio, Correction, NoiseOfLength
from offbeat.learner.objectives.correction_rules import AnyCorrection, correct, resolve_corrections
from offbeat.learner.objectives.losses import LossInputs, TokenLosses
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
    """`group_logprob` for every token; None but with the anchor `group`."""

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


OBJECTIVES: Mapping[str, Callable[..., TokenLosses]] = {
    "gspo": losses.gspo,
    "gspo_token": losses.gspo_token,
    "luspo": losses.gspo,
    "grpo": losses.ppo_clip,
    "dr_grpo": losses.ppo_clip,
    "dapo": losses.ppo_clip,
    "ppo": losses.ppo_clip,
    "gmpo": losses.gmpo,
    "ctpo": losses.ctpo,
    "ce_gppo": losses.ce_gppo,
    "sapo": losses.sapo,
    "sapo_sequence": losses.sapo_sequence,
    "m2po": losses.m2po,
    "cispo": weighted_losses.cispo,
    "minirl": weighted_losses.minirl,
    "sao": weighted_losses.sao,
    "aspo": weighted_losses.aspo,
    "dppo_tv": weighted_losses.dppo_tv,
    "dppo_kl": weighted_losses.dppo_kl,
    "topr": weighted_losses.topr,
    "vespo": weighted_losses.vespo,
    "reinforce": weighted_losses.reinforce,
}
"""The loss function of each `loss.objective`. It takes `LossInputs`, and by keyword its own parameters and, if it has them,
`clip_low`, `clip_high` and `dual_clip`. All else that tells objectives apart is in `common.settings.objectives.DEFAULTS`."""


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
    """A run's objective."""

    function: Callable[..., TokenLosses]
    """The loss function: one of `OBJECTIVES`, or the user's own."""
    parameters: Mapping[str, Any]
    """The keyword arguments of `function` that are the same in every step."""
    bounds: ClipBand | None
    """`clip_low` and `clip_high` of `function`; None for a loss without them."""
    clips_ratio: bool
    """`bounds` are a band of the importance ratio; False where they bound a divergence."""
    takes_gradient: bool
    """Tokens beyond `bounds` lose their gradient."""
    m2_threshold: float | None
    """Largest mean of `(log r)^2` over the candidates that m2po keeps; None for other objectives."""
    anchor: Literal["behavior", "group", "interpolated", "proximal", "decoupled"]
    """The policy in the denominator of the importance ratio."""
    corrections: tuple[AnyCorrection, ...]
    normalize_correction: bool
    """Divide the corrections' weights by their mean over the step."""
    aggregation: Aggregation
    aggregation_length: int | None
    """The constant L that `seq-mean-token-sum-norm` divides by; None for the other aggregations."""
    entropy_coef: float
    """Factor of the entropy bonus; 0 for none."""

    @property
    def needs_proximal(self) -> bool:
        """The policy's log-probs before the update enter the loss."""
        return self.anchor in RECOMPUTED

    @property
    def band(self) -> ClipBand | None:
        """The band that the ratio is clipped to; None for an objective that does not clip."""
        return self.bounds if self.clips_ratio else None

    @property
    def engine_band(self) -> ClipBand | None:
        """The band beyond which tokens lose their gradient for the noise of engine log-probs.

        None where the ratio's denominator is not mu, and where the clip takes no gradient.
        """
        return self.band if self.takes_gradient and self.anchor == "behavior" else None

    def evaluate(
        self,
        logprobs: PolicyLogprobs,
        completion_mask: Tensor,
        advantages: Tensor,
        constants: StepConstants = NO_CONSTANTS,
        *,
        turns: Tensor | None = None,
    ) -> Evaluation:
        """Return the corrected token losses of a micro-batch, and what the clip and the correction did to them.

        `completion_mask` and `advantages`: `[rows, tokens]`. `constants` are those of the whole optimizer step. `turns`: as in
        `correct`.
        """
        inputs = LossInputs(logprobs.policy, logprobs.anchor, completion_mask, advantages, logprobs.behavior)
        of_step: dict[str, Any] = {} if self.m2_threshold is None else {"cutoff": constants.m2po_cutoff}
        band, lengths = self.band, completion_mask.sum(dim=-1, keepdim=True).clamp(min=1)
        if band is not None and band.by_length is not None:
            of_step["clip_low"], of_step["clip_high"] = band.bounds_of(lengths)
        token_losses, clipped, log_ratio = self.function(inputs, **{**self.parameters, **of_step})
        correction: Correction | None = None
        if self.corrections:
            correction = correct(
                self.corrections,
                logprobs.log_rho,
                completion_mask,
                advantages,
                turns=turns,
                mean_weight=constants.mean_weight,
            )
            token_losses = token_losses * correction.weights
        clipped_ratio = None
        if band is not None and log_ratio is not None:
            clipped_ratio = ClippedRatio(log_ratio, *band.bounds_of(lengths))
        return Evaluation(token_losses, clipped, clipped_ratio, correction)

    def denominator(self, *, num_groups: int, num_rows: int, num_tokens: int) -> float:
        """Return the divisor of an optimizer step's summed loss: see `aggregation.denominator`."""
        return denominator(
            self.aggregation, num_groups=num_groups, num_rows=num_rows, num_tokens=num_tokens, length=self.aggregation_length
        )


def make_objective(loss: LossSection, noise: NoiseOfLength = USUAL_NOISE) -> Objective:
    """Return the objective of these settings, none of which is left open. Import the user's own functions.

    `noise` is the engine's, for `loss.clip_by = "own_length"`.
    """
    chosen = parse_objective(loss.objective)
    function = OBJECTIVES[chosen.name] if not loss.function else _own_loss(load_loss(loss.function))
    taken = [name for name, parameter in signature(function).parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY]
    of_settings = {"clip_low": loss.clip_low, "clip_high": loss.clip_high, "dual_clip": loss.dual_clip}
    parameters = of_settings | objective_parameters(loss.objective)
    defaults = defaults_of(loss.objective)
    bounds = None
    if "clip_low" in taken:
        assert loss.clip_low is not None and loss.clip_high is not None, "the band of the objective is filled in"
        by_length = noise if loss.clip_by == "own_length" else None
        bounds = ClipBand(
            loss.clip_low,
            loss.clip_high,
            defaults.is_sequence_ratio,
            defaults.is_prefix_ratio,
            defaults.takes_both_sides,
            by_length,
        )
    assert loss.aggregation is not None, "the aggregation of the objective is filled in"
    return Objective(
        function=function,
        parameters={name: parameters[name] for name in taken if name != "cutoff"},
        bounds=bounds,
        clips_ratio=bounds is not None and not defaults.bounds_divergence,
        takes_gradient=not defaults.keeps_gradient,
        m2_threshold=parameters["m2_threshold"] if "cutoff" in taken else None,
        anchor=loss.anchor,
        corrections=resolve_corrections(loss.correction),
        normalize_correction=loss.normalize_correction,
        aggregation=loss.aggregation,
        aggregation_length=loss.aggregation_length,
        entropy_coef=loss.entropy_coef,
    )


def _own_loss(function: OwnLoss) -> Callable[[LossInputs], TokenLosses]:
    def own_loss(inputs: LossInputs) -> TokenLosses:
        mask = inputs.completion_mask
        # Neutralize padding on both sides of the user's code: 0 * nan is nan, in the backward pass too.
        policy, anchor, advantages = (
            torch.where(mask, tensor, 0.0) for tensor in (inputs.policy_logprobs, inputs.anchor_logprobs, inputs.advantages)
        )
        token_losses = torch.where(mask, function(policy, anchor, mask, advantages), 0.0)
        return TokenLosses(token_losses, torch.zeros_like(mask), None)

    return own_loss


def group_logprob(behavior_logprobs: Sequence[NDArray[np.float32]]) -> float:
    """Return `log(sum_i q_i^2 / sum_i q_i)` with `q_i = exp(mean_t log mu_it)`, over the completions i of a group.

    It is the mean of the `q_i`, each weighed by itself: GEPO, https://arxiv.org/abs/2508.17850, with the likelihood of a
    completion taken per token, as in the authors' code. Arguments: the log-probs under mu of each completion's sampled tokens;
    completions without tokens are left out, and a group of such has 0.
    """
    means = np.array([logprobs.mean(dtype=np.float64) for logprobs in behavior_logprobs if len(logprobs)])
    if not len(means):
        return 0.0
    # Sums of likelihoods per token, none of which is above 1: the largest is taken out, so that they do not vanish.
    largest = means.max()
    likelihoods = np.exp(means - largest)
    return float(largest + np.log((likelihoods**2).sum() / likelihoods.sum()))


@torch.no_grad()
def interpolated_logprobs(policy_logprobs: Tensor, behavior_logprobs: Tensor, token_lags: Tensor) -> Tensor:
    """`log pi_old = log mu + a (log pi - log mu)` with `a = (L - 1) / L` for a token sampled L optimizer steps ago.

    A-3PO, https://arxiv.org/abs/2512.06547, with logarithms, as AReaL's `loglinear`: as if the log-prob had moved by the same
    amount in each of the L steps. With L of 0 or 1 it is mu itself. Arguments and result are `[rows, tokens]`; no gradient.
    """
    share = (token_lags - 1).clamp(min=0) / token_lags.clamp(min=1)
    return behavior_logprobs + share * (policy_logprobs - behavior_logprobs)
