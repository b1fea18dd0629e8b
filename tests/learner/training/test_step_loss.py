"""The loss of a micro-batch is the sum of the objective and of each term that the run has."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.common.settings.completion import complete_loss
from offbeat.common.settings.learning_sections import CriticSection, KlSection, LossSection
from offbeat.learner.diagnostics.row_statistics import Broken, Column, find_broken
from offbeat.learner.diagnostics.step_table import broken_metrics
from offbeat.learner.leases.groups import Rollout
from offbeat.learner.objectives.kl import kl_estimate, unbiased_kl
from offbeat.learner.objectives.losses import LOG_RATIO_BOUND
from offbeat.learner.objectives.objective import NO_CONSTANTS, Objective, PolicyLogprobs, StepConstants, make_objective
from offbeat.learner.policy.networks import FrozenOutputs, Outputs
from offbeat.learner.policy.process_group import join_process_group
from offbeat.learner.training.batching import TrainingRow, collate
from offbeat.learner.training.preparation import PreparedMicroBatch
from offbeat.learner.training.step_loss import MicroBatchLoss, compute_loss, find_mean_weight
from offbeat.protocols.payload import Segment, Turn
from tests.learner.training.test_preparation import micro_batch

MASK = torch.tensor([[True, True, True], [True, True, False]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5], [-1.25, -1.75, 0.0]])
REFERENCE = torch.tensor([[-1.5, -1.0, -1.0], [-1.0, -2.5, 0.0]])
ENTROPIES = torch.tensor([[0.5, 1.0, 0.25], [2.0, 0.75, 0.0]])
VALUES, FROZEN_VALUES = torch.full((2, 3), 2.0), torch.full((2, 3), 0.5)
RETURNS = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 0.0]])
BEHAVIOR = torch.where(MASK, -1.5, 0.0)
"""The behavior log-probs of `micro_batch`."""
BEYOND = LOG_RATIO_BOUND
"""A log-prob that is 1.5 more above the behavior log-probs than a ratio may be."""
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]])


def objective_of(loss: LossSection) -> Objective:
    return make_objective(complete_loss(loss, max_new_tokens=9))


def loss_of(
    *, kl: KlSection | None = None, kl_coefficient: float = 0.0, entropy_coef: float = 0.0, critic: CriticSection | None = None
) -> tuple[MicroBatchLoss, torch.Tensor]:
    """Return the loss under REINFORCE, summed over tokens, and the log-probs that its gradient is with respect to."""
    logprobs = LOGPROBS.clone().requires_grad_()
    frozen = FrozenOutputs(
        reference_logprobs=REFERENCE if kl is not None else None, values=FROZEN_VALUES if critic is not None else None
    )
    loss = compute_loss(
        PreparedMicroBatch(micro_batch(), frozen, ADVANTAGES, RETURNS if critic is not None else None),
        Outputs(logprobs, ENTROPIES, VALUES if critic is not None else None),
        objective_of(LossSection(objective="reinforce", aggregation="token-mean", entropy_coef=entropy_coef)),
        kl=kl or KlSection(),
        kl_coefficient=kl_coefficient,
        critic=critic or CriticSection(),
        constants=NO_CONSTANTS,
    )
    return loss, logprobs


PLAIN = float(-(ADVANTAGES * LOGPROBS).sum())


def test_objective_alone_has_no_other_sum_but_the_entropy_which_is_only_measured() -> None:
    loss, _ = loss_of()
    assert loss.total.item() == PLAIN
    assert {name: value.item() for name, value in loss.sums.items()} == {"entropy/mean": 4.5}


@pytest.mark.parametrize("is_unbiased", [False, True])
def test_kl_enters_the_loss_with_the_current_coefficient(is_unbiased: bool) -> None:
    loss, logprobs = loss_of(kl=KlSection(loss_coef=9.0, estimator="k3", unbiased=is_unbiased), kl_coefficient=0.5)
    expected_of = LOGPROBS.clone().requires_grad_()
    estimate = kl_estimate(expected_of, REFERENCE, MASK, estimator="k3")
    corrected = unbiased_kl(expected_of, REFERENCE, BEHAVIOR, MASK, estimator="k3")
    expected = -(ADVANTAGES * expected_of).sum() + 0.5 * (corrected if is_unbiased else estimate).sum()
    assert loss.total.item() == pytest.approx(expected.item())
    assert loss.sums["kl/reference"].item() == pytest.approx(estimate.sum().item()), "measured without the correction"
    loss.total.backward()
    expected.backward()
    torch.testing.assert_close(logprobs.grad, expected_of.grad)


def test_kl_in_the_reward_is_measured_under_the_behavior_policy_and_not_in_the_loss() -> None:
    loss, _ = loss_of(kl=KlSection(reward_coef=0.1, estimator="k1"), kl_coefficient=0.1)
    assert loss.total.item() == PLAIN
    assert loss.sums["kl/reward"].item() == pytest.approx((BEHAVIOR - REFERENCE)[MASK].sum().item())
    assert loss.sums["kl/reference"].item() == pytest.approx((LOGPROBS - REFERENCE)[MASK].sum().item())


def test_entropy_is_a_bonus() -> None:
    loss, _ = loss_of(entropy_coef=0.5)
    assert loss.total.item() == pytest.approx(PLAIN - 0.5 * 4.5)
    assert loss.sums["entropy/mean"].item() == 4.5


@pytest.mark.parametrize(
    ("value_clip", "errors"),
    # V = 2, before the update 0.5; with the clip V = 0.75 where that is further from the target.
    [(None, [1.0, 1.0, 0.0, 4.0, 9.0]), (0.25, [1.0, 2.25**2, 1.25**2, 4.0, 9.0])],
)
def test_value_loss_has_its_coefficient_and_its_clip(value_clip: Any, errors: list[float]) -> None:
    loss, _ = loss_of(critic=CriticSection(loss_coef=0.25, value_clip=value_clip))
    assert loss.sums["loss/value"].item() == pytest.approx(sum(errors) / 2)
    assert loss.total.item() == pytest.approx(PLAIN + 0.25 * sum(errors) / 2)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [(math.nan, Broken.NOT_FINITE), (-math.inf, Broken.NOT_FINITE), (BEYOND, Broken.RATIO)],
    ids=["nan", "-inf", "beyond the bound"],
)
@pytest.mark.parametrize("objective", ["gspo", "grpo", "cispo", "minirl", "dppo_tv", "ce_gppo", "aspo", "reinforce"])
def test_completion_with_a_broken_logprob_has_no_gradient_is_counted_and_leaves_the_others_as_they_are(
    objective: Any, changed: float, reason: Broken
) -> None:
    """The second row has A < 0, where no clip would hold a ratio that is too large."""

    def loss_and_gradient(logprobs: torch.Tensor) -> tuple[MicroBatchLoss, torch.Tensor]:
        logprobs = logprobs.clone().requires_grad_()
        loss = compute_loss(
            PreparedMicroBatch(micro_batch(), FrozenOutputs(reference_logprobs=REFERENCE), ADVANTAGES, None),
            Outputs(logprobs, torch.where(logprobs.isnan(), math.nan, ENTROPIES), None),
            objective_of(LossSection(objective=objective, aggregation="token-mean", entropy_coef=0.1)),
            kl=KlSection(loss_coef=0.5),
            kl_coefficient=0.5,
            critic=CriticSection(),
            constants=NO_CONSTANTS,
        )
        (gradient,) = torch.autograd.grad(loss.total, logprobs)
        return loss, gradient

    broken = LOGPROBS.clone()
    broken[1, 1] = changed
    loss, gradient = loss_and_gradient(broken)
    alone, gradient_alone = loss_and_gradient(LOGPROBS)
    assert torch.equal(gradient[0], gradient_alone[0])
    assert gradient[0].abs().min() > 0
    assert torch.equal(gradient[1], torch.zeros(3))
    assert gradient_alone[1, :2].abs().min() > 0
    assert math.isfinite(loss.total.item()) and loss.table.nan_to_num().isfinite().all()
    assert torch.equal(loss.table[0].nan_to_num(), alone.table[0].nan_to_num())
    assert (loss.table[1, Column.NUM_TOKENS], loss.table[1, Column.LOSS]) == (0, 0)
    assert loss.table[:, Column.BROKEN].tolist() == [0, reason]
    assert all(math.isfinite(value.item()) for value in loss.sums.values())
    name = "broken/not_finite" if reason == Broken.NOT_FINITE else "broken/ratio"
    counted = {"broken/not_finite": 0, "broken/ratio": 0, name: 1, "broken/leases": {"17": 1}}
    group = int(loss.table[1, Column.GROUP])
    assert broken_metrics(loss.table, [17] * (group + 1)) == counted
    assert broken_metrics(alone.table, [17] * (group + 1)) == {"broken/not_finite": 0, "broken/ratio": 0}


def test_ratio_at_the_bound_keeps_its_gradient_and_a_small_one_is_not_broken() -> None:
    mask = torch.tensor([[True, False]])
    for log_ratio, reason in ((LOG_RATIO_BOUND, 0), (LOG_RATIO_BOUND + 0.1, Broken.RATIO), (-50.0, 0)):
        logprobs = PolicyLogprobs(torch.tensor([[log_ratio - 30, math.nan]]), torch.tensor([[-30.0, math.nan]]), None)
        assert find_broken(logprobs, mask).tolist() == [reason]


def interpolated(token_lags: torch.Tensor, *, anchor: str, correction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the total of `grpo` and its gradient."""
    logprobs = LOGPROBS.clone().requires_grad_()
    loss = compute_loss(
        PreparedMicroBatch(micro_batch()._replace(token_lags=token_lags), FrozenOutputs(), ADVANTAGES, None),
        Outputs(logprobs, None, None),
        objective_of(
            LossSection(objective="grpo", aggregation="token-mean", anchor=anchor, correction=correction),  # pyright: ignore[reportArgumentType]
        ),
        kl=KlSection(),
        kl_coefficient=0.0,
        critic=CriticSection(),
        constants=NO_CONSTANTS,
    )
    loss.total.backward()
    assert logprobs.grad is not None
    return loss.total.detach(), logprobs.grad


