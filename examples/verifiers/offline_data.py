"""Write stand-ins for the datasets of reverse-text and alphabet-sort, for machines that cannot reach the Hugging Face Hub.

    python examples/verifiers/offline_data.py

`datasets` looks for a dataset in the current folder first. The texts are of two words, short enough for a small model.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORDS = (
    *("apple", "river", "bread", "horse", "storm", "music", "tiger", "cloud", "stone", "green", "paper", "light", "table"),
    *("ocean", "lemon", "piano", "chair", "happy", "small", "brave", "quiet", "sweet", "seven", "north", "metal", "candy"),
)
FIRST = (
    "Anna",
    "Boris",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Henry",
    "Irene",
    "Jonas",
    "Karla",
    "Louis",
    "Maria",
    "Nora",
)
LAST = (
    "Adler",
    "Brown",
    "Clark",
    "Dunn",
    "Evans",
    "Fisher",
    "Green",
    "Hill",
    "Irwin",
    "Jones",
    "King",
    "Lopez",
    "Moore",
    "Novak",
)


def write(dataset: str, rows: Iterable[dict[str, Any]]) -> None:
    file = Path(dataset, "train.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(file)


def main() -> None:
    random_numbers = random.Random(0)
    pairs = [f"{first} {second}" for first in WORDS for second in WORDS if first != second]
    random_numbers.shuffle(pairs)
    write("PrimeIntellect/Reverse-Text-RL", ({"prompt": pair} for pair in pairs))
    names = ([f"{random_numbers.choice(FIRST)} {last}" for last in random_numbers.sample(LAST, 5)] for _ in range(1000))
    write("kalomaze/alphabetic-arxiv-authors-it1", ({"names": row} for row in names))


if __name__ == "__main__":
    main()
