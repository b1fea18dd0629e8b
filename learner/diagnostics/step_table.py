"""The metrics of an optimizer step, most of them from a table with a line for each completion (`row_statistics`).

| metrics | computed from | by |
|---|---|---|
| `reward`, `lag`, `length`, `group`, `tokens`, `turns`, `environment`, ... | groups | `group_metrics` |
| `by_turn` | groups and table | `turn_metrics` |
| `broken` | table | `broken_metrics` |
| `loss/policy`, `ratio`, `clip`, `ess`, `kl` between policies, `correction`, `by_lag` | table | `loss_metrics` |
| `entropy/mean`, `kl/reference`, `kl/reward`, `loss/value` | the loss's other terms | `compute_loss`, averaged over tokens |
| `loss/grad_cosine` | the gradient and the one before | `GradientDirection` |
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offbeat.learner.calibration.bound_noise import NoiseBySign
from offbeat.learner.diagnostics.batch_metrics import EngineNoise, Metrics, group_metrics, loss_metrics
from offbeat.learner.diagnostics.row_statistics import K3_OF_TURNS, TURN_BUCKETS, Broken, Column
from offbeat.learner.leases.groups import Group
from offbeat.learner.objectives.objective import Objective


class StepLoss(NamedTuple):
    """The loss of an optimizer step in numbers, over all ranks."""

    table: Tensor
    """`row_statistics` of all completions, in CPU memory."""
    denominator: float
    """The divisor of the summed loss."""
    sums: Mapping[str, float]
    """Sums over loss tokens of the quantities besides the objective, by the name of the metric that is the mean."""
    kl_coefficient: float
    """The coefficient of the KL in it; 0 without a KL."""

    @property
    def num_tokens(self) -> float:
        """Loss tokens, those of broken completions left out; at least 1."""
        return max(1.0, self.table[:, Column.NUM_TOKENS].sum().item())

    @property
    def means(self) -> dict[str, float]:
        """Means per token of the quantities besides the objective, by metric name."""
        num_tokens = self.num_tokens
        return {name: total / num_tokens for name, total in self.sums.items()}


def step_metrics(
    loss: StepLoss, groups: Sequence[Group], policy_version: int, objective: Objective, noise: NoiseBySign | None
) -> Metrics:
    """Compute the metrics of a step on `groups`.

    `policy_version` is the learner's before the step; `noise` is the engine's, None without a calibration.
    """
    metrics: Metrics = {**group_metrics(groups, policy_version)}
    metrics |= turn_metrics(groups, policy_version, loss.table)
    metrics |= broken_metrics(loss.table, [group.lease_id for group in groups])
    metrics |= loss_metrics(
        loss.table,
        aggregation=objective.aggregation,
        denominator=loss.denominator,
        noise=None if noise is None else EngineNoise(noise, objective.engine_band),
    )
    if policy_version > 0:
        del metrics["ratio/first"]
    metrics |= loss.means
    if "kl/reference" in loss.sums:
        metrics["kl/coefficient"] = loss.kl_coefficient
    return metrics


def turn_metrics(groups: Sequence[Group], policy_version: int, table: Tensor) -> dict[str, float]:
    """Compute the metrics of a step's tokens by turn; none for a step whose completions all have one turn.

    `policy_version` is the learner's before the step, `table` the step's `row_statistics`. For the tokens of each bucket:
    `by_turn/<bucket>/tokens` is their number, `lag_mean` their mean lag in optimizer steps, each token's by its own version,
    and `kl_behavior_policy_k3` their mean k3.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if all(rollout.num_turns == 1 for rollout in rollouts):
        return {}
    turns = np.concatenate([rollout.token_turns for rollout in rollouts])
    lags = np.concatenate([rollout.token_lags(policy_version) for rollout in rollouts]).clip(min=0)
    metrics: dict[str, float] = {}
    for column, (name, (first, last)) in zip(K3_OF_TURNS, TURN_BUCKETS.items(), strict=True):
        in_bucket = (turns >= first - 1) & (turns < last)
        if num_tokens := int(in_bucket.sum()):
            metrics[f"by_turn/{name}/tokens"] = num_tokens
            metrics[f"by_turn/{name}/lag_mean"] = float(lags[in_bucket].mean())
            metrics[f"by_turn/{name}/kl_behavior_policy_k3"] = table[:, column].sum().item() / num_tokens
    return metrics


