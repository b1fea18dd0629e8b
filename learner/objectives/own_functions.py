"""The user's own token loss, advantages and correction, named by import path; their results are checked at every call.

`docs/own_code.md` has an example of each.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offbeat.common.errors import SettingError
from offbeat.common.user_code.functions import load_function, mistakes_of

if TYPE_CHECKING:
    from torch import Tensor

OwnLoss = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
"""Takes `policy_logprobs`, `anchor_logprobs`, `completion_mask`, `advantages`, each `[rows, tokens]`, 0 or False on padding;
returns the loss of each token, differentiable with respect to `policy_logprobs`."""
OwnAdvantage = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Takes the rewards of an optimizer step, `[groups, group_size]`, and returns an advantage for each."""
OwnCorrection = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""Takes `log_rho`, `completion_mask`, `advantages`, each `[rows, tokens]`, 0 or False on padding and without a gradient;
returns the weight of each token's loss, finite and at least 0, or a mask."""

LOSS_PARAMETERS = ("policy_logprobs", "anchor_logprobs", "completion_mask", "advantages")
CORRECTION_PARAMETERS = ("log_rho", "completion_mask", "advantages")


def load_loss(path: str) -> OwnLoss:
    """Return the loss `module:function`, which raises `SettingError` when it fails or returns something else than losses.

    Raise `SettingError` about `loss.function` if there is no such function.
    """
    function = load_function(path, setting="loss.function", parameters=LOSS_PARAMETERS)

    def own_loss(policy: "Tensor", anchor: "Tensor", mask: "Tensor", advantages: "Tensor") -> "Tensor":
        # A micro-batch of one of several ranks may have no completions, and no tokens have no maximum that a function may take.
        if not mask.any():
            return policy * 0.0
        with mistakes_of("loss.function", path):
            losses = function(policy, anchor, mask, advantages)
        shape = losses.shape if isinstance(losses, type(policy)) else None
        if shape != policy.shape:
            problem = f"it returned {_shape_in_words(shape)} for log-probs of the shape {tuple(policy.shape)}"
            raise SettingError("loss.function", path, problem, "Return the loss of each token.")
        if policy.requires_grad and not losses.requires_grad:
            problem = "its losses have no gradient with respect to policy_logprobs, so nothing would be learned"
            raise SettingError("loss.function", path, problem, "Compute them from policy_logprobs, without detach().")
        return losses

    return own_loss


def load_advantage(path: str) -> OwnAdvantage:
    """Return the advantages `module:function`, which raises `SettingError` when it fails or returns no finite numbers.

    Raise `SettingError` about `advantage.function` if there is no such function.
    """
    function = load_function(path, setting="advantage.function", parameters=("rewards",))

    def own_advantage(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        with mistakes_of("advantage.function", path):
            # Pass a copy, because the user's function may write to its argument.
            advantages = np.asarray(function(rewards.copy()), dtype=np.float64)
        if advantages.shape != rewards.shape:
            problem = f"it returned {_shape_in_words(advantages.shape)} for rewards of the shape {rewards.shape}"
            raise SettingError("advantage.function", path, problem, "Return one number per reward.")
        if not np.isfinite(advantages).all():
            raise SettingError("advantage.function", path, "it returned numbers that are not finite", "Return finite numbers.")
        return advantages

    return own_advantage


def load_correction(path: str) -> OwnCorrection:
    """Return the correction `module:function`, which raises `SettingError` when it fails or returns what weighs no loss.

    Weights are 0 outside the mask. Raise `SettingError` about `loss.correction` if there is no such function.
    """
    function = load_function(path, setting="loss.correction", parameters=CORRECTION_PARAMETERS)

    def own_correction(log_rho: "Tensor", mask: "Tensor", advantages: "Tensor") -> "Tensor":
        if not mask.any():
            return log_rho * 0.0
        with mistakes_of("loss.correction", path):
            # Pass a copy, because the user's function may write to its argument, which is measured afterwards.
            weights = function(log_rho.clone(), mask, advantages)
        if not isinstance(weights, type(log_rho)):
            problem = f"it returned {type(weights).__name__}, which is no tensor"
            raise SettingError("loss.correction", path, problem, "Return the weight of each token's loss, or a mask.")
        if weights.shape != log_rho.shape:
            problem = f"it returned {_shape_in_words(weights.shape)} for log-ratios of the shape {tuple(log_rho.shape)}"
            raise SettingError("loss.correction", path, problem, "Return the weight of each token's loss, or a mask.")
        weights = weights.to(log_rho).where(mask, 0.0)
        if not weights.isfinite().all():
            raise SettingError("loss.correction", path, "it returned weights that are not finite", "Bound them.")
        if (weights < 0).any():
            problem = f"it returned a weight below 0: {weights.min().item():g}"
            raise SettingError("loss.correction", path, problem, "Return weights of at least 0: 0 leaves a token out.")
        return weights

    return own_correction


def _shape_in_words(shape: object) -> str:
    return "no tensor" if shape is None else f"the shape {tuple(shape)}" if isinstance(shape, tuple) else str(shape)
