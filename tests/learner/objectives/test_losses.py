import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.learner.objectives.aggregation import aggregate, denominator
from offbeat.learner.objectives.losses import LOG_RATIO_BOUND, ce_gppo, gspo, gspo_token, ppo_clip, value_loss
from offbeat.learner.objectives.weighted_losses import cispo
from tests.learner.objectives.loss_cases import (
    BAND,
    DUAL_CLIP,
    OBJECTIVES,
    PRINTED,
    SEQUENCE_DUAL_CLIP,
    WITHOUT_CLIP,
    Batch,
    inputs_of,
    one_token,
    random_batch,
    run,
)

every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


@pytest.mark.parametrize("vary_advantages", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_equal_the_printed_formula_differentiated_in_float64(name, vary_advantages):
    batch = random_batch(0, vary_advantages=vary_advantages)
    # Not the plain sum: only different weights show to which token a gradient belongs.
    cotangent = torch.rand(batch.completion_mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    policy = batch.policy_logprobs.clone().requires_grad_()
    expected = torch.zeros(policy.shape, dtype=torch.float64)
    for row, mask in enumerate(batch.completion_mask):
        if mask.any():
            losses = PRINTED[name](policy[row, mask], batch.anchor_logprobs[row, mask], batch.advantages[row, mask])
            expected = expected.index_put((torch.tensor(row), mask.nonzero().squeeze(-1)), losses)
    (expected_gradient,) = torch.autograd.grad((expected * cotangent).sum(), policy)

    losses, _, gradient = run(OBJECTIVES[name], batch, cotangent)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "uncapped"),
    [
        ("dual_clip", "ppo_clip"),
        ("gspo_dual_clip", "gspo"),
        ("gspo_token_dual_clip", "gspo_token"),
        ("ce_gppo_dual_clip", "ce_gppo"),
    ],
)
def test_the_random_case_reaches_the_cap(name, uncapped):
    batch = random_batch(0)
    capped = run(OBJECTIVES[name], batch)[1] & ~run(OBJECTIVES[uncapped], batch)[1]
    assert 0 < capped.sum() < (batch.advantages < 0).sum()


@every_objective
def test_outside_the_mask_loss_and_gradient_are_exactly_zero_and_nothing_is_clipped(objective):
    batch = random_batch(1, spread=2.0)
    losses, clipped, gradient = run(
        objective, batch.map(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)
    )
    outside = ~batch.completion_mask
    assert losses.dtype == torch.float32
    assert torch.all(losses[outside] == 0)
    assert torch.all(gradient[outside] == 0)
    assert not clipped[outside].any()
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradient).all()


@every_objective
def test_without_advantage_loss_and_gradient_are_exactly_zero_and_nothing_is_clipped(objective):
    for log_ratio in (0.0, 3.0, -3.0, 50.0, -50.0):
        losses, clipped, gradient = run(objective, one_token(log_ratio, 0.0, anchor=-2.0))
        assert losses.item() == 0.0
        assert gradient.item() == 0.0
        assert not clipped.item()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_clipped_are_the_tokens_with_an_advantage_whose_gradient_is_exactly_zero(name):
    batch = random_batch(2)
    _, clipped, gradient = run(OBJECTIVES[name], batch)
    expected = batch.completion_mask & (batch.advantages != 0) & (gradient == 0)
    assert torch.equal(clipped, expected)
    assert clipped.any() == (name not in WITHOUT_CLIP), "the case must reach the clip"


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "ppo_clip"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 2.0, -2.4, 0.0),  # clipped to 1.2
        (0.5, 2.0, -1.0, -1.0),  # the gradient pulls it back up
        (1.5, -2.0, 3.0, 3.0),  # the gradient pulls it back down
        (0.5, -2.0, 1.8, 0.0),  # clipped to 0.9
        (1.15, 2.0, -2.3, -2.3),
        (0.95, -2.0, 1.9, 1.9),
    ],
)
def test_only_the_side_that_the_advantage_pushes_to_is_clipped(name, ratio, advantage, loss, gradient):
    losses, clipped, policy_gradient = run(OBJECTIVES[name], one_token(math.log(ratio), advantage))
    assert losses.item() == pytest.approx(loss)
    assert policy_gradient.item() == pytest.approx(gradient)
    assert clipped.item() == (gradient == 0)
    if gradient == 0:
        assert policy_gradient.item() == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, -2.0, 3.0, 3.0),  # below 1.6: as without
        (2.0, -2.0, 3.2, 0.0),  # 2 * 2 = 4 is capped at 1.6 * 2
        (0.5, -2.0, 1.8, 0.0),  # the lower clip stays
        (2.0, 2.0, -2.4, 0.0),  # positive advantages have only the upper clip
    ],
)
@pytest.mark.parametrize("function", [ppo_clip, gspo, gspo_token])
def test_dual_clip_caps_the_loss_of_a_negative_advantage_only(function, ratio, advantage, loss, gradient):
    batch = one_token(math.log(ratio), advantage)
    losses, clipped, policy_gradient = run(lambda *tensors: function(inputs_of(*tensors), **BAND, dual_clip=DUAL_CLIP), batch)
    assert losses.item() == pytest.approx(loss)
    assert policy_gradient.item() == pytest.approx(gradient)
    assert clipped.item() == (gradient == 0)


