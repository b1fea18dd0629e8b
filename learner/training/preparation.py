"""What is settled about a batch before its first optimizer step: rewards, the frozen policies' log-probs, advantages."""

from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.common.config import AdvantageSection, KlSection
from offbeat.learner.objectives.advantages import (
    discounted_returns,
    generalized_advantages,
    group_advantages,
    merge_moments,
    moments,
    rewards_by_token,
    whiten,
)
from offbeat.learner.objectives.kl import kl_estimate
from offbeat.learner.policy.process_group import gather_tensors
from offbeat.learner.training.batching import MicroBatch

_BASELINES: dict[str, Literal["mean", "leave_one_out", "none"]] = {
    "group": "mean",
    "leave_one_out": "leave_one_out",
    "critic": "none",
    "zero": "none",
}
"""What `advantage.baseline` is to `group_advantages`."""


class Frozen(NamedTuple):
    """What the policies that do not move during the update say of a micro-batch, `[rows, tokens]` float32; None: not asked."""

    proximal_logprobs: Tensor | None = None
    """The policy's own, before the update."""
    reference_logprobs: Tensor | None = None
    """Of the KL's reference."""
    values: Tensor | None = None
    """The critic's, before the update."""


class Prepared(NamedTuple):
    """A micro-batch, ready to be trained on."""

    micro_batch: MicroBatch
    frozen: Frozen
    advantages: Tensor
    """`[rows, tokens]` float32, 0 outside the mask."""
    returns: Tensor | None
    """`[rows, tokens]`: what the critic should have said; None without one."""


def completion_advantages(rewards: NDArray[np.float64], advantage: AdvantageSection) -> NDArray[np.float64]:
    """One advantage for each completion, `[num_groups, group_size]` as `rewards`; under a critic it is not looked at."""
    assert advantage.baseline is not None, "the config is not complete (common.objectives)"
    return group_advantages(
        torch.from_numpy(rewards),
        baseline=_BASELINES[advantage.baseline],
        divide_by_std=bool(advantage.divide_by_std),
        epsilon=advantage.std_epsilon,
        unbiased=advantage.std_unbiased,
    ).numpy()


def token_kl(micro_batch: MicroBatch, frozen: Frozen, kl: KlSection) -> Tensor:
    """The KL from the reference that is taken out of the rewards, `[rows, tokens]`.

    Of the behavior policy: it has sampled the tokens, so the estimate is unbiased however stale they are.
    """
    assert frozen.reference_logprobs is not None
    return kl_estimate(
        micro_batch.behavior_logprobs, frozen.reference_logprobs, micro_batch.completion_mask, estimator=kl.estimator
    )


def prepare(
    micro_batch: MicroBatch, frozen: Frozen, *, advantage: AdvantageSection, kl: KlSection, kl_coefficient: float
) -> Prepared:
    """Advantages for every token, before they are whitened and clipped.

    `kl_coefficient`: of the KL in the reward, which is spread over the tokens (`rewards_by_token`); 0: there is none.
    """
    mask = micro_batch.completion_mask
    penalty = token_kl(micro_batch, frozen, kl) if kl_coefficient else torch.zeros_like(micro_batch.behavior_logprobs)
    if frozen.values is not None:
        token_rewards = rewards_by_token(micro_batch.rewards, penalty, mask, kl_coefficient=kl_coefficient)
        advantages, returns = generalized_advantages(
            token_rewards, frozen.values, mask, gamma=advantage.gamma, gae_lambda=advantage.gae_lambda
        )
        return Prepared(micro_batch, frozen, advantages, returns)
    advantages = torch.where(mask, micro_batch.advantages[:, None], 0.0)
    if kl_coefficient:
        nothing = torch.zeros_like(micro_batch.rewards)
        token_rewards = rewards_by_token(nothing, penalty, mask, kl_coefficient=kl_coefficient)
        advantages = advantages + discounted_returns(token_rewards, mask, gamma=advantage.gamma)
    return Prepared(micro_batch, frozen, advantages, None)


def scale_advantages(batch: list[Prepared], advantage: AdvantageSection) -> list[Prepared]:
    """Whitened over all ranks' tokens and clipped, as far as the settings ask for it; a collective if they whiten."""
    if advantage.whiten:
        of_micro_batches = [moments(prepared.advantages, prepared.micro_batch.completion_mask) for prepared in batch]
        merged = merge_moments(gather_tensors(merge_moments(torch.stack(of_micro_batches))))
        batch = [
            prepared._replace(advantages=whiten(prepared.advantages, prepared.micro_batch.completion_mask, merged))
            for prepared in batch
        ]
    if advantage.clip is not None:
        limit = advantage.clip
        batch = [prepared._replace(advantages=prepared.advantages.clamp(-limit, limit)) for prepared in batch]
    return batch
