"""What each objective is where its settings are left open: the papers' values, in one table."""

from typing import Any, NamedTuple

import msgspec

from offbeat.common.config import AdvantageSection, Config, LossSection, RewardSection


class Band(NamedTuple):
    """A clip band around a ratio of 1."""

    low: float
    high: float


class Defaults(NamedTuple):
    """One objective's own settings."""

    aggregation: str
    is_sequence_ratio: bool = False
    band: Band | None = None
    """Clip band; None: the objective has none."""
    recomputed_band: Band | None = None
    """The band against recomputed log-probs, where it is another one."""
    dual_clip: bool = False
    """Whether `loss.dual_clip` applies."""
    baseline: str = "group"
    divide_by_std: bool = True
    zero_variance: str = "count"
    overlong_share: float = 0.0
    """Share of `rollout.max_new_tokens` that overlong shaping punishes."""


_ENGINE_BAND = Band(0.05, 0.05)
"""Far above the numerical noise between engine and learner."""
_GSPO_BAND = Band(3e-4, 4e-4)
"""GSPO's paper, section 5.1."""

DEFAULTS: dict[str, Defaults] = {
    "gspo": Defaults(
        "seq-mean-token-mean", is_sequence_ratio=True, band=_ENGINE_BAND, recomputed_band=_GSPO_BAND, dual_clip=True
    ),
    "gspo_token": Defaults(
        "seq-mean-token-mean", is_sequence_ratio=True, band=_ENGINE_BAND, recomputed_band=_GSPO_BAND, dual_clip=True
    ),
    "grpo": Defaults("seq-mean-token-mean", band=Band(0.2, 0.2), dual_clip=True),
    "dr_grpo": Defaults("seq-mean-token-sum-norm", band=Band(0.2, 0.2), dual_clip=True, divide_by_std=False),
    "dapo": Defaults("token-mean", band=Band(0.2, 0.28), dual_clip=True, zero_variance="drop", overlong_share=0.2),
    "sapo": Defaults("seq-mean-token-mean"),
    # No lower bound, as in the paper; its upper one is not disclosed: ScaleRL finds caps of 4, 5 and 8 equivalent.
    "cispo": Defaults("token-mean", band=Band(1.0, 4.0)),
    "reinforce": Defaults("seq-mean-token-mean"),
    "ppo": Defaults("token-mean", band=Band(0.2, 0.2), dual_clip=True, baseline="critic", divide_by_std=False),
}
"""By `loss.objective`. Dr. GRPO and DAPO are GRPO's clip with other values, PPO the same clip with a critic."""

CORRECTION_BANDS: dict[str, Band] = {
    "token_tis": Band(0.0, 2.0),
    "sequence_tis": Band(0.0, 2.0),
    "icepop": Band(0.5, 5.0),
    "sequence_mask": Band(0.0, 3.0),
    "geometric_mask": Band(0.999, 1.001),
    "opsm": Band(0.0, 1e-4),
    "m2po": Band(0.0, 0.04),
}
"""By `loss.correction`: bounds of its ratio; for opsm and m2po only the threshold, in `high`."""
LOWER_BOUNDED = ("token_tis", "icepop", "sequence_mask", "geometric_mask")
"""Corrections that have a lower bound."""


def complete(config: Config) -> Config:
    """The config with what `loss`, `advantage` and `reward` left open filled in from the tables."""
    defaults = DEFAULTS[config.loss.objective]
    return msgspec.structs.replace(
        config,
        loss=_complete_loss(config.loss, defaults, config.rollout.max_new_tokens),
        advantage=_complete_advantage(config.advantage, defaults),
        reward=_complete_reward(config.reward, defaults, config.rollout.max_new_tokens),
    )


def _complete_loss(loss: LossSection, defaults: Defaults, max_new_tokens: int) -> LossSection:
    band = defaults.band
    if defaults.recomputed_band is not None and loss.anchor != "behavior":
        band = defaults.recomputed_band
    correction = CORRECTION_BANDS.get(loss.correction)
    aggregation = loss.aggregation or defaults.aggregation
    values: dict[str, Any] = {
        "clip_low": band.low if band is not None and loss.clip_low is None else loss.clip_low,
        "clip_high": band.high if band is not None and loss.clip_high is None else loss.clip_high,
        "aggregation": aggregation,
        "zero_variance": loss.zero_variance or defaults.zero_variance,
    }
    if aggregation == "seq-mean-token-sum-norm" and loss.aggregation_length is None:
        values["aggregation_length"] = max_new_tokens
    if correction is not None and loss.correction_high is None:
        values["correction_high"] = correction.high
    if loss.correction in LOWER_BOUNDED and loss.correction_low is None:
        values["correction_low"] = CORRECTION_BANDS[loss.correction].low
    return msgspec.structs.replace(loss, **values)


def _complete_advantage(advantage: AdvantageSection, defaults: Defaults) -> AdvantageSection:
    baseline: Any = advantage.baseline or defaults.baseline
    divide_by_std = advantage.divide_by_std
    if divide_by_std is None:
        divide_by_std = baseline == "group" and defaults.divide_by_std
    return msgspec.structs.replace(advantage, baseline=baseline, divide_by_std=divide_by_std)


def _complete_reward(reward: RewardSection, defaults: Defaults, max_new_tokens: int) -> RewardSection:
    buffer = reward.overlong_buffer
    if buffer is None:
        buffer = round(defaults.overlong_share * max_new_tokens)
    return msgspec.structs.replace(reward, overlong_buffer=buffer)