@pytest.mark.parametrize("function", [gspo, gspo_token])
def test_dual_clip_of_a_sequence_goes_by_its_ratio_and_caps_all_of_its_tokens_or_none(function):
    # Token ratios 4 and 1, (masked): s = 2 is capped at 1.6, 3.2 on each token. 9 and 0.25: s = 1.5 is not, though 9 is above.
    nan = math.nan
    batch = Batch(
        torch.tensor([[4.0, 0.0, 1.0], [9.0, 0.25, 0.0]], dtype=torch.float64).log(),
        torch.tensor([[0.0, nan, 0.0], [0.0, 0.0, nan]], dtype=torch.float64),
        torch.tensor([[True, False, True], [True, True, False]]),
        torch.full((2, 3), -2.0, dtype=torch.float64),
    )
    losses, clipped, gradient = run(lambda *tensors: function(inputs_of(*tensors), **BAND, dual_clip=DUAL_CLIP), batch)
    torch.testing.assert_close(losses, torch.tensor([[3.2, 0.0, 3.2], [3.0, 3.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0, 0.0], [3.0, 3.0, 0.0]], dtype=torch.float64))
    assert clipped.tolist() == [[True, False, True], [False, False, False]]


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "ppo_clip"])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_a_ratio_that_lies_on_the_bound_keeps_its_whole_gradient(name, advantage):
    # A band without width: ratio, clipped ratio and both bounds are all 1.
    function = {"gspo": gspo, "gspo_token": gspo_token, "ppo_clip": ppo_clip}[name]
    losses, clipped, gradient = run(
        lambda *tensors: function(inputs_of(*tensors), clip_low=0.0, clip_high=0.0), one_token(0.0, advantage)
    )
    assert losses.item() == -advantage
    assert gradient.item() == -advantage
    assert not clipped.item()


def test_gspo_ratio_is_the_geometric_mean_over_loss_tokens_inside_and_at_the_ends():
    # Token ratios 1.21, (masked), 1.0: the root of 1.21 is 1.1, inside the band. Row loss -1.1 * 2, twice.
    batch = Batch(
        torch.tensor([[0.0, math.log(1.21), -7.0, 0.0, 3.0]], dtype=torch.float64),
        torch.tensor([[9.0, 0.0, 5.0, 0.0, -4.0]], dtype=torch.float64),
        torch.tensor([[False, True, False, True, False]]),
        torch.full((1, 5), 2.0, dtype=torch.float64),
    )
    losses, _, gradient = run(OBJECTIVES["gspo"], batch)
    torch.testing.assert_close(losses, torch.tensor([[0.0, -2.2, 0.0, -2.2, 0.0]], dtype=torch.float64))
    # -s A / |y| = -1.1 * 2 / 2 on each loss token, from each of the two token losses.
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -2.2, 0.0, -2.2, 0.0]], dtype=torch.float64))


