"""Anchors of the importance ratio that are made from other log-probs: interpolated ones, and the likelihood of a group."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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