def test_interpolated_anchor_is_a_share_of_the_way_from_mu_and_a_constant() -> None:
    """`pi_old = mu (pi/mu)^((L-1)/L)`: the ratio is `(pi/mu)^(1/L)`, the weight the rest, and nothing flows through it."""
    lags = torch.tensor([[2, 4, 5], [8, 3, 0]])
    total, gradient = interpolated(lags, anchor="interpolated", correction="token_tis(0, 1.3)")
    moved = torch.where(MASK, LOGPROBS - BEHAVIOR, 0.0)
    ratio, weight = (moved / lags.clamp(min=1)).exp(), (moved - moved / lags.clamp(min=1)).exp().clamp(max=1.3)
    surrogate = torch.minimum(ratio * ADVANTAGES, ratio.clamp(0.8, 1.2) * ADVANTAGES)
    assert total.item() == pytest.approx(-(weight * surrogate).where(MASK, 0.0).sum().item(), rel=1e-6)
    clipped = ((ADVANTAGES > 0) & (ratio > 1.2)) | ((ADVANTAGES < 0) & (ratio < 0.8))
    assert 0 < clipped.sum() < MASK.sum()
    expected = torch.where(MASK & ~clipped, -weight * ratio * ADVANTAGES, 0.0)
    torch.testing.assert_close(gradient, expected)


