"""Tiny programs: the prompt is a formula in Polish notation, `*+abc=`, and the completion the same in Python, `(a+b)*c`.

The warm start teaches four completions with equal probability: a right one, one with its operators swapped, one with its
names swapped, and one that does not parse. Several are right, `c*(b+a)` too, so only running them tells.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

NAMES = "abcdef"
OPERATORS = "+-*"
END_OF_PROMPT = "="
NUM_TESTS = 3
FILLER = " "
LENGTH = 8
"""Characters of the longest completion, with its end."""


FORMULAS = list(itertools.product(OPERATORS, OPERATORS, itertools.permutations(NAMES, 3)))


class Expressions(NamedTuple):
    """The formulas and the programs shown for them."""

    version: int = 1
    """Version of the code below; raise it when the code makes other files."""

    @property
    def name(self) -> str:
        """The placeholder without braces."""
        return "expressions"

    @property
    def alphabet(self) -> str:
        """All characters of prompts and programs."""
        return f"{NAMES}{OPERATORS}(){END_OF_PROMPT}{FILLER}"

    @property
    def chat_template(self) -> None:
        """Prompts are plain text."""
        return None

    def rows(self, generator: random.Random) -> Iterator[dict[str, Any]]:
        """Yield every formula once."""
        for formula in generator.sample(FORMULAS, len(FORMULAS)):
            yield make_row(*formula, generator)

    def shown(self, generator: random.Random) -> tuple[str, str]:
        """Return a formula with one of its four completions."""
        return shown_program(*generator.choice(FORMULAS), generator)


def make_row(outer: str, inner: str, names: tuple[str, ...], generator: random.Random) -> dict[str, Any]:
    """Return a formula and its unit tests: values of the names, and what the formula gives."""
    inputs = [{name: generator.randrange(2, 100) for name in names} for _ in range(NUM_TESTS)]
    right = python_of(outer, inner, *names)
    return {"prompt": _prompt(outer, inner, names), "inputs": inputs, "outputs": [eval(right, dict(test)) for test in inputs]}


def python_of(outer: str, inner: str, first: str, second: str, third: str) -> str:
    """Return a formula in Python."""
    return f"({first}{inner}{second}){outer}{third}"


def shown_program(outer: str, inner: str, names: tuple[str, ...], generator: random.Random) -> tuple[str, str]:
    """Return prompt and completion as one text, and a mask with an `x` at each character that the model learns."""
    first, second, third = names
    completion = (
        python_of(outer, inner, first, second, third),
        python_of(inner, outer, first, second, third),
        python_of(outer, inner, third, first, second),
        f"{first}{inner}{second}){outer}{third}",
    )[generator.randrange(4)]
    prompt = _prompt(outer, inner, names)
    mask = "." * len(prompt) + "x" * (len(completion) + 1)
    length = len(prompt) + LENGTH
    return f"{prompt}{completion}$".ljust(length, FILLER), mask.ljust(length, ".")


def _prompt(outer: str, inner: str, names: tuple[str, ...]) -> str:
    return f"{outer}{inner}{''.join(names)}{END_OF_PROMPT}"
