"""Reward functions: the built-in ones, the user's by import path, their four forms, and the values that they may return.

| parameters                    | called with                                    | returns                    |
|-------------------------------|------------------------------------------------|----------------------------|
| `(prompt, completion, row)`   | one completion                                 | a reward                   |
| `(sample)`                    | one completion, as a `Sample`                  | a reward                   |
| `(group)`                     | all completions of one prompt, `list[Sample]`  | a reward per completion    |
| `(samples)`                   | completions of any prompts, `list[Sample]`     | a reward per completion    |

A reward is a number or a mapping of named parts. Each form may be a plain function or an `async` one.
"""

import asyncio
import copy
import inspect
import math
import numbers
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from offbeat.actor.rewards.failures import Failure, failure_of, file_of
from offbeat.actor.rewards.samples import Sample
from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.common.user_code.functions import load_function, takes
from offbeat.common.user_code.generated_tasks import score
from offbeat.protocols.fields import LARGEST_REWARD, MAX_PARTS, PART_NAME
from offbeat.protocols.text import plain

Form = Literal["completion", "sample", "group", "samples"]
"""`completion` takes `(prompt, completion, row)`; the others are named after their only parameter."""


class Reward(NamedTuple):
    """The reward of one completion."""

    total: float
    """The number that is trained on; at most `LARGEST_REWARD` from 0."""
    parts: dict[str, float] = {}  # noqa: RUF012, no code changes it
    """The named parts that the reward function returned; empty when it returned a number."""


Outcome = Reward | Failure


