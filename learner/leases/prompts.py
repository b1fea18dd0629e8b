"""Prompts: reads and tokenizes the task's data, and orders it endlessly for leasing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.common.config import TaskSection
from offbeat.common.settings import SettingError, is_data_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """Weight of its groups in the loss (`task.weight_field`)."""


class LoadedPrompts(NamedTuple):
    """The result of `load_prompts`."""

    prompts: list[Prompt]
    num_dropped: int
    """Rows left out because their prompt is longer than `task.max_prompt_tokens`."""


class _Row(NamedTuple):
    place: str
    """The row's place, for messages: `train.jsonl:7`, or `row 7 of openai/gsm8k`."""
    fields: dict[str, Any]
    json: str


def load_prompts(
    source: str, split: str, task: TaskSection, tokenizer: PreTrainedTokenizerBase, *, setting: str = "task.train_data"
) -> LoadedPrompts:
    """Read and tokenize every row of `source`, a JSONL file or a Hugging Face dataset (see `task.train_data`).

    `setting` is the setting that gave `source`, for errors. Raises `SettingError` for data that is missing,
    malformed, without the prompt field, empty, or too long where `task.long_prompts` is "error".
    """
    prompts: list[Prompt] = []
    num_dropped = 0
    for row in _read_rows(source, split, setting):
        text = _prompt_text(row, task.prompt_field)
        token_ids = _tokenize(text, task, tokenizer)
        if len(token_ids) == 0:
            raise SettingError("task.prompt_field", task.prompt_field, f"{row.place} has an empty prompt", "Remove the row.")
        if len(token_ids) > task.max_prompt_tokens:
            if task.long_prompts == "error":
                raise SettingError(
                    "task.max_prompt_tokens",
                    task.max_prompt_tokens,
                    f"the prompt of {row.place} has {len(token_ids)} tokens",
                    'Raise the limit, or set task.long_prompts="drop" to leave such rows out.',
                )
            num_dropped += 1
            continue
        prompts.append(Prompt(len(prompts), text, token_ids, row.json, _weight(row, task.weight_field)))
    if not prompts:
        problem = f"all {num_dropped} prompts are too long" if num_dropped else "there are no rows"
        raise SettingError(setting, source, problem, "Give data with at least one row of at most task.max_prompt_tokens.")
    return LoadedPrompts(prompts, num_dropped)


class Turn(NamedTuple):
    """A prompt in its place in the order."""

    prompt_id: int
    epoch: int
    """Pass over the data that the turn belongs to."""


