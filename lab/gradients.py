"""Gradients at a recorded run's checkpoints: each objective's, at the staleness of each replayed bound.

For every checkpoint and bound a batch is put together from recorded groups, with lags spread as the replayed ones. Every
objective's gradient on it, without a step, is compared with the one on a batch of the checkpoint's freshest groups. A second
fresh batch that shares no group with the first shows how far two gradients point apart because of their groups alone.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from offbeat.common.errors import SettingError
from offbeat.common.models.folders import resolve_model
from offbeat.common.settings.completion import FILLED_IN
from offbeat.common.settings.config import Config, environment_of
from offbeat.common.settings.loading import replace_settings
from offbeat.common.settings.objective_checks import check_objective
from offbeat.common.settings.objectives import DEFAULTS, parse_objective
from offbeat.learner.diagnostics.batch_metrics import Metrics
from offbeat.learner.leases.events import Accepted, Dropped, Granted
from offbeat.learner.leases.groups import Group, make_group
from offbeat.learner.leases.log_reading import Record
from offbeat.learner.leases.prompts import Prompt, load_prompts
from offbeat.learner.training.trainer import Trainer

logger = logging.getLogger(__name__)

_DOT_NUMEL = 1 << 24
"""Coordinates multiplied at once, in double precision."""


class Candidates(NamedTuple):
    """The groups of a log that batches are put together from."""

    groups: list[Group]
    trained_at: dict[int, int]
    """Policy version at which the recorded run trained on the group, by lease; groups it never trained on are missing."""

    def is_seen(self, group: Group, policy_version: int) -> bool:
        """Return whether the weights of this version were trained on the group."""
        return self.trained_at.get(group.lease_id, policy_version) < policy_version


class GradientRow(msgspec.Struct, frozen=True):
    """One objective at one checkpoint, on groups as stale as one bound makes them."""

    objective: str
    bound: str
    """The replay whose lags the batch has; "fresh": the second batch of the checkpoint's freshest groups."""
    policy_version: int
    """Version of the checkpoint."""
    lag_mean: float
    """Mean lag of the batch, in optimizer steps."""
    seen_fraction: float
    """Share of the batch's groups that the checkpoint was trained on, because no others are as old."""
    clip_fraction: float
    """`clip/fraction` of this first step on the batch."""
    masked_fraction: float | None
    """`correction/masked`; None without a correction."""
    ratio_log_mean: float
    """`ratio/log_mean`; the next two are named like their metrics too."""
    ratio_log_std: float
    ess_sequence: float
    grad_norm: float
    """Norm of the gradient before clipping."""
    fresh_grad_norm: float
    """Norm of the gradient on the checkpoint's freshest groups."""
    cosine: float | None
    """Cosine between the two gradients; None when one is 0."""


