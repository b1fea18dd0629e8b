"""Tasks that need no download: the generators of reasoning-gym as data, each with its own verifier.

    reasoning-gym:chain_sum?size=2000&max_digits=2 + reasoning-gym:leg_counting

A row is a function of its generator, its options, the split, the seed and its number. It holds these, so whoever has the row
can make the whole entry again, as the verifier needs it.
"""

import functools
import re
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from offbeat.common.errors import SettingError, one_line

PREFIX = "reasoning-gym:"
_PART = re.compile(r"reasoning-gym:(?P<name>\w+)(?:\?(?P<options>\S*))?")
DEFAULT_SIZE = 1000
LARGEST_SIZE = 1_000_000


class Generator(NamedTuple):
    """One generator with its options."""

    name: str
    options: dict[str, Any]
    """The options of the task itself: all but `size`, `seed` and `task`."""
    size: int
    seed: int
    task: str
    """Name of the task of its rows."""


def is_generated(source: str) -> bool:
    """Return whether a data setting names generators."""
    return source.startswith(PREFIX)


def generated_rows(source: str, split: str, setting: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of each generator, one after another.

    Raise `SettingError` about `setting` for those that cannot be made.
    """
    for generator in parse(source, split, setting):
        try:
            entries = _entries(generator.name, msgspec.json.encode(generator.options), generator.size, generator.seed)
            for index in range(generator.size):
                yield _row(generator, index, entries[index])
        # A generator checks its options by assertions, and some while they generate.
        except Exception as error:
            if isinstance(error, SettingError):
                raise
            problem = f"{generator.name} cannot make its rows ({one_line(error)})"
            raise SettingError(setting, source, problem, "Correct its name or its options: docs/data.md.") from error


def parse(source: str, split: str, setting: str) -> list[Generator]:
    """Return the generators that a source names, with seeds of this split."""
    generators: list[Generator] = []
    for part in source.split(" + "):
        match = _PART.fullmatch(part.strip())
        if match is None:
            cure = "Write reasoning-gym:NAME or reasoning-gym:NAME?OPTION=VALUE&OPTION=VALUE, several with ` + ` between them."
            raise SettingError(setting, source, f"{part.strip()!r} is no generator", cure)
        options = dict(_option(pair) for pair in (match["options"] or "").split("&") if pair)
        size, seed = options.pop("size", DEFAULT_SIZE), options.pop("seed", 0)
        task = str(options.pop("task", match["name"]))
        if type(size) is not int or type(seed) is not int or not 1 <= size <= LARGEST_SIZE:
            cure = f"Give a size of 1 to {LARGEST_SIZE}."
            raise SettingError(setting, source, f"size={size!r}, seed={seed!r}: whole numbers are needed", cure)
        # Another seed for each split: held-out rows are not those that are trained on.
        generators.append(Generator(match["name"], options, size, zlib.crc32(f"{seed} {split}".encode()), task))
    return generators


def score(row: dict[str, Any], completion: str) -> float:
    """Return the verifier's reward for a completion, 0 to 1. The answer is what is in the last <answer> tags, or all of it.

    Raise `ValueError` for a row of no generator, or of another version of one.
    """
    made = row.get("generated")
    if not isinstance(made, dict):
        raise ValueError('the row has no field "generated": it is no row of reasoning-gym')
    options = msgspec.json.encode(made["options"])
    entries = _entries(made["name"], options, made["size"], made["seed"])
    entry = _entry(made["name"], options, made["size"], made["seed"], made["index"])
    if (entry["question"], str(entry["answer"])) != (row["prompt"], row["answer"]):
        raise ValueError(
            f"this reasoning-gym makes another row {made['index']} of {made['name']}: install the learner's version"
        )
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, flags=re.DOTALL)
    answer = (tagged[-1] if tagged else completion).strip()
    try:
        return float(entries.score_answer(answer, entry))
    # A verifier that cannot read a wrong answer is not broken, if it can read the right one.
    except Exception:  # noqa: BLE001
        entries.score_answer(entry["answer"], entry)
        return 0.0


def _option(pair: str) -> tuple[str, Any]:
    name, _, text = pair.partition("=")
    try:
        return name, msgspec.json.decode(unquote(text))
    except msgspec.DecodeError:
        return name, unquote(text)


def _row(generator: Generator, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    made = {**generator._asdict(), "index": index}
    return {"prompt": entry["question"], "answer": str(entry["answer"]), "task": made.pop("task"), "generated": made}


@functools.lru_cache(maxsize=64)
def _entries(name: str, options: bytes, size: int, seed: int) -> Any:
    """Return the entries of a generator, each made when it is asked for."""
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        problem = "reasoning-gym is not installed"
        raise SettingError("data.train_data", f"{PREFIX}{name}", problem, "Install offbeat[tasks].") from error
    return reasoning_gym.create_dataset(name, **msgspec.json.decode(options), size=size, seed=seed)


@functools.lru_cache(maxsize=256)
def _entry(name: str, options: bytes, size: int, seed: int, index: int) -> dict[str, Any]:
    """Return one entry; the completions of a group are scored one after another."""
    return _entries(name, options, size, seed)[index]
