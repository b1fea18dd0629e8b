"""A task of words: sentences with a given word and of a given number of words."""

import re
from itertools import product
from typing import Any

WORDS = (
    *("apple", "river", "teacher", "garden", "music", "winter", "doctor", "bread", "mountain", "letter", "horse", "market"),
    *("island", "candle", "bridge", "summer", "kitchen", "forest", "window", "train", "captain", "flower", "village", "storm"),
)
OTHER_WORDS = ("ocean", "farmer", "library", "bicycle", "castle", "dinner", "moon", "painter")
"""Words of held-out prompts."""
LENGTHS = range(4, 12)


def sentences(split: str) -> list[dict[str, Any]]:
    """Return the prompts of a split: each word with each length. The words of the two splits differ."""
    words = OTHER_WORDS if split == "test" else WORDS
    return [
        {"prompt": f'Write one sentence of exactly {length} words with the word "{word}".', "word": word, "length": length}
        for word, length in product(words, LENGTHS)
    ]


def sentence(prompt: str, completion: str, row: dict[str, Any]) -> dict[str, float]:
    """Return how near the completion is to the number of words, and whether it is one sentence with the word.

    Each part is between 0 and 1, and so is their sum. The number of words counts only in a sentence with the word, so that
    noise of the right length earns nothing.
    """
    text, length = completion.strip(), int(row["length"])
    words = re.findall(r"[A-Za-z'-]+", text)
    has_form = bool(re.fullmatch(r"[A-Z][^.!?\n]*[.!?]", text)) and str(row["word"]) in map(str.lower, words)
    return {"form": 0.3 * has_form, "length": 0.7 * has_form * max(0.0, 1 - abs(len(words) - length) / 3)}
