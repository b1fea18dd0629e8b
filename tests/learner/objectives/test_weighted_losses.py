"""Hand-computed weights and masks of losses with constant weights; test_losses.py has them among all losses."""

import math

import pytest
import torch

from offbeat.learner.objectives.losses import LossInputs, ppo_clip
from offbeat.learner.objectives.weighted_losses import aspo, dppo_kl, dppo_tv, minirl, sao, topr
from tests.learner.objectives.loss_cases import BAND, OBJECTIVES, Batch, inputs_of, one_token, random_batch, run


def three(pi: float, anchor: float, mu: float, advantage: float) -> LossInputs:
    """Return the inputs of a loss for one token of these probabilities."""
    policy, of_anchor, behavior = torch.tensor([[[pi]], [[anchor]], [[mu]]], dtype=torch.float64).log()
    mask, advantages = torch.ones(1, 1, dtype=torch.bool), torch.full((1, 1), advantage, dtype=torch.float64)
    return LossInputs(policy, of_anchor, mask, advantages, behavior)


def weight(function, inputs: LossInputs, **settings: float) -> float:
    """Return the weight of one token: minus its gradient over its advantage; check that loss and `clipped` agree."""
    policy = inputs.policy_logprobs.clone().requires_grad_()
    losses, clipped, _ = function(inputs._replace(policy_logprobs=policy), **settings)
    (gradient,) = torch.autograd.grad(losses.sum(), policy)
    assert losses.item() == pytest.approx((gradient * policy).item())
    assert clipped.item() == (gradient.item() == 0)
    return -gradient.item() / inputs.advantages.item()


@pytest.mark.parametrize(
    ("pi", "anchor", "mu", "advantage", "expected"),
    [
        (0.44, 0.4, 0.2, 1.0, 2.2),  # r = 1.1 is inside, pi / mu weighs
        (0.5, 0.4, 0.5, 1.0, 0.0),  # r = 1.25 is above
        (0.5, 0.4, 0.5, -1.0, 1.0),  # and is pulled back
        (0.3, 0.4, 0.2, -1.0, 0.0),  # r = 0.75 is below
        (0.3, 0.4, 0.2, 1.0, 1.5),
        (0.4, 0.4, 0.1, 1.0, 3.0),  # 4 is capped
    ],
)
def test_minirl_clips_by_the_ratio_to_the_anchor_and_weighs_by_that_to_the_engine(pi, anchor, mu, advantage, expected):
    assert weight(minirl, three(pi, anchor, mu, advantage), **BAND, weight_cap=3.0) == pytest.approx(expected)


def test_minirl_against_the_engine_has_the_gradient_of_the_clip():
    batch = random_batch(5)
    minirl_of = run(lambda *tensors: minirl(inputs_of(*tensors), **BAND, weight_cap=1e9), batch)
    clip_of = run(lambda *tensors: ppo_clip(inputs_of(*tensors), **BAND), batch)
    torch.testing.assert_close(minirl_of[2], clip_of[2], rtol=1e-12, atol=1e-12)
    assert torch.equal(minirl_of[1], clip_of[1])


@pytest.mark.parametrize("advantage", [1.0, -0.5])
@pytest.mark.parametrize(("pi", "expected"), [(0.3, 0.0), (0.37, 0.925), (0.4, 1.0), (0.47, 1.175), (0.5, 0.0)])
def test_sao_leaves_out_both_sides_of_its_band_at_either_sign(pi, advantage, expected):
    assert weight(sao, three(pi, 0.4, 0.4, advantage), **BAND) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pi", "anchor", "mu", "advantage", "expected"),
    [
        (0.10, 0.01, 0.02, 1.0, 5.0),  # ten times as likely, and moved by 0.09 alone
        (0.62, 0.50, 0.50, 1.0, 0.0),  # r = 1.24, moved by 0.12
        (0.62, 0.50, 0.50, -1.0, 1.24),
        (0.85, 0.95, 0.85, -1.0, 0.0),  # r = 0.89, moved by 0.1
        (0.85, 0.95, 0.85, 1.0, 1.0),
        (0.92, 0.95, 0.92, -1.0, 1.0),
        (0.10, 0.01, 0.01, 1.0, 6.0),  # 10 is capped
    ],
)
def test_dppo_tv_drops_by_the_movement_of_the_probability(pi, anchor, mu, advantage, expected):
    settings = {"clip_low": 0.05, "clip_high": 0.1, "weight_cap": 6.0}
    assert weight(dppo_tv, three(pi, anchor, mu, advantage), **settings) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pi", "anchor", "advantage", "divergence"),
    [
        # 0.5 log(0.5 / 0.6) + 0.5 log(0.5 / 0.4)
        (0.6, 0.5, 1.0, 0.0204110),
        # 0.9 log(0.9 / 0.8) + 0.1 log(0.1 / 0.2)
        (0.8, 0.9, -1.0, 0.0366900),
    ],
)
def test_dppo_kl_drops_by_the_binary_divergence_on_the_side_of_the_advantage(pi, anchor, advantage, divergence):
    for scale, expected in ((0.999, 0.0), (1.001, pi / anchor)):
        # Only the bound of the advantage's sign is close.
        low, high = (divergence * scale, 9.0) if advantage < 0 else (9.0, divergence * scale)
        settings = {"clip_low": low, "clip_high": high, "weight_cap": 9.0}
        assert weight(dppo_kl, three(pi, anchor, anchor, advantage), **settings) == pytest.approx(expected)
        assert weight(dppo_kl, three(pi, anchor, anchor, -advantage), **settings) == pytest.approx(pi / anchor), "pulled back"


