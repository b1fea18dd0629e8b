"""The settings that are left open, filled in by the values of the objective: once, when a config is loaded.

`complete` is the last step of loading. Whoever reads a config after it finds no setting that an objective has still to decide.
"""

import math
from typing import Literal

import msgspec

from offbeat.common.settings.config import Config
from offbeat.common.settings.corrections import parse_corrections, write_corrections
from offbeat.common.settings.learning_sections import AdvantageSection, LossSection
from offbeat.common.settings.objectives import RECOMPUTED, Bounds, Defaults, defaults_of, parse_objective

_GROUP_BAND = Bounds(0.2, 0.2)
"""Clip band against the group's likelihood, from which a completion's own differs on-policy too: that of GEPO's code."""
_WIDEST_ENGINE_BAND = 0.05
"""Best on completions of six tokens, far above the numerical noise between engine and learner (docs/study.md)."""
COMPLETION_DRIFT = 0.3
"""Change of a completion's log-prob, in nats, at which the study finds it best to clip."""
TOKEN_NOISE = 0.035
"""Standard deviation of a token's log-prob between engine and learner, in nats: that of a KL divergence of 6e-4."""
_USUAL_SHARE = 0.4
"""Usual length of a completion, as a share of `rollout.max_new_tokens`."""

FILLED_IN = (
    *(f"loss.{key}" for key in ("clip_low", "clip_high", "clip_by", "aggregation", "aggregation_length", "zero_variance")),
    *("advantage.baseline", "advantage.divide_by_std", "reward.overlong_buffer"),
)
"""The settings that `complete` fills in."""


def complete(config: Config) -> Config:
    """Return the config with every setting that the objective decides and the user left open filled in."""
    objective, max_new_tokens = defaults_of(config.loss.objective), config.rollout.max_new_tokens
    reward = config.reward
    if reward.overlong_buffer is None:
        reward = msgspec.structs.replace(reward, overlong_buffer=round(objective.overlong_share * max_new_tokens))
    return msgspec.structs.replace(
        config,
        loss=complete_loss(config.loss, max_new_tokens=max_new_tokens),
        advantage=_complete_advantage(config.advantage, objective),
        reward=reward,
    )


def complete_loss(loss: LossSection, *, max_new_tokens: int) -> LossSection:
    """Return the settings of the loss with those that are left open filled in."""
    objective = defaults_of(loss.objective)
    aggregation = loss.aggregation or objective.aggregation
    has_length = aggregation == "seq-mean-token-sum-norm" and loss.aggregation_length is None
    clip_by = loss.clip_by or _find_clip_by(loss, objective)
    # A setting that does not apply to the objective stays as the user wrote it: `check_objective` refuses it.
    band = None if loss.function else _find_band(loss, objective, max_new_tokens, clip_by)
    return msgspec.structs.replace(
        loss,
        objective=str(parse_objective(loss.objective)),
        clip_low=band.low if band is not None and loss.clip_low is None else loss.clip_low,
        clip_high=band.high if band is not None and loss.clip_high is None else loss.clip_high,
        clip_by=clip_by,
        correction=write_corrections(parse_corrections(loss.correction)),
        aggregation=aggregation,
        aggregation_length=max_new_tokens if has_length else loss.aggregation_length,
        zero_variance=loss.zero_variance or objective.zero_variance,
    )


def engine_band(max_new_tokens: int) -> Bounds:
    """Return the default clip band of a sequence ratio to engine log-probs with `loss.clip_by = "run"`.

    It suits completions of usual length: for them it is `COMPLETION_DRIFT` wide, or one standard deviation of the noise.
    """
    drift = COMPLETION_DRIFT / (_USUAL_SHARE * max_new_tokens)
    width = float(f"{min(_WIDEST_ENGINE_BAND, max(drift, engine_noise(max_new_tokens))):.2g}")
    return Bounds(width, width)


def engine_noise(max_new_tokens: int) -> float:
    """Return the standard deviation that a usual engine's noise gives the sequence ratio of a completion of usual length."""
    return TOKEN_NOISE / math.sqrt(_USUAL_SHARE * max_new_tokens)


def has_engine_noise(loss: LossSection, objective: Defaults) -> bool:
    """Return if the objective clips a sequence ratio whose denominator has the engine's noise."""
    return objective.is_sequence_ratio and not loss.function and loss.anchor not in (*RECOMPUTED, "group")


def _find_clip_by(loss: LossSection, objective: Defaults) -> Literal["own_length", "run"]:
    is_open = loss.clip_low is None and loss.clip_high is None
    return "own_length" if is_open and has_engine_noise(loss, objective) else "run"


def _find_band(loss: LossSection, objective: Defaults, max_new_tokens: int, clip_by: str) -> Bounds | None:
    """Return the objective's clip band against the anchor; None if it does not clip."""
    if objective.band is None:
        return None
    if loss.anchor == "group":
        return _GROUP_BAND
    if clip_by == "own_length":
        return Bounds(_WIDEST_ENGINE_BAND, _WIDEST_ENGINE_BAND)
    if has_engine_noise(loss, objective):
        return engine_band(max_new_tokens)
    return objective.band


def _complete_advantage(advantage: AdvantageSection, objective: Defaults) -> AdvantageSection:
    baseline, divide_by_std = advantage.baseline or objective.baseline, advantage.divide_by_std
    if divide_by_std is None:
        divide_by_std = advantage.turns == "sum" and baseline == "group" and objective.divide_by_std
    return msgspec.structs.replace(advantage, baseline=baseline, divide_by_std=divide_by_std)
