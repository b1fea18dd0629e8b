"""Prompts: the rows of the task's data, rendered and checked, ready to be leased."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from offbeat.common.errors import SettingError
from offbeat.common.models.images import ImageFile, ImageReader
from offbeat.common.settings.config import NO_ENVIRONMENT, DataSection, Environment, eval_sets, eval_setting
from offbeat.common.user_code.environment_function import with_tools
from offbeat.learner.leases.data_rows import DataRow, read_rows
from offbeat.learner.leases.rendering import image_folder, render, render_with_images
from offbeat.protocols.fields import MAX_PARTS, PART_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_LEASE_ATTEMPTS = 3
"""Failed leases (reward errors) after which a prompt is dropped. Leases lost with an actor count for themselves, and late ones
only in an evaluation, which must end."""
MUCH_LEFT_OUT = 0.05
"""Share of rows left out as too long above which the user is warned."""
MUCH_UNKNOWN = 0.1
"""Share of tokens that the tokenizer does not know above which the user is warned."""
_SHOWN_CHARACTERS = 1000


class Prompt(NamedTuple):
    """One row of the data, ready to be leased."""

    prompt_id: int
    """Index into the list that `load_prompts` returns; rows left out are not counted."""
    text: str
    """The row's prompt field, before the chat template."""
    token_ids: NDArray[np.int32]
    """`[num_tokens]`, the chat template and the tokenizer's own special tokens included."""
    row: str
    """The whole row as a JSON object, for the reward."""
    weight: float = 1.0
    """Weight of its groups in the loss (`data.weight_field`)."""
    task: str = ""
    """Name of its task (`data.task_field`); empty where tasks are not told apart."""
    data_set: str = ""
    """Name of its set in `data.eval_data`; empty for a prompt of no named set."""
    images: tuple[ImageFile, ...] = ()
    """The images of the prompt, in the order of their tokens."""

    @property
    def content_hash(self) -> int:
        """A 64-bit hash of the row, of the tokens that it became, of its weight, and of its images."""
        content = b"%b%b%r" % (self.row.encode(), self.token_ids.tobytes(), self.weight)
        return xxhash.xxh3_64_intdigest(content + b"".join(b"%r" % image.hash for image in self.images))


class Prompts(NamedTuple):
    """The prompts of a run, each at the index that is its `prompt_id`, and the text of its tokens."""

    train: Sequence[Prompt]
    evaluation: Sequence[Prompt]
    decode: Callable[[Sequence[int]], str]
    """Returns the text of token ids, with special tokens. The hub's thread and the training thread call it."""


