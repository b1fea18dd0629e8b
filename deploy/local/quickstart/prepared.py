"""Models and tasks that are made on this machine at their first use, below `XDG_CACHE_HOME`.

`{quickstart}`, `{quickstart_qwen3_5}`, `{lookup}`, `{expressions}`, `{calculator}`, `{gsm8k}`, `{squares}` and `{smollm2}` each
stand for a folder with `model/`, `train.jsonl` and `eval.jsonl`. The recipe of `{smollm2}` brings a pretrained model, those of
`{gsm8k}` and `{squares}` make a random one. The others are a task's rows, and a tiny model that was shown how to play it, well
and badly. A GGUF file at `model.path` becomes a model folder.
`python -m offbeat.deploy.local.quickstart.prepared` makes them and prints their paths.
"""

import errno
import fcntl
import hashlib
import logging
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace
from safetensors import SafetensorError

from offbeat.common.errors import SettingError
from offbeat.common.processes.environment import prepare_environment
from offbeat.common.processes.files import cache_folder
from offbeat.common.records.logs import doing
from offbeat.common.settings.config import Config
from offbeat.deploy.local.quickstart.pretrained import SmolLM2, convert, gguf_file, hash_file
from offbeat.deploy.local.quickstart.stand_ins import GSM8K, SQUARES, StandIn
from offbeat.deploy.local.quickstart.tiny_tasks import Calculator, Expressions, Lookup, Reversal

logger = logging.getLogger(__name__)


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
    architecture: Literal["qwen3", "qwen3_moe", "qwen3_5"] = "qwen3"
    """The model's family."""

    @property
    def name(self) -> str:
        """The placeholder without braces."""
        return self.task.name + {"qwen3": "", "qwen3_moe": "_moe", "qwen3_5": "_qwen3_5"}[self.architecture]

    @property
    def what(self) -> str:
        """The folder's content, in a log line."""
        return f"the model and data of {{{self.name}}}"

    def make(self, folder: Path, say: Callable[[str], None]) -> None:
        """Write model/, train.jsonl and eval.jsonl. `say` gets the stage for the log."""
        say("loading PyTorch")
        generator = random.Random(self.seed)
        lines = [msgspec.json.encode(row) + b"\n" for row in islice(self.task.rows(generator), self.num_train + self.num_eval)]
        (folder / "eval.jsonl").write_bytes(b"".join(lines[: self.num_eval]))
        (folder / "train.jsonl").write_bytes(b"".join(lines[self.num_eval :]))

        def batches() -> Iterator[list[tuple[Sequence[str], str]]]:
            for step in range(self.warm_start_steps):
                say(f"step {step} of {self.warm_start_steps}")
                yield [self.task.shown(generator) for _ in range(self.warm_start_rows)]

        warm_start(folder / "model", self, batches())


class GgufRecipe(NamedTuple):
    """The model folder of a GGUF file."""

    file: Path
    dtype: str
    """torch dtype of the folder's weights, without its prefix."""
    digest: str
    """Hash of the file's content."""

    @property
    def name(self) -> str:
        """The first part of the folder's name."""
        return self.file.stem

    @property
    def what(self) -> str:
        """The folder's content, in a log line."""
        return f"a model folder of {self.file}, with weights of {self.dtype}"

    def make(self, folder: Path, say: Callable[[str], None]) -> None:
        """Write model/. `say` gets the stage for the log. Raise `SettingError`."""
        say("reading")
        convert(self.file, folder / "model", self.dtype)


AnyRecipe = Recipe | StandIn | SmolLM2 | GgufRecipe
RECIPES = (
    Recipe(Reversal()),
    Recipe(Reversal(), architecture="qwen3_5"),
    Recipe(Lookup()),
    Recipe(Expressions(), num_eval=128),
    Recipe(Calculator()),
    GSM8K,
    SQUARES,
    SmolLM2(),
)


def prepared_folder(recipe: AnyRecipe) -> Path:
    """Return the folder of a recipe, whether it exists or not: below `XDG_CACHE_HOME`, else `~/.cache`."""
    text = recipe.digest + recipe.dtype if isinstance(recipe, GgufRecipe) else repr(recipe)
    return cache_folder() / f"{recipe.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def ensure(folder: Path, recipe: AnyRecipe) -> bool:
    """Make `folder` unless it exists; return True when this call made it.

    The folder appears complete or not at all. Other processes that want the same one wait for it.
    """
    if folder.exists():
        return False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f"{folder.name}.lock").open("w")
    except OSError as error:
        raise _cannot_make(recipe, folder, str(error.strerror)) from error
    partial = folder.with_name(f"{folder.name}.partial")
    said: list[str] = []
    what = f"making {recipe.what}, once for this machine, in {folder}"
    with lock, doing(logger, what, lambda: f", {said[-1]}" if said else ""):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return False
        # A process may have been killed while it made the folder.
        shutil.rmtree(partial, ignore_errors=True)
        prepare_environment()
        try:
            partial.mkdir()
            recipe.make(partial, said.append)
            partial.rename(folder)
        except SafetensorError as error:
            raise _cannot_make(recipe, folder, str(error)) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _cannot_make(recipe, folder, str(error.strerror)) from error
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return True


