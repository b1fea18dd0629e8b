"""Bias and variance of each method's gradient, measured at one policy on many batches of one staleness.

A run of the default method at a lag ends at a policy pi; mu is its version of `lag` steps before. With g the gradient of a
method on a batch from mu, and f that on a batch from pi, both at the weights of pi and without a step:

- bias: the angle between E[g] and E[f]. AdamW takes a gradient's scale out, so directions count, and each method is compared
  with itself: methods weigh prompts and lengths differently on-policy, too.
- variance: E|g - E[g]|^2 / |E[g]|^2.
- how far apart the policies are: the total variation `E_mu max(0, 1 - w)` and chi-squared `E_mu w^2 - 1` over completions, with
  `w = pi / mu`. The first bounds the bias of a method that leaves w out, and with the second grows the variance of one that
  has all of it.
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from docs.study.exact_run import ExactRun, TaskPrompt
from docs.study.trials import ProbeRow
from offbeat.common.settings.config import Config
from offbeat.learner.leases.groups import Group
from offbeat.learner.training.trainer import Trainer

NUM_BATCHES = 32
"""Batches from mu, and as many from pi."""
_FIRST_DRAW = 500_000
"""Random draws of the probe: no run has as many steps."""


def probe(
    task: str, baseline: Config, methods: Mapping[str, Config], prompts: Sequence[TaskPrompt], *, lag: int
) -> list[ProbeRow]:
    """Return a row for each method at the end of a run of `baseline` at this lag."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        with closing(Trainer(baseline)) as trainer:
            run = ExactRun(baseline, trainer, prompts, prompts[:1], lag=lag, noise=0.0)
            run.run()
            version = trainer.policy_version
            draws = range(_FIRST_DRAW, _FIRST_DRAW + NUM_BATCHES)
            stale = [run.sample_groups(max(0, version - lag), draw=draw) for draw in draws]
            fresh = [run.sample_groups(version, draw=NUM_BATCHES + draw) for draw in draws]
            weights = np.exp(np.concatenate([_log_weights(trainer, groups) for groups in stale]))
            trainer.save_model(model)
        total_variation, chi_squared = distances(weights)
        rows: list[ProbeRow] = []
        for name, config in methods.items():
            there = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(model)))
            with closing(Trainer(there)) as trainer:
                cosine, variance = compare_gradients(_gradients(trainer, stale), _gradients(trainer, fresh))
            rows.append(ProbeRow(task, name, lag, baseline.run.seed, cosine, variance, total_variation, chi_squared))
    return rows


def distances(weights: NDArray[np.float64]) -> tuple[float, float]:
    """Return total variation and chi-squared between pi and mu, by the weights `pi / mu` of completions from mu."""
    return float(np.maximum(0, 1 - weights).mean()), float(np.square(weights).mean() - 1)


def compare_gradients(stale: Tensor, fresh: Tensor) -> tuple[float | None, float | None]:
    """Return the cosine of the two expected gradients, and the relative variance of the first; `[batches, parameters]` each.

    The norm of a sample's mean holds a part of the variance, which is taken out of it, so a cosine may by chance be above 1.
    None for a cosine where the noise of either mean is larger than what it is a mean of,
    and for a variance where nothing is left of the norm.
    """
    (stale_mean, stale_norm, stale_variance), (fresh_mean, fresh_norm, fresh_variance) = map(_moments, (stale, fresh))
    relative = stale_variance / stale_norm if stale_norm > 0 else None
    if stale_norm < stale_variance / len(stale) or fresh_norm < fresh_variance / len(fresh):
        return None, relative
    return float(torch.dot(stale_mean, fresh_mean)) / (stale_norm * fresh_norm) ** 0.5, relative


def _moments(gradients: Tensor) -> tuple[Tensor, float, float]:
    """Return the mean, the square of the expectation's norm, and the variance."""
    gradients = gradients.double()
    mean = gradients.mean(dim=0)
    variance = float((gradients - mean).square().sum() / (len(gradients) - 1))
    return mean, float(mean.square().sum()) - variance / len(gradients), variance


def _gradients(trainer: Trainer, batches: Sequence[Sequence[Group]]) -> Tensor:
    """Return the gradient of each batch with respect to the weights that are published, `[batches, parameters]`."""
    # A critic's own parameters come last, and are not the policy's.
    num_parameters = sum(torch.Size(spec.shape).numel() for spec in trainer.layout())
    return torch.stack([trainer.gradient(groups)[1][:num_parameters] for groups in batches])


def _log_weights(trainer: Trainer, groups: Sequence[Group]) -> NDArray[np.float64]:
    """Return `log pi / mu` of each completion, in any order."""
    differences = trainer.compare(groups)
    return differences.log_sequence_ratios * differences.lengths
