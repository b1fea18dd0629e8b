"""The identity of a run: everything that it is made with, kept in its folder and checkpoints, and compared when it is resumed.

RUN/identity.json   `RunIdentity`: settings, hashes of contents, versions of software
RUN/prompts.bin     a hash per training prompt, in order: 8 bytes each, little-endian
"""

import importlib.metadata
import logging
import platform
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from offbeat.common.errors import SettingError
from offbeat.common.models.folders import hash_weights, resolve_model
from offbeat.common.processes.files import replace
from offbeat.common.records.rows import EventRow, Recorder
from offbeat.common.records.run_folder import IDENTITY_FILE, PROMPT_HASHES_FILE
from offbeat.common.settings.config import Config
from offbeat.common.settings.corrections import own_functions
from offbeat.common.settings.loading import setting_names, setting_text
from offbeat.common.settings.resume_rules import OUTCOMES
from offbeat.common.user_code.functions import find_sources, is_function
from offbeat.learner.leases.prompts import Prompt
from offbeat.protocols.message_parts import ModelHashes

logger = logging.getLogger(__name__)

PACKAGES = ("offbeat", "torch", "deepspeed", "transformers")
"""The packages that a result depends on."""
TRAIN_PROMPTS = "data.train_data: prompts"

PromptHashes = NDArray[np.uint64]
"""`[num_prompts]`: `Prompt.content_hash` of each, in their order."""


class RunIdentity(msgspec.Struct, frozen=True):
    """Everything that a learner process makes its run with."""

    settings: dict[str, str]
    """`section.key` to its value, as TOML: all settings, resolved."""
    contents: dict[str, str]
    """Hashes and versions of software, by the names of `common.settings.resume_rules`. What is not there is left out."""
    run_id: str = ""
    """The id that the run's checkpoints and its rollout log have, too; empty while there is no run yet."""


class Change(NamedTuple):
    """A difference between a run and its resumption."""

    name: str
    """A setting or a content."""
    before: str
    after: str


def make_identity(config: Config, hashes: ModelHashes, train: PromptHashes, evaluation: PromptHashes) -> RunIdentity:
    """Return the identity of a run on this machine; `hashes` are those of `model.path`."""
    loss, kl, data, task, reward = config.loss, config.kl, config.data, config.task, config.reward
    contents = {
        "model.path: config": hashes.config,
        "model.path: weight files": hash_weights(resolve_model(config.model.path)),
        "model.path: tokenizer": hashes.tokenizer,
        "model.path: chat template": hashes.chat_template,
        "kl.reference: weight files": hash_weights(resolve_model(kl.reference, "kl.reference")) if kl.reference else None,
        TRAIN_PROMPTS: _digest(train),
        "data.eval_data: prompts": _digest(evaluation) if len(evaluation) else None,
        "data.train_data: source files": _hash_sources(data.train_data),
        "data.curriculum: source files": _hash_sources(data.curriculum),
        "task.environment: source files": _hash_sources(task.environment),
        "task.reward: source files": _hash_sources(task.reward),
        "reward.length_penalty: source files": _hash_sources(reward.length_penalty),
        "loss.function: source files": _hash_sources(loss.function),
        "loss.correction: source files": _hash_sources(*own_functions(loss.correction)),
        "advantage.function: source files": _hash_sources(config.advantage.function),
        "evaluation.function: source files": _hash_sources(config.evaluation.function),
        "loss.noise_floor: file": _hash_file(Path(loss.noise_floor)) if loss.noise_floor else None,
        **{f"software: {package}": version for package, version in software_versions().items()},
    }
    return RunIdentity(
        settings={setting: setting_text(config, setting) for setting in setting_names()},
        contents={name: content for name, content in contents.items() if content is not None},
    )


def software_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}


def hash_prompts(prompts: Sequence[Prompt]) -> PromptHashes:
    """Return the hash of each prompt."""
    return np.fromiter((prompt.content_hash for prompt in prompts), np.uint64, len(prompts))


def write_identity(folder: Path, identity: RunIdentity, train: PromptHashes) -> None:
    """Write the identity into a run's folder, replacing that of an earlier process."""
    replace(folder / PROMPT_HASHES_FILE, train.astype("<u8").tobytes())
    replace(folder / IDENTITY_FILE, msgspec.json.format(msgspec.json.encode(identity)))


def read_identity(folder: Path) -> RunIdentity | None:
    """Return the identity in a run's folder; None when the file is missing or damaged."""
    try:
        return msgspec.json.decode((folder / IDENTITY_FILE).read_bytes(), type=RunIdentity)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.warning("%s is damaged and not compared: %s", folder / IDENTITY_FILE, error)
        return None


