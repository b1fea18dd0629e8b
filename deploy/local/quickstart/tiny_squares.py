"""A tiny task with images, made on the spot: name the color of a square.

`python -m offbeat.deploy.local.quickstart.tiny_squares FOLDER` makes model and data for examples/squares_cpu.
"""

import json
import random
import sys
from pathlib import Path

COLORS = {"r": (220, 40, 40), "g": (40, 200, 60), "b": (50, 70, 230)}
"""The answers, and the colors that they name."""
SIDE = 56
"""Width and height of an image, in pixels."""
ALPHABET = "abcdefghijklmnopqrstuvwxyz?"


def make(folder: Path, *, num_train: int = 256, num_eval: int = 32, seed: int = 0) -> None:
    """Write a vision-language model and data into a folder; an existing model is kept."""
    from offbeat.deploy.local.quickstart.tiny_models import make_tiny_vision_model

    generator = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, number in (("train", num_train), ("eval", num_eval)):
        rows = [_row(folder, f"images/{name}-{index}.png", generator) for index in range(number)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if not (folder / "model" / "config.json").exists():
        make_tiny_vision_model(folder / "model", alphabet=ALPHABET, seed=seed)


def _row(folder: Path, path: str, generator: random.Random) -> dict[str, str]:
    """Draw a square of one color at a random place of a gray image."""
    from PIL import Image, ImageDraw

    answer = generator.choice(list(COLORS))
    image = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))
    side = generator.randint(SIDE // 3, SIDE // 2)
    left, top = generator.randint(0, SIDE - side), generator.randint(0, SIDE - side)
    ImageDraw.Draw(image).rectangle((left, top, left + side, top + side), fill=COLORS[answer])
    image.save(folder / path)
    return {"prompt": "<image>color?", "image": path, "answer": answer}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m offbeat.deploy.local.quickstart.tiny_squares FOLDER")
    from offbeat.common.processes.environment import prepare_environment

    prepare_environment()
    make(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
