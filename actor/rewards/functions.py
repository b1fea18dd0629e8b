"""Reward functions: the built-in ones, the user's by import path, and the four forms that a function may have.

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
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from offbeat.actor.rewards.failures import Failure, failure_of, file_of
from offbeat.actor.rewards.samples import Sample
from offbeat.actor.rewards.values import Reward, reward_of, rewards_of
from offbeat.common.errors import SettingError
from offbeat.common.user_code.functions import load_function
from offbeat.common.user_code.generated_tasks import score

Form = Literal["completion", "sample", "group", "samples"]
"""`completion` takes `(prompt, completion, row)`; the others are named after their only parameter."""
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
    function = _load(name)
    form = _form(function)
    if form is None:
        problem = f"{name.rpartition(':')[2]}{inspect.signature(function)} cannot take (prompt, completion, row)"
        forms = ", ".join(f"({parameter})" for parameter in get_args(Form)[1:])
        raise SettingError("task.reward", name, problem, f"Give it these parameters, or one of {forms}: docs/rewards.md.")
    return RewardFunction(function, form, inspect.iscoroutinefunction(function))


def _load(name: str) -> Callable[..., Any]:
    if ":" not in name:
        if name not in BUILT_IN:
            cure = f"Take {' or '.join(BUILT_IN)}, or name your own as module:function."
            raise SettingError("task.reward", name, f"there is no built-in reward {name!r}", cure)
        return BUILT_IN[name]
    return load_function(name, setting="task.reward")


def _form(function: Callable[..., Any]) -> Form | None:
    """Return the form of a function, from its parameters; None for a function that has none of the forms."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without a signature
        return "completion"
    names = list(signature.parameters)
    if len(names) == 1 and names[0] in ("sample", "group", "samples"):
        return names[0]
    try:
        signature.bind(*[None] * 3)
    except TypeError:
        return None
    return "completion"
