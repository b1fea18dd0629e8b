"""Data and random models in the place of real ones, for examples on machines that cannot reach the Hugging Face Hub.

| placeholder | in the place of | what a run shows |
|---|---|---|
| `{gsm8k}` | GSM8K and Qwen3 | the whole path of such a run: chat template, mathematical reward; the model learns nothing |
| `{squares}` | a vision-language task | a model that learns to name the color of a square |
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
THINGS = ("apples", "books", "clips", "marbles", "stamps", "tickets")
COLORS = {"r": (220, 40, 40), "g": (40, 200, 60), "b": (50, 70, 230)}
"""The answers about squares, and the colors that they name."""
SIDE = 56
"""Width and height of an image, in pixels."""
ALPHABET = "abcdefghijklmnopqrstuvwxyz?"
"""Characters of the model that sees squares."""


class StandIn(NamedTuple):
    """A recipe: its text is part of the folder's name."""

    name: str
    """The placeholder without braces."""
    num_train: int
    num_eval: int
    version: int = 1
    """Version of the code below; raise it when the code makes other files."""

    @property
    def what(self) -> str:
        """The folder's content, in a log line."""
        return f"a random model and the data of {{{self.name}}}"

    def make(self, folder: Path, say: Callable[[str], None]) -> None:
        """Write model/, train.jsonl and eval.jsonl. `say` gets the stage for the log."""
        say("loading PyTorch")
        from offbeat.deploy.local.quickstart.tiny_models import make_tiny_bpe_model, make_tiny_vision_model

        generator = random.Random(0)
        places = [f"{part}-{index}" for part, n in (("eval", self.num_eval), ("train", self.num_train)) for index in range(n)]
        if self.name == "squares":
            (folder / "images").mkdir()
            rows = [_square(folder, f"images/{place}.png", generator) for place in places]
            make_tiny_vision_model(folder / "model", alphabet=ALPHABET, seed=0)
        else:
            rows = [_sale(generator) for _ in places]
            make_tiny_bpe_model(folder / "model", [text for row in rows for text in row.values()], vocab_size=512, seed=0)
        lines = [msgspec.json.encode(row) + b"\n" for row in rows]
        (folder / "eval.jsonl").write_bytes(b"".join(lines[: self.num_eval]))
        (folder / "train.jsonl").write_bytes(b"".join(lines[self.num_eval :]))


GSM8K = StandIn("gsm8k", num_train=512, num_eval=64)
SQUARES = StandIn("squares", num_train=256, num_eval=32)


def _sale(generator: random.Random) -> dict[str, str]:
    """Return a row in GSM8K's format."""
    name, thing = generator.choice(PEOPLE), generator.choice(THINGS)
    first, factor = generator.randint(2, 50), generator.randint(2, 5)
    second = first * factor
    return {
        "question": f"{name} sold {first} {thing} in April, and {factor} times as many in May. "
        f"How many {thing} did {name} sell altogether in April and May?",
        "answer": f"{name} sold {first} * {factor} = {second} {thing} in May.\n"
        f"Altogether that is {first} + {second} = {first + second}.\n#### {first + second}",
    }


def _square(folder: Path, path: str, generator: random.Random) -> dict[str, str]:
    """Draw a square of one color at a random place of a gray image; return its row."""
    from PIL import Image, ImageDraw

    answer = generator.choice(list(COLORS))
    image = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))
    side = generator.randint(SIDE // 3, SIDE // 2)
    left, top = generator.randint(0, SIDE - side), generator.randint(0, SIDE - side)
    ImageDraw.Draw(image).rectangle((left, top, left + side, top + side), fill=COLORS[answer])
    image.save(folder / path)
    return {"prompt": "<image>color?", "image": path, "answer": answer}
