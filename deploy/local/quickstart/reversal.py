"""The quick start's task: reverse five digits, with a model that does so in about one answer of five.

A prompt is five different digits and `>`. The warm start teaches the model four answers (the digits reversed, copied, rotated
left, rotated right) with equal probability. Reinforcement learning then rewards only the reversal.
"""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

END_OF_PROMPT = ">"


class Reversal(NamedTuple):
    """The task's data and answers."""

    version: int = 2
    """Version of the code below; raise it when the code makes other files."""
    alphabet: str = "0123456789abcdefghijklmnopqrstuvwxyz+-=" + END_OF_PROMPT
    """Characters the model knows."""
    task_characters: str = "0123456789"
    """Characters of the prompts; each occurs at most once in a prompt."""
    length: int = 5
    """Number of characters of a prompt before `>`, and of an answer."""

    @property
    def name(self) -> str:
        """The placeholder without braces."""
        return "quickstart"

    @property
    def chat_template(self) -> None:
        """Prompts are plain text."""
        return None

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
