"""Preparation of training: ranks that agree on settings, the learning rate of a step, frozen networks and advantages."""

import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.common.settings.learning_sections import AdvantageSection
from offbeat.common.settings.loading import setting_names, setting_text
from offbeat.common.settings.objectives import Baseline, resolve_baseline, resolve_divide_by_std
from offbeat.learner.leases.groups import Group
from offbeat.learner.objectives.advantages import (
    GroupBaseline,
    discounted_returns,
    generalized_advantages,
    group_advantages,
    merge_moments,
    moments,
    rewards_by_token,
    turn_advantages,
    whiten,
)
from offbeat.learner.objectives.kl import KlEstimator, kl_estimate
from offbeat.learner.objectives.own_functions import OwnAdvantage, load_advantage
from offbeat.learner.policy.packing import unpack
from offbeat.learner.policy.process_group import gather_tensors
from offbeat.learner.training.batching import MicroBatch

SECTIONS = ("model", "rollout", "loss", "advantage", "reward", "kl", "critic", "lora", "train")
"""The sections that every rank computes with."""
PATHS = ("model.path", "kl.reference", "loss.noise_floor")
"""Settings that may differ between machines."""
PACKAGES = ("offbeat", "torch", "deepspeed", "transformers")


def require_same_settings(config: Config) -> None:
    """Raise `SettingError` on every rank where one has other software or settings than rank 0; a collective.

    Ranks that compute differently would train a wrong model, or wait for each other in different collectives.
    """
    # First: other versions may have other settings.
    _compare(
        {f"package {name}": importlib.metadata.version(name) for name in PACKAGES}, "Install the same versions everywhere."
    )
    names = [name for name in setting_names() if name.partition(".")[0] in SECTIONS and name not in PATHS]
    cure = "Give all machines of the learner the same settings."
    _compare({name: setting_text(config, name) for name in ["run.seed", *names]}, cure)


def _compare(values: Mapping[str, str], cure: str) -> None:
    digests = gather_tensors(torch.tensor([xxhash.xxh3_64_intdigest(value.encode()) >> 1 for value in values.values()]))
    for index, (name, value) in enumerate(values.items()):
        others = [rank for rank, digest in enumerate(digests[:, index]) if digest != digests[0, index]]
        if others:
            raise SettingError(name, value, f"learner ranks 0 and {others[0]} have different values", cure)


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup_steps: int,
    num_steps: int,
) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0: linear warm-up to `peak`, then the schedule.

    Step `warmup_steps` is the first at `peak`; `linear` and `cosine` fall from there to 0 at `num_steps`, the first step that
    is not taken.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if schedule == "linear":
        return peak * max(0.0, 1 - progress)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def ess_scale(ess: float, *, on_policy_ess: float) -> float:
    """`min(1, sqrt(ess / on_policy_ess))`: the factor of the learning rate of a step with this effective sample size.

    Both are shares of the step's completions, of sequence weights pi / mu up to 8: VCPO,
    https://arxiv.org/abs/2602.17616. The variance of a weighted mean is inverse to its effective sample size, and a learning
    rate goes with the square root of the batch. The bound of 1 is ours: above it the share is larger by chance.
    """
    return min(1.0, math.sqrt(ess / on_policy_ess))


_GROUP_BASELINES: dict[Baseline, GroupBaseline] = {
    "group": "mean",
    "leave_one_out": "leave_one_out",
    "length_weighted": "length_weighted",
    "critic": "none",
    "zero": "none",
}
"""The baseline of `group_advantages` for each `advantage.baseline`."""


class AdvantageRule(NamedTuple):
    """The settings of `[advantage]`, every value decided."""

    baseline: Baseline
    turns: Literal["sum", "to_go"]
    """The rewards that a turn is credited with: all of its episode, or those given after it was asked for."""
    divide_by_std: bool
    std_epsilon: float
    std_unbiased: bool
    whiten: bool
    clip: float | None
    """Largest absolute advantage; None for no bound."""
    gamma: float
    gae_lambda: float
    function: OwnAdvantage | None = None
    """The user's own advantages in place of baseline and division; None for none."""


class Outputs(NamedTuple):
    """A network's outputs on a micro-batch, each `[rows, tokens]` float32, 0 on padding."""

    logprobs: Tensor
    entropies: Tensor | None
    """The entropy of each token's distribution; None where no gradient is computed."""
    values: Tensor | None
    """The critic's values; None without a critic."""


class FrozenOutputs(NamedTuple):
    """The outputs of the networks that stay fixed during an update, `[rows, tokens]` float32; None where the run needs none."""

    proximal_logprobs: Tensor | None = None
    """Log-probs under the policy before the update."""
    reference_logprobs: Tensor | None = None
    """Log-probs under the reference of the KL."""
    values: Tensor | None = None
    """The critic's values before the update."""
    experts: Tensor | None = None
    """The experts that the policy's routers chose before the update, `[num_inputs, layers, top_k]`, where they are replayed."""


class PreparedMicroBatch(NamedTuple):
    """A micro-batch, ready to be trained on."""

    micro_batch: MicroBatch
    frozen: FrozenOutputs
    advantages: Tensor
    """`[rows, tokens]` float32, 0 outside the mask."""
    returns: Tensor | None
    """Targets of the critic, `[rows, tokens]`; None without a critic."""


def resolve_advantage(advantage: AdvantageSection, *, objective: str) -> AdvantageRule:
    """Return the rule of these settings; those left open take the objective's own values."""
    return AdvantageRule(
        baseline=resolve_baseline(advantage, objective),
        turns=advantage.turns,
        divide_by_std=resolve_divide_by_std(advantage, objective),
        std_epsilon=advantage.std_epsilon,
        std_unbiased=advantage.std_unbiased,
        whiten=advantage.whiten,
        clip=advantage.clip,
        gamma=advantage.gamma,
        gae_lambda=advantage.gae_lambda,
        function=load_advantage(advantage.function) if advantage.function else None,
    )


