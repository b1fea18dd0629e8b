"""The loss of a micro-batch is the sum of the objective and of each term that the run has."""

from typing import Any

import pytest
import torch

from offbeat.common.learning_sections import CriticSection, KlSection, LossSection
from offbeat.learner.objectives.kl import kl_estimate, unbiased_kl
from offbeat.learner.objectives.objective import NO_CONSTANTS, resolve_objective
from offbeat.learner.training.micro_batch_loss import MicroBatchLoss, compute_loss
from offbeat.learner.training.preparation import FrozenOutputs, Outputs, PreparedMicroBatch
from tests.learner.training.test_preparation import micro_batch

MASK = torch.tensor([[True, True, True], [True, True, False]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5], [-1.25, -1.75, 0.0]])
REFERENCE = torch.tensor([[-1.5, -1.0, -1.0], [-1.0, -2.5, 0.0]])
ENTROPIES = torch.tensor([[0.5, 1.0, 0.25], [2.0, 0.75, 0.0]])
VALUES, FROZEN_VALUES = torch.full((2, 3), 2.0), torch.full((2, 3), 0.5)
RETURNS = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 0.0]])
BEHAVIOR = torch.where(MASK, -1.5, 0.0)
"""The behavior log-probs of `micro_batch`."""
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]])


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
        resolve_objective(
            LossSection(objective="reinforce", aggregation="token-mean", entropy_coef=entropy_coef), max_new_tokens=9
        ),
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
    assert [value.item() for value in loss.sums] == [0.0, 0.0, 4.5, 0.0]


@pytest.mark.parametrize("is_unbiased", [False, True])
def test_kl_enters_the_loss_with_the_current_coefficient(is_unbiased: bool) -> None:
    loss, logprobs = loss_of(kl=KlSection(loss_coef=9.0, estimator="k3", unbiased=is_unbiased), kl_coefficient=0.5)
    expected_of = LOGPROBS.clone().requires_grad_()
    estimate = kl_estimate(expected_of, REFERENCE, MASK, estimator="k3")
    corrected = unbiased_kl(expected_of, REFERENCE, BEHAVIOR, MASK, estimator="k3")
    expected = -(ADVANTAGES * expected_of).sum() + 0.5 * (corrected if is_unbiased else estimate).sum()
    assert loss.total.item() == pytest.approx(expected.item())
    assert loss.sums.reference_kl.item() == pytest.approx(estimate.sum().item()), "measured without the correction"
    loss.total.backward()
    expected.backward()
    torch.testing.assert_close(logprobs.grad, expected_of.grad)


def test_kl_in_the_reward_is_measured_under_the_behavior_policy_and_not_in_the_loss() -> None:
    loss, _ = loss_of(kl=KlSection(reward_coef=0.1, estimator="k1"), kl_coefficient=0.1)
    assert loss.total.item() == PLAIN
    assert loss.sums.reward_kl.item() == pytest.approx((BEHAVIOR - REFERENCE)[MASK].sum().item())
    assert loss.sums.reference_kl.item() == pytest.approx((LOGPROBS - REFERENCE)[MASK].sum().item())


def test_entropy_is_a_bonus() -> None:
    loss, _ = loss_of(entropy_coef=0.5)
    assert loss.total.item() == pytest.approx(PLAIN - 0.5 * 4.5)
    assert loss.sums.entropy.item() == 4.5


@pytest.mark.parametrize(
    ("value_clip", "errors"),
    # V = 2, before the update 0.5; with the clip V = 0.75 where that is further from the target.
    [(None, [1.0, 1.0, 0.0, 4.0, 9.0]), (0.25, [1.0, 2.25**2, 1.25**2, 4.0, 9.0])],
)
def test_value_loss_has_its_coefficient_and_its_clip(value_clip: Any, errors: list[float]) -> None:
    loss, _ = loss_of(critic=CriticSection(loss_coef=0.25, value_clip=value_clip))
    assert loss.sums.value_loss.item() == pytest.approx(sum(errors) / 2)
    assert loss.total.item() == pytest.approx(PLAIN + 0.25 * sum(errors) / 2)
