"""Rewards: the user's function or a built-in one, run where it can neither delay the actor nor crash it.

A reward is `function(prompt: str, completion: str, row: dict) -> float`, plain or async. Plain functions run in worker
processes, a group at a time; async ones on one event loop in a thread, all completions of a group at once.
"""

import asyncio
import functools
import inspect
import logging
import multiprocessing
import numbers
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import numpy as np
from pebble import ProcessExpired, ProcessPool

from offbeat.actor.reward_guard import guard_session
from offbeat.common.settings import SettingError
from offbeat.common.shutdown import die_with_parent
from offbeat.common.user_functions import load_function, one_line, shortened
from offbeat.protocols.messages import LARGEST_REWARD

logger = logging.getLogger(__name__)

RewardFunction = Callable[[str, str, dict[str, Any]], Any]

_BLOCKED_LOOP_GRACE_S = 1.0
"""Seconds after the time limit of an async reward until the event loop counts as blocked."""


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


class Rewarded(NamedTuple):
    """The rewards of one group."""

    key: int
    rewards: tuple[float, ...]
    """Finite, in the order of the completions."""


class RewardFailure(NamedTuple):
    """A group without rewards: the reward function failed on a completion, or took too long."""

    key: int
    reason: Literal["reward_error", "reward_timeout"]
    detail: str
    """One line: exception, message, file and line."""


class RewardRunner:
    """Computes rewards of groups beside the thread that submits them.

    Create it on a thread that lives as long as the process: worker processes die with the thread that started them.
    """

    def __init__(self, path: str, *, num_workers: int, timeout_s: float) -> None:
        """Load the reward that `path` names, as in `load_reward`. Raise `SettingError` if there is none.

        `timeout_s` limits the rewards of one group, from their start.
        """
        function = load_reward(path)
        self._timeout_s = timeout_s
        self._backend = (
            _EventLoopThread(function, timeout_s)
            if inspect.iscoroutinefunction(function)
            else _WorkerProcesses(path, num_workers, timeout_s)
        )
        self._pending: dict[int, float] = {}
        """Times of submission of the groups that `poll` has not returned."""
        self._done: queue.SimpleQueue[Rewarded | RewardFailure] = queue.SimpleQueue()

    @property
    def num_pending(self) -> int:
        """Groups submitted and not yet returned by `poll`."""
        return len(self._pending)

    def submit(self, key: int, prompt: str, completions: Sequence[str], row: dict[str, Any]) -> None:
        """Start the rewards of a group; `key` names it in the results of `poll`."""
        self._pending[key] = time.monotonic()
        future = self._backend.start(prompt, tuple(completions), row)
        # Called by the thread that sets the future; the queue is all it touches.
        future.add_done_callback(lambda future: self._done.put(_outcome(key, future, self._timeout_s)))

    def poll(self) -> list[Rewarded | RewardFailure]:
        """Return the results of groups that ended since the last call, each once. Never waits."""
        outcomes: list[Rewarded | RewardFailure] = []
        while not self._done.empty():
            outcomes.append(self._done.get())
        outcomes += self._stuck()
        return [outcome for outcome in outcomes if self._pending.pop(outcome.key, None) is not None]

    def close(self) -> None:
        """End all rewards and their processes."""
        self._backend.close()

    def _stuck(self) -> list[RewardFailure]:
        """Return groups past their time limit on an event loop that cannot time out because a reward blocks it."""
        if not isinstance(self._backend, _EventLoopThread):
            return []
        latest = time.monotonic() - self._timeout_s - _BLOCKED_LOOP_GRACE_S
        detail = f"no result {self._timeout_s:g} s after the start: an async reward must not make blocking calls"
        return [RewardFailure(key, "reward_timeout", detail) for key, started in self._pending.items() if started < latest]


class RewardError(Exception):
    """A reward function failed on a completion; the text is one line."""


BUILT_IN: Mapping[str, RewardFunction] = {"exact_match": exact_match, "math_answer": math_answer}
"""Rewards that `task.reward` names without a module."""
_FORMER_MODULE = "actor.rewards:"
"""Named the built-in rewards in run folders made before the package was `offbeat`."""


def load_reward(name: str) -> RewardFunction:
    """Return the built-in reward of this name, or the function that `module:function` names.

    Raise `SettingError` that says what is wrong with `task.reward`.
    """
    if ":" not in name:
        if name not in BUILT_IN:
            cure = f"Take {' or '.join(BUILT_IN)}, or name your own as module:function."
            raise SettingError("task.reward", name, f"there is no built-in reward {name!r}", cure)
        return BUILT_IN[name]
    try:
        return load_function(name, setting="task.reward", parameters=("prompt", "completion", "row"))
    except SettingError as error:
        # A module of the user's that is there but wrong must be seen, not replaced by a built-in reward.
        if not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        former = name.removeprefix(_FORMER_MODULE)
        if former == name or former not in BUILT_IN:
            raise
        return BUILT_IN[former]


