"""The configured corrections: each with its bounds, and all of them applied to a micro-batch.

Every correction sees the whole micro-batch, and their weights are multiplied, so their order changes nothing: a mask drops what
it would drop alone, and a weight is what it would be alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.common.settings.corrections import WEIGHING, CorrectionName, built_in, parse_corrections
from offbeat.learner.objectives import corrections
from offbeat.learner.objectives.bands import Correction
from offbeat.learner.objectives.own_functions import OwnCorrection, load_correction


@dataclass(frozen=True)
class CorrectionRule:
    """A built-in correction with its bounds."""

    name: CorrectionName
    """The function of `corrections`."""
    low: float
    """Lower bound of the ratio; 0 where the correction has none."""
    high: float
    """Upper bound of the ratio, or the threshold of k2_mask, k3_mask and opsm."""

    @property
    def weighs(self) -> bool:
        """The correction multiplies by an importance ratio; False: it keeps or drops."""
        return self.name in WEIGHING

    @property
    def truncates(self) -> bool:
        """The correction cuts weights to its bounds; False: it gives 0 beyond them."""
        return self.name in ("token_tis", "geometric_tis", "sequence_tis")


_BETWEEN: dict[CorrectionName, Callable[..., Tensor]] = {
    "token_tis": corrections.token_tis,
    "geometric_tis": corrections.geometric_tis,
    "sequence_tis": corrections.sequence_tis,
    "icepop": corrections.icepop,
    "sequence_mask": corrections.sequence_mask,
    "geometric_mask": corrections.geometric_mask,
}
"""The corrections with two bounds; `segment_mask` looks at turns, too."""
_BELOW: dict[CorrectionName, Callable[..., Tensor]] = {"k2_mask": corrections.k2_mask, "k3_mask": corrections.k3_mask}
"""Those with an upper bound alone; `opsm` looks at advantages, too."""

AnyCorrection = CorrectionRule | OwnCorrection
"""A built-in correction, or the user's own."""


def resolve_corrections(text: str) -> tuple[AnyCorrection, ...]:
    """Return the corrections of `loss.correction`; import the user's own."""
    resolved: list[AnyCorrection] = []
    for choice in parse_corrections(text):
        if (name := built_in(choice.name)) is None:
            resolved.append(load_correction(choice.name))
            continue
        assert choice.high is not None, "a built-in correction has an upper bound of its own"
        resolved.append(CorrectionRule(name, choice.low or 0.0, choice.high))
    return tuple(resolved)


def correct(
    rules: Sequence[AnyCorrection],
    log_rho: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    *,
    turns: Tensor | None = None,
    mean_weight: float = 1.0,
) -> Correction:
    """Return the product of the weights of at least one correction; tensors are `[rows, tokens]`.

    `log_rho` and `advantages` may hold any value outside the mask. `turns` are those of `segment_mask`; None where every
    completion has one. `mean_weight` divides the weights (`weigh`).
    """
    log_rho = torch.where(completion_mask, log_rho, 0.0)
    advantages = torch.where(completion_mask, advantages, 0.0)
    weights, truncated = completion_mask.float() / mean_weight, torch.zeros_like(completion_mask)
    for rule in rules:
        factors = apply_correction(rule, log_rho, completion_mask, advantages, turns)
        weights = weights * factors
        if isinstance(rule, CorrectionRule) and rule.truncates:
            # A weight at a lower bound of 0 is masked, not truncated.
            truncated = truncated | (completion_mask & (factors != 0) & ((factors == rule.low) | (factors == rule.high)))
    return Correction(weights, log_rho, truncated)


def weigh(rules: Sequence[AnyCorrection], log_rho: Tensor, completion_mask: Tensor) -> Tensor:
    """Return the weights of those built-in corrections alone that multiply by a ratio, `[rows, tokens]`.

    Their mean over the optimizer step is the `mean_weight` of self-normalized importance sampling: masks beside them must not
    amplify what they keep.
    """
    weighing = [rule for rule in rules if isinstance(rule, CorrectionRule) and rule.weighs]
    return correct(weighing, log_rho, completion_mask, torch.zeros_like(log_rho)).weights


def apply_correction(
    rule: AnyCorrection, log_rho: Tensor, completion_mask: Tensor, advantages: Tensor, turns: Tensor | None = None
) -> Tensor:
    """Return the weights of one correction, `[rows, tokens]`; `log_rho` and `advantages` are 0 outside the mask.

    `turns`: as in `correct`.
    """
    if not isinstance(rule, CorrectionRule):
        return rule(log_rho, completion_mask, advantages)
    if rule.name == "opsm":
        return corrections.opsm(log_rho, completion_mask, advantages, threshold=rule.high)
    if rule.name == "segment_mask":
        turns = torch.zeros_like(log_rho, dtype=torch.int64) if turns is None else turns
        return corrections.segment_mask(log_rho, completion_mask, turns, low=rule.low, high=rule.high)
    if rule.name in _BELOW:
        return _BELOW[rule.name](log_rho, completion_mask, high=rule.high)
    return _BETWEEN[rule.name](log_rho, completion_mask, low=rule.low, high=rule.high)
