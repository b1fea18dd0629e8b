"""A game of two look-ups: the smallest task that needs several turns, with a model that plays it right three times in ten.

The prompt is a key, `a:`. `?a` asks for its entry, which is another key; `?c` asks for that one's, a digit; `!7` answers. The
warm start shows games of all kinds: right ones, guesses, and ones that stop looking too early.
"""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

KEYS = "abcdefghij"
DIGITS = "0123456789"
MAX_TURNS = 4
NOTHING = "."
"""The answer to anything that is no key."""
FILLER = " "


class Lookup(NamedTuple):
    """The game's data and games."""

    version: int = 1
    """Version of the code below; raise it when the code makes other files."""

    @property
    def name(self) -> str:
        """The placeholder without braces."""
        return "lookup"

    @property
    def alphabet(self) -> str:
        """All characters of a game."""
        return f"{KEYS}{DIGITS}?!:{NOTHING}{FILLER}"

    @property
    def chat_template(self) -> None:
        """The environment adds raw text."""
        return None

    def rows(self, generator: random.Random) -> Iterator[dict[str, Any]]:
        """Yield games."""
        while True:
            yield make_row(generator)

    def shown(self, generator: random.Random) -> tuple[str, str]:
        """Return a game to learn from."""
        return shown_game(make_row(generator), generator)


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
