"""Values that reward functions return: checked, and made into rewards with named parts."""

import numbers
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from offbeat.protocols.fields import LARGEST_REWARD, MAX_PARTS, PART_NAME
from offbeat.protocols.text import plain


class Reward(NamedTuple):
    """The reward of one completion."""

    total: float
    """The number that is trained on; at most `LARGEST_REWARD` from 0."""
    parts: dict[str, float] = {}  # noqa: RUF012, no code changes it
    """The named parts that the reward function returned; empty when it returned a number."""


def reward_of(value: object, weights: Mapping[str, float]) -> Reward:
    """Return the reward of one returned value: a number, or a mapping of named parts, each times its weight (default 1).

    Raise `TypeError` or `ValueError` for anything else, and for numbers beyond `LARGEST_REWARD`.
    """
    if not isinstance(value, Mapping):
        if weights:
            raise TypeError(f"task.reward_weights has {', '.join(weights)}, and the reward is {_shown(value)}, without parts")
        return Reward(_number(value, "the reward"))
    if len(value) > MAX_PARTS:
        raise ValueError(f"the reward has {len(value)} parts, more than {MAX_PARTS}")
    parts = {_part_name(name): _number(part, f"part {name!r} of the reward") for name, part in value.items()}
    unknown = [name for name in weights if name not in parts]
    if unknown:
        raise ValueError(f"task.reward_weights has {', '.join(unknown)}, which the reward's parts {list(parts)} lack")
    return Reward(_number(sum(weights.get(name, 1.0) * part for name, part in parts.items()), "the reward"), parts)


def rewards_of(values: object, num_samples: int, weights: Mapping[str, float]) -> list[Reward]:
    """Return the rewards of a returned sequence of values, one per completion. Raises as `reward_of`."""
    if isinstance(values, np.ndarray):
        values = list(values)
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"the rewards are {_shown(values)}, not a sequence with one reward per completion")
    if len(values) != num_samples:
        raise ValueError(f"there are {len(values)} rewards for {num_samples} completions")
    return [reward_of(value, weights) for value in values]


def _part_name(name: object) -> str:
    if not isinstance(name, str) or not re.match(PART_NAME, name):
        raise ValueError(f"a part of the reward is named {_shown(name)}: use letters, digits, '_', '.' and '-', at most 64")
    return name


def _number(value: object, what: str) -> float:
    if not isinstance(value, numbers.Real | np.bool_):
        raise TypeError(f"{what} is {_shown(value)}, not a number")
    number = float(value)
    # Not `>`: a NaN must not pass.
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"{what} is {number:g}, not within {LARGEST_REWARD:g} of 0")
    return number


def _shown(value: object) -> str:
    return plain(repr(value), 300)
