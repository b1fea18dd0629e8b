"""Rewards and frozen log-probs become one advantage per token."""

from typing import Any

import numpy as np
import pytest
import torch

from offbeat.common.settings.completion import complete
from offbeat.common.settings.config import Config
from offbeat.common.settings.learning_sections import AdvantageSection
from offbeat.learner.leases.groups import Group, Rollout
from offbeat.learner.objectives.losses import ppo_clip
from offbeat.learner.policy.networks import FrozenOutputs
from offbeat.learner.policy.process_group import join_process_group
from offbeat.learner.training.batching import MicroBatch, TrainingRow, collate, make_rows
from offbeat.learner.training.preparation import (
    completion_advantages,
    prepare_micro_batch,
    row_advantages,
    scale_advantages,
)
from offbeat.protocols.payload import Segment, Turn
from tests.learner.objectives.loss_cases import inputs_of

REFERENCE = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, -2.0, 0.0]])


def micro_batch() -> MicroBatch:
    """Return completions of 3 and 2 tokens with rewards 4 and -2, advantages 1 and -1, behavior log-probs -1.5."""

    def row(length: int, reward: float, advantage: float) -> TrainingRow:
        ids = np.ones(length, dtype=np.int32)
        rollout = Rollout(ids, np.full(length, -1.5, dtype=np.float32), reward, "stop", (Segment(0, 0),))
        return TrainingRow(0, ids[:1], rollout, reward, advantage, 1.0, 0, 0)

    return collate([row(3, 4.0, 1.0), row(2, -2.0, -1.0)])


def rule(**settings: Any) -> AdvantageSection:
    """Return these settings under GSPO."""
    return complete(Config(advantage=AdvantageSection(**settings))).advantage


def advantages_of(frozen: FrozenOutputs, *, kl_coefficient: float = 0.0, **settings: Any) -> list[list[float]]:
    prepared = prepare_micro_batch(micro_batch(), frozen, rule(**settings), estimator="k1", kl_coefficient=kl_coefficient)
    return prepared.advantages.tolist()


@pytest.mark.parametrize(
    ("baseline", "divide_by_std", "expected"),
    [
        ("group", False, [-2.0, 0.0, 2.0]),
        ("group", True, [-1.0, 0.0, 1.0]),
        ("leave_one_out", False, [-3.0, 0.0, 3.0]),
        ("zero", False, [1.0, 3.0, 5.0]),
        ("critic", False, [1.0, 3.0, 5.0]),
    ],
)
def test_baseline_is_taken_from_the_rewards_of_the_group(baseline: Any, divide_by_std: bool, expected: list[float]) -> None:
    settings = rule(baseline=baseline, divide_by_std=divide_by_std)
    np.testing.assert_allclose(completion_advantages(np.array([[1.0, 3.0, 5.0]]), settings), [expected], atol=1e-5)


def test_baseline_weighed_by_lengths_is_that_of_the_sampled_tokens() -> None:
    """Rewards 1, 3 and 5 of 6, 1 and 1 tokens: the baseline is (6 + 3 + 5) / 8 = 1.75."""
    ids, logprobs = np.arange(1, 7, dtype=np.int32), np.full(6, -1.5, dtype=np.float32)
    rollouts = tuple(Rollout(ids[:n], logprobs[:n], 0.0, "stop", (Segment(0, 0),)) for n in (6, 1, 1))
    group = Group(0, 0, ids[:1], rollouts, "actor", 0.0)
    found = row_advantages([group], np.array([[1.0, 3.0, 5.0]]), rule(baseline="length_weighted", divide_by_std=False))
    assert found == [[-0.75, 1.25, 3.25]]
    equal = row_advantages([group], np.array([[0.1, 0.1, 0.1]]), rule(baseline="length_weighted", divide_by_std=True))
    assert equal == [[0.0, 0.0, 0.0]]


def test_tokens_have_the_advantage_of_their_turn_and_the_loss_its_gradient() -> None:
    """Two episodes: rewards 1 and then 2, of turns of 2 tokens and 1; and 3 in one turn of 2 tokens."""
    ids = np.arange(1, 4, dtype=np.int32)
    logprobs = np.full(3, -1.5, dtype=np.float32)
    turns = (Turn(0, 2, 1, 1.0), Turn(1, 1, 1, 2.0))
    long = Rollout(ids, logprobs, 3.0, "stop", (Segment(0, 0),), turns=turns, context_ids=ids[:1])
    short = Rollout(ids[:2], logprobs[:2], 3.0, "stop", (Segment(0, 0),))
    group = Group(0, 0, ids[:1], (long, short), "actor", 0.0)
    # A length penalty of -1 for the second episode: the shaped rewards are 3 and 2.
    rewards = np.array([[3.0, 2.0]])
    settings = rule(baseline="group", turns="to_go")
    # Returns 3, 2 and 2: the means are 2.5 and 2.
    rows = make_rows([group], rewards, row_advantages([group], rewards, settings), policy_version=0)
    prepared = prepare_micro_batch(collate(rows), FrozenOutputs(), settings, estimator="k1", kl_coefficient=0.0)
    assert prepared.advantages.tolist() == [[0.5, 0.5, 0.0], [-0.5, -0.5, 0.0]]
    policy = prepared.micro_batch.behavior_logprobs.clone().requires_grad_()
    mask, behavior = prepared.micro_batch.completion_mask, prepared.micro_batch.behavior_logprobs
    ppo_clip(inputs_of(policy, behavior, mask, prepared.advantages), clip_low=0.2, clip_high=0.2).losses.sum().backward()
    assert policy.grad is not None and policy.grad.tolist() == [[-0.5, -0.5, 0.0], [0.5, 0.5, 0.0]]
    (summed,) = row_advantages([group], rewards, rule(baseline="group", divide_by_std=False))
    assert summed == [0.5, -0.5]


