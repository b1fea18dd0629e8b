"""Preparation of a batch: from groups to micro-batches with everything that stays fixed while steps are taken on them.

groups -> shaped rewards, advantages -> rows -> micro-batches of this rank -> frozen outputs -> advantages by token
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.common.models.folders import resolve_model
from offbeat.common.models.images import ImageReader
from offbeat.common.settings.config import Config
from offbeat.common.settings.learning_sections import AdvantageSection
from offbeat.learner.diagnostics.row_statistics import Broken, find_broken
from offbeat.learner.leases.groups import Group
from offbeat.learner.objectives.advantages import (
    discounted_returns,
    generalized_advantages,
    group_advantages,
    lambda_by_length,
    merge_moments,
    moments,
    rewards_by_token,
    turn_advantages,
    whiten,
)
from offbeat.learner.objectives.kl import KlEstimator, kl_estimate
from offbeat.learner.objectives.objective import Objective, PolicyLogprobs
from offbeat.learner.objectives.own_functions import OwnAdvantage, load_advantage
from offbeat.learner.objectives.reward_shaping import RunningMoments, load_length_penalty, shape_rewards
from offbeat.learner.policy.images import ImagePacker
from offbeat.learner.policy.networks import FrozenOutputs, Networks
from offbeat.learner.policy.process_group import gather_tensors
from offbeat.learner.training.batching import MicroBatch, TrainingRow, assign_rows, collate, make_rows


class PreparedMicroBatch(NamedTuple):
    """A micro-batch, ready to be trained on."""

    micro_batch: MicroBatch
    frozen: FrozenOutputs
    advantages: Tensor
    """`[rows, tokens]` float32, 0 outside the mask."""
    returns: Tensor | None
    """Targets of the critic, `[rows, tokens]`; None without a critic."""


class Preparation:
    """Prepares the batches of a run."""

    def __init__(self, config: Config, objective: Objective) -> None:
        """Read the settings; of the `objective` only what no live setting changes."""
        self._train = config.train
        self._kl = config.kl
        self._needs_proximal = objective.needs_proximal
        self._is_prompt_mean = objective.aggregation == "prompt-mean-token-mean"
        self._advantage = config.advantage
        self._own_advantage = load_advantage(config.advantage.function) if config.advantage.function else None
        self._target_lambda = config.critic.target_lambda
        self._reward, self._max_new_tokens = config.reward, config.rollout.max_new_tokens
        self._length_penalty = load_length_penalty(config.reward.length_penalty) if config.reward.length_penalty else None
        has_images = bool(config.data.image_field)
        self._images = ImagePacker(ImageReader(resolve_model(config.model.path))) if has_images else None

    def make_rows(
        self, groups: Sequence[Group], policy_version: int, running: RunningMoments
    ) -> tuple[list[TrainingRow], RunningMoments]:
        """Return the completions of one optimizer step with shaped rewards, and the reward moments to continue with."""
        shaped = shape_rewards(
            np.array([[rollout.reward for rollout in group.rollouts] for group in groups]),
            np.array([[rollout.longest_turn for rollout in group.rollouts] for group in groups]),
            self._reward,
            max_new_tokens=self._max_new_tokens,
            length_penalty=self._length_penalty,
            running=running,
        )
        advantages = row_advantages(groups, shaped.rewards, self._advantage, self._own_advantage)
        rows = make_rows(
            groups, shaped.rewards, advantages, policy_version=policy_version, weigh_by_tokens=self._is_prompt_mean
        )
        return rows, shaped.running

    def prepare(self, rows: Sequence[TrainingRow], networks: Networks, *, kl_coefficient: float) -> list[PreparedMicroBatch]:
        """Return this rank's micro-batches of one optimizer step; a collective.

        `kl_coefficient` is the current one of the KL in the loss, or of that in the reward if the loss has none.
        """
        num_alike, place = networks.num_alike, networks.place
        assigned = assign_rows(
            rows,
            micro_batch_tokens=self._train.micro_batch_tokens,
            world_size=place.world_size // num_alike,
            packs=networks.packs,
        )
        own_share = assigned[place.rank // num_alike]
        prepared: list[PreparedMicroBatch] = []
        for micro_batch in [collate(of_micro_batch, self._images).to(place.device) for of_micro_batch in own_share]:
            frozen = networks.run_frozen(micro_batch.pack, needs_proximal=self._needs_proximal)
            prepared.append(
                prepare_micro_batch(
                    micro_batch,
                    frozen,
                    self._advantage,
                    target_lambda=self._target_lambda,
                    estimator=self._kl.estimator,
                    kl_coefficient=kl_coefficient if self._kl.reward_coef and not self._kl.loss_coef else self._kl.reward_coef,
                )
            )
        return scale_advantages(prepared, self._advantage, num_alike=num_alike)


def completion_advantages(
    rewards: NDArray[np.float64],
    advantage: AdvantageSection,
    own: OwnAdvantage | None = None,
    lengths: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """Return one advantage per completion, `[num_groups, group_size]` as `rewards`; a critic's advantages ignore it.

    `own`: the user's advantages in place of baseline and division. `lengths`: tokens of each completion, in the shape of
    `rewards`, which the baseline `length_weighted` needs.
    """
    if own is not None:
        return own(rewards)
    assert advantage.baseline is not None and advantage.divide_by_std is not None, "the objective's values are filled in"
    return group_advantages(
        torch.from_numpy(rewards),
        baseline=advantage.baseline,
        lengths=None if lengths is None else torch.from_numpy(lengths),
        divide_by_std=advantage.divide_by_std,
    ).numpy()


def row_advantages(
    groups: Sequence[Group], rewards: NDArray[np.float64], advantage: AdvantageSection, own: OwnAdvantage | None = None
) -> list[list[float | NDArray[np.float64]]]:
    """Return the advantage of each completion of each group, or that of each of its tokens where its turns differ.

    `rewards`: the shaped ones, `[num_groups, group_size]`. What shaping adds to the task's rewards belongs to every turn.
    """
    if advantage.turns == "sum":
        lengths = np.array([[len(rollout.token_ids) for rollout in group.rollouts] for group in groups])
        return completion_advantages(rewards, advantage, own, lengths).tolist()
    assert advantage.baseline is not None, "the objective's value is filled in"
    of_groups: list[list[float | NDArray[np.float64]]] = []
    for group, of_group in zip(groups, rewards.tolist(), strict=True):
        rollouts = group.rollouts
        returns = [
            rollout.returns_to_go(reward) if advantage.turns == "to_go" else rollout.branch_returns(reward)
            for rollout, reward in zip(rollouts, of_group, strict=True)
        ]
        advantages = turn_advantages([torch.from_numpy(one) for one in returns], baseline=advantage.baseline)
        of_groups.append(
            [np.repeat(one.numpy(), rollout.turn_lengths) for rollout, one in zip(rollouts, advantages, strict=True)]
        )
    return of_groups


def reward_kl(micro_batch: MicroBatch, reference_logprobs: Tensor, *, estimator: KlEstimator) -> Tensor:
    """Return the KL from the reference that the rewards are charged with, `[rows, tokens]`.

    The KL of the behavior policy, not the current one: mu sampled the tokens, so the estimate is unbiased at any staleness.
    It is 0 for a completion whose ratio of reference to mu is that of a broken one (`Broken.RATIO`): one such token would
    outweigh the rewards of the whole step, also where the step skips the completion.
    """
    behavior, mask = micro_batch.behavior_logprobs, micro_batch.completion_mask
    is_broken = find_broken(PolicyLogprobs(reference_logprobs, behavior, None), mask) == Broken.RATIO
    return kl_estimate(behavior, reference_logprobs, mask & ~is_broken[:, None], estimator=estimator)


def prepare_micro_batch(
    micro_batch: MicroBatch,
    frozen: FrozenOutputs,
    advantage: AdvantageSection,
    *,
    target_lambda: float | None = None,
    estimator: KlEstimator,
    kl_coefficient: float,
) -> PreparedMicroBatch:
    """Give every token its advantage, before whitening and clipping, and every input the experts to replay.

    `target_lambda`: as in `generalized_advantages`. `kl_coefficient`: of the KL in the reward, which is spread over the tokens
    (`rewards_by_token`); 0 for none.
    """
    if frozen.experts is not None:
        micro_batch = micro_batch._replace(pack=micro_batch.pack._replace(experts=frozen.experts))
    mask = micro_batch.completion_mask
    penalty = torch.zeros_like(micro_batch.behavior_logprobs)
    if kl_coefficient:
        assert frozen.reference_logprobs is not None, "a KL in the reward needs the reference's log-probs"
        penalty = reward_kl(micro_batch, frozen.reference_logprobs, estimator=estimator)
    if frozen.values is not None:
        token_rewards = rewards_by_token(micro_batch.rewards, penalty, mask, kl_coefficient=kl_coefficient)
        advantages, returns = generalized_advantages(
            token_rewards,
            frozen.values,
            mask,
            gamma=advantage.gamma,
            gae_lambda=lambda_by_length(mask) if advantage.gae_lambda == "by_length" else advantage.gae_lambda,
            target_lambda=target_lambda,
        )
        return PreparedMicroBatch(micro_batch, frozen, advantages, returns)
    advantages = torch.where(mask, micro_batch.advantages, 0.0)
    if kl_coefficient:
        no_rewards = torch.zeros_like(micro_batch.rewards)
        token_rewards = rewards_by_token(no_rewards, penalty, mask, kl_coefficient=kl_coefficient)
        advantages = advantages + discounted_returns(token_rewards, mask, gamma=advantage.gamma)
    return PreparedMicroBatch(micro_batch, frozen, advantages, None)


def scale_advantages(
    batch: list[PreparedMicroBatch], advantage: AdvantageSection, *, num_alike: int = 1
) -> list[PreparedMicroBatch]:
    """Whiten advantages over the tokens of all ranks, then clip them, each only if set; a collective if it whitens.

    `num_alike`: number of neighboring ranks with the same micro-batches.
    """
    if advantage.whiten:
        of_micro_batches = [moments(prepared.advantages, prepared.micro_batch.completion_mask) for prepared in batch]
        merged = merge_moments(gather_tensors(merge_moments(torch.stack(of_micro_batches)), num_alike=num_alike))
        batch = [
            prepared._replace(advantages=whiten(prepared.advantages, prepared.micro_batch.completion_mask, merged))
            for prepared in batch
        ]
    if (limit := advantage.clip) is not None:
        batch = [prepared._replace(advantages=prepared.advantages.clamp(-limit, limit)) for prepared in batch]
    return batch


def explained_variance(batch: Sequence[PreparedMicroBatch], *, num_alike: int = 1) -> float | None:
    """Return `1 - var(R - V) / var(R)` over the tokens of all ranks, V before the update; a collective.

    None without a critic, and where all targets R are equal. `num_alike`: as in `scale_advantages`.
    """
    parts: list[Tensor] = []
    for micro_batch, frozen, _, returns in batch:
        if returns is None or frozen.values is None:
            return None
        of_both = [moments(values, micro_batch.completion_mask) for values in (returns, returns - frozen.values)]
        parts.append(torch.stack(of_both))
    own = [merge_moments(of_micro_batches) for of_micro_batches in torch.stack(parts, dim=1)]
    gathered = gather_tensors(torch.stack(own), num_alike=num_alike)
    targets, errors = (merge_moments(of_ranks)[2].item() for of_ranks in gathered.unbind(dim=1))
    return 1 - errors / targets if targets > 0 else None


def add_lag(prepared: PreparedMicroBatch, num_steps: int) -> PreparedMicroBatch:
    """Return the micro-batch as it is after `num_steps` more optimizer steps: its completions lag by that many more."""
    micro_batch = prepared.micro_batch
    aged = micro_batch._replace(policy_lags=micro_batch.policy_lags + num_steps, token_lags=micro_batch.token_lags + num_steps)
    return prepared._replace(micro_batch=aged)