class LoadedPrompts(NamedTuple):
    """The result of `load_prompts`."""

    prompts: list[Prompt]
    num_dropped: int
    """Rows left out because their prompt is longer than `data.max_prompt_tokens`."""

    @property
    def share_dropped(self) -> float:
        """Share of the rows that were left out, 0 to 1."""
        return self.num_dropped / (len(self.prompts) + self.num_dropped)

    def dropped_text(self) -> str:
        """Return the number and share of the rows left out, in words."""
        num_rows = len(self.prompts) + self.num_dropped
        share = f"{self.num_dropped} of {num_rows} prompts ({self.share_dropped:.0%})"
        return f"{share} are left out because they are longer than data.max_prompt_tokens"

    def first_text(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the first prompt as the model will see it, shortened."""
        first = str(tokenizer.decode(self.prompts[0].token_ids.tolist()))
        return first if len(first) <= _SHOWN_CHARACTERS else f"{first[:_SHOWN_CHARACTERS]}..."

    def unknown_text(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """Return in words how many of the prompts' tokens the tokenizer does not know; None for few."""
        num_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_unknown = sum(int(np.count_nonzero(prompt.token_ids == tokenizer.unk_token_id)) for prompt in self.prompts)
        if tokenizer.unk_token_id is None or num_unknown <= MUCH_UNKNOWN * num_tokens:
            return None
        share, first = num_unknown / num_tokens, self.first_text(tokenizer)
        return f"the tokenizer does not know {share:.0%} of the prompts' tokens; the first prompt as tokens: {first!r}"


def load_prompts(
    source: str,
    split: str,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    environment: Environment = NO_ENVIRONMENT,
    setting: str = "data.train_data",
) -> LoadedPrompts:
    """Read and tokenize every row of `source` (see `data.train_data`).

    `setting` is the setting that gave `source`, for errors. Images are read as the tokenizer's model reads them. Raises
    `SettingError` for data that is missing, malformed, without the prompt field, empty, or too long where `data.long_prompts`
    is "error". The chat template is given the tools of `environment`.
    """
    data = with_tools(data, environment)
    prompts: list[Prompt] = []
    num_dropped = 0
    tasks: set[str] = set()
    reader = ImageReader(Path(tokenizer.name_or_path)) if data.image_field else None
    folder = image_folder(source)
    for row in read_rows(source, split, setting, environment):
        images: tuple[ImageFile, ...] = ()
        if reader is None:
            text, token_ids = render(row, data, tokenizer)
        else:
            text, token_ids, images = render_with_images(row, data, tokenizer, reader, folder)
        if len(token_ids) == 0:
            raise SettingError("data.prompt_field", data.prompt_field, f"{row.place} has an empty prompt", "Remove the row.")
        if len(token_ids) > data.max_prompt_tokens:
            if data.long_prompts == "error":
                # Of a very long text only the beginning is tokenized.
                least = "at least " if len(token_ids) > 2 * data.max_prompt_tokens else ""
                problem = f"the prompt of {row.place} has {least}{len(token_ids)} tokens"
                cure = 'Raise the limit, or set data.long_prompts="drop" to leave such rows out.'
                raise SettingError("data.max_prompt_tokens", data.max_prompt_tokens, problem, cure)
            num_dropped += 1
            continue
        weight, name = _weight(row, data.weight_field), _task(row, data.task_field, tasks)
        prompts.append(Prompt(len(prompts), text, token_ids, row.json, weight, name, images=images))
    if not prompts:
        problem = f"all {num_dropped} prompts are too long" if num_dropped else "there are no rows"
        raise SettingError(setting, source, problem, "Give data with at least one row of at most data.max_prompt_tokens.")
    return LoadedPrompts(prompts, num_dropped)


def _weight(row: DataRow, field: str) -> float:
    if not field:
        return 1.0
    weight = row.fields.get(field)
    # A bool is an int to Python, and no weight.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        problem = f"in {row.place} it is {weight!r}" if field in row.fields else f"{row.place} has no such field"
        raise SettingError("data.weight_field", field, problem, "Choose a field that holds a finite number of at least 0.")
    return float(weight)


def _task(row: DataRow, field: str, tasks: set[str]) -> str:
    """Return the name of a row's task, and add it to those that are known."""
    if not field:
        return ""
    name = row.fields.get(field)
    if not isinstance(name, str) or not re.match(PART_NAME, name):
        problem = f"in {row.place} it is {name!r}" if field in row.fields else f"{row.place} has no such field"
        cure = "Choose a field that holds names: a letter or '_', then letters, digits, '_', '.' and '-', at most 64."
        raise SettingError("data.task_field", field, problem, cure)
    tasks.add(name)
    if len(tasks) > MAX_PARTS:
        problem = f"with {row.place} there are more than {MAX_PARTS} tasks"
        raise SettingError("data.task_field", field, problem, "Choose a field with fewer names.")
    return name


def load_held_out(data: DataSection, num_prompts: int, load: Callable[[str, str], Sequence[Prompt]]) -> list[Prompt]:
    """Return the first `num_prompts` prompts of each set in `data.eval_data`, one after another.

    `load(setting, source)` returns the prompts of one set.
    """
    prompts: list[Prompt] = []
    for name, source in eval_sets(data).items():
        for prompt in load(eval_setting(name), source)[:num_prompts]:
            prompts.append(prompt._replace(prompt_id=len(prompts), data_set=name))
    return prompts