@pytest.mark.parametrize("function", [dppo_tv, dppo_kl])
def test_certain_tokens_have_a_finite_divergence_in_float32(function):
    for log_ratio, anchor in ((0.0, 0.0), (-1e-8, 0.0), (0.0, -1e-8), (-15.0, 0.0), (15.0, -15.0)):
        for advantage in (1.0, -1.0):
            batch = one_token(log_ratio, advantage, anchor=anchor, dtype=torch.float32)
            losses, clipped, gradient = run(
                lambda *tensors: function(inputs_of(*tensors), clip_low=0.05, clip_high=0.05, weight_cap=2.0),
                batch,
            )
            assert math.isfinite(losses.item())
            assert clipped.item() == (log_ratio * advantage > 0 and abs(log_ratio) > 1)
            assert gradient.item() == (0 if clipped.item() else pytest.approx(-advantage * min(math.exp(log_ratio), 2)))


@pytest.mark.parametrize(
    ("pi", "anchor", "advantage", "expected"),
    [
        (0.3, 0.4, 1.0, 4 / 3),  # turned over
        (0.44, 0.4, 1.0, 1 / 1.1),
        (0.5, 0.4, 1.0, 0.0),  # r = 1.25 is above
        (0.1, 0.4, 1.0, 1.6),  # 4 is capped
        (0.38, 0.4, -1.0, 0.95),
        (0.3, 0.4, -1.0, 0.0),  # r = 0.75 is below
        (0.8, 0.4, -1.0, 1.6),  # 2 is capped
    ],
)
def test_aspo_turns_the_ratio_of_good_tokens_over_and_caps_without_clipping(pi, anchor, advantage, expected):
    assert weight(aspo, three(pi, anchor, anchor, advantage), **BAND, weight_cap=1.6) == pytest.approx(expected)


def two_tokens(first: float, second: float, advantage: float) -> Batch:
    """Return a row of two loss tokens with these ratios, and a masked one between them."""
    return Batch(
        torch.tensor([[first, 9.0, second]], dtype=torch.float64).log(),
        torch.zeros(1, 3, dtype=torch.float64),
        torch.tensor([[True, False, True]]),
        torch.full((1, 3), advantage, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("advantage", "first", "second", "expected"),
    [(2.0, 0.5, 0.5, 1.0), (2.0, 3.0, 1.0, 1.0), (-2.0, 0.5, 0.8, 0.4), (-2.0, 3.0, 1.5, 1.0), (-2.0, 4.0, 0.125, 0.5)],
)
def test_topr_weighs_bad_completions_by_their_product_up_to_one(advantage, first, second, expected):
    _, clipped, gradient = run(lambda *tensors: topr(inputs_of(*tensors)), two_tokens(first, second, advantage))
    torch.testing.assert_close(gradient, -expected * advantage * torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64))
    assert not clipped.any()


@pytest.mark.parametrize(
    ("advantage", "first", "second", "expected"),
    [
        (1.0, 2.0, 0.5, 1.0),  # W = 1
        (1.0, 2.0, 1.0, 4 * math.exp(-3)),
        (-1.0, 2.0, 1.0, 8 * math.exp(-2)),
        (1.0, 0.5, 1.0, 0.25 * math.exp(1.5)),
        (-1.0, 0.25, 2.0, 0.125 * math.exp(1.0)),
    ],
)
def test_vespo_weighs_a_completion_by_the_bell_of_its_advantages_sign(advantage, first, second, expected):
    _, clipped, gradient = run(OBJECTIVES["vespo"], two_tokens(first, second, advantage))
    torch.testing.assert_close(gradient, -expected * advantage * torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64))
    assert not clipped.any()


def test_vespo_counts_completions_whose_weight_is_gone():
    _, clipped, gradient = run(OBJECTIVES["vespo"], one_token(6.0, 1.0, dtype=torch.float32))
    assert gradient.item() == 0 and clipped.item()
