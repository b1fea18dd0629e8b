"""Prompts that a function makes (docs/own_code.md).

[data]
train_data = "digits:rows"
eval_data = "digits:rows"
"""

import random
from itertools import permutations

NUM_EVAL = 64
NUM_TRAIN = 2048


def rows(split: str) -> list[dict[str, str]]:
    """Return texts of five different digits to reverse: no text is in both splits, and each call returns the same."""
    texts = ["".join(digits) for digits in permutations("0123456789", 5)]
    random.Random(0).shuffle(texts)
    chosen = texts[:NUM_EVAL] if split == "test" else texts[NUM_EVAL : NUM_EVAL + NUM_TRAIN]
    return [{"prompt": f"{text}>", "answer": text[::-1]} for text in chosen]
