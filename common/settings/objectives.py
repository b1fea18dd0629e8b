"""The objectives: their parameters and their papers' values in one table, and how `loss.objective` names one of them.

    loss.objective = "sapo(1, 1.05)"

Parameters that are left out are the paper's. `common.settings.completion` fills in the settings that an objective decides; its
loss function is in `learner.objectives.objective`.
"""

import math
from typing import Literal, NamedTuple

from offbeat.common.errors import SettingError
from offbeat.common.settings.section import Method, parse_method, unknown_method

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


class Parameter(NamedTuple):
    """A number that belongs to one objective."""

    name: str
    """The keyword of the loss function that takes it. Of `m2_threshold` the learner makes m2po's `cutoff` of each step."""
    default: float
    """The paper's value."""
    may_be_zero: bool = False


class Defaults(NamedTuple):
    """The parameters of one objective, and the settings that its paper gives it."""

    aggregation: Aggregation
    parameters: tuple[Parameter, ...] = ()
    """The numbers in the parentheses of `loss.objective`, in this order."""
    is_sequence_ratio: bool = False
    """The importance ratio is that of a completion; False: each token's own."""
    is_prefix_ratio: bool = False
    """The importance ratio is the product of the tokens' up to each one, and its band grows."""
    shares_advantage: bool = False
    """All tokens of a completion get its mean advantage, so they must not differ in theirs."""
    band: Bounds | None = None
    """Clip band; None for an objective that does not clip. With `is_sequence_ratio` that against recomputed log-probs: the one
    against the engine's is `engine_band`."""
    takes_both_sides: bool = False
    """Tokens on either side of the band lose their gradient, whatever the sign of their advantage."""
    keeps_gradient: bool = False
    """Tokens beyond the band keep a gradient: the band bounds a weight, or leaves a part."""
    dual_clip: bool = False
    """`loss.dual_clip` applies."""
    bounds_divergence: bool = False
    """`band` bounds a divergence of the token's probability, not a ratio."""
    has_behavior_weight: bool = False
    """The objective weighs by pi / mu itself, whatever the anchor of its clip is."""
    baseline: Baseline = "group"
    divide_by_std: bool = True
    zero_variance: Literal["count", "drop"] = "count"
    overlong_share: float = 0.0
    """Share of `rollout.max_new_tokens` that overlong shaping punishes."""


_GSPO_BAND = Bounds(3e-4, 4e-4)
"""GSPO's paper, section 5.1."""
_TAUS = (Parameter("tau_positive", 1.0), Parameter("tau_negative", 1.05))
"""SAPO's temperatures for positive and negative advantages."""


def _weight_cap(default: float) -> tuple[Parameter, ...]:
    """Return the one parameter of objectives that bound the weight of a token."""
    return (Parameter("weight_cap", default),)


_DPPO = Defaults(
    "seq-mean-token-sum-norm",
    _weight_cap(20.0),
    band=Bounds(0.15, 0.15),
    bounds_divergence=True,
    has_behavior_weight=True,
    divide_by_std=False,
)