def test_group_anchor_is_the_denominator_of_every_completion_of_the_group() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    of_group, advantages = torch.tensor([-0.7, -0.9]), ADVANTAGES[:, :1].expand(2, 3)
    loss = compute_loss(
        PreparedMicroBatch(micro_batch()._replace(group_logprobs=of_group), FrozenOutputs(), advantages, None),
        Outputs(logprobs, None, None),
        objective_of(LossSection(anchor="group", clip_low=0.9, clip_high=9.0)),
        kl=KlSection(),
        kl_coefficient=0.0,
        critic=CriticSection(),
        constants=NO_CONSTANTS,
    )
    means = torch.where(MASK, LOGPROBS, 0.0).sum(dim=1) / MASK.sum(dim=1)
    expected = -(means - of_group).exp() * ADVANTAGES[:, 0] * micro_batch().weights
    assert loss.total.item() == pytest.approx(expected.sum().item(), rel=1e-6)


def test_interpolated_anchor_is_mu_for_tokens_that_lag_a_step_or_none() -> None:
    for lags in (torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)):
        of_behavior = interpolated(lags, anchor="behavior", correction="none")
        torch.testing.assert_close(interpolated(lags, anchor="interpolated", correction="token_tis"), of_behavior)


def test_segment_mask_drops_the_turn_that_is_out_of_bounds_and_keeps_the_others() -> None:
    ids, behavior = np.array([7, 8, 9], dtype=np.int32), np.full(3, -1.5, dtype=np.float32)
    episode = Rollout(ids, behavior, 1.0, "stop", (Segment(0, 0),), turns=(Turn(0, 2), Turn(1, 1)), context_ids=ids[:1])
    logprobs = torch.tensor([[-1.5, -1.5, -1.0]], requires_grad=True)
    loss = compute_loss(
        PreparedMicroBatch(
            collate([TrainingRow(0, ids, episode, 1.0, 1.0, 1.0, 0, 0)]), FrozenOutputs(), torch.ones(1, 3), None
        ),
        Outputs(logprobs, None, None),
        objective_of(LossSection(objective="reinforce", aggregation="token-mean", correction="segment_mask(0.9, 1.1)")),
        kl=KlSection(),
        kl_coefficient=0.0,
        critic=CriticSection(),
        constants=NO_CONSTANTS,
    )
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    assert (gradient != 0).tolist() == [[True, True, False]]
    assert loss.table[0, Column.NUM_MASKED] == 1


