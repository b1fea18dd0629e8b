"""A game of two look-ups: the smallest task that needs several turns, with a model that plays it right three times in ten.

The prompt is a key, `a:`. `?a` asks for its entry, which is another key; `?c` asks for that one's, a digit; `!7` answers. The
warm start shows games of all kinds: right ones, guesses, and ones that stop looking too early.
"""

import random
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.deploy.quickstart.warm_start import warm_start, write_rows

KEYS = "abcdefghij"
DIGITS = "0123456789"
MAX_TURNS = 4
NOTHING = "."
"""The answer to anything that is no key."""
FILLER = " "


class LookupRecipe(NamedTuple):
    """The parameters of the data and the model."""

    version: int = 1
    """Version of the code below; raise it when the code makes other files."""
    seed: int = 0
    warm_start_steps: int = 400
    """Number of supervised optimizer steps."""
    warm_start_rows: int = 64
    """Number of games in one supervised step."""
    num_train: int = 8192
    """Number of rows in train.jsonl."""
    num_eval: int = 256
    """Number of rows in eval.jsonl."""

    @property
    def name(self) -> str:
        """The placeholder without braces."""
        return "lookup"

    def make(self, folder: Path) -> None:
        """Write model/, train.jsonl and eval.jsonl."""
        generator = random.Random(self.seed)
        rows = (make_row(generator) for _ in range(self.num_train + self.num_eval))
        write_rows(folder / "eval.jsonl", islice(rows, self.num_eval))
        write_rows(folder / "train.jsonl", rows)
        batches = (
            [shown_game(make_row(generator), generator) for _ in range(self.warm_start_rows)]
            for _ in range(self.warm_start_steps)
        )
        alphabet = f"{KEYS}{DIGITS}?!:{NOTHING}{FILLER}"
        warm_start(folder / "model", batches, num_steps=self.warm_start_steps, alphabet=alphabet, seed=self.seed)


def make_row(generator: random.Random) -> dict[str, Any]:
    """Return a game: the prompt, the table, and the digit that two look-ups find."""
    first, second = generator.sample(KEYS, 2)
    table = {key: generator.choice(KEYS) if generator.random() < 0.5 else generator.choice(DIGITS) for key in KEYS}
    table |= {first: second, second: generator.choice(DIGITS)}
    return {"prompt": f"{first}:", "table": table, "answer": table[second]}


def shown_game(row: dict[str, Any], generator: random.Random) -> tuple[str, str]:
    """Return a game as text, and a mask with an `x` at each character that a player writes.

    A quarter of the games is right, a quarter stops after the first look-up, a quarter looks up at random, a quarter guesses.
    """
    prompt, table = row["prompt"], row["table"]
    kind = generator.randrange(4)
    first = prompt[0]
    keys = (
        [first, table[first]],
        [first],
        generator.choices(KEYS, k=generator.randrange(1, MAX_TURNS)),
        [],
    )[kind]
    found = [table[key] for key in keys]
    digit = found[-1] if found and found[-1] in DIGITS else generator.choice(DIGITS)
    looked = "".join(f"?{key}{entry}" for key, entry in zip(keys, found, strict=True))
    text = f"{prompt}{looked}!{digit}"
    mask = "." * len(prompt) + "xx." * len(keys) + "xx"
    length = len(prompt) + 3 * MAX_TURNS - 1
    return text.ljust(length, FILLER), mask.ljust(length, ".")
