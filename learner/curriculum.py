"""The curriculum: after each batch the user's function says anew which share of each task's prompts is leased."""

import difflib
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import EventRow, Recorder
from offbeat.common.user_code.functions import load_function, located
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.dispatch.reports import RepeatedEvents
from offbeat.learner.leases.groups import TaskResults

SETTING = "data.curriculum"

LIMIT_S = 10.0
"""Longest time for one call of the function. Its thread cannot be ended: until it ends, the function is not called again."""


class OwnCurriculum:
    """The function `module:function`, called within a time limit, and its result checked."""

    def __init__(self, path: str, limit_s: float = LIMIT_S) -> None:
        """Raise `SettingError` if there is no such function."""
        self._path = path
        self._function = load_function(path, setting=SETTING, parameters=("results", "policy_version"))
        self._limit_s = limit_s
        self._call: threading.Thread | None = None

    def __call__(self, results: Mapping[str, TaskResults], policy_version: int) -> dict[str, float]:
        """Return the share of each task, the largest 1; raise `SettingError` when the function returns no weights in time."""
        if self._call is not None and self._call.is_alive():
            raise self._error("an earlier call of the function has not ended yet")
        outcomes: list[dict[str, float] | str] = []
        self._call = threading.Thread(
            target=lambda: outcomes.append(_weights(self._function, results, policy_version)), name="curriculum", daemon=True
        )
        self._call.start()
        self._call.join(self._limit_s)
        match outcomes:
            case [dict(weights)]:
                largest = max(weights.values())
                return {task: weight / largest for task, weight in weights.items()}
            case [flaw]:
                raise self._error(str(flaw))
            case _:
                raise self._error(f"the function took more than {self._limit_s:g} s")

    def _error(self, problem: str) -> SettingError:
        cure = "Return a number of at least 0 for each task, one of them above 0, as in {'sums': 1, 'sorting': 0.2}."
        return SettingError(SETTING, self._path, problem, cure)


def _weights(function: Callable[..., Any], results: Mapping[str, TaskResults], policy_version: int) -> dict[str, float] | str:
    """Return the weights that the function gives the tasks, or why it gives none."""
    try:
        returned = function(dict(results), policy_version)
        return _flaw(returned, results) or {task: float(returned[task]) for task in results}
    # The user's code.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return f"it raised {located(error)}"


def _flaw(weights: object, tasks: Mapping[str, TaskResults]) -> str | None:
    """Return why these are no weights of the tasks; None for good ones."""
    if not isinstance(weights, Mapping):
        return f"it returned {type(weights).__name__}"
    for task in weights:
        if task not in tasks:
            close = difflib.get_close_matches(str(task), tasks, n=1, cutoff=0.5)
            meant = f"did you mean {close[0]!r}?" if close else f"the tasks are {', '.join(tasks)}"
            return f"it returned a weight for {task!r:.100}, which is no task ({meant})"
    for task in tasks:
        if task not in weights:
            return f"it returned no weight for the task {task!r}"
        weight = weights[task]
        if not isinstance(weight, SupportsFloat) or not 0 <= float(weight) < math.inf:
            return f"it returned {weight!r:.100} for the task {task!r}"
    return None if any(float(weight) for weight in weights.values()) else "all weights are 0"


Function = Callable[[Mapping[str, TaskResults], int], dict[str, float]]
"""From the results of tasks and the policy version to the share of each task; raises `SettingError` when it has none."""


class Curriculum:
    """Calls the function in a thread beside training, and hands its shares to the dispatcher.

    results of tasks -> function -> shares -> event in the rollout log -> prompt stream
    """

    def __init__(
        self, function: Function | None, num_prompts: Mapping[str, int], dispatcher: Dispatcher, record: Recorder
    ) -> None:
        """`num_prompts` are the prompts of each task; `function` is None for a run without a curriculum."""
        self._function = function
        self._num_prompts = num_prompts
        self._dispatcher = dispatcher
        self._events = RepeatedEvents(record)
        self._call: threading.Thread | None = None
        self._closing = threading.Lock()
        """Held while shares are handed over, so that none are after `close`."""
        self._is_closed = False

    def begin(self, policy_version: int) -> None:
        """Set the first shares, unless the run that is resumed has some; lift those of a curriculum that is gone.

        Raises `SettingError` when the function fails.
        """
        results = self._results()
        has_shares = any(result.share < 1 for result in results.values())
        if self._function is None and has_shares:
            self._dispatcher.weigh({})
        elif self._function is not None and not has_shares:
            self._dispatcher.weigh(self._function(results, policy_version))

    def shares(self) -> dict[str, float]:
        """Return the share of each task's prompts that is leased; empty without a curriculum."""
        return {} if self._function is None else {task: result.share for task, result in self._results().items()}

    def observe(self, policy_version: int) -> None:
        """Call the function with the results after a batch, unless it is still at work on earlier ones."""
        function = self._function
        if function is None or (self._call is not None and self._call.is_alive()):
            return
        arguments = (function, self._results(), policy_version)
        self._call = threading.Thread(target=self._weigh, args=arguments, name="curriculum-shares", daemon=True)
        self._call.start()

    def close(self) -> None:
        """Leave the shares as they are from now on."""
        with self._closing:
            self._is_closed = True

    def _weigh(self, function: Function, results: Mapping[str, TaskResults], policy_version: int) -> None:
        try:
            shares = function(results, policy_version)
        except SettingError as error:
            detail = f"the shares of tasks stay as they are: {error}"
            self._events.report(EventRow(event="curriculum_failed", detail=detail, policy_version=policy_version))
            return
        with self._closing:
            if not self._is_closed and shares != {task: result.share for task, result in results.items()}:
                self._dispatcher.weigh(shares)

    def _results(self) -> dict[str, TaskResults]:
        return self._dispatcher.task_results(self._num_prompts)
