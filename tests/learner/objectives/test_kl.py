import math
from typing import get_args

import pytest
import torch

from offbeat.learner.objectives.kl import KlEstimator, adapt_kl_coefficient, kl_estimate, unbiased_kl
from offbeat.learner.objectives.losses import LOG_RATIO_BOUND

ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", 0.5 - 1 + math.log(2), 1 - 0.5),
    ],
)
def test_estimates_of_a_token_twice_as_likely_as_under_the_reference(estimator, value, gradient):
    policy = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.0 - math.log(2)]], dtype=torch.float64)
    estimate = kl_estimate(policy, reference, torch.tensor([[True]]), estimator=estimator)
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value)
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(gradient)


def test_unbiased_kl_of_a_token_multiplies_by_the_ratio_and_differentiates_both():
    # rho = 4, reference ratio 2: k3 = 0.5 - 1 + log 2, its slope 0.5.
    policy = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    reference, behavior = policy.detach() - math.log(2), policy.detach() - math.log(4)
    estimate = unbiased_kl(policy, reference, behavior, torch.tensor([[True]]), estimator="k3")
    estimate.sum().backward()
    k3 = math.log(2) - 0.5
    assert estimate.item() == pytest.approx(4 * k3)
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(4 * (k3 + 0.5))


class Vocabulary:
    """Three policies over five tokens. Each token is a completion, so sums over rows are exact expectations."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        logits, reference, behavior = torch.randn(3, 5, generator=generator, dtype=torch.float64)
        self.logits = logits.requires_grad_()
        self.policy = logits.log_softmax(-1)
        self.reference, self.behavior = reference.log_softmax(-1), behavior.log_softmax(-1)
        self.mask = torch.ones(5, 1, dtype=torch.bool)

    def gradient(self, scalar: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(scalar, self.logits, retain_graph=True)[0]

    def expected_kl_estimate(self, estimator: KlEstimator) -> torch.Tensor:
        """Return the expectation over tokens that the policy itself sampled; their probabilities are constants."""
        estimates = kl_estimate(self.policy[:, None], self.reference[:, None], self.mask, estimator=estimator)
        return (self.policy.exp().detach() * estimates[:, 0]).sum()

    def expected_unbiased_kl(self, estimator: KlEstimator) -> torch.Tensor:
        """Return the expectation over tokens that the behavior policy sampled."""
        columns = (self.policy[:, None], self.reference[:, None], self.behavior[:, None])
        return (self.behavior.exp() * unbiased_kl(*columns, self.mask, estimator=estimator)[:, 0]).sum()


def test_expectations_on_policy_are_those_the_docstring_claims():
    words = Vocabulary()
    forward = (words.policy.exp() * (words.policy - words.reference)).sum()
    backward = (words.reference.exp() * (words.reference - words.policy)).sum()
    assert words.expected_kl_estimate("k1").item() == pytest.approx(forward.item())
    assert words.expected_kl_estimate("k3").item() == pytest.approx(forward.item())
    assert words.expected_kl_estimate("k2").item() != pytest.approx(forward.item(), rel=0.05)
    torch.testing.assert_close(words.gradient(words.expected_kl_estimate("k1")), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(words.gradient(words.expected_kl_estimate("k2")), words.gradient(forward))
    torch.testing.assert_close(words.gradient(words.expected_kl_estimate("k3")), words.gradient(backward))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_kl_has_value_and_gradient_of_the_kl_on_tokens_of_another_policy(estimator):
    words = Vocabulary()
    forward = (words.policy.exp() * (words.policy - words.reference)).sum()
    torch.testing.assert_close(words.expected_unbiased_kl(estimator), forward)
    torch.testing.assert_close(words.gradient(words.expected_unbiased_kl(estimator)), words.gradient(forward))


def test_unbiased_k2_has_the_gradient_of_its_own_expectation():
    words = Vocabulary()
    half_square = (words.policy.exp() * (words.policy - words.reference).square() / 2).sum()
    torch.testing.assert_close(words.gradient(words.expected_unbiased_kl("k2")), words.gradient(half_square))


@every_estimator
@pytest.mark.parametrize("padding", [math.nan, math.inf, -math.inf])
def test_outside_the_mask_value_and_gradient_are_exactly_zero(estimator, padding):
    policy = torch.tensor([[-1.0, padding], [padding, padding]], requires_grad=True)
    others = torch.tensor([[-1.5, padding], [-padding, 0.0]])
    mask = torch.tensor([[True, False], [False, False]])
    for estimate in (
        kl_estimate(policy, others, mask, estimator=estimator),
        unbiased_kl(policy, others, others, mask, estimator=estimator),
    ):
        (gradient,) = torch.autograd.grad(estimate.sum(), policy)
        assert torch.all(estimate[~mask] == 0)
        assert torch.all(gradient[~mask] == 0)
        assert estimate[0, 0].item() > 0
        assert gradient[0, 0].item() > 0


@every_estimator
@pytest.mark.parametrize("log_ratio", [50.0, -50.0, 1000.0, -1000.0])
def test_extreme_ratios_leave_value_and_gradient_finite_in_float32(estimator, log_ratio):
    policy = torch.tensor([[log_ratio]], requires_grad=True)
    other, mask = torch.zeros(1, 1), torch.tensor([[True]])
    for estimate in (
        kl_estimate(policy, other, mask, estimator=estimator),
        unbiased_kl(policy, other, other, mask, estimator=estimator),
    ):
        (gradient,) = torch.autograd.grad(estimate.sum(), policy)
        assert math.isfinite(estimate.item())
        assert math.isfinite(gradient.item())


def test_k3_is_never_negative_and_keeps_its_size_near_zero_in_float32():
    log_ratio = torch.linspace(-1e-3, 1e-3, 1001)[None]
    k3 = kl_estimate(log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio, dtype=torch.bool), estimator="k3")
    assert torch.all(k3 >= 0)
    torch.testing.assert_close(k3, log_ratio.square() / 2, rtol=2e-3, atol=1e-10)


def test_k3_beyond_the_bound_stands_and_has_no_gradient():
    for distance, moves in ((LOG_RATIO_BOUND - 0.5, True), (LOG_RATIO_BOUND + 0.5, False)):
        policy = torch.tensor([[-distance]], dtype=torch.float64, requires_grad=True)
        estimate = kl_estimate(policy, torch.zeros(1, 1), torch.tensor([[True]]), estimator="k3")
        estimate.sum().backward()
        bounded = min(distance, LOG_RATIO_BOUND)
        assert estimate.item() == pytest.approx(math.exp(bounded) - 1 - bounded)
        assert policy.grad is not None
        assert policy.grad.item() == (pytest.approx(1 - math.exp(distance)) if moves else 0.0)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (6.0, 0.5),  # on target
        (6.6, 0.5 * (1 + 0.1 * 0.025)),
        (5.4, 0.5 * (1 - 0.1 * 0.025)),
        (100.0, 0.5 * (1 + 0.2 * 0.025)),
        (0.0, 0.5 * (1 - 0.2 * 0.025)),
    ],
)
def test_the_coefficient_follows_the_measured_kl_by_at_most_a_fifth_of_the_gain(measured, expected):
    # 256 completions of a horizon of 10,240: gain 0.025.
    adapted = adapt_kl_coefficient(0.5, measured, target=6.0, num_steps=256, horizon=10_240)
    assert adapted == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("num_steps", [10_240, 51_200, 60_000])
def test_a_step_of_any_size_moves_the_coefficient_by_a_fifth_at_most(num_steps: int) -> None:
    assert adapt_kl_coefficient(0.5, 0.0, target=6.0, num_steps=num_steps, horizon=10_240) == pytest.approx(0.4)
    assert adapt_kl_coefficient(0.5, 100.0, target=6.0, num_steps=num_steps, horizon=10_240) == pytest.approx(0.6)
