"""The likelihood of a group's completions, as the denominator of their importance ratios."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


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