def test_gspo_gives_every_token_the_mean_advantage_and_gspo_token_its_own():
    # s = 1, advantages 1 and 3 in a row of two.
    batch = Batch(
        torch.zeros(1, 2, dtype=torch.float64),
        torch.zeros(1, 2, dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.bool),
        torch.tensor([[1.0, 3.0]], dtype=torch.float64),
    )
    assert run(OBJECTIVES["gspo"], batch)[2].tolist() == [[-2.0, -2.0]]
    assert run(OBJECTIVES["gspo_token"], batch)[2].tolist() == [[-1.0, -3.0]]


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**31), spread=st.sampled_from([0.01, 0.4, 3.0]), dual_clip=st.sampled_from([None, SEQUENCE_DUAL_CLIP])
)
def test_gspo_token_equals_gspo_where_the_advantages_of_a_row_are_equal(seed, spread, dual_clip):
    batch = random_batch(seed, spread=spread)
    of_sequences = run(lambda *tensors: gspo(inputs_of(*tensors), **BAND, dual_clip=dual_clip), batch)
    of_tokens = run(lambda *tensors: gspo_token(inputs_of(*tensors), **BAND, dual_clip=dual_clip), batch)
    for of_sequence, of_token in zip(of_sequences, of_tokens, strict=True):
        torch.testing.assert_close(of_token, of_sequence, rtol=1e-12, atol=1e-12)


def test_gspo_tells_a_ratio_inside_the_papers_band_from_one_outside_in_float32():
    # 1,000 tokens, log s = 3.9e-4 and 4.1e-4 around the bound of 4e-4, on log-probs of size 10.
    for log_ratio, is_clipped in ((3.9e-4, False), (4.1e-4, True)):
        anchor = torch.full((1, 1000), -10.0)
        mask = torch.ones(1, 1000, dtype=torch.bool)
        for objective in (gspo, gspo_token):
            _, clipped, _ = objective(
                inputs_of(anchor + log_ratio, anchor, mask, torch.ones(1, 1000)), clip_low=3e-4, clip_high=4e-4
            )
            assert clipped.all() == clipped.any() == is_clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # Gate 4 sigmoid(0) = 2, weight sech^2(0) = 1.
        (1.0, 3.0, -6.0, -3.0),
        # 4 sigmoid(1) = 2.924234, sech^2(0.5) = 0.786448; times ratio 2.
        (2.0, 1.0, -2.9242343, -1.5728954),
        # tau 1.5: (4 / 1.5) sigmoid(-0.75) = 0.855523, sech^2(0.375) = 0.871580; times ratio 0.5.
        (0.5, -2.0, 1.7110469, 0.8715798),
    ],
)
def test_sapo_weighs_the_ratio_by_the_gate_of_the_advantages_sign(ratio, advantage, loss, gradient):
    losses, _, policy_gradient = run(OBJECTIVES["sapo"], one_token(math.log(ratio), advantage))
    assert losses.item() == pytest.approx(loss, rel=1e-6)
    assert policy_gradient.item() == pytest.approx(gradient, rel=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.5, 2.0, 1.2 * 0.9, -2.16),  # above: the second part of the bound
        (0.5, 2.0, 0.5, -1.0),
        (1.5, -2.0, 1.5, 3.0),
        (0.5, -2.0, 0.9 * 0.75, 1.35),  # below: the first part of the bound
        (2.0, -2.0, 1.6, 0.0),  # capped by the dual clip
    ],
)
def test_ce_gppo_leaves_clipped_tokens_their_part_of_the_gradient_at_the_bound(ratio, advantage, value, gradient):
    losses, clipped, policy_gradient = run(OBJECTIVES["ce_gppo_dual_clip"], one_token(math.log(ratio), advantage))
    assert losses.item() == pytest.approx(-value * advantage)
    assert policy_gradient.item() == pytest.approx(gradient)
    assert clipped.item() == (gradient == 0)


