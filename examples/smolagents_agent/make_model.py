"""Make the model and the data of this example: python -m examples.smolagents_agent.make_model FOLDER."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.deploy.local.quickstart.prepared import Recipe
from offbeat.deploy.local.quickstart.tiny_tasks import DIGITS, KEYS, game_row

TASK, OPEN, LOOK, ANSWER, CLOSE = "New task:\n", "<code>", "look(", "final_answer(", "</code>"
CALLING = "\nCalling tools:\n[{'id': 'call_1', 'type': 'function', 'function': {'name': 'python_interpreter', 'arguments': '"
CALLED = "'}}]"
OBSERVATION = "Observation:\nExecution logs:\nLast output from code snippet:\n"
FILLER = " "
LENGTH = 30
"""Tokens of the longest game."""


class LookupInCode(NamedTuple):
    """The look-up game in the messages of smolagents, whose fixed texts are one token each."""

    name: str = "lookup-in-code"
    alphabet: tuple[str, ...] = (*KEYS, *DIGITS, *':")', TASK, OPEN, LOOK, ANSWER, CLOSE, CALLING, CALLED, OBSERVATION, FILLER)
    chat_template: str = (
        "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    )

    def rows(self, generator: random.Random) -> Iterator[dict[str, Any]]:
        """Yield games."""
        while True:
            yield game_row(generator)

    def shown(self, generator: random.Random) -> tuple[list[str], str]:
        """Return what the model reads and one turn, with the mask of the turn.

        A quarter of the games is right at once, a quarter looks before it answers, a quarter stops looking too early, and a
        quarter guesses.
        """
        row = game_row(generator)
        question, first = row["prompt"], row["prompt"][0]
        read, look, guess = [TASK, *question], _look(first), _quoted(generator.choice(DIGITS))
        code = generator.choice(([ANSWER, LOOK, *look, ")", ")"], look, [ANSWER, *look, ")"], [ANSWER, *guess, ")"]))
        if code is look and generator.random() < 0.5:
            entry = row["table"][first]
            read += [OPEN, *look, CLOSE, CALLING, *look, CALLED, "$", OBSERVATION, entry]
            code = [ANSWER, *generator.choice((_look(entry), guess)), ")"]
        turn = [OPEN, *code, CLOSE, "$"]
        padding = LENGTH - len(read) - len(turn)
        return [*read, *turn, *[FILLER] * padding], "." * len(read) + "x" * len(turn) + "." * padding


def _look(key: str) -> list[str]:
    return [LOOK, *_quoted(key), ")"]


def _quoted(text: str) -> list[str]:
    return ['"', text, '"']


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    Recipe(LookupInCode()).make(folder)
