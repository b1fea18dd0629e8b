"""A calculator: the smallest task of tool calls, with a model that uses its tools right one time in four.

The prompt is `17*25=`. The model may call a tool in the form of Hermes and Qwen, reads the result, and answers:

    <tool_call>{"name": "multiply", "arguments": {"a": 17, "b": 25}}</tool_call>

The texts between the numbers are one token each. The warm start shows right games, guesses, wrong calls, and results that are
ignored.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

OPEN, ARGUMENTS, BETWEEN, CLOSE = '<tool_call>{"name": "', '", "arguments": {"a": ', ', "b": ', "}}</tool_call>"
TOOLS = {"+": "add", "*": "multiply"}
END_OF_RESULT = ">"
FILLER = " "
SMALLEST, LARGEST = 10, 99
LENGTH = 30
"""Tokens of the longest game and some."""


class Calculator(NamedTuple):
    """The calculator's data and games."""

    version: int = 1
    """Version of the code below; raise it when the code makes other files."""

    @property
    def name(self) -> str:
        """The placeholder without braces."""
        return "calculator"

    @property
    def alphabet(self) -> Sequence[str]:
        """The parts of a call, digits and signs."""
        return [OPEN, ARGUMENTS, BETWEEN, CLOSE, *TOOLS.values(), *"0123456789+*=-", END_OF_RESULT, FILLER]

    @property
    def chat_template(self) -> str:
        """A template that writes contents, the end of the model's turns, and that of results."""
        return (
            "{% for message in messages %}{{ message.content }}"
            "{% if message.role == 'assistant' %}{{ eos_token }}{% elif message.role == 'tool' %}"
            + END_OF_RESULT
            + "{% endif %}"
            "{% endfor %}"
        )

    def rows(self, generator: random.Random) -> Iterator[dict[str, Any]]:
        """Yield rows: `17*25=` and `425`."""
        while True:
            a, sign, b = _draw(generator)
            yield {"prompt": f"{a}{sign}{b}=", "answer": str(_result(a, sign, b))}

    def shown(self, generator: random.Random) -> tuple[Sequence[str], str]:
        """Return a game as tokens with the mask of the model's own.

        A quarter of the games is right, a quarter guesses without a call, a quarter calls for other numbers or the other tool,
        and a quarter answers with another number than the result.
        """
        kind = generator.randrange(4)
        a, sign, b = _draw(generator)
        prompt = [*f"{a}{sign}{b}="]
        if kind == 1:
            return _padded(prompt, [*_guess(generator, sign), "$"], [], [])
        called = _draw(generator) if kind == 2 else (a, sign, b)
        result = str(_result(*called))
        call = [OPEN, TOOLS[called[1]], ARGUMENTS, *str(called[0]), BETWEEN, *str(called[2]), CLOSE, "$"]
        answer = _guess(generator, sign) if kind == 3 else result
        return _padded(prompt, call, [*result, END_OF_RESULT], [*answer, "$"])


def _draw(generator: random.Random) -> tuple[int, str, int]:
    return generator.randint(SMALLEST, LARGEST), generator.choice([*TOOLS]), generator.randint(SMALLEST, LARGEST)


def _result(a: int, sign: str, b: int) -> int:
    return a + b if sign == "+" else a * b


def _guess(generator: random.Random, sign: str) -> str:
    return str(_result(generator.randint(SMALLEST, LARGEST), sign, generator.randint(SMALLEST, LARGEST)))


def _padded(prompt: list[str], first: list[str], read: list[str], last: list[str]) -> tuple[list[str], str]:
    tokens = [*prompt, *first, *read, *last]
    mask = "." * len(prompt) + "x" * len(first) + "." * len(read) + "x" * len(last)
    return tokens + [FILLER] * (LENGTH - len(tokens)), mask.ljust(LENGTH, ".")