def read_prompt_hashes(folder: Path) -> PromptHashes | None:
    """Return the hash of each training prompt of the run in a folder; None when the file is missing or damaged."""
    identity, file = read_identity(folder), folder / PROMPT_HASHES_FILE
    if identity is None or not file.exists():
        return None
    content = file.read_bytes()
    hashes = np.frombuffer(content[: len(content) // 8 * 8], "<u8")
    return hashes if _digest(hashes) == identity.contents.get(TRAIN_PROMPTS) else None


def compare(before: RunIdentity, after: RunIdentity) -> list[Change]:
    """Return all differences but the ignored ones. A name that one of the two does not have says nothing."""
    return [
        Change(name, theirs[name], value)
        for theirs, ours in ((before.settings, after.settings), (before.contents, after.contents))
        for name, value in ours.items()
        if name in theirs and theirs[name] != value and OUTCOMES[name] != "ignored"
    ]


def require_same_run(
    before: RunIdentity,
    after: RunIdentity,
    hashes_before: PromptHashes | None,
    hashes: PromptHashes,
    *,
    may_append: bool = False,
) -> list[Change]:
    """Return the differences that a resumed run may have; raise `SettingError` where it has one that it may not.

    `hashes_before` are those of the run's training prompts, None where they are not known any more. `hashes` may have more
    behind them with `may_append` (`data.appended_data`).
    """
    changes = compare(before, after)
    refused = [change for change in changes if OUTCOMES[change.name] == "refused"]
    grown_from = next((_first_of(hashes, digest) for name, digest, _ in refused if name == TRAIN_PROMPTS), None)
    if grown_from is not None and may_append:
        refused = [change for change in refused if change.name != TRAIN_PROMPTS]
    if not refused:
        return changes
    first, *others = refused
    setting, is_content, content = first.name.partition(": ")
    if first.name == TRAIN_PROMPTS:
        given = after.settings["data.train_data"].strip('"')
        cure = "Let the function return the rows as it did" if is_function(given) else "Give the data as it was"
        if grown_from is not None:
            hashes_before = grown_from
            cure += ", or set data.appended_data=allow,"
        problem = f"these are not the prompts that the run was made with: {describe_prompts(hashes_before, hashes)}"
    elif is_content:
        problem = f"{content}: not as the run was made with (hash {first.before}, now {first.after})"
        cure = "Give the files as they were"
    else:
        problem = f"the run was made with {first.before}"
        cure = f"Set {setting}={first.before}"
    more = (
        f" Also different: {', '.join(f'{name} (was {was}, is {is_now})' for name, was, is_now in others)}." if others else ""
    )
    # `setting_text` writes None as a bare word, which is no TOML.
    text = after.settings[setting]
    value = None if text == "none" else tomllib.loads(f"value = {text}")["value"]
    raise SettingError(setting, value, problem, f"{cure} to resume, or begin a new run in another run.dir.{more}")


def describe_prompts(before: PromptHashes | None, after: PromptHashes) -> str:
    """Return in words how the prompts of a run have changed."""
    if before is None:
        return f"their hash differs, and there are {len(after)} now"
    shared = min(len(before), len(after))
    differing = np.flatnonzero(before[:shared] != after[:shared])
    if not len(differing):
        grown = len(after) - len(before)
        return f"{abs(grown)} prompts were {'added to' if grown > 0 else 'taken from'} the end of the {len(before)}"
    if len(before) == len(after) and np.array_equal(np.sort(before), np.sort(after)):
        return f"the {len(after)} prompts are in another order"
    counts = f"{len(differing)} of the first {shared} differ, the first of them prompt {differing[0]} (counted from 0)"
    return counts if len(before) == len(after) else f"there were {len(before)}, and are {len(after)}; {counts}"


def report_changes(changes: Iterable[Change], record: Recorder) -> None:
    """Log and record each difference of a resumed run."""
    for change in changes:
        detail = f"resumed with {change.name} = {change.after}, was {change.before}"
        logger.warning(detail)
        record(
            EventRow(event="resumed_with_changes", detail=detail, setting=change.name, before=change.before, after=change.after)
        )


def _digest(hashes: PromptHashes) -> str:
    return f"{len(hashes)} prompts, hash {xxhash.xxh3_128_hexdigest(hashes.astype('<u8').tobytes())}"


def _first_of(hashes: PromptHashes, digest: str) -> PromptHashes | None:
    """Return the first of these prompts that make the digest, in their order; None when they do not."""
    first = hashes[: int(digest.partition(" ")[0])]
    return first if _digest(first) == digest else None


def _hash_sources(*paths: str) -> str | None:
    """Return each file that functions named as `module:function` are made of, with a hash; None without such a function."""
    sources = {name: file for path in paths if is_function(path) for name, file in find_sources(path).items()}
    return ", ".join(f"{name} {_hash_file(sources[name])}" for name in sorted(sources)) or None


def _hash_file(path: Path) -> str | None:
    return xxhash.xxh3_128_hexdigest(path.read_bytes()) if path.is_file() else None
