"""The tasks of the study, which differ in kind: short completions, long ones, a mixture of experts, sizes of a step."""

import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import AutoTokenizer

from offbeat.actor.rewards.functions import exact_match
from offbeat.deploy.local.quickstart.prepared import ensure, prepared_folder
from offbeat.deploy.local.quickstart.progression import LENGTH, Progression
from offbeat.deploy.local.quickstart.recipes import Recipe
from offbeat.deploy.local.quickstart.reversal import Reversal
from offbeat.lab.study.exact_run import TaskPrompt


class StudyTask(NamedTuple):
    """A task of the study."""

    recipe: Recipe
    settings: tuple[str, ...]
    """Settings of its runs that differ from the quick start's."""

    @property
    def model_path(self) -> str:
        """Folder of the model."""
        return str(prepared_folder(self.recipe) / "model")

    def make(self) -> None:
        """Make model and data on this machine unless they are there."""
        ensure(prepared_folder(self.recipe), self.recipe)

    def prompts(self) -> tuple[list[TaskPrompt], list[TaskPrompt]]:
        """Return the prompts to train on and the held-out ones."""
        folder = prepared_folder(self.recipe)
        return self._read(folder / "train.jsonl"), self._read(folder / "eval.jsonl")

    def _read(self, file: Path) -> list[TaskPrompt]:
        tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        token_ids = tokenizer([row["prompt"] for row in rows], add_special_tokens=False)["input_ids"]
        return [
            TaskPrompt(np.array(ids, dtype=np.int32), partial(_reward, row)) for ids, row in zip(token_ids, rows, strict=True)
        ]


_SHORT = ("train.groups_per_step=16", "train.num_steps=100")

TASKS = {
    "reversal": StudyTask(Recipe(Reversal()), _SHORT),
    "reversal_moe": StudyTask(Recipe(Reversal(), moe=True), _SHORT),
    "progression": StudyTask(
        Recipe(Progression(), warm_start_rows=16, warm_start_steps=800, num_eval=64),
        (
            "train.groups_per_step=8",
            "train.num_steps=100",
            # At the quick start's 2e-4 the reward begins to fall after 30 steps on-policy.
            "train.learning_rate=1e-4",
            f"model.max_length={16 + LENGTH}",
            f"rollout.max_new_tokens={LENGTH}",
        ),
    ),
    # As many completions as `reversal`, in steps of another size.
    **{
        f"reversal_batch{size}": StudyTask(
            Recipe(Reversal()), (f"train.groups_per_step={size}", f"train.num_steps={1600 // size}")
        )
        for size in (8, 32, 64)
    },
}
"""The tasks by name."""
MAIN_TASKS = ("reversal", "reversal_moe", "progression")
"""Tasks of a study that names none."""


def _reward(row: dict, completion: str) -> float:
    return exact_match(row["prompt"], completion, row)
