"""A stand-in for GSM8K and Qwen3 on machines that cannot reach the Hugging Face Hub.

`python -m offbeat.deploy.local.quickstart.tiny_gsm8k FOLDER` makes it for gsm8k_cpu.toml.

The rows have GSM8K's format and the model a chat template, so the whole path of a GSM8K run is exercised. The model is
random and far too small to learn the task.
"""

import random
import sys
from pathlib import Path

import msgspec

from offbeat.common.processes.environment import prepare_environment

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
THINGS = ("apples", "books", "clips", "marbles", "stamps", "tickets")


def make(folder: Path, *, num_train: int = 512, num_eval: int = 64, seed: int = 0) -> None:
    """Write model/, train.jsonl and eval.jsonl."""
    from offbeat.deploy.local.quickstart.tiny_models import make_tiny_bpe_model

    generator = random.Random(seed)
    rows = [_row(generator) for _ in range(num_train + num_eval)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows[num_eval:]))
    (folder / "eval.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows[:num_eval]))
    make_tiny_bpe_model(folder / "model", [text for row in rows for text in row.values()], vocab_size=512, seed=seed)


def _row(generator: random.Random) -> dict[str, str]:
    name, thing = generator.choice(NAMES), generator.choice(THINGS)
    first, factor = generator.randint(2, 50), generator.randint(2, 5)
    second = first * factor
    return {
        "question": f"{name} sold {first} {thing} in April, and {factor} times as many in May. "
        f"How many {thing} did {name} sell altogether in April and May?",
        "answer": f"{name} sold {first} * {factor} = {second} {thing} in May.\n"
        f"Altogether that is {first} + {second} = {first + second}.\n#### {first + second}",
    }


def main() -> None:
    """Make the folder that the command line names."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m offbeat.deploy.local.quickstart.tiny_gsm8k FOLDER")
    prepare_environment()
    folder = Path(sys.argv[1])
    make(folder)
    print(f"made {folder}/model, {folder}/train.jsonl and {folder}/eval.jsonl")


if __name__ == "__main__":
    main()
