"""The off-policy corrections of `loss.correction`: their own bounds, and how the setting names several of them.

    loss.correction = "geometric_mask(0.99, 1.01) + token_tis(2)"

A bound that is left out is the correction's own; one number alone is the upper bound.
"""

import re
from typing import Literal, NamedTuple

from offbeat.common.errors import SettingError
from offbeat.common.settings.section import Method, parse_method, unknown_method

CorrectionName = Literal[
    "token_tis",
    "geometric_tis",
    "sequence_tis",
    "icepop",
    "sequence_mask",
    "geometric_mask",
    "segment_mask",
    "k2_mask",
    "k3_mask",
    "opsm",
]
"""The built-in corrections."""
_SETTING = "loss.correction"


class OwnBounds(NamedTuple):
    """The bounds that a correction has by itself."""

    low: float | None
    """Lower bound of the ratio, 0 for any; None for a correction that cannot have one."""
    high: float
    """Upper bound of the ratio; a threshold for those that bound something else."""


class CorrectionChoice(NamedTuple):
    """One of the corrections that a setting names."""

    name: str
    """A key of `CORRECTIONS`, or `module:function`, which has no bounds."""
    low: float | None = None
    """Lower bound; None for a correction that has none."""
    high: float | None = None
    """Upper bound or threshold; None for the user's own."""


CORRECTIONS: dict[CorrectionName, OwnBounds] = {
    "token_tis": OwnBounds(0.0, 2.0),
    "geometric_tis": OwnBounds(0.0, 2.0),
    "sequence_tis": OwnBounds(0.0, 2.0),
    "icepop": OwnBounds(0.5, 5.0),
    "sequence_mask": OwnBounds(0.0, 3.0),
    "geometric_mask": OwnBounds(0.999, 1.001),
    "segment_mask": OwnBounds(0.8, 1.2),
    "k2_mask": OwnBounds(None, 0.01),
    "k3_mask": OwnBounds(None, 0.01),
    "opsm": OwnBounds(None, 1e-4),
}
"""The built-in corrections."""
WEIGHING = ("token_tis", "geometric_tis", "sequence_tis", "icepop", "sequence_mask")
"""Corrections that multiply by an importance ratio; the others keep or drop, and multiply by 1."""

# A name follows, so that the plus of 1e+2 is none.
_PLUS = re.compile(r" ?\+ ?(?=[A-Za-z_]|$)")


def parse_corrections(text: str) -> tuple[CorrectionChoice, ...]:
    """Return the corrections that a text names, with all of their bounds; those left out are the correction's own.

    Raises `SettingError` for an unknown name, and for bounds that the correction does not take.
    """
    return () if text == "none" else tuple(_parse(part, text) for part in _PLUS.split(text))


def built_in(name: str) -> CorrectionName | None:
    """Return the name of a built-in correction; None for the user's own."""
    return next((known for known in CORRECTIONS if known == name), None)


def own_functions(text: str) -> tuple[str, ...]:
    """Return the user's own corrections in `loss.correction`, each as `module:function`."""
    return tuple(choice.name for choice in parse_corrections(text) if built_in(choice.name) is None)


def write_corrections(choices: tuple[CorrectionChoice, ...]) -> str:
    """Return the text that `parse_corrections` reads."""
    return " + ".join(map(_write, choices)) or "none"


def _parse(part: str, text: str) -> CorrectionChoice:
    name, bounds = parse_method(part, _SETTING)
    if ":" in name:
        if bounds:
            problem = f"the function {name} is not given any bounds"
            raise SettingError(_SETTING, text, problem, "Remove them, and write the bound in the function.")
        return CorrectionChoice(name)
    known = built_in(name)
    if known is None:
        raise unknown_method(name, CORRECTIONS, text, _SETTING)
    if len(bounds) > 2:
        problem = f"{name} has a lower and an upper bound, and gets {len(bounds)}"
        raise SettingError(_SETTING, text, problem, "Give it at most two numbers.")
    if len(bounds) == 2 and CORRECTIONS[known].low is None:
        raise SettingError(_SETTING, text, f"{name} has no lower bound", "Give it one number.")
    low = bounds[0] if len(bounds) == 2 else CORRECTIONS[known].low
    high = bounds[-1] if bounds else CORRECTIONS[known].high
    if high <= (low or 0.0):
        problem = f"the bounds of {name} leave nothing between them"
        raise SettingError(_SETTING, text, problem, "Give a lower bound below the upper one.")
    return CorrectionChoice(name, low, high)


def _write(choice: CorrectionChoice) -> str:
    return str(Method(choice.name, tuple(bound for bound in (choice.low, choice.high) if bound is not None)))
