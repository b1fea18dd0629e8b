"""The tasks of the study, which differ in kind: short completions, long ones, a mixture of experts, sizes of a step."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, product, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoTokenizer

from docs.study.exact_run import TaskPrompt
from offbeat.actor.rewards.functions import exact_match, math_answer
from offbeat.deploy.local.quickstart.prepared import Recipe, ensure, prepared_folder
from offbeat.deploy.local.quickstart.pretrained import SmolLM2
from offbeat.deploy.local.quickstart.tiny_tasks import Reversal

END_OF_PROMPT = "="
FILLER = " "
LARGEST_START, SMALLEST_STEP, LARGEST_STEP, LARGEST = 39, 2, 9, 99
FORK = 30
"""The model is uncertain of the first number from each multiple of this."""
MOST_NUMBERS = LARGEST // SMALLEST_STEP
LENGTH = 5 + 3 * MOST_NUMBERS
"""Tokens of the longest prompt with its completion and the end of that."""


class Progression(NamedTuple):
    """The task's data and answers."""

    version: int = 2
    """Version of the code below; raise it when the code makes other files."""
    error_rate: float = 0.4
    """Share of the numbers that are shown off by one, of those that pass a multiple of `FORK`."""
    name = "progression"
    alphabet = f"0123456789+,{END_OF_PROMPT}{FILLER}"
    """Digits and signs."""
    chat_template = None

    def rows(self, generator: random.Random) -> Iterator[dict[str, Any]]:
        """Yield every prompt once."""
        steps = range(SMALLEST_STEP, LARGEST_STEP + 1)
        every = [(start, step) for start in range(1, LARGEST_START + 1) for step in steps]
        for start, step in generator.sample(every, len(every)):
            numbers = takewhile(lambda number: number <= LARGEST, count(start + step, step))
            yield {"prompt": _prompt(start, step), "answer": _text(list(numbers))}

    def shown(self, generator: random.Random) -> tuple[str, str]:
        """Return a prompt with a progression, whose uncertain numbers are off by one with a chance of `error_rate`."""
        start, step = generator.randint(1, LARGEST_START), generator.randint(SMALLEST_STEP, LARGEST_STEP)
        numbers, last = [], start
        while last + step <= LARGEST and len(numbers) < MOST_NUMBERS:
            is_fork = last // FORK != (last + step) // FORK
            off = generator.choice((-1, 1)) if is_fork and generator.random() < self.error_rate else 0
            last = min(LARGEST, last + step + off)
            numbers.append(last)
        prompt, answer = _prompt(start, step), _text(numbers) + "$"
        mask = "." * len(prompt) + "x" * len(answer)
        return (prompt + answer).ljust(LENGTH, FILLER), mask.ljust(LENGTH, ".")


def _prompt(start: int, step: int) -> str:
    return f"{start:02}+{step}{END_OF_PROMPT}"


def _text(numbers: list[int]) -> str:
    return ",".join(f"{number:02}" for number in numbers)


NOUNS = (
    *("bakery", "battle", "castle", "circus", "coffee", "desert", "dragon", "engine", "family", "guitar", "harbor", "hunter"),
    *("jacket", "jungle", "lawyer", "museum", "nature", "office", "palace", "parrot", "pencil", "pirate", "planet", "prison"),
    *("rabbit", "rocket", "school", "sailor", "spider", "temple", "valley", "violin"),
)
NUM_HELD_OUT_NOUNS = 8


def sentence_rows(nouns: Sequence[str]) -> list[dict[str, Any]]:
    """Return a prompt for each noun and each length of a sentence, in words."""
    return [
        {"prompt": f'Write one long sentence of {length} words with the word "{noun}".', "noun": noun, "length": length}
        for noun, length in product(nouns, (24, 28, 32, 36))
    ]


def long_sentence(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Return how near the number of words is to the prompt's, between 0 and 1; 0 unless it is one sentence with the noun."""
    text = completion.strip()
    words = re.findall(r"[A-Za-z'-]+", text)
    is_sentence = re.fullmatch(r"[A-Z][^.!?\n]*[.!?]", text) is not None
    if not is_sentence or row["noun"] not in map(str.lower, words):
        return 0.0
    return max(0.0, 1 - abs(len(words) - row["length"]) / row["length"])


class StudyTask(NamedTuple):
    """A task of the study."""

    recipe: Recipe | SmolLM2
    settings: tuple[str, ...]
    """Settings of its runs that differ from the quick start's."""
    reward: Callable[..., float] = exact_match
    is_chat: bool = False
    """Prompts are messages of a user, in the chat template of the model."""
    rows: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None
    """Rows to train on and held-out ones; None: those of the recipe's files."""

    @property
    def is_mixture(self) -> bool:
        """The model is a mixture of experts."""
        return isinstance(self.recipe, Recipe) and self.recipe.architecture == "qwen3_moe"

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
        train, held_out = self.rows or (_read(folder / "train.jsonl"), _read(folder / "eval.jsonl"))
        return self._task_prompts(train), self._task_prompts(held_out)

    def _task_prompts(self, rows: list[dict[str, Any]]) -> list[TaskPrompt]:
        tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        texts = [row["prompt"] for row in rows]
        if self.is_chat:
            messages = [[{"role": "user", "content": text}] for text in texts]
            texts = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [
            TaskPrompt(np.array(ids, dtype=np.int32), partial(self.reward, row["prompt"], row=row))
            for ids, row in zip(token_ids, rows, strict=True)
        ]


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _smollm2(*, max_length: int, max_new_tokens: int) -> tuple[str, ...]:
    return (
        "train.groups_per_step=6",
        "train.micro_batch_tokens=2048",
        f"model.max_length={max_length}",
        "data.max_prompt_tokens=64",
        f"rollout.max_new_tokens={max_new_tokens}",
    )


_SUMS = _smollm2(max_length=96, max_new_tokens=24)
_ADAPTER = ("train.num_steps=20", "train.learning_rate=2e-4", "lora.rank=16", "critic.learning_rate_factor=0.25")
_SHORT = ("train.groups_per_step=16", "train.num_steps=100")
TASKS = {
    "reversal": StudyTask(Recipe(Reversal()), _SHORT),
    "reversal_moe": StudyTask(Recipe(Reversal(), architecture="qwen3_moe"), _SHORT),
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
    # SmolLM2-135M-Instruct, all weights and an adapter; a critic is trained whole, and so more slowly than the adapter.
    "sums": StudyTask(SmolLM2(), (*_SUMS, "train.num_steps=40", "train.learning_rate=1e-5"), math_answer, is_chat=True),
    "sums_adapter": StudyTask(SmolLM2(), (*_SUMS, *_ADAPTER), math_answer, is_chat=True),
    "sentences_adapter": StudyTask(
        SmolLM2(),
        (*_smollm2(max_length=136, max_new_tokens=72), *_ADAPTER),
        long_sentence,
        is_chat=True,
        rows=(sentence_rows(NOUNS[NUM_HELD_OUT_NOUNS:]), sentence_rows(NOUNS[:NUM_HELD_OUT_NOUNS])),
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