def test_ce_gppo_that_preserves_nothing_is_the_clip():
    batch = random_batch(6)
    for dual_clip in (None, DUAL_CLIP):
        found = run(
            lambda *tensors, cap=dual_clip: ce_gppo(
                inputs_of(*tensors), **BAND, dual_clip=cap, preserved_below=0.0, preserved_above=0.0
            ),
            batch,
        )
        expected = run(lambda *tensors, cap=dual_clip: ppo_clip(inputs_of(*tensors), **BAND, dual_clip=cap), batch)
        torch.testing.assert_close(found[2], expected[2])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("advantage", "losses", "gradient"),
    [
        # Products 1.1, (masked), 1.32, 1.6 and 0.6; bounds 1.2, 1.2^1.414 = 1.294, 1.2^1.732 = 1.371 and 0.9^2 = 0.81.
        (2.0, [-2.2, 0, -2 * 1.2**2**0.5, -2 * 1.2**3**0.5, -1.2], [-2.2, 0, 0, 0, -1.2]),
        (-2.0, [2.2, 0, 2 * 1.2**2**0.5, 2 * 1.2**3**0.5, 1.62], [2.2, 0, 0, 0, 0]),
    ],
)
def test_ctpo_clips_the_product_up_to_each_token_to_a_band_that_grows(advantage, losses, gradient):
    products = torch.tensor([[1.1, 9.0, 1.32, 1.6, 0.6]], dtype=torch.float64)
    before = torch.tensor([[1.0, 1.0, 1.1, 1.32, 1.6]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True, True]])
    batch = Batch((products / before).log(), torch.zeros_like(before), mask, torch.full_like(before, advantage))
    found, clipped, policy_gradient = run(OBJECTIVES["ctpo"], batch)
    torch.testing.assert_close(found, torch.tensor([losses], dtype=torch.float64))
    torch.testing.assert_close(policy_gradient, torch.tensor([gradient], dtype=torch.float64))
    assert clipped.tolist() == [[of_token == 0 and kept for of_token, kept in zip(gradient, mask[0].tolist(), strict=True)]]


def test_gmpo_clips_tokens_one_by_one_before_their_geometric_mean():
    # Ratios 4 and 0.25 with A > 0: 4 is clipped to 1.2, 0.25 is pulled up; (1.2 * 0.25)^(1/2) = 0.5477.
    batch = Batch(
        torch.tensor([[4.0, 9.0, 0.25]], dtype=torch.float64).log(),
        torch.zeros(1, 3, dtype=torch.float64),
        torch.tensor([[True, False, True]]),
        torch.full((1, 3), 2.0, dtype=torch.float64),
    )
    losses, clipped, gradient = run(OBJECTIVES["gmpo"], batch)
    mean = math.sqrt(1.2 * 0.25)
    torch.testing.assert_close(losses, torch.tensor([[-2 * mean, 0.0, -2 * mean]], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0, -2 * mean]], dtype=torch.float64))
    assert clipped.tolist() == [[True, False, False]]


@pytest.mark.parametrize(("ratio", "weight"), [(1.5, 1.2), (1.1, 1.1), (0.5, 0.9)])
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio, weight):
    for advantage in (2.0, -2.0):
        batch = one_token(math.log(ratio), advantage, anchor=-1.0)
        losses, clipped, gradient = run(OBJECTIVES["cispo"], batch)
        assert losses.item() == pytest.approx(-weight * advantage * (math.log(ratio) - 1.0))
        assert gradient.item() == pytest.approx(-weight * advantage)
        assert not clipped.item()


def test_cispo_with_a_clip_low_of_one_has_no_lower_bound():
    _, _, gradient = run(
        lambda *tensors: cispo(inputs_of(*tensors), clip_low=1.0, clip_high=4.0), one_token(math.log(0.01), 2.0)
    )
    assert gradient.item() == pytest.approx(-0.02)


@every_objective
@pytest.mark.parametrize("log_ratio", [50.0, -50.0, 1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_extreme_ratios_leave_loss_and_gradient_finite_in_float32(objective, log_ratio, advantage):
    losses, _, gradient = run(objective, one_token(log_ratio, advantage, dtype=torch.float32))
    assert math.isfinite(losses.item())
    assert math.isfinite(gradient.item())
    # Its square too: the gradient norm is a sum of squares.
    assert torch.isfinite(gradient.square()).all()


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "ppo_clip", "ce_gppo"])
def test_beyond_the_bound_a_ratio_stands_and_counts_as_clipped(name):
    losses, clipped, gradient = run(OBJECTIVES[name], one_token(LOG_RATIO_BOUND + 0.5, -2.0))
    assert losses.item() == pytest.approx(2 * math.exp(LOG_RATIO_BOUND))
    assert clipped.item()
    assert gradient.item() == 0.0
    losses, clipped, gradient = run(OBJECTIVES[name], one_token(LOG_RATIO_BOUND - 0.5, -2.0))
    assert not clipped.item()
    assert gradient.item() == pytest.approx(2 * math.exp(LOG_RATIO_BOUND - 0.5))


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_at_ratio_one_the_gradient_of_the_mean_is_minus_the_advantage_over_rows_and_length(name, seed):
    batch = random_batch(seed)
    batch = batch._replace(anchor_logprobs=batch.policy_logprobs)
    num_rows = len(batch.completion_mask)
    policy = batch.policy_logprobs.clone().requires_grad_()
    losses = OBJECTIVES[name](policy, *batch[1:]).losses
    total = aggregate(losses, batch.completion_mask, torch.ones(num_rows), mode="seq-mean-token-mean")
    mean = total / denominator("seq-mean-token-mean", num_groups=1, num_rows=num_rows, num_tokens=0, length=0)
    (gradient,) = torch.autograd.grad(mean, policy)
    lengths = batch.completion_mask.sum(dim=-1, keepdim=True)
    expected = torch.where(batch.completion_mask, -batch.advantages / (num_rows * lengths), 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31), padding=st.integers(0, 5))
