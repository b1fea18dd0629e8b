"""Small tasks with a model that nearly solves them, made on this machine at their first use and named by a placeholder.

`{quickstart}`, `{lookup}`, `{expressions}` and `{calculator}` each stand for a folder with `model/`, `train.jsonl` and
`eval.jsonl` below `XDG_CACHE_HOME`.
`python -m offbeat.deploy.local.quickstart.prepared` makes them and prints their paths.
"""

import hashlib
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from offbeat.common.processes.environment import prepare_environment
from offbeat.common.settings.config import Config
from offbeat.deploy.local.quickstart.calculator import Calculator
from offbeat.deploy.local.quickstart.expressions import Expressions
from offbeat.deploy.local.quickstart.lookup import Lookup
from offbeat.deploy.local.quickstart.recipes import Recipe
from offbeat.deploy.local.quickstart.reversal import Reversal

logger = logging.getLogger(__name__)


RECIPES = (Recipe(Reversal()), Recipe(Lookup()), Recipe(Expressions(), num_eval=128), Recipe(Calculator()))


def prepared_folder(recipe: Recipe) -> Path:
    """Return the folder of a recipe, whether it exists or not: below `XDG_CACHE_HOME`, else `~/.cache`."""
    digest = hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "offbeat" / f"{recipe.name}-{digest}"


def quickstart_folder() -> Path:
    """Return the folder of the quick start, whether it exists or not."""
    return prepared_folder(RECIPES[0])


def ensure(folder: Path, recipe: Recipe) -> bool:
    """Make `folder` unless it exists; return True when this call made it.

    The folder appears complete or not at all, also when several processes make it at the same time.
    """
    if folder.exists():
        return False
    logger.info("making the model and data of {%s}, once, in about ten seconds: %s", recipe.name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        prepare_environment()
        # mkdtemp makes folders that only their owner can read, but a cache may be shared.
        building.chmod(0o755)
        recipe.make(building)
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


def is_made(config: Config) -> bool:
    """Return whether every folder that a placeholder in the settings stands for exists."""
    return all(prepared_folder(recipe).exists() for recipe in RECIPES if _names(config, recipe))


def expand(config: Config) -> Config:
    """Replace the placeholders in the settings that may contain one; make the folders they stand for."""
    for recipe in RECIPES:
        if _names(config, recipe):
            folder = prepared_folder(recipe)
            ensure(folder, recipe)
            config = _replace(config, f"{{{recipe.name}}}", str(folder))
    return config


def _names(config: Config, recipe: Recipe) -> bool:
    return _replace(config, f"{{{recipe.name}}}", "") != config


def _replace(config: Config, placeholder: str, folder: str) -> Config:
    task = config.task
    # Named sets are the user's own.
    eval_data = task.eval_data.replace(placeholder, folder) if isinstance(task.eval_data, str) else task.eval_data
    return replace(
        config,
        model=replace(config.model, path=config.model.path.replace(placeholder, folder)),
        task=replace(task, train_data=task.train_data.replace(placeholder, folder), eval_data=eval_data),
    )


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
