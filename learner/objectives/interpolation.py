"""Approximates the policy of one optimizer step before, from the one that sampled a token and the current one."""

import torch
from torch import Tensor


@torch.no_grad()
def interpolated_logprobs(policy_logprobs: Tensor, behavior_logprobs: Tensor, token_lags: Tensor) -> Tensor:
    """`log pi_old = log mu + a (log pi - log mu)` with `a = (L - 1) / L` for a token sampled L optimizer steps ago.

    A-3PO, https://arxiv.org/abs/2512.06547, with logarithms, as AReaL's `loglinear`: as if the log-prob had moved by the same
    amount in each of the L steps. With L of 0 or 1 it is mu itself. Arguments and result are `[rows, tokens]`; no gradient.
    """
    share = (token_lags - 1).clamp(min=0) / token_lags.clamp(min=1)
    return behavior_logprobs + share * (policy_logprobs - behavior_logprobs)
