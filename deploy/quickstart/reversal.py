"""The quick start's task: reverse five digits, with a model that does so in about one answer of five.

A prompt is five different digits and `>`. The warm start teaches the model four answers (the digits reversed, copied, rotated
left, rotated right) with equal probability. Reinforcement learning then rewards only the reversal.
"""

import random
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from offbeat.deploy.quickstart.warm_start import warm_start, write_rows

END_OF_PROMPT = ">"


class ReversalRecipe(NamedTuple):
    """The parameters of the data and the model."""

    version: int = 2
    """Version of the code below; raise it when the code makes other files."""
    seed: int = 0
    alphabet: str = "0123456789abcdefghijklmnopqrstuvwxyz+-=" + END_OF_PROMPT
    """Characters the model knows."""
    task_characters: str = "0123456789"
    """Characters of the prompts; each occurs at most once in a prompt."""
    length: int = 5
    """Number of characters of a prompt before `>`, and of an answer."""
    warm_start_steps: int = 400
    """Number of supervised optimizer steps."""
    warm_start_rows: int = 64
    """Number of rows in one supervised step."""
    num_train: int = 8192
    """Number of rows in train.jsonl; none of them is in eval.jsonl."""
    num_eval: int = 256
    """Number of rows in eval.jsonl."""

    @property
    def name(self) -> str:
        """The placeholder without braces."""
        return "quickstart"

    def make(self, folder: Path) -> None:
        """Write model/, train.jsonl and eval.jsonl."""
        generator = random.Random(self.seed)
        texts: dict[str, None] = {}
        while len(texts) < self.num_train + self.num_eval:
            texts[self._text(generator)] = None
        rows = ({"prompt": text + END_OF_PROMPT, "answer": answers(text)[0]} for text in texts)
        write_rows(folder / "eval.jsonl", islice(rows, self.num_eval))
        write_rows(folder / "train.jsonl", rows)
        batches = ([self._supervised(generator) for _ in range(self.warm_start_rows)] for _ in range(self.warm_start_steps))
        warm_start(folder / "model", batches, num_steps=self.warm_start_steps, alphabet=self.alphabet, seed=self.seed)

    def _text(self, generator: random.Random) -> str:
        return "".join(generator.sample(self.task_characters, k=self.length))

    def _supervised(self, generator: random.Random) -> tuple[str, str]:
        prompt = self._text(generator)
        answer = generator.choice(answers(prompt)) + "$"
        return prompt + END_OF_PROMPT + answer, "." * (len(prompt) + 1) + "x" * len(answer)


def answers(text: str) -> tuple[str, str, str, str]:
    """Return the four answers that the warm start teaches for a prompt; the first, the reversal, is rewarded later."""
    return text[::-1], text, text[1:] + text[:1], text[-1:] + text[:-1]
