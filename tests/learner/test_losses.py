import math

import pytest
import torch

from learner.losses import gspo_loss

BAND = {"clip_low": 0.1, "clip_high": 0.2}


def log_of(*ratios: float) -> list[float]:
    return [math.log(ratio) for ratio in ratios]


def run(policy, anchor, mask, advantages):
    """Loss, statistics and the gradient with respect to the policy's log-probs, in float64."""
    policy_logprobs = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    result = gspo_loss(
        policy_logprobs,
        torch.tensor(anchor, dtype=torch.float64),
        torch.tensor(mask),
        torch.tensor(advantages, dtype=torch.float64),
        **BAND,
    )
    (gradient,) = torch.autograd.grad(result.loss_sum, policy_logprobs)
    return result.loss_sum.item(), result.statistics, gradient


def test_the_ratio_is_the_geometric_mean_over_loss_tokens_inside_and_at_the_ends():
    # Token ratios 1.21, (masked), 1.0: the root of 1.21 is 1.1, inside the band. Loss -1.1 * 2.
    loss, statistics, gradient = run(
        policy=[[0.0, *log_of(1.21), -7.0, 0.0, 3.0]],
        anchor=[[9.0, 0.0, 5.0, 0.0, -4.0]],
        mask=[[False, True, False, True, False]],
        advantages=[2.0],
    )
    assert loss == pytest.approx(-2.2)
    assert statistics.log_sequence_ratio.item() == pytest.approx(math.log(1.1))
    assert statistics.largest_token_log_ratio.item() == pytest.approx(math.log(1.21))
    # -s A / |y| = -1.1 * 2 / 2 on loss tokens, nothing elsewhere.
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -1.1, 0.0, -1.1, 0.0]], dtype=torch.float64))


def test_rows_are_summed_not_averaged():
    # Loss -1 * 1 (ratio 1) and +1.05 * 3.
    loss, _, gradient = run(
        policy=[[0.0, 0.0], log_of(1.05, 1.05)],
        anchor=[[0.0, 0.0], [0.0, 0.0]],
        mask=[[True, False], [True, True]],
        advantages=[1.0, -3.0],
    )
    assert loss == pytest.approx(-1.0 + 3.15)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 0.0], [1.575, 1.575]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "flag"),
    [
        (1.5, 2.0, -2.4, 0.0, "positive_above"),  # clipped to 1.2
        (0.5, 2.0, -1.0, -1.0, "positive_below"),  # the gradient pulls it back up
        (1.5, -2.0, 3.0, 3.0, "negative_above"),  # the gradient pulls it back down
        (0.5, -2.0, 1.8, 0.0, "negative_below"),  # clipped to 0.9
        (1.15, 2.0, -2.3, -2.3, None),
        (0.95, -2.0, 1.9, 1.9, None),
        (1.5, 0.0, 0.0, 0.0, None),
        (0.5, 0.0, 0.0, 0.0, None),
    ],
)
def test_only_the_side_that_the_advantage_pushes_to_is_clipped(ratio, advantage, loss, gradient, flag):
    result, statistics, policy_gradient = run(policy=[log_of(ratio)], anchor=[[0.0]], mask=[[True]], advantages=[advantage])
    assert result == pytest.approx(loss)
    assert policy_gradient.item() == pytest.approx(gradient)
    if gradient == 0.0:
        assert policy_gradient.item() == 0.0
    flags = ("positive_above", "positive_below", "negative_above", "negative_below")
    assert [name for name in flags if getattr(statistics, name).item()] == ([flag] if flag else [])


@pytest.mark.parametrize("padding", [-math.inf, math.inf, math.nan])
def test_padding_of_any_value_leaves_loss_and_gradient_finite(padding):
    policy_logprobs = torch.tensor([[padding, -1.0, padding, -2.0, padding]], requires_grad=True)
    anchor_logprobs = torch.tensor([[padding, -1.0, -3.0, -2.0, padding]])
    mask = torch.tensor([[False, True, False, True, False]])
    result = gspo_loss(policy_logprobs, anchor_logprobs, mask, torch.tensor([3.0]), **BAND)
    result.loss_sum.backward()
    assert result.loss_sum.item() == pytest.approx(-3.0)
    assert policy_logprobs.grad is not None
    torch.testing.assert_close(policy_logprobs.grad, torch.tensor([[0.0, -1.5, 0.0, -1.5, 0.0]]))
    assert result.statistics.largest_token_log_ratio.item() == 0.0


def test_a_row_without_loss_tokens_has_ratio_one_and_no_gradient():
    loss, statistics, gradient = run(policy=[[-5.0, -math.inf]], anchor=[[-1.0, 0.0]], mask=[[False, False]], advantages=[2.0])
    assert loss == -2.0
    assert statistics.log_sequence_ratio.item() == 0.0
    assert not statistics.has_loss_tokens.item()
    assert torch.equal(gradient, torch.zeros(1, 2, dtype=torch.float64))


def test_loss_and_gradient_equal_the_papers_formula_differentiated_in_float64():
    """Eq. 5 and 7 as they are printed: likelihoods, their root, min and clip; no logarithm of a ratio anywhere."""
    generator = torch.Generator().manual_seed(0)
    rows, tokens = 64, 9
    anchor = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64)
    policy = anchor + 0.4 * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, tokens, generator=generator) < 0.6
    mask[:, 4] = True
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    policy.requires_grad_()

    expected = torch.zeros((), dtype=torch.float64)
    for row in range(rows):
        likelihood = policy[row, mask[row]].exp().prod()
        anchor_likelihood = anchor[row, mask[row]].exp().prod()
        ratio = (likelihood / anchor_likelihood) ** (1 / int(mask[row].sum()))
        clipped = ratio.clamp(1 - BAND["clip_low"], 1 + BAND["clip_high"])
        expected = expected - torch.minimum(ratio * advantages[row], clipped * advantages[row])
    (expected_gradient,) = torch.autograd.grad(expected, policy)

    result = gspo_loss(policy, anchor, mask, advantages, **BAND)
    (gradient,) = torch.autograd.grad(result.loss_sum, policy)
    torch.testing.assert_close(result.loss_sum, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    statistics = result.statistics
    for flag in (statistics.positive_above, statistics.positive_below, statistics.negative_above, statistics.negative_below):
        assert flag.any(), "the case must reach every side of the band"
