"""The loss of one micro-batch: the objective's token losses plus the KL, entropy and value terms, aggregated."""

from typing import NamedTuple

from torch import Tensor

from offbeat.common.settings.learning_sections import CriticSection, KlSection
from offbeat.learner.diagnostics.broken_rows import Broken, find_broken
from offbeat.learner.diagnostics.row_statistics import Column, row_statistics
from offbeat.learner.objectives.aggregation import aggregate
from offbeat.learner.objectives.anchors import interpolated_logprobs
from offbeat.learner.objectives.kl import kl_estimate, unbiased_kl
from offbeat.learner.objectives.losses import value_loss
from offbeat.learner.objectives.objective import Objective, PolicyLogprobs, StepConstants
from offbeat.learner.training.preparation import Outputs, PreparedMicroBatch, reward_kl


class TermSums(NamedTuple):
    """Sums over tokens of the quantities besides the objective, detached scalars; 0 where the run does not have one."""

    reference_kl: Tensor
    """KL of the policy from the reference."""
    reward_kl: Tensor
    """KL of the behavior policy from the reference, as charged to the rewards."""
    entropy: Tensor
    value_loss: Tensor


class MicroBatchLoss(NamedTuple):
    """The loss of a micro-batch and its statistics."""

    total: Tensor
    """Aggregated loss, a scalar with a gradient; to be divided by the denominator of the optimizer step."""
    table: Tensor
    """`row_statistics` of the micro-batch."""
    sums: TermSums


def compute_loss(
    prepared: PreparedMicroBatch,
    outputs: Outputs,
    objective: Objective,
    *,
    kl: KlSection,
    kl_coefficient: float,
    critic: CriticSection,
    constants: StepConstants,
) -> MicroBatchLoss:
    """Return the loss of the policy's `outputs` on a micro-batch, without its broken completions (`broken_rows`).

    `kl_coefficient` is the current one, which may have adapted since `kl` was read; `constants` are those of the whole
    optimizer step.
    """
    micro_batch, frozen = prepared.micro_batch, prepared.frozen
    proximal = frozen.proximal_logprobs
    if objective.anchor == "interpolated":
        proximal = interpolated_logprobs(outputs.logprobs, micro_batch.behavior_logprobs, micro_batch.token_lags)
    group: Tensor | None = None
    if objective.anchor == "group":
        group = micro_batch.group_logprobs[:, None].expand_as(outputs.logprobs)
    logprobs = PolicyLogprobs(outputs.logprobs, micro_batch.behavior_logprobs, proximal, group)
    broken = find_broken(logprobs, micro_batch.completion_mask)
    mask = micro_batch.completion_mask & (broken == Broken.NOT_AT_ALL)[:, None]
    evaluation = objective.evaluate(logprobs, mask, prepared.advantages, constants)
    losses = evaluation.losses
    sums = TermSums(*[losses.new_zeros(())] * len(TermSums._fields))
    if frozen.reference_logprobs is not None:
        estimate, divergence = _estimate_kl(logprobs, frozen.reference_logprobs, mask, kl)
        sums = sums._replace(reference_kl=estimate.detach().sum())
        if kl.reward_coef:
            charged = reward_kl(micro_batch, frozen.reference_logprobs, estimator=kl.estimator).where(mask, 0.0)
            sums = sums._replace(reward_kl=charged.sum())
        if kl.loss_coef:
            losses = losses + kl_coefficient * divergence
    if outputs.entropies is not None:
        # Without a bonus the entropy stays out of the graph: its gradient would cost time and be 0.
        if objective.entropy_coef:
            losses = losses - objective.entropy_coef * outputs.entropies
        sums = sums._replace(entropy=outputs.entropies.detach().where(mask, 0.0).sum())
    if outputs.values is not None:
        errors = _value_errors(prepared, outputs.values, mask, critic)
        losses = losses + critic.loss_coef * errors
        sums = sums._replace(value_loss=errors.detach().sum())
    table = row_statistics(
        logprobs,
        evaluation,
        completion_mask=mask,
        advantages=prepared.advantages,
        row_weights=micro_batch.weights,
        policy_lags=micro_batch.policy_lags,
        turn_buckets=micro_batch.turn_buckets,
    )
    table[:, Column.GROUP], table[:, Column.BROKEN] = micro_batch.groups, broken
    return MicroBatchLoss(aggregate(losses, mask, micro_batch.weights, mode=objective.aggregation), table, sums)


def _estimate_kl(logprobs: PolicyLogprobs, reference_logprobs: Tensor, mask: Tensor, kl: KlSection) -> tuple[Tensor, Tensor]:
    """Return the KL from the reference, to be measured, and the form of it that belongs in the loss, `[rows, tokens]` each."""
    estimate = kl_estimate(logprobs.policy, reference_logprobs, mask, estimator=kl.estimator)
    if not kl.unbiased:
        return estimate, estimate
    return estimate, unbiased_kl(logprobs.policy, reference_logprobs, logprobs.behavior, mask, estimator=kl.estimator)


def _value_errors(prepared: PreparedMicroBatch, values: Tensor, mask: Tensor, critic: CriticSection) -> Tensor:
    frozen_values, returns = prepared.frozen.values, prepared.returns
    assert frozen_values is not None and returns is not None, "a critic has values before the update, and targets"
    return value_loss(values, frozen_values, returns, mask, value_clip=critic.value_clip)
