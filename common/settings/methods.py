"""A method that a setting names, with the numbers that belong to it: `token_tis(0.5, 2)`."""

import difflib
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from offbeat.common.errors import SettingError

_METHOD = re.compile(r"([\w.:]+) ?(?:\(([^()]*)\))?")


class Method(NamedTuple):
    """A name with the numbers behind it."""

    name: str
    numbers: tuple[float, ...] = ()

    def __str__(self) -> str:
        """Return the text that `parse_method` reads."""
        numbers = ", ".join(repr(float(number)).removesuffix(".0") for number in self.numbers)
        return f"{self.name}({numbers})" if numbers else self.name


def parse_method(text: str, setting: str) -> Method:
    """Return the method of a text `NAME` or `NAME(NUMBER, ...)`; raise `SettingError` for `setting` otherwise."""
    found = _METHOD.fullmatch(text.strip())
    if found is None:
        raise SettingError(setting, text, "it is no name with numbers behind it", "Write NAME or NAME(NUMBER, NUMBER).")
    name, inside = found.groups()
    return Method(name, () if inside is None else tuple(_parse_number(number, text, setting) for number in inside.split(",")))


def unknown_method(name: str, known: Iterable[str], text: str, setting: str) -> SettingError:
    """Return the error for a name that is none of those known."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    cure = f"Did you mean {close[0]}?" if close else f"The known names are: {', '.join(known)}."
    return SettingError(setting, text, f"{name} is not a known name", cure)


def _parse_number(number: str, text: str, setting: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        problem = f"{number.strip() or 'nothing'} is not a number of at least 0"
        raise SettingError(setting, text, problem, "Write numbers in the parentheses, separated by commas, or leave both out.")
    return value