def normalized_step(ratios: list[list[float]], correction: str) -> tuple[float, MicroBatchLoss, torch.Tensor]:
    """Return the mean weight of a step with these ratios pi_old / mu, its loss under pi = pi_old, and the gradient."""
    proximal = torch.where(MASK, BEHAVIOR + torch.tensor(ratios).log(), 0.0)
    objective = objective_of(
        LossSection(
            objective="grpo",
            aggregation="token-mean",
            anchor="decoupled",
            correction=correction,  # pyright: ignore[reportArgumentType]
            normalize_correction=True,
        )
    )
    join_process_group()
    prepared = PreparedMicroBatch(micro_batch(), FrozenOutputs(proximal), ADVANTAGES, None)
    mean = find_mean_weight([prepared], objective)
    logprobs = proximal.clone().requires_grad_()
    loss = compute_loss(
        prepared,
        Outputs(logprobs, None, None),
        objective,
        kl=KlSection(),
        kl_coefficient=0.0,
        critic=CriticSection(),
        constants=StepConstants(mean_weight=mean),
    )
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    return mean, loss, gradient


def test_corrections_weights_are_divided_by_their_mean_over_the_loss_tokens() -> None:
    """Truncated at 2 the weights are 2, 1, 0.5 and 2, 1."""
    mean, loss, gradient = normalized_step([[2.0, 1.0, 0.5], [4.0, 1.0, 1.0]], "token_tis(0, 2)")
    assert mean == pytest.approx(6.5 / 5)
    assert loss.total.item() == pytest.approx(-(3.5 - 3.0) / 1.3)
    expected = torch.tensor([[-2.0, -1.0, -0.5], [2.0, 1.0, 0.0]]) / 1.3
    torch.testing.assert_close(gradient, expected)


def test_step_whose_corrections_all_weigh_nothing_has_no_loss_and_no_gradient() -> None:
    mean, loss, gradient = normalized_step([[9.0, 9.0, 0.1], [9.0, 0.1, 1.0]], "icepop(0.5, 5)")
    assert mean == 1.0
    assert loss.total.item() == 0.0
    assert torch.equal(gradient, torch.zeros(2, 3))


@pytest.mark.parametrize("ratio", [math.nan, math.inf, 0.0])
def test_completion_that_is_not_finite_has_no_part_in_the_mean_weight_of_the_others(ratio: float) -> None:
    mean, loss, gradient = normalized_step([[2.0, 1.0, 0.5], [1.0, ratio, 1.0]], "token_tis(0, 2)")
    assert mean == pytest.approx(3.5 / 3)
    assert loss.total.item() == pytest.approx(-3.0)
    torch.testing.assert_close(gradient, torch.tensor([[-2.0, -1.0, -0.5], [0.0, 0.0, 0.0]]) * 3 / 3.5)


def test_step_without_a_finite_completion_has_a_mean_weight() -> None:
    mean, _, _ = normalized_step([[math.nan, 1.0, 1.0], [1.0, math.nan, 1.0]], "token_tis(0, 2)")
    assert mean == 1.0
