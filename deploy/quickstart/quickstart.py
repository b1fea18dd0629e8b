"""The quick start: a task, its data, and a model that nearly solves it, made on this machine in seconds.

A prompt is five different digits and `>`. A short supervised warm start teaches the model four answers (the digits reversed,
copied, rotated left, rotated right) with equal probability, so that about one sampled answer in five is the reversal.
Reinforcement learning then rewards only the reversal. `python -m offbeat.deploy.quickstart.quickstart` makes the folder and
prints its path.
"""

import hashlib
import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from offbeat.common.config import Config
from offbeat.common.environment import prepare_environment

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PLACEHOLDER = "{quickstart}"
"""Stands for `quickstart_folder()` in `model.path`, `task.train_data` and `task.eval_data`."""

END_OF_PROMPT = ">"


class Recipe(NamedTuple):
    """The parameters of the data and the model; their hash is part of the folder's name."""

    version: int = 1
    """Version of the code below; raise it when the code makes other files."""
    seed: int = 0
    alphabet: str = "0123456789abcdefghijklmnopqrstuvwxyz+-=" + END_OF_PROMPT
    """Characters the model knows."""
    task_characters: str = "0123456789"
    """Characters of the prompts; each occurs at most once in a prompt."""
    length: int = 5
    """Number of characters of a prompt before `>`, and of an answer."""
    warm_start_steps: int = 400
    """Number of supervised optimizer steps."""
    warm_start_rows: int = 64
    """Number of rows in one supervised step."""
    learning_rate: float = 2e-3
    """Peak learning rate, reached after twenty steps; then the rate falls linearly to 0."""
    num_train: int = 8192
    """Number of rows in train.jsonl; none of them is in eval.jsonl."""
    num_eval: int = 256
    """Number of rows in eval.jsonl."""


def quickstart_folder(recipe: Recipe = Recipe()) -> Path:  # noqa: B008, a NamedTuple of constants
    """Return the folder of this recipe, whether it exists or not: below `XDG_CACHE_HOME`, else `~/.cache`."""
    digest = hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "offbeat" / f"quickstart-{digest}"


def ensure(folder: Path, recipe: Recipe = Recipe()) -> bool:  # noqa: B008
    """Make `folder` (model/, train.jsonl, eval.jsonl) unless it exists; return True when this call made it.

    The folder appears complete or not at all, also when several processes make it at the same time.
    """
    if folder.exists():
        return False
    logger.info("making the quick start's model and data, once, in about ten seconds: %s", folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        prepare_environment()
        _make(building, recipe)
        try:
            building.rename(folder)
        except OSError:
            # Another process was first; its files are the same.
            if not folder.exists():
                raise
            return False
        return True
    finally:
        shutil.rmtree(building, ignore_errors=True)


def expand(config: Config) -> Config:
    """Replace `{quickstart}` in the settings that may contain it; make the folder if one does."""
    eval_data = config.task.eval_data
    # Named sets are the user's own.
    values = (config.model.path, config.task.train_data, eval_data if isinstance(eval_data, str) else "")
    if not any(PLACEHOLDER in value for value in values):
        return config
    folder = quickstart_folder()
    ensure(folder)
    path, train_data, of_evaluation = (value.replace(PLACEHOLDER, str(folder)) for value in values)
    if isinstance(eval_data, str):
        eval_data = of_evaluation
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=path),
        task=msgspec.structs.replace(config.task, train_data=train_data, eval_data=eval_data),
    )


def answers(text: str) -> tuple[str, str, str, str]:
    """Return the four answers that the warm start teaches for a prompt; the first, the reversal, is rewarded later."""
    return text[::-1], text, text[1:] + text[:1], text[-1:] + text[:-1]


def _make(folder: Path, recipe: Recipe) -> None:
    # mkdtemp makes folders that only their owner can read, but a cache may be shared.
    folder.chmod(0o755)
    generator = random.Random(recipe.seed)
    texts: dict[str, None] = {}
    while len(texts) < recipe.num_train + recipe.num_eval:
        texts[_random_text(generator, recipe)] = None
    rows = iter(texts)
    _write_rows(folder / "eval.jsonl", rows, recipe.num_eval)
    _write_rows(folder / "train.jsonl", rows, recipe.num_train)
    _warm_start(folder / "model", recipe, generator)


def _random_text(generator: random.Random, recipe: Recipe) -> str:
    return "".join(generator.sample(recipe.task_characters, k=recipe.length))


def _write_rows(path: Path, texts: Iterator[str], num_rows: int) -> None:
    with path.open("wb") as file:
        for text in islice(texts, num_rows):
            row = {"prompt": text + END_OF_PROMPT, "answer": answers(text)[0]}
            file.write(msgspec.json.encode(row) + b"\n")


def _warm_start(folder: Path, recipe: Recipe, generator: random.Random) -> None:
    """Train a random tiny model on one of the four answers at random, and save it."""
    # Imported here: they take seconds, and only the first run on this machine needs them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from offbeat.deploy.quickstart.tiny_models import make_tiny_model

    transformers_logging.disable_progress_bar()
    make_tiny_model(folder, alphabet=recipe.alphabet, seed=recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1.0) * (1.0 - step / recipe.warm_start_steps)
    )
    # One thread sums in a fixed order, so the weights are reproducible; more threads are not faster at this size.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(recipe.warm_start_steps):
            rows = [_supervised_row(generator, recipe) for _ in range(recipe.warm_start_rows)]
            token_ids = torch.tensor(tokenizer([prompt + answer for prompt, answer in rows]).input_ids)
            end = torch.full((len(rows), 1), tokenizer.eos_token_id)
            _supervised_loss(model, torch.cat([token_ids, end], dim=1), recipe.length + 1).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    finally:
        torch.set_num_threads(num_threads)
    model.save_pretrained(folder)


def _supervised_row(generator: random.Random, recipe: Recipe) -> tuple[str, str]:
    text = _random_text(generator, recipe)
    return text + END_OF_PROMPT, generator.choice(answers(text))


def _supervised_loss(model: "torch.nn.Module", token_ids: "torch.Tensor", prompt_length: int) -> "torch.Tensor":
    """Return the mean negative log-prob of the tokens after the prompt, for `token_ids` `[rows, tokens]` without padding."""
    import torch

    logits = model(token_ids[:, :-1]).logits[:, prompt_length - 1 :]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, prompt_length:].flatten())


def main() -> None:
    """Make the quick start's folder and print its path."""
    prepare_environment()
    folder = quickstart_folder()
    started = time.monotonic()
    made = ensure(folder)
    print(f"quick start {'made' if made else 'found'} in {time.monotonic() - started:.1f} s: {folder}")


if __name__ == "__main__":
    main()
