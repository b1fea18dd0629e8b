"""Arithmetic progressions: a task of long completions in which every number must be right.

The prompt is `07+6=`, and the completion counts on by six while it has two digits: `13,19,25,…,97`. The warm start teaches
right progressions in which the numbers that pass 30, 60 or 90 are often off by one. So a long completion fails at few of its
tokens, which training has to find: were all numbers uncertain, a reward for the whole would tell too little of each.
"""

import random
from collections.abc import Iterator
from itertools import count, takewhile
from typing import Any, NamedTuple

END_OF_PROMPT = "="
FILLER = " "
LARGEST_START, SMALLEST_STEP, LARGEST_STEP, LARGEST = 39, 2, 9, 99
FORK = 30
"""The model is uncertain of the first number from each multiple of this."""
MOST_NUMBERS = LARGEST // SMALLEST_STEP
LENGTH = 5 + 3 * MOST_NUMBERS
"""Tokens of the longest prompt with its completion and the end of that."""


class Progression(NamedTuple):
    """The task's data and answers."""

    version: int = 2
    """Version of the code below; raise it when the code makes other files."""
    error_rate: float = 0.4
    """Share of the numbers that are shown off by one, of those that pass a multiple of `FORK`."""

    @property
    def name(self) -> str:
        """The placeholder without braces."""
        return "progression"

    @property
    def alphabet(self) -> str:
        """Digits and signs."""
        return f"0123456789+,{END_OF_PROMPT}{FILLER}"

    @property
    def chat_template(self) -> None:
        """Prompts are plain text."""
        return None

    def rows(self, generator: random.Random) -> Iterator[dict[str, Any]]:
        """Yield every prompt once."""
        steps = range(SMALLEST_STEP, LARGEST_STEP + 1)
        every = [(start, step) for start in range(1, LARGEST_START + 1) for step in steps]
        for start, step in generator.sample(every, len(every)):
            numbers = takewhile(lambda number: number <= LARGEST, count(start + step, step))
            yield {"prompt": _prompt(start, step), "answer": _text(list(numbers))}

    def shown(self, generator: random.Random) -> tuple[str, str]:
        """Return a prompt with a progression, whose uncertain numbers are off by one with a chance of `error_rate`."""
        start, step = generator.randint(1, LARGEST_START), generator.randint(SMALLEST_STEP, LARGEST_STEP)
        numbers, last = [], start
        while last + step <= LARGEST and len(numbers) < MOST_NUMBERS:
            is_fork = last // FORK != (last + step) // FORK
            off = generator.choice((-1, 1)) if is_fork and generator.random() < self.error_rate else 0
            last = min(LARGEST, last + step + off)
            numbers.append(last)
        prompt, answer = _prompt(start, step), _text(numbers) + "$"
        mask = "." * len(prompt) + "x" * len(answer)
        return (prompt + answer).ljust(LENGTH, FILLER), mask.ljust(LENGTH, ".")


def _prompt(start: int, step: int) -> str:
    return f"{start:02}+{step}{END_OF_PROMPT}"


def _text(numbers: list[int]) -> str:
    return ",".join(f"{number:02}" for number in numbers)
