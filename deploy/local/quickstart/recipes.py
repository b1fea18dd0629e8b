"""A recipe: a task's rows, and a tiny model that was shown how to play it, well and badly."""

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from offbeat.deploy.local.quickstart.warm_start import warm_start


class Task(Protocol):
    """A task that a tiny model can learn. Its text, as `repr` writes it, is part of the folder's name."""

    @property
    def name(self) -> str:
        """The placeholder without braces."""
        ...

    @property
    def alphabet(self) -> Sequence[str]:
        """The texts that are tokens of the model."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's template; None for a model without one."""
        ...

    def rows(self, generator: random.Random) -> Iterator[dict[str, Any]]:
        """Yield rows of the data, as many as there are."""
        ...

    def shown(self, generator: random.Random) -> tuple[Sequence[str], str]:
        """Return an example for the warm start: its tokens (`$` ends a turn), and a mask with an `x` at each to learn."""
        ...


class Recipe(NamedTuple):
    """The parameters of a task's data and model."""

    task: Task
    seed: int = 0
    warm_start_steps: int = 400
    """Number of supervised optimizer steps."""
    warm_start_rows: int = 64
    """Number of examples in one supervised step."""
    num_train: int = 8192
    """Largest number of rows in train.jsonl."""
    num_eval: int = 256
    """Number of rows in eval.jsonl."""
    moe: bool = False
    """The model is a mixture of experts."""

    @property
    def name(self) -> str:
        """The placeholder without braces."""
        return f"{self.task.name}_moe" if self.moe else self.task.name

    def make(self, folder: Path) -> None:
        """Write model/, train.jsonl and eval.jsonl."""
        generator = random.Random(self.seed)
        lines = [msgspec.json.encode(row) + b"\n" for row in islice(self.task.rows(generator), self.num_train + self.num_eval)]
        (folder / "eval.jsonl").write_bytes(b"".join(lines[: self.num_eval]))
        (folder / "train.jsonl").write_bytes(b"".join(lines[self.num_eval :]))
        batches = ([self.task.shown(generator) for _ in range(self.warm_start_rows)] for _ in range(self.warm_start_steps))
        warm_start(
            folder / "model",
            batches,
            num_steps=self.warm_start_steps,
            alphabet=self.task.alphabet,
            chat_template=self.task.chat_template,
            seed=self.seed,
            moe=self.moe,
        )