def run_network(network: nn.Module, micro_batch: MicroBatch, *, temperature: float) -> Outputs:
    """Return the outputs of a `CompletionLogprobs`, or of the DeepSpeed engine around one."""
    packed = micro_batch.pack
    logprobs, entropies, values = network(*packed.inputs, temperature, packed.images)
    return Outputs(
        unpack(logprobs, packed.lengths),
        None if entropies is None else unpack(entropies, packed.lengths),
        None if values is None else unpack(values, packed.lengths),
    )


def completion_advantages(
    rewards: NDArray[np.float64], rule: AdvantageRule, lengths: NDArray[np.int64] | None = None
) -> NDArray[np.float64]:
    """Return one advantage per completion, `[num_groups, group_size]` as `rewards`; a critic's advantages ignore it.

    `lengths`: tokens of each completion, in this shape, which the baseline `length_weighted` needs.
    """
    if rule.function is not None:
        return rule.function(rewards)
    return group_advantages(
        torch.from_numpy(rewards),
        baseline=_GROUP_BASELINES[rule.baseline],
        lengths=None if lengths is None else torch.from_numpy(lengths),
        divide_by_std=rule.divide_by_std,
        epsilon=rule.std_epsilon,
        unbiased=rule.std_unbiased,
    ).numpy()


def row_advantages(
    groups: Sequence[Group], rewards: NDArray[np.float64], rule: AdvantageRule
) -> list[list[float | NDArray[np.float64]]]:
    """Return the advantage of each completion of each group, or that of each of its tokens where its turns differ.

    `rewards`: the shaped ones, `[num_groups, group_size]`. What shaping adds to the task's rewards belongs to every turn.
    """
    if rule.turns == "sum":
        lengths = np.array([[len(rollout.token_ids) for rollout in group.rollouts] for group in groups])
        return completion_advantages(rewards, rule, lengths).tolist()
    baseline = _GROUP_BASELINES[rule.baseline]
    of_groups: list[list[float | NDArray[np.float64]]] = []
    for group, of_group in zip(groups, rewards.tolist(), strict=True):
        rollouts = group.rollouts
        returns = [rollout.returns_to_go(reward) for rollout, reward in zip(rollouts, of_group, strict=True)]
        advantages = turn_advantages([torch.from_numpy(one) for one in returns], baseline=baseline)
        of_groups.append(
            [np.repeat(one.numpy(), rollout.turn_lengths) for rollout, one in zip(rollouts, advantages, strict=True)]
        )
    return of_groups


def reward_kl(micro_batch: MicroBatch, reference_logprobs: Tensor, *, estimator: KlEstimator) -> Tensor:
    """Return the KL from the reference that the rewards are charged with, `[rows, tokens]`.

    The KL of the behavior policy, not the current one: mu sampled the tokens, so the estimate is unbiased at any staleness.
    """
    return kl_estimate(micro_batch.behavior_logprobs, reference_logprobs, micro_batch.completion_mask, estimator=estimator)


def prepare_micro_batch(
    micro_batch: MicroBatch, frozen: FrozenOutputs, rule: AdvantageRule, *, estimator: KlEstimator, kl_coefficient: float
) -> PreparedMicroBatch:
    """Give every token its advantage, before whitening and clipping, and every input the experts to replay.

    `kl_coefficient`: of the KL in the reward, which is spread over the tokens (`rewards_by_token`); 0 for none.
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
            token_rewards, frozen.values, mask, gamma=rule.gamma, gae_lambda=rule.gae_lambda
        )
        return PreparedMicroBatch(micro_batch, frozen, advantages, returns)
    advantages = torch.where(mask, micro_batch.advantages, 0.0)
    if kl_coefficient:
        no_rewards = torch.zeros_like(micro_batch.rewards)
        token_rewards = rewards_by_token(no_rewards, penalty, mask, kl_coefficient=kl_coefficient)
        advantages = advantages + discounted_returns(token_rewards, mask, gamma=rule.gamma)
    return PreparedMicroBatch(micro_batch, frozen, advantages, None)


def scale_advantages(batch: list[PreparedMicroBatch], rule: AdvantageRule, *, num_alike: int = 1) -> list[PreparedMicroBatch]:
    """Whiten advantages over the tokens of all ranks, then clip them, each only if set; a collective if it whitens.

    `num_alike`: number of neighboring ranks with the same micro-batches.
    """
    if rule.whiten:
        of_micro_batches = [moments(prepared.advantages, prepared.micro_batch.completion_mask) for prepared in batch]
        merged = merge_moments(gather_tensors(merge_moments(torch.stack(of_micro_batches)), num_alike=num_alike))
        batch = [
            prepared._replace(advantages=whiten(prepared.advantages, prepared.micro_batch.completion_mask, merged))
            for prepared in batch
        ]
    if rule.clip is not None:
        limit = rule.clip
        batch = [prepared._replace(advantages=prepared.advantages.clamp(-limit, limit)) for prepared in batch]
    return batch


def add_lag(prepared: PreparedMicroBatch, num_steps: int) -> PreparedMicroBatch:
    """Return the micro-batch as it is after `num_steps` more optimizer steps: its completions lag by that many more."""
    micro_batch = prepared.micro_batch
    aged = micro_batch._replace(policy_lags=micro_batch.policy_lags + num_steps, token_lags=micro_batch.token_lags + num_steps)
    return prepared._replace(micro_batch=aged)