def exact_match(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Return 1 if the completion is `row["answer"]` up to surrounding white space, else 0."""
    return float(completion.strip() == str(row["answer"]).strip())


def math_answer(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Return 1 if the last answer in the completion equals `row["answer"]` mathematically, else 0.

    In GSM8K's format (`... #### 72`) only the part after the mark counts. The completion needs no particular format: a
    boxed answer is preferred to other LaTeX, and LaTeX to plain numbers.
    """
    from math_verify import parse, verify  # the import takes a second, which other rewards need not pay

    # math-verify limits its time by SIGALRM, which only a main thread has; without it, the group's limit remains.
    seconds = 2 if threading.current_thread() is threading.main_thread() else 0
    answer = str(row["answer"]).rpartition("####")[2].strip()
    # A plain formula is only recognized as LaTeX; a plain number needs nothing.
    gold = parse(answer, parsing_timeout=seconds) or parse(f"${answer}$", parsing_timeout=seconds)
    if not gold:
        raise ValueError(f"the row's answer {answer!r} is not a mathematical expression")
    return float(verify(gold, parse(completion, parsing_timeout=seconds), timeout_seconds=seconds))


def reasoning_gym(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Return the reward of the verifier of the generator that made the row, 0 to 1."""
    return score(row, completion)


BUILT_IN: Mapping[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "math_answer": math_answer,
    "reasoning_gym": reasoning_gym,
}
"""Rewards that `task.reward` names without a module."""


class RewardFunction(NamedTuple):
    """A reward function, and the way to call it."""

    function: Callable[..., Any]
    form: Form
    is_async: bool

    @property
    def takes_many(self) -> bool:
        """True when one call rewards several completions."""
        return self.form in ("group", "samples")

    def num_calls(self, samples: Sequence[Sample]) -> int:
        """Return the number of calls that reward these samples."""
        return 1 if self.takes_many else len(samples)

    def most_groups(self, config: Config) -> float:
        """Return the number of groups that `actor.reward_calls_per_s` rewards while one lease lasts; inf without a rate."""
        rate, size = config.actor.reward_calls_per_s, config.rollout.group_size
        if rate is None:
            return math.inf
        calls = {"group": 1.0, "samples": size / config.actor.reward_batch_size}.get(self.form, size)
        return config.rollout.lease_timeout_s * rate / calls

    def outcomes(self, samples: Sequence[Sample], weights: Mapping[str, float]) -> list[Outcome]:
        """Call a plain function and return the outcome of each sample, in order."""
        assert not self.is_async
        if not self.takes_many:
            return [outcome for sample in samples for outcome in self._outcomes_of_call([sample], weights)]
        return self._outcomes_of_call(samples, weights)

    async def outcomes_async(self, samples: Sequence[Sample], weights: Mapping[str, float]) -> list[Outcome]:
        """Call an async function once and return the outcome of each sample, in order."""
        try:
            return [*self._rewards(await self.function(*self._arguments(samples)), samples, weights)]
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001, the user's code may raise an interrupt, or end the process
            return [failure_of(error, file_of(self.function))] * len(samples)

    def _outcomes_of_call(self, samples: Sequence[Sample], weights: Mapping[str, float]) -> list[Outcome]:
        try:
            return [*self._rewards(self.function(*self._arguments(samples)), samples, weights)]
        except BaseException as error:  # noqa: BLE001, the user's code may raise an interrupt, or end the process
            return [failure_of(error, file_of(self.function))] * len(samples)

    def _arguments(self, samples: Sequence[Sample]) -> tuple[Any, ...]:
        # A function may change its row. The completions of a group share theirs, and a retry has it again.
        samples = [sample._replace(row=copy.deepcopy(sample.row)) for sample in samples]
        match self.form:
            case "completion":
                return samples[0].prompt, samples[0].completion, samples[0].row
            case "sample":
                return (samples[0],)
            case "group" | "samples":
                return (samples,)

    def _rewards(self, value: object, samples: Sequence[Sample], weights: Mapping[str, float]) -> list[Reward]:
        return rewards_of(value, len(samples), weights) if self.takes_many else [reward_of(value, weights)]


def load_reward(name: str) -> RewardFunction:
    """Return the built-in reward of this name, or the function that `module:function` names.

    Raise `SettingError` that says what is wrong with `task.reward`.
    """
    if ":" in name:
        function = load_function(name, setting="task.reward")
    elif name in BUILT_IN:
        function = BUILT_IN[name]
    else:
        cure = f"Take {' or '.join(BUILT_IN)}, or name your own as module:function."
        raise SettingError("task.reward", name, f"there is no built-in reward {name!r}", cure)
    form = _form(function)
    if form is None:
        problem = f"{name.rpartition(':')[2]}{inspect.signature(function)} cannot take (prompt, completion, row)"
        forms = ", ".join(f"({parameter})" for parameter in get_args(Form)[1:])
        raise SettingError("task.reward", name, problem, f"Give it these parameters, or one of {forms}: docs/rewards.md.")
    return RewardFunction(function, form, inspect.iscoroutinefunction(function))


def _form(function: Callable[..., Any]) -> Form | None:
    """Return the form of a function, from its parameters; None for a function that has none of the forms."""
    if takes(function, 3):
        return "completion"
    match list(inspect.signature(function).parameters):
        case ["sample" | "group" | "samples" as form]:
            return form
        case _:
            return None


def reward_of(value: object, weights: Mapping[str, float]) -> Reward:
    """Return the reward of one returned value: a number, or a mapping of named parts, each times its weight (default 1).

    Raise `TypeError` or `ValueError` for anything else, and for numbers beyond `LARGEST_REWARD`.
    """
    if not isinstance(value, Mapping):
        if weights:
            raise TypeError(f"task.reward_weights has {', '.join(weights)}, and the reward is {_shown(value)}, without parts")
        return Reward(_number(value, "the reward"))
    parts = parts_of(value)
    unknown = [name for name in weights if name not in parts]
    if unknown:
        raise ValueError(f"task.reward_weights has {', '.join(unknown)}, which the reward's parts {list(parts)} lack")
    return Reward(_number(sum(weights.get(name, 1.0) * part for name, part in parts.items()), "the reward"), parts)


def parts_of(value: Mapping[Any, object]) -> dict[str, float]:
    """Return named parts, checked one by one. Raises as `reward_of`."""
    if len(value) > MAX_PARTS:
        raise ValueError(f"the reward has {len(value)} parts, more than {MAX_PARTS}")
    return {_part_name(name): _number(part, f"part {name!r} of the reward") for name, part in value.items()}


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
        # As tensors have, and arrays of one number.
        hint = "; return its item()" if hasattr(value, "item") else ""
        raise TypeError(f"{what} is {_shown(value)}, not a number{hint}")
    number = float(value)
    # Not `>`: a NaN must not pass.
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"{what} is {number:g}, not within {LARGEST_REWARD:g} of 0")
    return number


def _shown(value: object) -> str:
    return plain(repr(value), 300)