def broken_metrics(table: Tensor, lease_ids: Sequence[int]) -> Metrics:
    """Count the broken completions of an optimizer step by reason, and by the lease of their group if there are any.

    `table`: `row_statistics` of the step; `lease_ids`: of its groups, in order.
    """
    reasons = table[:, Column.BROKEN].long()
    counts: Metrics = {
        "broken/not_finite": int((reasons == Broken.NOT_FINITE).sum()),
        "broken/ratio": int((reasons == Broken.RATIO).sum()),
    }
    groups = table[reasons != Broken.NOT_AT_ALL][:, Column.GROUP].long().tolist()
    if groups:
        counts["broken/leases"] = {str(lease_ids[group]): count for group, count in sorted(Counter(groups).items())}
    return counts


MAX_COORDINATES = 2**20
"""Gradient coordinates kept from step to step: 4 MiB in float32, 8 MiB in float64, and 8 MiB for their indices."""


class GradientDirection:
    """Cosine between each step's gradient and the one before, from a fixed random sample of their coordinates.

    The cosine is near 0 where noise dominates the steps and -1 where they undo each other. It stays high when training on stale
    data goes wrong: GAC, https://arxiv.org/abs/2603.01501. The standard error of the estimate is about 1 / sqrt(coordinates),
    0.001 for 2^20, if the gradient is spread evenly over them.
    """

    def __init__(self, *, max_coordinates: int = MAX_COORDINATES) -> None:
        """Keep at most `max_coordinates`, which must be at least the number of tensors."""
        self._max_coordinates = max_coordinates
        # A separate generator, because checkpoints hold the learner's random state, which must not depend on diagnostics.
        self._generator = torch.Generator().manual_seed(0)
        self._share = 1.0
        """Share of each tensor's coordinates that is kept."""
        self._indices: dict[str, Tensor] = {}
        self._previous: dict[str, Tensor] = {}
        self._before: Tensor | None = None
        """The vector of `_previous`; None since the choice of coordinates changed."""

    def compare(self, gradients: Iterable[tuple[str, Tensor | None]]) -> float | None:
        """Return the cosine of these gradients with those of the last call, reading one tensor at a time.

        Tensors are matched by name; one that is None or missing in a call counts as 0. Returns None in the first call and
        where either gradient is 0, and nan if a gradient is not finite.
        """
        current: dict[str, Tensor] = {}
        for name, gradient in gradients:
            if gradient is None:
                continue
            flat = gradient.detach().flatten()
            if name not in self._indices:
                self._admit(name, flat)
            current[name] = flat[self._indices[name]].float()
        if not self._indices:
            return None
        before = self._vector(self._previous) if self._before is None else self._before
        now = self._before = self._vector(current)
        self._previous = current
        dot, of_before, of_now = torch.stack([before @ now, before @ before, now @ now]).tolist()
        if of_before == 0 or of_now == 0:
            return None
        return dot / math.sqrt(of_before * of_now)

    def _admit(self, name: str, flat: Tensor) -> None:
        """Choose this tensor's coordinates; where there are too many, halve those of the others."""
        self._before = None
        while sum(map(len, self._indices.values())) + self._num_chosen(flat.numel()) > self._max_coordinates:
            self._share /= 2
            # They are in random order, so the first half is a random half.
            self._indices = {known: indices[: math.ceil(len(indices) / 2)] for known, indices in self._indices.items()}
        num_chosen = self._num_chosen(flat.numel())
        if num_chosen == flat.numel():
            indices = torch.randperm(num_chosen, generator=self._generator)
        else:
            indices = torch.randint(flat.numel(), (num_chosen,), generator=self._generator)
        self._indices[name] = indices.to(flat.device)

    def _num_chosen(self, numel: int) -> int:
        return math.ceil(numel * self._share)

    def _vector(self, samples: dict[str, Tensor]) -> Tensor:
        """Concatenate the samples of the coordinates that are still kept, in float64."""
        parts = [
            samples[name][: len(indices)] if name in samples else indices.new_zeros(len(indices), dtype=torch.float32)
            for name, indices in self._indices.items()
        ]
        return torch.cat(parts).double()