def load_candidates(records: Iterable[Record], config: Config, trained_at: dict[int, int]) -> Candidates:
    """Return every group of a log with its prompt, except those whose log-probs were wrong."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(config.model.path))
    data = config.data
    prompts = load_prompts(data.train_data, data.train_split, data, tokenizer, environment=environment_of(config)).prompts
    prompt_of: dict[int, Prompt] = {}
    groups: dict[int, Group] = {}
    for record in records:
        match event := record.event:
            case Granted():
                prompt_of[event.lease_id] = prompts[event.prompt_id]
            case Accepted():
                groups[event.lease_id] = make_group(event, record.arrays, prompt_of[event.lease_id])
            case Dropped(reason="quarantined"):
                groups.pop(event.lease_id, None)
            case _:
                pass
    return Candidates(list(groups.values()), trained_at)


def objective_config(config: Config, objective: str) -> Config:
    """Return the run's config with another objective, and the values that `common.settings.completion` fills in for it.

    Anchor, correction, KL and whatever else is not the objective's stays. `SettingError` where that cannot be, or where the
    checkpoints have no critic that it needs, or have one.
    """
    method = parse_objective(objective, setting="--loss")
    if not Path(config.loss.noise_floor).is_file():
        config = replace_settings(config, {"loss.noise_floor": ""})
    if str(method) == config.loss.objective:
        return config
    of_objective = FILLED_IN if DEFAULTS[method.name].dual_clip else (*FILLED_IN, "loss.dual_clip")
    replaced = {"loss.objective": str(method), "loss.function": "", **dict.fromkeys(of_objective, "none")}
    changed = replace_settings(config, replaced)
    if (changed.advantage.baseline == "critic") != (config.advantage.baseline == "critic"):
        has = (
            "have a critic, which this objective would not train" if config.advantage.baseline == "critic" else "have no critic"
        )
        raise SettingError("--loss", objective, f"the run's checkpoints {has}", "Leave it out.")
    check_objective(changed)
    return changed


def compare(
    config: Config,
    objectives: Sequence[str],
    checkpoints: Sequence[Path],
    candidates: Candidates,
    lags: Mapping[str, Sequence[int]],
) -> Iterator[GradientRow]:
    """Yield a row for every objective, checkpoint and bound, "fresh" before the bounds; `lags` are those of each replay.

    A checkpoint with too few groups, or too few that it has not been trained on, is passed over with a warning.
    """
    configs = [objective_config(config, objective) for objective in objectives]
    for changed in configs:
        with closing(Trainer(changed)) as trainer:
            for folder in sorted(checkpoints):
                trainer.load_checkpoint(folder)
                yield from _compare_at(trainer, changed, candidates, lags)


def _compare_at(
    trainer: Trainer, config: Config, candidates: Candidates, lags: Mapping[str, Sequence[int]]
) -> Iterator[GradientRow]:
    """Yield the rows of one objective at the checkpoint that the trainer has loaded."""
    version, num_groups = trainer.policy_version, config.train.groups_per_step
    groups = eligible(candidates, version, drop_zero_variance=config.loss.zero_variance == "drop")
    num_unseen = sum(not candidates.is_seen(group, version) for group in groups)
    # Among the last versions of a run there is nothing fresh to compare with.
    if num_unseen < num_groups or len(groups) < 2 * num_groups:
        logger.warning(
            "%s at checkpoint %d: passed over; it takes %d groups no newer than that, of which half were not trained on then, "
            "and the log has %d and %d",
            *(config.loss.objective, version, 2 * num_groups, len(groups), num_unseen),
        )
        return
    # Alternately, so that both are equally fresh.
    freshest = choose(groups, version, [0] * (2 * num_groups))
    fresh, others = freshest[::2], freshest[1::2]
    _, fresh_gradient = trainer.gradient(fresh)
    used = {group.lease_id for group in fresh}
    rest = [group for group in groups if group.lease_id not in used]
    batches = {"fresh": others}
    batches |= {bound: choose(rest, version, quantiles(of_bound, num_groups)) for bound, of_bound in lags.items() if of_bound}
    measured: dict[tuple[int, ...], tuple[Metrics, float, float | None]] = {}
    for bound, batch in batches.items():
        key = tuple(group.lease_id for group in batch)
        # Bounds that make no difference have the same batch.
        if key not in measured:
            metrics, gradient = trainer.gradient(batch)
            measured[key] = metrics, _norm(gradient), cosine(gradient, fresh_gradient)
        metrics, grad_norm, cosine_with_fresh = measured[key]
        numbers = cast("dict[str, float]", metrics)
        yield GradientRow(
            objective=config.loss.objective,
            bound=bound,
            policy_version=version,
            lag_mean=float(np.mean([group.policy_lag(version) for group in batch])),
            seen_fraction=float(np.mean([candidates.is_seen(group, version) for group in batch])),
            clip_fraction=numbers["clip/fraction"],
            masked_fraction=numbers.get("correction/masked"),
            ratio_log_mean=numbers["ratio/log_mean"],
            ratio_log_std=numbers["ratio/log_std"],
            ess_sequence=numbers["ess/sequence"],
            grad_norm=grad_norm,
            fresh_grad_norm=_norm(fresh_gradient),
            cosine=cosine_with_fresh,
        )


def eligible(candidates: Candidates, version: int, *, drop_zero_variance: bool) -> list[Group]:
    """Return the groups that a learner at this version could train on, first those that it had not trained on by then."""

    def is_eligible(group: Group) -> bool:
        rewards = {rollout.reward for rollout in group.rollouts}
        return group.newest_version <= version and not (drop_zero_variance and len(rewards) == 1)

    return sorted(filter(is_eligible, candidates.groups), key=lambda group: candidates.is_seen(group, version))


def quantiles(values: Sequence[int], number: int) -> list[int]:
    """Return `number` values spread as these, ascending: the middles of equal shares of them."""
    ordered = sorted(values)
    return [ordered[int((index + 0.5) * len(ordered) / number)] for index in range(number)]


def choose(groups: Sequence[Group], version: int, lags: Sequence[int]) -> list[Group]:
    """Return, for each lag in order, the group not chosen yet whose lag is nearest to it, the first of several."""
    own = np.array([group.policy_lag(version) for group in groups], dtype=np.float64)
    chosen: list[Group] = []
    for lag in lags:
        index = int(np.abs(own - lag).argmin())
        own[index] = math.inf
        chosen.append(groups[index])
    return chosen


def cosine(first: Tensor, second: Tensor) -> float | None:
    """Return the cosine of the angle between two vectors; None when one is 0."""
    norms = _norm(first) * _norm(second)
    return _dot(first, second) / norms if norms else None


def _norm(vector: Tensor) -> float:
    return math.sqrt(_dot(vector, vector))


def _dot(first: Tensor, second: Tensor) -> float:
    parts = zip(first.split(_DOT_NUMEL), second.split(_DOT_NUMEL), strict=True)
    return float(sum(torch.dot(one.double(), other.double()) for one, other in parts))
