"""Checks of the data with the model's tokenizer: every row read, prompts rendered, lengths and token ids looked at.

They run apart (`deploy/checks/preflight.py`): transformers is imported without torch, which saves two seconds, and this process
must not see torch afterwards.
"""

import difflib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from offbeat.actor.environments.chat import ChatFormat
from offbeat.common.errors import SettingError
from offbeat.common.models.folders import hub_obstacle, reference_obstacle, vocabulary_obstacle
from offbeat.common.models.images import MODEL_TYPES
from offbeat.common.settings.config import Config, environment_of, eval_sets, eval_setting
from offbeat.common.settings.loading import is_local_data
from offbeat.common.user_code.environment_function import with_tools
from offbeat.common.user_code.functions import is_function
from offbeat.common.user_code.generated_tasks import is_generated
from offbeat.deploy.checks.findings import Finding, mistake
from offbeat.learner.leases.data_rows import is_json, read_rows
from offbeat.learner.leases.prompts import MUCH_LEFT_OUT, LoadedPrompts, load_prompts


def check_rows(config: Config) -> Iterator[Finding]:
    """Find data files that are missing or malformed, without a tokenizer; for a model that is not on this machine."""
    for setting, source, split in _local_sources(config):
        try:
            is_empty = not any(True for _ in read_rows(source, split, setting, environment_of(config)))
        except SettingError as error:
            yield Finding("mistake", str(error))
            continue
        if is_empty:
            yield mistake(setting, source, "there are no rows", "Give data with at least one row.")


def check_inputs(config: Config) -> Iterator[Finding]:
    """Find mistakes in the tokenizer and the data, and show the first prompt as the model will see it."""
    folder = Path(config.model.path)
    try:
        # A function may import torch itself, and `datasets` does where it finds it installed.
        hides_torch = all(is_json(source) for _, source, _ in _local_sources(config))
        tokenizer, vocabulary_size = _load(folder, hides_torch=hides_torch, has_images=bool(config.data.image_field))
    except SettingError:
        raise
    # transformers raises whatever a broken file makes it raise.
    except Exception as error:  # noqa: BLE001
        reason = " ".join(str(error).split())[:300]
        yield mistake("model.path", config.model.path, f"its tokenizer or config cannot be loaded ({reason})", "Save it again.")
        yield from check_rows(config)
        return
    if (obstacle := vocabulary_obstacle(tokenizer, vocabulary_size)) is not None:
        yield mistake("model.path", config.model.path, *obstacle)
    reference = config.kl.reference
    if Path(reference, "config.json").is_file() and (obstacle := reference_obstacle(tokenizer, Path(reference))) is not None:
        yield mistake("kl.reference", reference, *obstacle)
    if config.task.environment:
        try:
            ChatFormat(
                tokenizer,
                with_tools(config.data, environment_of(config)).template_arguments,
                has_chat_template=config.data.chat_template,
            )
        except SettingError as error:
            yield Finding("mistake", str(error))
    for setting, source, split in _local_sources(config):
        try:
            load = partial(
                load_prompts, source, split, config.data, tokenizer, environment=environment_of(config), setting=setting
            )
            loaded = load()
            is_called = setting == "data.train_data" and is_function(source)
            if is_called and [one.row for one in loaded.prompts] != [one.row for one in load().prompts]:
                text = "data.train_data: called twice, the function returned other rows. Such a run cannot be resumed: give"
                yield Finding("warning", f"{text} its random numbers a fixed seed, and sort what has no order.")
        except SettingError as error:
            yield Finding("mistake", str(error))
            continue
        yield from _describe(setting, loaded, tokenizer)


