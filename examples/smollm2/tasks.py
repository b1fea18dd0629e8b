"""The two tasks of SmolLM2: sums, whose prompts come with the model, and sentences of a given number of words."""

import re
from collections.abc import Iterator, Mapping
from itertools import product

WORDS = (
    *("apple", "river", "teacher", "garden", "music", "winter", "doctor", "bread", "mountain", "letter", "horse", "market"),
    *("island", "candle", "bridge", "summer", "kitchen", "forest", "window", "train", "captain", "flower", "village", "storm"),
)
OTHER_WORDS = ("ocean", "farmer", "library", "bicycle", "castle", "dinner", "moon", "painter")
"""Words of held-out prompts."""
LENGTHS = range(4, 12)


def last_number(prompt: str, completion: str, row: Mapping[str, str]) -> float:
    """Return 1 if the last number of the completion is the answer, else 0."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and numbers[-1] == row["answer"])


def sentences() -> Iterator[dict[str, object]]:
    """Yield the prompts to train on."""
    return map(_row, product(WORDS, LENGTHS))


def other_sentences() -> Iterator[dict[str, object]]:
    """Yield the held-out prompts: the same lengths, other words."""
    return map(_row, product(OTHER_WORDS, LENGTHS))


def sentence(prompt: str, completion: str, row: Mapping[str, str | int]) -> dict[str, float]:
    """Return how near the completion is to the number of words, and whether it is one sentence with the word.

    Each part is between 0 and 1, and so is their sum. The number of words counts only in a sentence with the word, so that
    noise of the right length earns nothing.
    """
    text, length = completion.strip(), int(row["length"])
    words = re.findall(r"[A-Za-z'-]+", text)
    has_form = bool(re.fullmatch(r"[A-Z][^.!?\n]*[.!?]", text)) and str(row["word"]) in map(str.lower, words)
    return {"form": 0.3 * has_form, "length": 0.7 * has_form * max(0.0, 1 - abs(len(words) - length) / 3)}


def _row(pair: tuple[str, int]) -> dict[str, object]:
    word, length = pair
    return {"prompt": f'Write one sentence of exactly {length} words with the word "{word}".', "word": word, "length": length}
