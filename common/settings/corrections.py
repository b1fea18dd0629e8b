"""The off-policy corrections of `loss.correction`: their own bounds, and how the setting names several of them.

    loss.correction = "geometric_mask(0.99, 1.01) + token_tis(2)"

A bound that is left out is the correction's own; one number alone is the upper bound.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from offbeat.common.settings.learning_sections import CorrectionName


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
    """Lower bound; None where it is left open, or there is none."""
    high: float | None = None
    """Upper bound or threshold; None where it is left open."""


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
_PLUS = re.compile(r" ?\+ ?(?=[A-Za-z_])")
_PART = re.compile(r"([\w.:]+)(?: ?\((?:([^,)]+), ?)?([^,)]+)\))?")


def parse_corrections(text: str) -> tuple[CorrectionChoice, ...]:
    """Return the corrections of `loss.correction`, which its pattern accepts; bounds are those that are written."""
    if text == "none":
        return ()
    found = [_PART.fullmatch(part) for part in _PLUS.split(text)]
    parts = [match.groups() for match in found if match is not None]
    return tuple(CorrectionChoice(name, _number(low), _number(high)) for name, low, high in parts)


def built_in(name: str) -> CorrectionName | None:
    """Return the name of a built-in correction; None for the user's own."""
    return next((known for known in CORRECTIONS if known == name), None)


def own_functions(text: str) -> tuple[str, ...]:
    """Return the user's own corrections in `loss.correction`, each as `module:function`."""
    return tuple(choice.name for choice in parse_corrections(text) if built_in(choice.name) is None)


def complete_corrections(text: str) -> str:
    """Return `loss.correction` with every bound written out."""
    return write_corrections(tuple(map(fill_bounds, parse_corrections(text))))


def fill_bounds(choice: CorrectionChoice) -> CorrectionChoice:
    """Return the correction with its own bounds where they are left open."""
    name = built_in(choice.name)
    if name is None:
        return choice
    own = CORRECTIONS[name]
    low = own.low if choice.low is None else choice.low
    return CorrectionChoice(choice.name, low, own.high if choice.high is None else choice.high)


def write_corrections(choices: tuple[CorrectionChoice, ...]) -> str:
    """Return the text that `parse_corrections` reads."""
    return " + ".join(map(_write, choices)) or "none"


def of_older_settings(name: str, low: float | None, high: float | None) -> str:
    """Return `loss.correction` of a run whose bounds were the settings `loss.correction_low` and `loss.correction_high`."""
    if low is None and high is None:
        return name
    (choice,) = parse_corrections(name)
    return write_corrections((fill_bounds(choice._replace(low=low, high=high)),))


def join_older_settings(values: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a run's identity, each as TOML, as they are named and written now."""
    if "loss.correction_high" not in values:
        return dict(values)
    joined = dict(values)
    low, high = (_number(joined.pop(f"loss.correction_{side}", "none")) for side in ("low", "high"))
    name = joined["loss.correction"].strip('"')
    joined["loss.correction"] = f'"{of_older_settings(name, low, high)}"'
    return joined


def _number(text: str | None) -> float | None:
    return None if text is None or text == "none" else float(text)


def _write(choice: CorrectionChoice) -> str:
    bounds = [repr(float(bound)).removesuffix(".0") for bound in (choice.low, choice.high) if bound is not None]
    return f"{choice.name}({', '.join(bounds)})" if bounds else choice.name