class _WorkerProcesses:
    """Runs a plain function in processes that are killed at the time limit."""

    def __init__(self, path: str, num_workers: int, timeout_s: float) -> None:
        self._path = path
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._pool = self._make_pool()

    def start(self, prompt: str, completions: tuple[str, ...], row: dict[str, Any]) -> Future[tuple[float, ...]]:
        # A worker that dies while it is idle breaks pebble's pool for good.
        if not self._pool.active:
            logger.warning("the reward processes died; starting new ones")
            self._pool = self._make_pool()
        return self._pool.schedule(_group_rewards, (self._path, prompt, completions, row), timeout=self._timeout_s)

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()

    def _make_pool(self) -> ProcessPool:
        # Spawned: a fork of a process that runs an engine's threads can hang.
        pool = ProcessPool(
            self._num_workers,
            initializer=_prepare_worker,
            initargs=(os.getpid(),),
            context=multiprocessing.get_context("spawn"),
        )
        # Starts the workers, and imports the function before the first group's time runs.
        pool.schedule(_load_once, (self._path,))
        return pool


def _prepare_worker(parent_pid: int) -> None:
    die_with_parent(parent_pid)
    guard_session()
    # Pebble's handler waits for the interpreter, which never runs again inside a catastrophic regular expression.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@functools.cache
def _load_once(path: str) -> RewardFunction:
    return load_reward(path)


def _group_rewards(path: str, prompt: str, completions: tuple[str, ...], row: dict[str, Any]) -> tuple[float, ...]:
    """Compute the rewards of a group, one completion after another. Runs in a worker."""
    function = _load_once(path)
    rewards = []
    for completion in completions:
        try:
            rewards.append(_as_reward(function(prompt, completion, row)))
        except (Exception, SystemExit) as error:  # noqa: BLE001, the user's code
            raise RewardError(_describe(error, function)) from None
    return tuple(rewards)


class _EventLoopThread:
    """Runs an async function on an event loop in a thread."""

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()

    def start(self, prompt: str, completions: tuple[str, ...], row: dict[str, Any]) -> Future[tuple[float, ...]]:
        return asyncio.run_coroutine_threadsafe(self._group_rewards(prompt, completions, row), self._loop)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(self._loop.stop)
        )
        # A loop that a reward blocks does not stop; its thread ends with the process.
        self._thread.join(_BLOCKED_LOOP_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _group_rewards(self, prompt: str, completions: tuple[str, ...], row: dict[str, Any]) -> tuple[float, ...]:
        tasks = [asyncio.create_task(self._reward(prompt, completion, row)) for completion in completions]
        try:
            return tuple(await asyncio.wait_for(asyncio.gather(*tasks), self._timeout_s))
        finally:
            # When one has failed, the others still run.
            for task in tasks:
                task.cancel()

    async def _reward(self, prompt: str, completion: str, row: dict[str, Any]) -> float:
        try:
            return _as_reward(await self._function(prompt, completion, row))
        except (Exception, SystemExit) as error:  # noqa: BLE001, the user's code
            raise RewardError(_describe(error, self._function)) from None


async def _cancel_others() -> None:
    """Cancel every other task of the running loop and wait for their ends."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _as_reward(value: object) -> float:
    if not isinstance(value, numbers.Real | np.bool_):
        raise TypeError(f"the reward is {shortened(repr(value))}, not a number")
    reward = float(value)
    # Not `>`: a NaN must not pass.
    if not abs(reward) <= LARGEST_REWARD:
        raise ValueError(f"the reward is {reward:g}, not within {LARGEST_REWARD:g} of 0")
    return reward


def _describe(error: BaseException, function: RewardFunction) -> str:
    """Return exception, message and the innermost line in the function's own file, on one line."""
    file = sys.modules[function.__module__].__file__
    # The first frame is the call, here.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if frame.filename == file]
    return f"{one_line(error)} ({file}:{frames[-1].lineno})" if frames else f"{one_line(error)} ({file})"


def _outcome(key: int, future: Future[tuple[float, ...]], timeout_s: float) -> Rewarded | RewardFailure:
    """Return the result of a finished future."""
    if future.cancelled():
        return RewardFailure(key, "reward_error", "cancelled")
    error = future.exception()
    if error is None:
        return Rewarded(key, future.result())
    if isinstance(error, RewardError):
        return RewardFailure(key, "reward_error", str(error))
    if isinstance(error, TimeoutError):
        return RewardFailure(key, "reward_timeout", f"the group took longer than task.reward_timeout_s = {timeout_s:g}")
    if isinstance(error, ProcessExpired):
        return RewardFailure(key, "reward_error", f"the reward ended its process, exit code {error.exitcode}")
    return RewardFailure(key, "reward_error", one_line(error))
