"""A loss, a correction and advantages of one's own (docs/own_code.md).

[loss]
objective = "grpo"
function = "own_objective:squared"
correction = "own_objective:damped"

[advantage]
function = "own_objective:ranks"
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def squared(policy_logprobs: Tensor, anchor_logprobs: Tensor, completion_mask: Tensor, advantages: Tensor) -> Tensor:
    """Pull each token's log-ratio toward a tenth of its advantage, instead of clipping it: `(log r - A / 10)^2`."""
    log_ratio = policy_logprobs - anchor_logprobs
    return (log_ratio - advantages / 10).square()


def damped(log_rho: Tensor, completion_mask: Tensor, advantages: Tensor) -> Tensor:
    """Return weights that fall with a token's distance from the policy that sampled it: `min(rho, 1 / rho)`."""
    return log_rho.abs().neg().exp()


def ranks(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each completion's rank in its group, from -1 for the worst to 1 for the best; ties share the mean of theirs."""
    below = (rewards[:, :, None] > rewards[:, None, :]).sum(axis=2)
    above = (rewards[:, :, None] < rewards[:, None, :]).sum(axis=2)
    return (below - above) / max(rewards.shape[1] - 1, 1)