def test_branches_are_credited_with_what_was_given_to_them_and_to_the_whole_episode() -> None:
    """A turn that two others continue, a sub-agent's turn, and 0.5 for all; beside it an episode of one turn."""
    ids = np.arange(1, 5, dtype=np.int32)
    logprobs = np.full(4, -1.5, dtype=np.float32)
    turns = (Turn(0, 1), Turn(1, 1, 1, 3.0, 1.0), Turn(1, 1, 2, 4.0, 2.0), Turn(1, 1, 0, 0.0, 4.0))
    tree = Rollout(ids, logprobs, 7.5, "stop", (Segment(0, 0),), turns=turns, context_ids=ids[:3])
    single = Rollout(ids[:1], logprobs[:1], 1.5, "stop", (Segment(0, 0),))
    group = Group(0, 0, ids[:1], (tree, single), "actor", 0.0)
    # The sub-agent's 4.0 is not of the others, nor is what one of the two was given of the other.
    returns = np.array([7.5 - 4.0, 7.5 - 2.0 - 4.0, 7.5 - 1.0 - 4.0, 7.5 - 1.0 - 2.0])
    (found,) = row_advantages([group], np.array([[7.5, 1.5]]), rule(baseline="group", turns="branch"))
    assert [np.asarray(one).tolist() for one in found] == [((returns - 1.5) / 2).tolist(), [-1.0]]


def test_every_token_has_its_completions_advantage_and_padding_none() -> None:
    assert advantages_of(FrozenOutputs(), baseline="group") == [[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]]


def test_kl_in_the_reward_is_charged_to_the_tokens_before_it() -> None:
    frozen = FrozenOutputs(reference_logprobs=REFERENCE)
    # k1 = behavior - reference: -0.5 for each token of the first row, +0.5 for each of the second.
    found = advantages_of(frozen, kl_coefficient=2.0, baseline="group")
    assert found == [[1.0 + 3.0, 1.0 + 2.0, 1.0 + 1.0], [-1.0 - 2.0, -1.0 - 1.0, 0.0]]
    discounted = advantages_of(frozen, kl_coefficient=2.0, baseline="group", gamma=0.5)
    assert discounted == [[1.0 + 1.75, 1.0 + 1.5, 1.0 + 1.0], [-1.0 - 1.5, -1.0 - 1.0, 0.0]]


def test_completion_with_an_impossible_logprob_is_charged_no_kl_and_leaves_the_whitened_others_apart() -> None:
    join_process_group()
    batch = micro_batch()
    batch.behavior_logprobs[0, 0] = -40.0
    frozen, settings = FrozenOutputs(reference_logprobs=REFERENCE), rule(baseline="group", whiten=True)
    prepared = prepare_micro_batch(batch, frozen, settings, estimator="k3", kl_coefficient=0.01)
    assert prepared.advantages[0].tolist() == [1.0, 1.0, 1.0], "that of its reward"
    assert (prepared.advantages[1, :2] < -1).all(), "the other is charged"
    (whitened,) = scale_advantages([prepared], settings)
    assert whitened.advantages[0, 0] - whitened.advantages[1, 0] > 1


def test_critic_turns_rewards_and_values_into_advantages_and_returns() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 9.0]])
    critic = rule(baseline="critic", gae_lambda=0.0)
    prepared = prepare_micro_batch(micro_batch(), FrozenOutputs(values=values), critic, estimator="k3", kl_coefficient=0.0)
    # lambda = 0: the next value minus this one, the reward at the last token.
    assert prepared.advantages.tolist() == [[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]]
    assert prepared.returns is not None
    assert prepared.returns.tolist() == [[2.0, 3.0, 4.0], [-1.0, -2.0, 0.0]]


def test_whitening_is_over_all_micro_batches_and_the_clip_comes_last() -> None:
    join_process_group()
    prepared = prepare_micro_batch(micro_batch(), FrozenOutputs(), rule(baseline="group"), estimator="k3", kl_coefficient=0)
    shifted = prepared._replace(advantages=prepared.advantages + 10)
    settings = rule(baseline="group", whiten=True)
    first, second = scale_advantages([prepared, shifted], settings)
    mask = prepared.micro_batch.completion_mask
    tokens = torch.cat([first.advantages[mask], second.advantages[mask]])
    assert tokens.mean().item() == pytest.approx(0, abs=1e-6)
    assert tokens.std().item() == pytest.approx(1, abs=1e-5)
    assert (first.advantages[~mask] == 0).all()
    clipped = scale_advantages([prepared, shifted], rule(baseline="group", whiten=True, clip=0.5))
    assert torch.equal(clipped[1].advantages, second.advantages.clamp(-0.5, 0.5))
    unscaled = scale_advantages([prepared], rule(baseline="group"))
    assert torch.equal(unscaled[0].advantages, prepared.advantages)