class StreamState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `PromptStream` in a checkpoint."""

    num_prompts: int
    seed: int
    position: int
    returned: tuple[Turn, ...]
    """Turns given back and not served again yet, oldest first."""


class PromptStream:
    """Endless epochs over the prompts, each another permutation; prompts given back come first.

    The order depends on the seed and the position alone, so a resumed run goes on where it stopped.
    """

    def __init__(self, num_prompts: int, seed: int, position: int = 0) -> None:
        assert num_prompts > 0
        assert position >= 0
        self._num_prompts = num_prompts
        self._seed = seed
        self._position = position
        self._returned: deque[Turn] = deque()
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @classmethod
    def from_state(cls, state: StreamState, num_prompts: int) -> PromptStream:
        """Continue a stream over the same data; raise `SettingError` when the number of prompts differs."""
        if state.num_prompts != num_prompts:
            raise SettingError(
                "run.resume",
                True,
                f"the checkpoint was made with {state.num_prompts} prompts, and task.train_data now has {num_prompts}",
                "Resume with the same data and prompt settings, or start a new run.",
            )
        stream = cls(num_prompts, state.seed, state.position)
        stream._returned.extend(state.returned)
        return stream

    @property
    def position(self) -> int:
        """Prompts served from the epochs since the start; those served again after `give_back` do not count."""
        return self._position

    @property
    def share_served(self) -> float:
        """Share of the current epoch that was served, 0 to 1."""
        return (self._position % self._num_prompts) / self._num_prompts

    @property
    def epoch(self) -> int:
        """The pass over the data that new prompts come from."""
        return self._position // self._num_prompts

    def peek(self) -> Turn:
        """Return the prompt to lease next, and leave it in its place."""
        if self._returned:
            return self._returned[0]
        epoch, index = divmod(self._position, self._num_prompts)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._num_prompts)
            self._epoch = epoch
        return Turn(int(self._order[index]), epoch)

    def next(self) -> Turn:
        """Return the prompt to lease next, and move on."""
        turn = self.peek()
        if self._returned:
            self._returned.popleft()
        else:
            self._position += 1
        return turn

    def give_back(self, prompt_id: int, epoch: int) -> None:
        """Serve this prompt again before any new one, in the order in which prompts were given back."""
        self._returned.append(Turn(prompt_id, epoch))

    def state(self) -> StreamState:
        """Return what `from_state` needs to serve the same prompts as this stream would."""
        return StreamState(self._num_prompts, self._seed, self._position, tuple(self._returned))


def _read_rows(source: str, split: str, setting: str) -> Iterable[_Row]:
    return _read_file(Path(source).expanduser(), setting) if is_data_file(source) else _read_dataset(source, split, setting)


def _read_file(path: Path, setting: str) -> Iterator[_Row]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise SettingError(
            setting, str(path), f"cannot be read ({error.strerror})", "Give the path of a JSONL file."
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise SettingError(
                setting, str(path), f"{place} is not a JSON object ({error})", "Write one JSON object on each line."
            ) from error
        yield _Row(place, fields, line.decode())


def _read_dataset(source: str, split: str, setting: str) -> Iterator[_Row]:
    # Imported here: it takes a second, and a run on files does not need it.
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    name, config = _split_dataset_name(source)
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise SettingError(
            setting,
            source,
            f"the dataset or its split {split!r} cannot be loaded ({error})",
            "Check the name (owner/name or owner/name/config), the split and the connection, or give a JSONL file.",
        ) from error
    for number, row in enumerate(rows):
        fields = dict(row)
        # Datasets hold values that JSON does not (dates, bytes, images): the reward gets those as text.
        yield _Row(f"row {number} of {source}", fields, msgspec.json.encode(fields, enc_hook=str).decode())


def _split_dataset_name(source: str) -> tuple[str, str | None]:
    """Split `owner/name/config` into `owner/name` and `config`, which is None when it is missing."""
    parts = source.split("/")
    return ("/".join(parts[:2]), parts[2]) if len(parts) == 3 else (source, None)


def _prompt_text(row: _Row, field: str) -> str:
    if field not in row.fields:
        there = ", ".join(row.fields) or "none"
        raise SettingError("task.prompt_field", field, f"{row.place} has no such field", f"Its fields are: {there}.")
    text = row.fields[field]
    if not isinstance(text, str):
        kind = type(text).__name__
        raise SettingError("task.prompt_field", field, f"in {row.place} it is a {kind}", "Choose a field that holds text.")
    return text


def _weight(row: _Row, field: str) -> float:
    if not field:
        return 1.0
    weight = row.fields.get(field)
    # A bool is an int to Python, and no weight.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        problem = f"in {row.place} it is {weight!r}" if field in row.fields else f"{row.place} has no such field"
        raise SettingError("task.weight_field", field, problem, "Choose a field that holds a finite number of at least 0.")
    return float(weight)


def _tokenize(text: str, task: TaskSection, tokenizer: PreTrainedTokenizerBase) -> NDArray[np.int32]:
    if not task.chat_template:
        return np.asarray(tokenizer.encode(text), dtype=np.int32)
    if tokenizer.chat_template is None:
        raise SettingError("task.chat_template", True, "the tokenizer has no chat template", "Set task.chat_template=false.")
    messages = [{"role": "user", "content": text}]
    if task.system_prompt:
        messages.insert(0, {"role": "system", "content": task.system_prompt})
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(rendered, str)
    # The template has put the special tokens into the text already.
    return np.asarray(tokenizer.encode(rendered, add_special_tokens=False), dtype=np.int32)