def test_row_order_and_padding_width_change_nothing(name, seed, padding):
    batch = random_batch(seed)
    rows, tokens = batch.completion_mask.shape
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))

    def shuffled_and_padded(tensor: Tensor) -> Tensor:
        filler = torch.full((rows, padding), math.nan, dtype=torch.float64)
        return torch.cat([tensor[order], filler if tensor.is_floating_point() else filler > 0], dim=1)

    changed = run(OBJECTIVES[name], batch.map(shuffled_and_padded))
    for before, after in zip(run(OBJECTIVES[name], batch), changed, strict=True):
        torch.testing.assert_close(after[:, :tokens], before[order], rtol=1e-12, atol=1e-12)
        assert not after[:, tokens:].any()


@every_objective
def test_completion_has_the_same_loss_alone_and_in_any_micro_batch(objective):
    """So the split into micro-batches and ranks changes nothing: the denominator is that of the whole step."""
    batch = random_batch(4)
    whole = run(objective, batch)
    alone = [run(objective, batch.map(lambda tensor, row=row: tensor[row : row + 1])) for row in range(len(whole[0]))]
    for of_batch, of_rows in zip(whole, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(of_rows), of_batch, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("value", "old_value", "value_clip", "return_", "loss", "gradient"),
    [
        (3.0, 1.0, None, 4.0, 0.5, -1.0),
        (3.0, 1.0, 0.5, 4.0, 3.125, 0.0),  # the clipped error 1.5 - 4 is larger: no way back up
        (3.0, 1.0, 0.5, 0.0, 4.5, 3.0),  # the clipped error 1.5 is smaller
        (1.25, 1.0, 0.5, 1.0, 0.03125, 0.25),  # inside
        (3.0, 1.0, 0.5, 2.25, 0.28125, 0.75),  # both errors are 0.75: the gradient stays
    ],
)
def test_value_loss_is_half_the_larger_square(value, old_value, value_clip, return_, loss, gradient):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    frozen_values, returns = torch.tensor([[[old_value]], [[return_]]], dtype=torch.float64)
    losses = value_loss(values, frozen_values, returns, torch.tensor([[True]]), value_clip=value_clip)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert values.grad is not None
    assert values.grad.item() == gradient


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_value_loss_equals_the_printed_formula_and_is_exactly_zero_outside_the_mask(value_clip):
    frozen_values, values, mask, returns = random_batch(3, vary_advantages=True)
    values = values.clone().requires_grad_()
    losses = value_loss(values, frozen_values, returns, mask, value_clip=value_clip)
    (gradient,) = torch.autograd.grad(losses.sum(), values)

    kept, old, target = values[mask], frozen_values[mask], returns[mask]
    squares = (kept - target) ** 2
    if value_clip is not None:
        clipped = torch.max(torch.min(kept, old + value_clip), old - value_clip)
        squares = torch.maximum(squares, (clipped - target) ** 2)
    (expected_gradient,) = torch.autograd.grad(0.5 * squares.sum(), values)
    torch.testing.assert_close(losses[mask], 0.5 * squares, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient[mask], expected_gradient[mask], rtol=1e-12, atol=1e-12)
    assert torch.all(losses[~mask] == 0)
    assert torch.all(gradient[~mask] == 0)
