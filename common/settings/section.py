"""Values that a section of settings may hold: bounded numbers, and methods with their numbers, such as `token_tis(0.5, 2)`."""

import ast
import difflib
import inspect
import math
import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from offbeat.common.errors import SettingError

NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFraction = Annotated[float, Meta(gt=0, le=1)]
RewardName = Annotated[str, Meta(pattern=r"^(\w+|[\w.]+:\w+)$")]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base of every section: immutable, and strict about unknown settings."""


@cache
def field_docstrings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the text below each field of a struct, its lines joined."""
    tree = ast.parse(inspect.getsource(struct))
    (definition,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    found: dict[str, str] = {}
    for attribute, text in pairwise(definition.body):
        match attribute, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                found[name] = " ".join(docstring.split())
    return found


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
