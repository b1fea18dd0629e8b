"""Tiny programs: the prompt is a formula in Polish notation, `*+abc=`, and the completion the same in Python, `(a+b)*c`.

The warm start teaches four completions with equal probability: a right one, one with its operators swapped, one with its
names swapped, and one that does not parse. Several are right, `c*(b+a)` too, so only running them tells.
"""

import itertools
import random
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.deploy.quickstart.warm_start import warm_start, write_rows

NAMES = "abcdef"
OPERATORS = "+-*"
END_OF_PROMPT = "="
NUM_TESTS = 3
FILLER = " "
LENGTH = 8
"""Characters of the longest completion, with its end."""


class ExpressionsRecipe(NamedTuple):
    """The parameters of the data and the model."""

    version: int = 1
    """Version of the code below; raise it when the code makes other files."""
    seed: int = 0
    warm_start_steps: int = 400
    """Number of supervised optimizer steps."""
    warm_start_rows: int = 64
    """Number of programs in one supervised step."""
    num_eval: int = 128
    """Number of formulas in eval.jsonl; all others are in train.jsonl."""

    @property
    def name(self) -> str:
        """The placeholder without braces."""
        return "expressions"

    def make(self, folder: Path) -> None:
        """Write model/, train.jsonl and eval.jsonl."""
        generator = random.Random(self.seed)
        formulas = list(itertools.product(OPERATORS, OPERATORS, itertools.permutations(NAMES, 3)))
        generator.shuffle(formulas)
        rows = [make_row(*formula, generator) for formula in formulas]
        write_rows(folder / "eval.jsonl", rows[: self.num_eval])
        write_rows(folder / "train.jsonl", rows[self.num_eval :])
        batches = (
            [shown_program(*generator.choice(formulas), generator) for _ in range(self.warm_start_rows)]
            for _ in range(self.warm_start_steps)
        )
        alphabet = f"{NAMES}{OPERATORS}(){END_OF_PROMPT}{FILLER}"
        warm_start(folder / "model", batches, num_steps=self.warm_start_steps, alphabet=alphabet, seed=self.seed)


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
