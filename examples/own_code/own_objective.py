"""A loss, a correction and advantages of one's own (docs/own_code.md).

[loss]
objective = "grpo"
function = "own_objective:squared"
correction = "own_objective:damped"

[advantage]
function = "own_objective:ranks"
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def squared(policy_logprobs: Tensor, anchor_logprobs: Tensor, completion_mask: Tensor, advantages: Tensor) -> Tensor:
    """Pull each token's log-ratio toward a tenth of its advantage, instead of clipping it: `(log r - A / 10)^2`."""
    log_ratio = policy_logprobs - anchor_logprobs
    return (log_ratio - advantages / 10).square()


FSPO_BAND = 0.03
"""The constant c of `fspo`, as implementers of the paper give it."""


def fspo(policy_logprobs: Tensor, anchor_logprobs: Tensor, completion_mask: Tensor, advantages: Tensor) -> Tensor:
    """`-min(e^S A, e^clip(S, -c sqrt(n), c sqrt(n)) A)`, S the summed log-ratio of a completion of n tokens.

    FSPO, https://arxiv.org/abs/2509.09177: to be used with `loss.objective = "gspo"`, whose mean over tokens and completions
    it takes, and whose completions have one advantage. A weight is at most e^20.
    """
    summed = ((policy_logprobs - anchor_logprobs) * completion_mask).sum(dim=-1, keepdim=True)
    band = FSPO_BAND * completion_mask.sum(dim=-1, keepdim=True).sqrt()
    weight = summed.clamp(-20, 20).exp()
    clipped = torch.minimum(torch.maximum(summed, -band), band).exp()
    return -torch.minimum(weight * advantages, clipped * advantages)


def damped(log_rho: Tensor, completion_mask: Tensor, advantages: Tensor) -> Tensor:
    """Return weights that fall with a token's distance from the policy that sampled it: `min(rho, 1 / rho)`."""
    return log_rho.abs().neg().exp()


def ranks(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each completion's rank in its group, from -1 for the worst to 1 for the best; ties share the mean of theirs."""
    below = (rewards[:, :, None] > rewards[:, None, :]).sum(axis=2)
    above = (rewards[:, :, None] < rewards[:, None, :]).sum(axis=2)
    return (below - above) / max(rewards.shape[1] - 1, 1)
