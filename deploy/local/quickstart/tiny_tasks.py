"""Tiny tasks, each with what its model is shown first: the quick start's, and one each for turns, for programs and for tools.

| task | prompt | right answer | share of right answers after the warm start |
|---|---|---|---|
| `Reversal`, the quick start | five different digits and `>` | the digits reversed | one in five |
| `Lookup` | a key, `a:` | the digit that two look-ups find, in several turns | three in ten |
| `Expressions` | a formula in Polish notation, `*+abc=` | the same in Python, `(a+b)*c` | one in four is shown |
| `Calculator` | `17*25=` | the result, by a tool call | one in four |

The warm start shows right answers and wrong ones, as the docstrings say; reinforcement learning then rewards the right ones.
`prepared.Task` says what the attributes of all tasks are.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

FILLER = " "
END_OF_PROMPT = ">"


class Reversal(NamedTuple):
    """Reverse five digits.

    The warm start teaches the model four answers with equal probability: the digits reversed, copied, rotated left, rotated
    right.
    """

    version: int = 2
    """Version of the code below; raise it when the code makes other files."""
    alphabet: str = "0123456789abcdefghijklmnopqrstuvwxyz+-=" + END_OF_PROMPT
    """Characters the model knows."""
    task_characters: str = "0123456789"
    """Characters of the prompts; each occurs at most once in a prompt."""
    length: int = 5
    """Number of characters of a prompt before `>`, and of an answer."""
    name = "quickstart"
    chat_template = None

    def rows(self, generator: random.Random) -> Iterator[dict[str, Any]]:
        """Yield rows, each only once."""
        seen: set[str] = set()
        while True:
            text = self._text(generator)
            if text not in seen:
                seen.add(text)
                yield {"prompt": text + END_OF_PROMPT, "answer": answers(text)[0]}

    def shown(self, generator: random.Random) -> tuple[str, str]:
        """Return a prompt with one of its four answers."""
        prompt = self._text(generator)
        answer = generator.choice(answers(prompt)) + "$"
        return prompt + END_OF_PROMPT + answer, "." * (len(prompt) + 1) + "x" * len(answer)

    def _text(self, generator: random.Random) -> str:
        return "".join(generator.sample(self.task_characters, k=self.length))


def answers(text: str) -> tuple[str, str, str, str]:
    """Return the four answers that the warm start teaches for a prompt; the first, the reversal, is rewarded later."""
    return text[::-1], text, text[1:] + text[:1], text[-1:] + text[:-1]


KEYS = "abcdefghij"
DIGITS = "0123456789"
MAX_TURNS = 4
NOTHING = "."
"""The answer to anything that is no key."""


class Lookup(NamedTuple):
    """A game of two look-ups: the smallest task that needs several turns.

    The prompt is a key, `a:`. `?a` asks for its entry, which is another key; `?c` asks for that one's, a digit; `!7` answers.
    The warm start shows games of all kinds: right ones, guesses, and ones that stop looking too early.
    """

    version: int = 1
    """Version of the code below; raise it when the code makes other files."""
    name = "lookup"
    alphabet = f"{KEYS}{DIGITS}?!:{NOTHING}{FILLER}"
    """All characters of a game."""
    chat_template = None
    """The environment adds raw text."""

    def rows(self, generator: random.Random) -> Iterator[dict[str, Any]]:
        """Yield games."""
        while True:
            yield game_row(generator)

    def shown(self, generator: random.Random) -> tuple[str, str]:
        """Return a game as text, and a mask with an `x` at each character that a player writes.

        A quarter of the games is right, a quarter stops after the first look-up, a quarter looks up at random, and a quarter
        guesses.
        """
        row = game_row(generator)
        prompt, table = row["prompt"], row["table"]
        kind = generator.randrange(4)
        first = prompt[0]
        keys = ([first, table[first]], [first], generator.choices(KEYS, k=generator.randrange(1, MAX_TURNS)), [])[kind]
        found = [table[key] for key in keys]
        digit = found[-1] if found and found[-1] in DIGITS else generator.choice(DIGITS)
        looked = "".join(f"?{key}{entry}" for key, entry in zip(keys, found, strict=True))
        text = f"{prompt}{looked}!{digit}"
        mask = "." * len(prompt) + "xx." * len(keys) + "xx"
        length = len(prompt) + 3 * MAX_TURNS - 1
        return text.ljust(length, FILLER), mask.ljust(length, ".")


def game_row(generator: random.Random) -> dict[str, Any]:
    """Return a game: the prompt, the table, and the digit that two look-ups find."""
    first, second = generator.sample(KEYS, 2)
    table = {key: generator.choice(KEYS) if generator.random() < 0.5 else generator.choice(DIGITS) for key in KEYS}
    table |= {first: second, second: generator.choice(DIGITS)}
    return {"prompt": f"{first}:", "table": table, "answer": table[second]}


NAMES = "abcdef"
OPERATORS = "+-*"
END_OF_FORMULA = "="
NUM_TESTS = 3
PROGRAM_LENGTH = 8
"""Characters of the longest completion, with its end."""
FORMULAS = list(itertools.product(OPERATORS, OPERATORS, itertools.permutations(NAMES, 3)))


class Expressions(NamedTuple):
    """Tiny programs: a formula in Polish notation, and the same in Python.

    The warm start teaches four completions with equal probability: a right one, one with its operators swapped, one with its
    names swapped, and one that does not parse. Several are right, `c*(b+a)` too, so only running them tells.
    """

    version: int = 1
    """Version of the code below; raise it when the code makes other files."""
    name = "expressions"
    alphabet = f"{NAMES}{OPERATORS}(){END_OF_FORMULA}{FILLER}"
    """All characters of prompts and programs."""
    chat_template = None

    def rows(self, generator: random.Random) -> Iterator[dict[str, Any]]:
        """Yield every formula once."""
        for formula in generator.sample(FORMULAS, len(FORMULAS)):
            yield formula_row(*formula, generator)

    def shown(self, generator: random.Random) -> tuple[str, str]:
        """Return a formula with one of its four completions."""
        return shown_program(*generator.choice(FORMULAS), generator)


def formula_row(outer: str, inner: str, names: tuple[str, ...], generator: random.Random) -> dict[str, Any]:
    """Return a formula and its unit tests: values of the names, and what the formula gives."""
    inputs = [{name: generator.randrange(2, 100) for name in names} for _ in range(NUM_TESTS)]
    right = python_of(outer, inner, *names)
    return {
        "prompt": _formula_prompt(outer, inner, names),
        "inputs": inputs,
        "outputs": [eval(right, dict(test)) for test in inputs],
    }


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
    prompt = _formula_prompt(outer, inner, names)
    mask = "." * len(prompt) + "x" * (len(completion) + 1)
    length = len(prompt) + PROGRAM_LENGTH
    return f"{prompt}{completion}$".ljust(length, FILLER), mask.ljust(length, ".")


def _formula_prompt(outer: str, inner: str, names: tuple[str, ...]) -> str:
    return f"{outer}{inner}{''.join(names)}{END_OF_FORMULA}"


OPEN_CALL, ARGUMENTS, BETWEEN, CLOSE_CALL = '<tool_call>{"name": "', '", "arguments": {"a": ', ', "b": ', "}}</tool_call>"
TOOLS = {"+": "add", "*": "multiply"}
END_OF_RESULT = ">"
OPERANDS = (10, 99)
"""The smallest and the largest."""
CALCULATION_LENGTH = 30
"""Tokens of the longest game and some."""


class Calculator(NamedTuple):
    """A calculator: the smallest task of tool calls.

    The model may call a tool in the form of Hermes and Qwen, reads the result, and answers:

        <tool_call>{"name": "multiply", "arguments": {"a": 17, "b": 25}}</tool_call>

    The texts between the numbers are one token each. The warm start shows right games, guesses, wrong calls, and results that
    are ignored.
    """

    version: int = 1
    """Version of the code below; raise it when the code makes other files."""
    name = "calculator"
    alphabet = (OPEN_CALL, ARGUMENTS, BETWEEN, CLOSE_CALL, *TOOLS.values(), *"0123456789+*=-", END_OF_RESULT, FILLER)
    """The parts of a call, digits and signs."""
    chat_template = (
        "{% for message in messages %}{{ message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% elif message.role == 'tool' %}" + END_OF_RESULT + "{% endif %}"
        "{% endfor %}"
    )
    """A template that writes contents, the end of the model's turns, and that of results."""

    def rows(self, generator: random.Random) -> Iterator[dict[str, Any]]:
        """Yield rows: `17*25=` and `425`."""
        while True:
            a, sign, b = _draw_calculation(generator)
            yield {"prompt": f"{a}{sign}{b}=", "answer": str(_calculate(a, sign, b))}

    def shown(self, generator: random.Random) -> tuple[Sequence[str], str]:
        """Return a game as tokens with the mask of the model's own.

        A quarter of the games is right, a quarter guesses without a call, a quarter calls for other numbers or the other tool,
        and a quarter answers with another number than the result.
        """
        kind = generator.randrange(4)
        a, sign, b = _draw_calculation(generator)
        prompt = [*f"{a}{sign}{b}="]
        if kind == 1:
            return _padded(prompt, [*_guess_result(generator, sign), "$"], [], [])
        called = _draw_calculation(generator) if kind == 2 else (a, sign, b)
        result = str(_calculate(*called))
        call = [OPEN_CALL, TOOLS[called[1]], ARGUMENTS, *str(called[0]), BETWEEN, *str(called[2]), CLOSE_CALL, "$"]
        answer = _guess_result(generator, sign) if kind == 3 else result
        return _padded(prompt, call, [*result, END_OF_RESULT], [*answer, "$"])


def _draw_calculation(generator: random.Random) -> tuple[int, str, int]:
    return (generator.randint(*OPERANDS), generator.choice([*TOOLS]), generator.randint(*OPERANDS))


def _calculate(a: int, sign: str, b: int) -> int:
    return a + b if sign == "+" else a * b


def _guess_result(generator: random.Random, sign: str) -> str:
    return str(_calculate(generator.randint(*OPERANDS), sign, generator.randint(*OPERANDS)))


def _padded(prompt: list[str], first: list[str], read: list[str], last: list[str]) -> tuple[list[str], str]:
    tokens = [*prompt, *first, *read, *last]
    mask = "." * len(prompt) + "x" * len(first) + "." * len(read) + "x" * len(last)
    return tokens + [FILLER] * (CALCULATION_LENGTH - len(tokens)), mask.ljust(CALCULATION_LENGTH, ".")
