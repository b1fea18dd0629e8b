import math
from typing import get_args

import pytest
import torch

from offbeat.learner.objectives.aggregation import Aggregation, aggregate, denominator
from offbeat.learner.objectives.losses import ppo_clip
from tests.learner.objectives.loss_cases import inputs_of

MODES: tuple[Aggregation, ...] = get_args(Aggregation)
every_mode = pytest.mark.parametrize("mode", MODES)

# Three completions of 1, 3 and 0 loss tokens, with rubbish beside them: N = 3, M = 4.
MASK = torch.tensor([[True, False, False, False], [True, False, True, True], [False, False, False, False]])
VALUES = torch.tensor([[2.0, math.nan, math.inf, 0.0], [1.0, math.nan, 3.0, 5.0], [math.nan, 7.0, -math.inf, 0.0]])


def mean(values, mask, weights, mode: Aggregation, *, length: int = 10):
    """Return the loss of a step; the first two rows are completions of one prompt, all others of prompts of their own."""
    if mode == "prompt-mean-token-mean":
        lengths = mask.sum(dim=-1)
        lengths[:2] = lengths[:2].sum()
        weights = weights / lengths.clamp(min=1)
    total = aggregate(values, mask, weights, mode=mode)
    return total / denominator(mode, num_groups=len(mask) - 1, num_rows=len(mask), num_tokens=int(mask.sum()), length=length)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (2 + 1 + 3 + 5) / 4),
        ("prompt-mean-token-mean", ((2 + 9) / 4 + 0) / 2),
        ("seq-mean-token-mean", (2 + 9 / 3 + 0) / 3),
        ("seq-mean-token-sum", (2 + 9 + 0) / 3),
        ("seq-mean-token-sum-norm", (2 + 9 + 0) / (3 * 10)),
    ],
)
def test_each_mode_is_the_mean_its_name_says(mode, expected):
    assert mean(VALUES, MASK, torch.ones(3), mode).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "per_token"),
    [
        ("token-mean", [1 / 4, 1 / 4]),
        ("prompt-mean-token-mean", [1 / 8, 1 / 8]),
        ("seq-mean-token-mean", [1 / 3, 1 / 9]),
        ("seq-mean-token-sum", [1 / 3, 1 / 3]),
        ("seq-mean-token-sum-norm", [1 / 30, 1 / 30]),
    ],
)
def test_the_gradient_of_a_token_is_its_weight_and_exactly_zero_outside_the_mask(mode, per_token):
    values = VALUES.clone().requires_grad_()
    mean(values, MASK, torch.ones(3), mode).backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad[0, MASK[0]], torch.tensor([per_token[0]]))
    torch.testing.assert_close(values.grad[1, MASK[1]], torch.full((3,), per_token[1]))
    assert torch.all(values.grad[~MASK] == 0)


@every_mode
def test_a_rows_weight_multiplies_its_share_and_leaves_the_others(mode):
    gradients = []
    for weight in (1.0, 0.5):
        values = VALUES.clone().requires_grad_()
        mean(values, MASK, torch.tensor([weight, 1.0, 1.0]), mode).backward()
        assert values.grad is not None
        gradients.append(values.grad)
    torch.testing.assert_close(gradients[1][0], 0.5 * gradients[0][0])
    torch.testing.assert_close(gradients[1][1:], gradients[0][1:])


@every_mode
def test_splitting_into_micro_batches_changes_neither_loss_nor_gradient(mode):
    """A step on ragged rows at once equals one row by row, each with its own padding, under global denominators."""
    generator = torch.Generator().manual_seed(0)
    anchor = -torch.rand(9, 6, generator=generator, dtype=torch.float64)
    start = anchor + 0.3 * torch.randn(9, 6, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([6, 5, 5, 4, 3, 2, 1, 1, 0])
    mask = torch.arange(6) < lengths[:, None]
    advantages = torch.randn(9, 1, generator=generator, dtype=torch.float64).expand(9, 6)
    weights = torch.rand(9, generator=generator, dtype=torch.float64)
    divisor = denominator(mode, num_groups=4, num_rows=9, num_tokens=int(mask.sum()), length=6)

    def gradient(micro_batches: list[slice]) -> tuple[float, torch.Tensor]:
        policy = start.clone().requires_grad_()
        total = 0.0
        for rows in micro_batches:
            width = max(1, int(lengths[rows].max()))
            tensors = (tensor[rows, :width] for tensor in (policy, anchor, mask, advantages))
            losses = ppo_clip(inputs_of(*tensors), clip_low=0.2, clip_high=0.2).losses
            loss = aggregate(losses, mask[rows, :width], weights[rows], mode=mode) / divisor
            loss.backward()
            total += loss.item()
        assert policy.grad is not None
        return total, policy.grad

    whole_loss, whole = gradient([slice(0, 9)])
    split_loss, split = gradient([slice(0, 1), slice(1, 4), slice(4, 8), slice(8, 9)])
    assert split_loss == pytest.approx(whole_loss, rel=1e-12)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-15)
    assert whole.any()


@every_mode
def test_dropping_tokens_by_weight_does_not_make_the_others_louder(mode):
    kept = torch.tensor([[1.0] * 4, [1.0, 1.0, 0.0, 0.0], [1.0] * 4])
    values = torch.where(MASK, VALUES, 0.0).requires_grad_()
    mean(values * kept, MASK, torch.ones(3), mode).backward()
    dropped = values.grad
    values = torch.where(MASK, VALUES, 0.0).requires_grad_()
    mean(values, MASK, torch.ones(3), mode).backward()
    assert dropped is not None
    assert values.grad is not None
    torch.testing.assert_close(dropped, values.grad * kept)


@every_mode
def test_a_batch_without_loss_tokens_has_a_loss_of_zero(mode):
    empty = torch.zeros(2, 3, dtype=torch.bool)
    assert mean(torch.full((2, 3), math.nan), empty, torch.ones(2), mode).item() == 0.0


def test_the_denominator_of_the_norm_does_not_depend_on_tokens_or_padding():
    counts = {
        denominator("seq-mean-token-sum-norm", num_groups=2, num_rows=3, num_tokens=count, length=10) for count in (1, 7, 30)
    }
    assert counts == {30.0}
