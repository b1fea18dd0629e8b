"""The curriculum: after each batch the user's function says anew which share of each task's prompts is leased."""

import threading
from collections.abc import Callable, Mapping

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import EventRow, Recorder
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.dispatch.reports import RepeatedEvents
from offbeat.learner.leases.task_results import TaskResults

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