def _cannot_make(recipe: AnyRecipe, folder: Path, reason: str) -> SettingError:
    problem = f"{recipe.what} cannot be made in {folder.parent} ({reason})"
    cure = "Set the variable to a folder that you may write to, and that has room."
    return SettingError("environment variable XDG_CACHE_HOME", str(folder.parents[1]), problem, cure)


def expand(config: Config) -> Config:
    """Return the settings with folders for placeholders and for a GGUF file; make those folders. Raise `SettingError`."""
    recipes = _recipes(config)
    for recipe in recipes:
        ensure(prepared_folder(recipe), recipe)
    return _with_folders(config, recipes)


def expand_made(config: Config) -> Config | None:
    """Return what `expand` returns, if every folder exists; else None. Makes nothing."""
    recipes = _recipes(config)
    return _with_folders(config, recipes) if all(prepared_folder(recipe).exists() for recipe in recipes) else None


def _with_folders(config: Config, recipes: Sequence[AnyRecipe]) -> Config:
    for recipe in recipes:
        folder = prepared_folder(recipe)
        if isinstance(recipe, GgufRecipe):
            config = replace(config, model=replace(config.model, path=str(folder / "model")))
        else:
            config = _replace(config, f"{{{recipe.name}}}", str(folder))
    return config


def _recipes(config: Config) -> list[AnyRecipe]:
    """Return the recipes of all folders that the settings ask for."""
    named: list[AnyRecipe] = [recipe for recipe in RECIPES if _replace(config, f"{{{recipe.name}}}", "") != config]
    file = gguf_file(config.model.path)
    return named if file is None else [*named, GgufRecipe(file, config.model.dtype, hash_file(file))]


def _replace(config: Config, placeholder: str, folder: str) -> Config:
    data = config.data
    # Named sets are the user's own.
    eval_data = data.eval_data.replace(placeholder, folder) if isinstance(data.eval_data, str) else data.eval_data
    return replace(
        config,
        model=replace(config.model, path=config.model.path.replace(placeholder, folder)),
        data=replace(data, train_data=data.train_data.replace(placeholder, folder), eval_data=eval_data),
    )


LEARNING_RATE = 2e-3
"""Peak, reached after twenty steps; then it falls linearly to 0."""


def warm_start(folder: Path, recipe: Recipe, batches: Iterable[Sequence[tuple[Sequence[str], str]]]) -> None:
    """Train a random tiny model whose tokens are the texts of the task's alphabet, and save it in `folder`.

    The `batches`, one for each step, hold examples of one length, each with a mask: the model learns to write the tokens below
    an `x`, after those before. The token `$` is the end of a turn.
    """
    # Imported here: they take seconds, and only the first run on this machine needs them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from offbeat.deploy.local.quickstart.tiny_models import EOS, make_tiny_model

    transformers_logging.disable_progress_bar()
    task, num_steps = recipe.task, recipe.warm_start_steps
    make_tiny_model(
        folder, alphabet=task.alphabet, chat_template=task.chat_template, architecture=recipe.architecture, seed=recipe.seed
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1.0) * (1.0 - step / num_steps))
    # One thread sums in a fixed order, so the weights are reproducible; more threads are not faster at this size.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for batch in batches:
            named = ([EOS if token == "$" else token for token in tokens] for tokens, _ in batch)
            token_ids = torch.tensor([tokenizer.convert_tokens_to_ids(tokens) for tokens in named])
            mask = torch.tensor([[one == "x" for one in mask] for _, mask in batch])
            logits = model(token_ids[:, :-1]).logits
            torch.nn.functional.cross_entropy(logits[mask[:, 1:]], token_ids[:, 1:][mask[:, 1:]]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    finally:
        torch.set_num_threads(num_threads)
    model.save_pretrained(folder)


def main() -> None:
    """Make every folder and print its path."""
    prepare_environment()
    for recipe in RECIPES:
        folder = prepared_folder(recipe)
        started = time.monotonic()
        made = ensure(folder, recipe)
        print(f"{{{recipe.name}}} {'made' if made else 'found'} in {time.monotonic() - started:.1f} s: {folder}")


if __name__ == "__main__":
    main()
