"""The KL divergence of the policy from a reference: estimates per token, for the loss or the reward, and its coefficient."""

from typing import Literal, assert_never

from torch import Tensor

from offbeat.learner.objectives.losses import LOG_RATIO_BOUND, bounded_ratio, log_token_ratio

KlEstimator = Literal["k1", "k2", "k3"]
"""Schulman's names, http://joschu.net/blog/kl-approx.html."""

KL_HORIZON = 10_000
"""Time scale on which the KL's coefficient is adapted to `kl.target`, in completions."""


def kl_estimate(
    policy_logprobs: Tensor, reference_logprobs: Tensor, completion_mask: Tensor, *, estimator: KlEstimator
) -> Tensor:
    """Estimate KL(policy || reference) from each sampled token, `[rows, tokens]`; exactly 0 outside the mask.

    With `x = policy_logprobs - reference_logprobs`, each estimator's value, its gradient with respect to `policy_logprobs`,
    and the gradient's expectation when the policy itself has sampled:

    - k1: `x`; 1. The value is unbiased, but the gradient has expectation 0: as a loss k1 is noise. Use it in the reward.
    - k2: `x^2 / 2`; `x`. The value is biased; the gradient is that of KL(policy || reference).
    - k3: `exp(-x) - 1 + x`; `1 - exp(-x)`. The value is unbiased and never negative; the gradient is that of
      KL(reference || policy). The loss of GRPO, https://arxiv.org/abs/2402.03300, eq. 4.

    All inputs are `[rows, tokens]`; log-probs float32, any value outside `completion_mask`. For k3, `x` is clamped from below
    to `-LOG_RATIO_BOUND`, beyond which there is no gradient.
    """
    log_ratio = log_token_ratio(policy_logprobs, reference_logprobs, completion_mask)
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            # Clamp both terms: with the exponent alone clamped, the gradient of the other would remain, with the wrong sign.
            log_ratio = log_ratio.clamp(min=-LOG_RATIO_BOUND)
            return (-log_ratio).expm1() + log_ratio
        case _:
            assert_never(estimator)


def unbiased_kl(
    policy_logprobs: Tensor,
    reference_logprobs: Tensor,
    behavior_logprobs: Tensor,
    completion_mask: Tensor,
    *,
    estimator: KlEstimator,
) -> Tensor:
    """`rho k` with `rho = exp(policy_logprobs - behavior_logprobs)` and `k` from `kl_estimate`: a KL loss for stale tokens.

    The gradient flows through both factors: with respect to `policy_logprobs` it is `rho (k + dk/dx)`. Since
    `E_mu[rho k] = E_pi[k]`, its expectation over tokens that mu sampled is the gradient of `E_pi[k]`, which for k1 and k3 is
    KL(policy || reference) itself. For k2, `E_pi[k]` is near the KL only where the policies are near. The form with k3 is that
    of DeepSeek-V3.2, https://arxiv.org/abs/2512.02556. Some implementations stop the gradient of rho, which leaves the
    expectations listed in `kl_estimate`, the wrong ones of k1 and k3 included.

    The correction is for a token given the tokens before it; that mu sampled those as well is not corrected. rho is not
    truncated, which would bring the bias back, except at `LOG_RATIO_BOUND`, beyond which it has no gradient. Shapes as in
    `kl_estimate`.
    """
    log_rho = log_token_ratio(policy_logprobs, behavior_logprobs, completion_mask)
    return bounded_ratio(log_rho) * kl_estimate(policy_logprobs, reference_logprobs, completion_mask, estimator=estimator)


def adapt_kl_coefficient(coefficient: float, measured_kl: float, *, target: float, num_steps: int, horizon: int) -> float:
    """`coefficient (1 + clip(measured_kl / target - 1, -0.2, 0.2) min(1, num_steps / horizon))`.

    The proportional controller of https://arxiv.org/abs/1909.08593 with the gain `num_steps / horizon` in place of its 0.1.
    `num_steps` and `horizon` have one unit, commonly completions: it takes about `horizon / 0.2` of them to change the
    coefficient e-fold. A larger gain than 1 could make it 0 or negative.
    """
    error = min(0.2, max(-0.2, measured_kl / target - 1))
    return coefficient * (1 + error * min(1.0, num_steps / horizon))