DEFAULTS: dict[str, Defaults] = {
    "gspo": Defaults("seq-mean-token-mean", is_sequence_ratio=True, shares_advantage=True, band=_GSPO_BAND, dual_clip=True),
    "gspo_token": Defaults("seq-mean-token-mean", is_sequence_ratio=True, band=_GSPO_BAND, dual_clip=True),
    "grpo": Defaults("seq-mean-token-mean", band=Bounds(0.2, 0.2), dual_clip=True),
    "dr_grpo": Defaults("seq-mean-token-sum-norm", band=Bounds(0.2, 0.2), dual_clip=True, divide_by_std=False),
    "dapo": Defaults("token-mean", band=Bounds(0.2, 0.28), dual_clip=True, zero_variance="drop", overlong_share=0.2),
    # The band is the paper's, section 5.1, as TRL's documentation has it.
    "luspo": Defaults(
        "seq-mean-token-sum", is_sequence_ratio=True, shares_advantage=True, band=Bounds(2e-3, 2.5e-3), dual_clip=True
    ),
    "gmpo": Defaults("seq-mean-token-mean", shares_advantage=True, band=Bounds(-math.expm1(-0.4), math.expm1(0.4))),
    "ctpo": Defaults("token-mean", is_prefix_ratio=True, band=Bounds(-math.expm1(-0.025), math.expm1(0.05))),
    "ce_gppo": Defaults(
        "token-mean",
        (Parameter("preserved_below", 0.75, may_be_zero=True), Parameter("preserved_above", 1.0, may_be_zero=True)),
        band=Bounds(0.2, 0.2),
        keeps_gradient=True,
        dual_clip=True,
    ),
    "sapo": Defaults("seq-mean-token-mean", _TAUS),
    "sapo_sequence": Defaults("seq-mean-token-mean", _TAUS, shares_advantage=True),
    # No lower bound, as in the paper, which does not disclose the upper one: ScaleRL finds caps of 4, 5 and 8 equivalent.
    "cispo": Defaults("token-mean", band=Bounds(1.0, 4.0), keeps_gradient=True),
    "minirl": Defaults(
        "seq-mean-token-sum", _weight_cap(5.0), band=Bounds(0.2, 0.27), has_behavior_weight=True, divide_by_std=False
    ),
    "dppo_tv": _DPPO,
    "dppo_kl": _DPPO._replace(band=Bounds(0.05, 0.05)),
    # The band is the paper's for mathematics; for code it has 0.8 and 3.
    "sao": Defaults("token-mean", band=Bounds(0.3, 5.0), takes_both_sides=True, baseline="critic", divide_by_std=False),
    "aspo": Defaults("token-mean", _weight_cap(3.0), band=Bounds(0.2, 0.2)),
    "topr": Defaults("seq-mean-token-sum", divide_by_std=False),
    "vespo": Defaults(
        "token-mean",
        (
            Parameter("k_positive", 2.0, may_be_zero=True),
            Parameter("lambda_positive", 3.0, may_be_zero=True),
            Parameter("k_negative", 3.0, may_be_zero=True),
            Parameter("lambda_negative", 2.0, may_be_zero=True),
        ),
    ),
    "m2po": Defaults("token-mean", (Parameter("m2_threshold", 0.04),)),
    "reinforce": Defaults("seq-mean-token-mean"),
    "ppo": Defaults("token-mean", band=Bounds(0.2, 0.2), dual_clip=True, baseline="critic", divide_by_std=False),
}
"""The defaults of each `loss.objective`. Dr. GRPO and DAPO are GRPO's clip with other values; PPO adds a critic."""


def parse_objective(text: str, setting: str = "loss.objective") -> Method:
    """Return the objective that a text names, with all of its parameters; those left out are the paper's.

    Raises `SettingError` on behalf of `setting` for an unknown name, and for parameters that the objective does not take.
    """
    method = parse_method(text, setting)
    if method.name not in DEFAULTS:
        raise unknown_method(method.name, DEFAULTS, text, setting)
    parameters = DEFAULTS[method.name].parameters
    own = Method(method.name, tuple(parameter.default for parameter in parameters))
    if not method.numbers:
        return own
    if len(method.numbers) != len(parameters):
        names = ", ".join(parameter.name for parameter in parameters)
        problem = f"{method.name} has {f'the parameters {names}' if names else 'no parameters'}, and gets {len(method.numbers)}"
        raise SettingError(setting, text, problem, f"Write {method.name}{f' or {own}' if names else ''}.")
    for parameter, number in zip(parameters, method.numbers, strict=True):
        if number == 0 and not parameter.may_be_zero:
            raise SettingError(setting, text, f"{parameter.name} is 0", f"Give a number above 0, as in {own}.")
    return method


def objective_parameters(text: str) -> dict[str, float]:
    """Return the parameters of the objective that a valid `loss.objective` names, as keywords of its loss function."""
    name, numbers = parse_objective(text)
    return {parameter.name: number for parameter, number in zip(DEFAULTS[name].parameters, numbers, strict=True)}


def defaults_of(text: str) -> Defaults:
    """Return the row of the objective that a valid `loss.objective` names."""
    return DEFAULTS[parse_objective(text).name]
