"""The user's curriculum, named by import path: from the results of each task to the share of its prompts to lease.

`docs/data.md` has an example.
"""

import difflib
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

from offbeat.common.errors import SettingError
from offbeat.common.user_code.functions import load_function, located
from offbeat.learner.leases.task_results import TaskResults

SETTING = "task.curriculum"
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
