"""The objectives' own settings: the papers' values in one table, and how they fill settings that are left open."""

import math
from typing import Literal, NamedTuple

import msgspec

from offbeat.common.settings.config import Config
from offbeat.common.settings.corrections import complete_corrections
from offbeat.common.settings.learning_sections import AdvantageSection, LossSection, RewardSection

Aggregation = Literal[
    "token-mean", "prompt-mean-token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
"""The mean that token losses are put into."""
Baseline = Literal["group", "leave_one_out", "length_weighted", "critic", "zero"]
"""The quantity subtracted from a reward."""


class Bounds(NamedTuple):
    """The band that a ratio is clipped to."""

    low: float
    """Distance below 1."""
    high: float
    """Distance above 1."""


RECOMPUTED = ("proximal", "decoupled")
"""Values of `loss.anchor` for which the learner computes log-probs once more before the update."""


_GROUP_BAND = Bounds(0.2, 0.2)
"""Clip band against the group's likelihood, from which a completion's own differs on-policy too: that of GEPO's code."""


class Defaults(NamedTuple):
    """The settings that one objective's paper gives it."""

    aggregation: Aggregation
    is_sequence_ratio: bool = False
    """The importance ratio is that of a completion; False: each token's own."""
    is_prefix_ratio: bool = False
    """The importance ratio is the product of the tokens' up to each one, and its band grows."""
    shares_advantage: bool = False
    """All tokens of a completion get its mean advantage, so they must not differ in theirs."""
    band: Bounds | None = None
    """Clip band; None for an objective that does not clip. With `is_sequence_ratio` that against recomputed log-probs: the one
    against the engine's is `engine_band`."""
    keeps_gradient: bool = False
    """Tokens beyond the band keep a gradient: the band bounds a weight, or leaves a part."""
    dual_clip: bool = False
    """`loss.dual_clip` applies."""
    weight_cap: float | None = None
    """Largest weight of a token; None for an objective without `loss.weight_cap`."""
    bounds_divergence: bool = False
    """`band` bounds a divergence of the token's probability, not a ratio."""
    has_behavior_weight: bool = False
    """The objective weighs by pi / mu itself, whatever the anchor of its clip is."""
    baseline: Baseline = "group"
    divide_by_std: bool = True
    zero_variance: Literal["count", "drop"] = "count"
    overlong_share: float = 0.0
    """Share of `rollout.max_new_tokens` that overlong shaping punishes."""


_WIDEST_ENGINE_BAND = 0.05
"""Best on completions of six tokens, far above the numerical noise between engine and learner (docs/study.md)."""
_COMPLETION_DRIFT = 0.3
"""Change of a completion's log-prob, in nats, at which the study finds it best to clip."""
_TOKEN_NOISE = 0.035
"""Standard deviation of a token's log-prob between engine and learner, in nats: that of a KL divergence of 6e-4."""
_USUAL_SHARE = 0.4
"""Usual length of a completion, as a share of `rollout.max_new_tokens`."""
_GSPO_BAND = Bounds(3e-4, 4e-4)
"""GSPO's paper, section 5.1."""

_DPPO = Defaults(
    "seq-mean-token-sum-norm",
    band=Bounds(0.15, 0.15),
    weight_cap=20.0,
    bounds_divergence=True,
    has_behavior_weight=True,
    divide_by_std=False,
)

DEFAULTS: dict[str, Defaults] = {
    "gspo": Defaults(
        "seq-mean-token-mean",
        is_sequence_ratio=True,
        shares_advantage=True,
        band=_GSPO_BAND,
        dual_clip=True,
    ),
    "gspo_token": Defaults("seq-mean-token-mean", is_sequence_ratio=True, band=_GSPO_BAND, dual_clip=True),
    "grpo": Defaults("seq-mean-token-mean", band=Bounds(0.2, 0.2), dual_clip=True),
    "dr_grpo": Defaults("seq-mean-token-sum-norm", band=Bounds(0.2, 0.2), dual_clip=True, divide_by_std=False),
    "dapo": Defaults("token-mean", band=Bounds(0.2, 0.28), dual_clip=True, zero_variance="drop", overlong_share=0.2),
    # The band is the paper's, section 5.1, as TRL's documentation has it.
    "luspo": Defaults(
        "seq-mean-token-sum",
        is_sequence_ratio=True,
        shares_advantage=True,
        band=Bounds(2e-3, 2.5e-3),
        dual_clip=True,
    ),
    "gmpo": Defaults("seq-mean-token-mean", shares_advantage=True, band=Bounds(-math.expm1(-0.4), math.expm1(0.4))),
    "ctpo": Defaults("token-mean", is_prefix_ratio=True, band=Bounds(-math.expm1(-0.025), math.expm1(0.05))),
    "ce_gppo": Defaults("token-mean", band=Bounds(0.2, 0.2), keeps_gradient=True, dual_clip=True),
    "sapo": Defaults("seq-mean-token-mean"),
    "sapo_sequence": Defaults("seq-mean-token-mean", shares_advantage=True),
    # No lower bound, as in the paper, which does not disclose the upper one: ScaleRL finds caps of 4, 5 and 8 equivalent.
    "cispo": Defaults("token-mean", band=Bounds(1.0, 4.0), keeps_gradient=True),
    "minirl": Defaults(
        "seq-mean-token-sum", band=Bounds(0.2, 0.27), weight_cap=5.0, has_behavior_weight=True, divide_by_std=False
    ),
    "dppo_tv": _DPPO,
    "dppo_kl": _DPPO._replace(band=Bounds(0.05, 0.05)),
    "aspo": Defaults("token-mean", band=Bounds(0.2, 0.2), weight_cap=3.0),
    "topr": Defaults("seq-mean-token-sum", divide_by_std=False),
    "vespo": Defaults("token-mean"),
    "m2po": Defaults("token-mean"),
    "reinforce": Defaults("seq-mean-token-mean"),
    "ppo": Defaults("token-mean", band=Bounds(0.2, 0.2), dual_clip=True, baseline="critic", divide_by_std=False),
}
"""The defaults of each `loss.objective`. Dr. GRPO and DAPO are GRPO's clip with other values; PPO adds a critic."""


def complete(config: Config) -> Config:
    """Return the config with every setting that the objective decides and the user left open filled in."""
    max_new_tokens, objective = config.rollout.max_new_tokens, config.loss.objective
    return msgspec.structs.replace(
        config,
        loss=_complete_loss(config.loss, max_new_tokens),
        advantage=msgspec.structs.replace(
            config.advantage,
            baseline=resolve_baseline(config.advantage, objective),
            divide_by_std=resolve_divide_by_std(config.advantage, objective),
        ),
        reward=msgspec.structs.replace(
            config.reward, overlong_buffer=resolve_overlong_buffer(config.reward, objective, max_new_tokens)
        ),
    )


def engine_band(max_new_tokens: int) -> Bounds:
    """Return the default clip band of a sequence ratio to engine log-probs.

    The ratio is a mean over tokens, so the band narrows as completions grow, but not below the engine's noise.
    """
    drift = _COMPLETION_DRIFT / (_USUAL_SHARE * max_new_tokens)
    width = float(f"{min(_WIDEST_ENGINE_BAND, max(drift, engine_noise(max_new_tokens))):.2g}")
    return Bounds(width, width)


def engine_noise(max_new_tokens: int) -> float:
    """Return the standard deviation that a usual engine's noise gives the sequence ratio of a completion of usual length."""
    return _TOKEN_NOISE / math.sqrt(_USUAL_SHARE * max_new_tokens)


def resolve_clip(loss: LossSection, max_new_tokens: int) -> Bounds | None:
    """Return `loss.clip_low` and `clip_high`; None for an objective that does not clip, and for the user's own."""
    if loss.function:
        return None
    defaults = DEFAULTS[loss.objective]
    own = defaults.band
    if own is None:
        return None
    if loss.anchor == "group":
        own = _GROUP_BAND
    elif defaults.is_sequence_ratio and loss.anchor not in RECOMPUTED:
        own = engine_band(max_new_tokens)
    return Bounds(own.low if loss.clip_low is None else loss.clip_low, own.high if loss.clip_high is None else loss.clip_high)


def resolve_weight_cap(loss: LossSection) -> float | None:
    """Return the largest weight of a token; None for an objective that has no such cap, and for the user's own."""
    own = None if loss.function else DEFAULTS[loss.objective].weight_cap
    return own if own is None or loss.weight_cap is None else loss.weight_cap


def resolve_aggregation(loss: LossSection) -> Aggregation:
    """Return the mean that token losses are put into."""
    return loss.aggregation or DEFAULTS[loss.objective].aggregation


def resolve_baseline(advantage: AdvantageSection, objective: str) -> Baseline:
    """Return the quantity that is subtracted from rewards."""
    return advantage.baseline or DEFAULTS[objective].baseline


def resolve_divide_by_std(advantage: AdvantageSection, objective: str) -> bool:
    """Tell if advantages are divided by the group's standard deviation; left open, only with the group's mean as baseline."""
    if advantage.divide_by_std is not None:
        return advantage.divide_by_std
    if advantage.turns == "to_go":
        return False
    return resolve_baseline(advantage, objective) == "group" and DEFAULTS[objective].divide_by_std


def resolve_overlong_buffer(reward: RewardSection, objective: str, max_new_tokens: int) -> int:
    """Return the number of tokens before `max_new_tokens` in which a completion is punished for its length."""
    if reward.overlong_buffer is not None:
        return reward.overlong_buffer
    return round(DEFAULTS[objective].overlong_share * max_new_tokens)


def _complete_loss(loss: LossSection, max_new_tokens: int) -> LossSection:
    clip, aggregation = resolve_clip(loss, max_new_tokens), resolve_aggregation(loss)
    # A setting that does not apply to the objective stays as the user wrote it: `check_objective` refuses it.
    completed = msgspec.structs.replace(
        loss,
        correction=complete_corrections(loss.correction),
        aggregation=aggregation,
        zero_variance=loss.zero_variance or DEFAULTS[loss.objective].zero_variance,
    )
    if clip is not None:
        completed = msgspec.structs.replace(completed, clip_low=clip.low, clip_high=clip.high)
    cap = resolve_weight_cap(loss)
    if cap is not None:
        completed = msgspec.structs.replace(completed, weight_cap=cap)
    if aggregation == "seq-mean-token-sum-norm" and loss.aggregation_length is None:
        completed = msgspec.structs.replace(completed, aggregation_length=max_new_tokens)
    return completed
