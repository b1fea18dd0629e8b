"""The user's own numbers about an evaluation, named by import path and computed in a thread beside training.

`docs/own_code.md` has an example.
"""

import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat

import msgspec

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import EvalRow, EventRow, Recorder
from offbeat.common.user_code.functions import load_function, mistakes_of
from offbeat.learner.diagnostics.sample_rows import Decode
from offbeat.learner.leases.groups import Rollout
from offbeat.learner.leases.prompts import Prompt
from offbeat.protocols.fields import RewardParts

logger = logging.getLogger(__name__)

LIMIT_S = 60.0
"""Longest time for one call of the function. Its thread cannot be ended: until it ends, further evaluations go without it."""


class EvaluatedCompletion(NamedTuple):
    """One completion of a finished evaluation."""

    prompt_id: int
    """Index of its prompt among the held-out ones; completions of one prompt follow each other."""
    prompt: str
    """The prompt as the reward saw it."""
    row: dict[str, Any]
    """The prompt's row in the data."""
    data_set: str
    """Name of its set in `data.eval_data`; empty for a prompt of no named set."""
    completion: str
    """The completion as text, without special tokens."""
    num_tokens: int
    finish_reason: str
    """`stop`: the model ended the completion. `length`: it was cut at `rollout.max_new_tokens`."""
    reward: float
    reward_parts: dict[str, float]
    """Named parts of the reward; empty where it is a number alone."""


OwnEvaluation = Callable[[Sequence[EvaluatedCompletion]], dict[str, float]]
"""Returns named numbers about the completions of an evaluation."""


def load_evaluation(path: str) -> OwnEvaluation:
    """Return the function `module:function`, which raises `SettingError` when it fails or returns no named numbers.

    Raise `SettingError` about `evaluation.function` if there is no such function.
    """
    function = load_function(path, setting="evaluation.function", parameters=("completions",))

    def own_evaluation(completions: Sequence[EvaluatedCompletion]) -> dict[str, float]:
        with mistakes_of("evaluation.function", path):
            result = function(completions)
            flaw = _flaw(result)
        if flaw is not None:
            cure = "Return at most 32 finite numbers by name: letters, digits, _, . and -, as in {'solved': 0.5}."
            raise SettingError("evaluation.function", path, flaw, cure)
        return {name: float(number) for name, number in result.items()}

    return own_evaluation


class EvaluationNumbers:
    """Adds the function's numbers to the rows of finished evaluations. The thread that trains never waits for it."""

    def __init__(
        self, function: OwnEvaluation, prompts: Sequence[Prompt], decode: Decode, record: Recorder, limit_s: float = LIMIT_S
    ) -> None:
        """`prompts` are the held-out ones; `decode` turns token ids into text without special tokens."""
        self._function = function
        self._prompts = prompts
        self._decode = decode
        self._record = record
        self._limit_s = limit_s
        self._finished: queue.SimpleQueue[tuple[EvalRow, Mapping[int, tuple[Rollout, ...]]] | None] = queue.SimpleQueue()
        self._call: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="evaluation-numbers", daemon=True)
        self._thread.start()

    def finish(self, row: EvalRow, rollouts: Mapping[int, tuple[Rollout, ...]]) -> None:
        """Record the row of an evaluation as soon as its numbers are there; `rollouts` are its completions, by prompt."""
        self._finished.put((row, rollouts))

    def close(self) -> None:
        """Wait until all rows are recorded, at most the time limit of a call for each."""
        self._finished.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Consumes: finished evaluations. Waits for: the next one, and the function, to its limit. Produces: their rows."""
        while (finished := self._finished.get()) is not None:
            row, rollouts = finished
            numbers = self._measure(row.policy_version, self._completions(rollouts))
            self._record(msgspec.structs.replace(row, numbers=numbers))

    def _measure(self, policy_version: int, completions: Sequence[EvaluatedCompletion]) -> dict[str, float]:
        """Return the function's numbers; none, and a warning, where it fails or takes too long."""
        if self._call is not None and self._call.is_alive():
            self._warn(policy_version, "the function's call for an earlier evaluation has not ended yet")
            return {}
        outcomes: list[dict[str, float] | SettingError] = []

        def call() -> None:
            try:
                outcomes.append(self._function(completions))
            except SettingError as error:
                outcomes.append(error)

        self._call = threading.Thread(target=call, name="evaluation-function", daemon=True)
        self._call.start()
        self._call.join(self._limit_s)
        match outcomes:
            case [dict(numbers)]:
                return numbers
            case [SettingError() as error]:
                self._warn(policy_version, str(error))
            case _:
                self._warn(policy_version, f"the function took more than {self._limit_s:g} s")
        return {}

    def _completions(self, rollouts: Mapping[int, tuple[Rollout, ...]]) -> list[EvaluatedCompletion]:
        return [
            EvaluatedCompletion(
                prompt_id=prompt_id,
                prompt=prompt.text,
                row=msgspec.json.decode(prompt.row),
                data_set=prompt.data_set,
                completion=self._decode(rollout.token_ids.tolist()),
                num_tokens=len(rollout.token_ids),
                finish_reason=rollout.finish_reason,
                reward=rollout.reward,
                reward_parts=dict(rollout.reward_parts),
            )
            for prompt_id, of_prompt in sorted(rollouts.items())
            for prompt in (self._prompts[prompt_id],)
            for rollout in of_prompt
        ]

    def _warn(self, policy_version: int, reason: str) -> None:
        detail = f"the evaluation at version {policy_version} has no numbers of evaluation.function: {reason}"
        logger.warning(detail)
        self._record(EventRow(event="evaluation_function_failed", detail=detail))


def _flaw(result: object) -> str | None:
    """Return why this is no table of named numbers; None for a good one."""
    if not isinstance(result, dict):
        return f"it returned {type(result).__name__}"
    for name, number in result.items():
        if not isinstance(number, SupportsFloat) or not math.isfinite(float(number)):
            return f"it returned {number!r:.100} for {name!r:.100}, which is no finite number"
    try:
        msgspec.convert({name: float(number) for name, number in result.items()}, RewardParts)
    except msgspec.ValidationError as error:
        return f"its names or their number are not accepted ({error})"
    return None