def check_hub_names(config: Config, kind_of_missing: Literal["mistake", "warning"]) -> Iterator[Finding]:
    """Note names that the Hugging Face Hub will be asked for, as they are not on this machine; warn of likely typing errors.

    A model that the hub cannot serve to this machine is a finding of `kind_of_missing`.
    """
    names = [
        ("model.path", config.model.path, "model", "its files, and the lengths of prompts,"),
        ("kl.reference", config.kl.reference, "model", "its files"),
    ]
    names += [(setting, source, "dataset", "its rows") for setting, source, _ in _sources(config) if not is_generated(source)]
    for setting, name, kind, unchecked in names:
        if not name or is_local_data(name) or is_function(name):
            continue
        path = Path(name)
        obstacle = hub_obstacle(name) if kind == "model" else None
        there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, there, n=1, cutoff=0.75)
        hint = f" Did you mean {path.with_name(close[0])}?" if close else ""
        if obstacle is not None:
            problem, cure = obstacle
            yield Finding(kind_of_missing, f"{SettingError(setting, name, problem, cure)}{hint}")
            continue
        text = (
            f'{setting} = "{name}" is not on this machine and is taken for a {kind} of the Hugging Face Hub: {unchecked} '
            "will only be checked after the start."
        )
        yield Finding("warning" if close or "/" not in name else "note", text + hint)


def first_prompt(config: Config, *, held_out: bool = False) -> tuple[str, dict[str, Any]] | None:
    """Return the text and the fields of the first row to train on, or of the first set of held-out ones.

    None where there is none, or the data is not on this machine.
    """
    found = [one for one in _sources(config) if (one[0] != "data.train_data") == held_out]
    if not found or not is_local_data(found[0][1]):
        return None
    setting, source, split = found[0]
    # Not rendered: a reward does not see the template.
    for row in islice(read_rows(source, split, setting, environment_of(config)), 1):
        prompt = row.fields.get(config.data.prompt_field)
        if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
            prompt = prompt[-1].get("content")
        return (prompt, row.fields) if isinstance(prompt, str) else None
    return None


def count_tasks(config: Config) -> Counter[str]:
    """Return the number of training rows of each task; none where the data is not on this machine."""
    data = config.data
    if not is_local_data(data.train_data):
        return Counter()
    rows = read_rows(data.train_data, data.train_split, "data.train_data", environment_of(config))
    # Other checks tell rows without a task.
    return Counter(name for row in rows if isinstance(name := row.fields.get(data.task_field), str))


def _local_sources(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield setting, source and split of the data on this machine."""
    return (found for found in _sources(config) if is_local_data(found[1]))


def _sources(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield setting, source and split of all data."""
    data = config.data
    for setting, source, split in (
        ("data.train_data", data.train_data, data.train_split),
        *((eval_setting(name), source, data.eval_split) for name, source in eval_sets(data).items()),
    ):
        if source:
            yield setting, source, split


def _load(folder: Path, *, hides_torch: bool, has_images: bool) -> tuple[Any, int]:
    """Return the tokenizer, and the number of token ids that the model knows.

    Raises `SettingError` for a model that only a run with images can train, and for a broken file whatever transformers raises.
    """
    if hides_torch and "torch" not in sys.modules:
        # Otherwise transformers would tell the user that torch is missing.
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType], makes it look absent
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    config = AutoConfig.from_pretrained(folder)
    if config.model_type not in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_TYPES):
        raise ValueError(f"{config.model_type} is not a language model that transformers knows")
    if not has_images and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        problem = f"the model is a {config.model_type}, which has no language model that can be loaded without its vision tower"
        raise SettingError("data.image_field", "", problem, 'Set it, for example to "image": no row needs to have images.')
    return AutoTokenizer.from_pretrained(folder), config.get_text_config().vocab_size


def _describe(setting: str, loaded: LoadedPrompts, tokenizer: Any) -> Iterator[Finding]:
    if loaded.share_dropped > MUCH_LEFT_OUT:
        yield Finding("warning", f"{setting}: {loaded.dropped_text()}.")
    if unknown := loaded.unknown_text(tokenizer):
        yield Finding("warning", f"{setting}: {unknown}.")
    lengths = [len(prompt.token_ids) for prompt in loaded.prompts]
    shown = loaded.first_text(tokenizer)
    yield Finding(
        "note", f"{setting}: {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens; the first as tokens: {shown!r}"
    )
