"""The loss of an optimizer step: its constants over all micro-batches, then the loss of each micro-batch.

A micro-batch's loss is the objective's token losses plus the KL, entropy and value terms, aggregated.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.common.settings.learning_sections import CriticSection, KlSection
from offbeat.learner.diagnostics.row_statistics import Broken, Column, find_broken, row_statistics
from offbeat.learner.objectives.aggregation import aggregate
from offbeat.learner.objectives.correction_rules import weigh
from offbeat.learner.objectives.kl import kl_estimate, unbiased_kl
from offbeat.learner.objectives.losses import m2po_candidates, m2po_cutoff, value_loss
from offbeat.learner.objectives.objective import Objective, PolicyLogprobs, StepConstants, interpolated_logprobs
from offbeat.learner.policy.networks import Networks, Outputs
from offbeat.learner.policy.process_group import gather_rows, gather_tensors
from offbeat.learner.training.preparation import PreparedMicroBatch, reward_kl


class MicroBatchLoss(NamedTuple):
    """The loss of a micro-batch and its statistics."""

    total: Tensor
    """Aggregated loss, a scalar with a gradient; to be divided by the denominator of the optimizer step."""
    table: Tensor
    """`row_statistics` of the micro-batch."""
    completion_mask: Tensor
    """That of the micro-batch without its broken completions."""
    sums: dict[str, Tensor]
    """Sums over tokens of the quantities besides the objective, detached scalars, each under the name of the metric that is its
    mean: `entropy/mean`, `kl/reference`, `kl/reward` and `loss/value`, as far as the run has them."""


def find_constants(batch: Sequence[PreparedMicroBatch], objective: Objective, networks: Networks) -> StepConstants:
    """Return the numbers of the whole step that enter each micro-batch's loss, from all ranks' micro-batches; a collective."""
    return StepConstants(
        _find_m2po_cutoff(batch, objective, networks), find_mean_weight(batch, objective, num_alike=networks.num_alike)
    )


def _find_m2po_cutoff(batch: Sequence[PreparedMicroBatch], objective: Objective, networks: Networks) -> float:
    """Return the cutoff of M2PO over the tokens of all ranks, broken completions left out; inf for other objectives.

    Runs the current policy once more: the cutoff must be known before the first gradient.
    """
    threshold = objective.m2_threshold
    if threshold is None:
        return math.inf
    candidates: list[Tensor] = []
    for micro_batch, _, advantages, _ in batch:
        logprobs = PolicyLogprobs(networks.run(micro_batch.pack).logprobs, micro_batch.behavior_logprobs, None)
        is_sound = find_broken(logprobs, micro_batch.completion_mask) == Broken.NOT_AT_ALL
        mask = micro_batch.completion_mask & is_sound[:, None]
        candidates.append(m2po_candidates(logprobs.policy - logprobs.behavior, mask, advantages))
    return m2po_cutoff(gather_rows(torch.cat(candidates), num_alike=networks.num_alike), threshold=threshold)


def find_mean_weight(batch: Sequence[PreparedMicroBatch], objective: Objective, *, num_alike: int = 1) -> float:
    """Return the mean of the corrections' weights over the loss of all ranks; 1 without `loss.normalize_correction`.

    The mean is the loss's own: over tokens under `token-mean`, over completions where these weigh alike. `num_alike`: number of
    neighboring ranks with the same micro-batches.
    """
    if not objective.normalize_correction:
        return 1.0
    sums: list[Tensor] = []
    for micro_batch, frozen, _, _ in batch:
        assert frozen.proximal_logprobs is not None, "only a decoupled anchor normalizes its weights"
        mask, row_weights = micro_batch.completion_mask, micro_batch.weights
        log_rho = frozen.proximal_logprobs - micro_batch.behavior_logprobs
        # Rows that are not finite have no loss (`find_broken`).
        mask = mask & (log_rho.isfinite() | ~mask).all(dim=-1, keepdim=True)
        weights = weigh(objective.corrections, log_rho, mask)
        of_both = [aggregate(values, mask, row_weights, mode=objective.aggregation) for values in (weights, mask.float())]
        sums.append(torch.stack(of_both).double())
    own = sum(sums, start=torch.zeros_like(sums[0]))
    weighed, unweighed = gather_tensors(own, num_alike=num_alike).sum(dim=0).tolist()
    # Weights that are all 0, or a step without loss tokens, have no mean to divide by.
    return weighed / unweighed if weighed > 0 else 1.0


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
    """Return the loss of the policy's `outputs` on a micro-batch, without its broken completions (`find_broken`).

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
    evaluation = objective.evaluate(logprobs, mask, prepared.advantages, constants, turns=micro_batch.turns)
    losses = evaluation.losses
    sums: dict[str, Tensor] = {}
    if frozen.reference_logprobs is not None:
        estimate, divergence = _estimate_kl(logprobs, frozen.reference_logprobs, mask, kl)
        sums["kl/reference"] = estimate.detach().sum()
        if kl.reward_coef:
            charged = reward_kl(micro_batch, frozen.reference_logprobs, estimator=kl.estimator).where(mask, 0.0)
            sums["kl/reward"] = charged.sum()
        if kl.loss_coef:
            losses = losses + kl_coefficient * divergence
    if outputs.entropies is not None:
        # Without a bonus the entropy stays out of the graph: its gradient would cost time and be 0.
        if objective.entropy_coef:
            losses = losses - objective.entropy_coef * outputs.entropies
        sums["entropy/mean"] = outputs.entropies.detach().where(mask, 0.0).sum()
    if outputs.values is not None:
        errors = value_errors(prepared, outputs.values, mask, critic)
        losses = losses + critic.loss_coef * errors
        sums["loss/value"] = errors.detach().sum()
    table = row_statistics(
        logprobs,
        evaluation,
        completion_mask=mask,
        advantages=prepared.advantages,
        row_weights=micro_batch.weights,
        policy_lags=micro_batch.policy_lags,
        turns=micro_batch.turns,
    )
    table[:, Column.GROUP], table[:, Column.BROKEN] = micro_batch.groups, broken
    return MicroBatchLoss(aggregate(losses, mask, micro_batch.weights, mode=objective.aggregation), table, mask, sums)


def _estimate_kl(logprobs: PolicyLogprobs, reference_logprobs: Tensor, mask: Tensor, kl: KlSection) -> tuple[Tensor, Tensor]:
    """Return the KL from the reference, to be measured, and the form of it that belongs in the loss, `[rows, tokens]` each."""
    estimate = kl_estimate(logprobs.policy, reference_logprobs, mask, estimator=kl.estimator)
    if not kl.unbiased:
        return estimate, estimate
    return estimate, unbiased_kl(logprobs.policy, reference_logprobs, logprobs.behavior, mask, estimator=kl.estimator)


def value_errors(prepared: PreparedMicroBatch, values: Tensor, mask: Tensor, critic: CriticSection) -> Tensor:
    """Return the losses of a critic's values, `[rows, tokens]`, with a gradient; 0 outside the mask."""
    frozen_values, returns = prepared.frozen.values, prepared.returns
    assert frozen_values is not None and returns is not None, "a critic has values before the update, and targets"
    return value_loss(values, frozen_values, returns, mask, value_clip=critic.value_clip)
