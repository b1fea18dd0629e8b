"""Calls of a reward function: divided by its form, batched, held to a rate, and isolated; each ends at its time limit.

    RewardCalls.make(group)
        -> by form: one call for the group, one for each completion, or `Batches` of any groups
        -> `at_rate`: calls per second
        -> `WorkerProcesses` (plain functions, killed at the time limit) or `on_event_loop` (async functions)
        -> RewardFunction -> `Reward` or `Failure` for each sample

`runner.py` tries again what may succeed later.
"""

import asyncio
import functools
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import NamedTuple

from pebble import CONSTS, ProcessExpired, ProcessPool

from offbeat.actor.rewards.failures import Failure
from offbeat.actor.rewards.functions import Outcome, RewardFunction, load_reward
from offbeat.actor.rewards.retries import RateLimiter
from offbeat.actor.rewards.samples import Sample
from offbeat.common.errors import one_line
from offbeat.common.processes.child import become_child, guard_session
from offbeat.common.records.logs import PrintedText
from offbeat.common.settings.config import ActorSection, TaskSection

logger = logging.getLogger(__name__)

MAX_BROKEN_POOLS = 3
"""Times that one call is given to new processes after all have died, which is no fault of the call."""
POOL_LOOK_S = 1.0
"""Seconds between two looks at the processes of a call that has not ended."""

Call = Callable[[Sequence[Sample]], Awaitable[list[Outcome]]]
"""A call of a reward function: returns the outcome of each sample, in order, and ends at the time limit."""


class MistakeError(Exception):
    """The reward function has a mistake; no further attempt would help."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class RewardCalls:
    """Divides the samples of a group into calls of the reward function, by its form."""

    def __init__(self, task: TaskSection, actor: ActorSection) -> None:
        """Load the reward that `task.reward` names. Raise `SettingError` if there is none."""
        self._reward = reward = load_reward(task.reward)
        self._processes: WorkerProcesses | None = None
        if reward.is_async:
            num_slots = actor.reward_concurrency
            call = on_event_loop(reward, task, concurrency=num_slots)
        else:
            num_slots = actor.reward_workers
            self._processes = WorkerProcesses(task, num_workers=num_slots)
            call = self._processes.call
        self._call = at_rate(call, RateLimiter(actor.reward_calls_per_s), reward.num_calls)
        self._is_quick = True
        """False once a process had to be killed over a whole group: the completions of later groups are called apart."""
        self._batches = Batches(self._call, batch_size=actor.reward_batch_size, num_slots=num_slots)

    @property
    def is_async(self) -> bool:
        """True when the function runs on the event loop of the calls, and may block it."""
        return self._reward.is_async

    async def run_batches(self) -> None:
        """Serve the calls that rewards of several groups share."""
        if self._reward.form == "samples":
            await self._batches.run()

    async def make(self, samples: Sequence[Sample], key: int, *, is_first: bool) -> list[Outcome]:
        """Return the outcome of each sample, in order; raise `MistakeError` as soon as one shows a mistake."""
        if self._reward.form == "samples":
            calls = [self._batches.outcome(key, sample) for sample in samples]
        elif self._reward.form == "group" or (is_first and self._is_quick and not self._reward.is_async):
            # One trip to a process for all: a cheap reward takes less time than the trip.
            outcomes = await self._call(samples)
            self._is_quick &= not any(isinstance(outcome, Failure) and outcome.was_killed for outcome in outcomes)
            return _without_mistakes(outcomes)
        else:
            # Call each sample apart, so that a call that never ends fails no other sample.
            calls = [self._call([sample]) for sample in samples]
        tasks = [asyncio.ensure_future(_checked(call)) for call in calls]
        try:
            return [outcome for outcomes in await asyncio.gather(*tasks) for outcome in outcomes]
        finally:
            # When one has failed, the others still run.
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """End the processes of the function."""
        if self._processes is not None:
            self._processes.close()


async def _checked(call: Awaitable[list[Outcome]]) -> list[Outcome]:
    return _without_mistakes(await call)


def _without_mistakes(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcomes, or raise `MistakeError` for the first that no further attempt would change."""
    for outcome in outcomes:
        if isinstance(outcome, Failure) and not outcome.is_transient:
            raise MistakeError(outcome)
    return outcomes


class _Item(NamedTuple):
    key: int
    """The group."""
    sample: Sample
    outcome: asyncio.Future[Outcome]


class Batches:
    """Collects samples while all calls that may run at once are busy, and then calls with those that wait."""

    def __init__(self, call: Call, *, batch_size: int, num_slots: int) -> None:
        """`batch_size` bounds the samples of one call, `num_slots` the calls at once."""
        self._call = call
        self._batch_size = batch_size
        self._num_slots = num_slots
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()

    async def run(self) -> None:
        """Serve the queue until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._num_slots):
                group.create_task(self._serve())

    async def outcome(self, key: int, sample: Sample) -> list[Outcome]:
        """Return the outcome of one sample of group `key`, in a list, when a call with it has ended."""
        item = _Item(key, sample, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(item)
        return [await item.outcome]

    async def _serve(self) -> None:
        while True:
            items = [await self._queue.get()]
            while len(items) < self._batch_size and not self._queue.empty():
                items.append(self._queue.get_nowait())
            # Samples of groups that were cancelled meanwhile need no reward.
            items = [item for item in items if not item.outcome.done()]
            if items:
                await self._answer(items)

    async def _answer(self, items: list[_Item]) -> None:
        outcomes = await self._call([item.sample for item in items])
        keys = dict.fromkeys(item.key for item in items)
        has_mistake = any(isinstance(outcome, Failure) and not outcome.is_transient for outcome in outcomes)
        if has_mistake and len(keys) > 1:
            # Only the group whose completion brings the function down is to fail.
            for key in keys:
                await self._answer([item for item in items if item.key == key])
            return
        for item, outcome in zip(items, outcomes, strict=True):
            if not item.outcome.done():
                item.outcome.set_result(outcome)


def at_rate(call: Call, limiter: RateLimiter, num_calls: Callable[[Sequence[Sample]], int]) -> Call:
    """Return a call that waits for its turn first; `num_calls` counts the calls of the function that some samples need."""

    turn = asyncio.Lock()

    async def wait_and_call(samples: Sequence[Sample]) -> list[Outcome]:
        # Turns are taken one after another: those of a group that is cancelled while it waits would be lost for all behind it.
        async with turn:
            wait_s = limiter.take_turn(num_calls(samples))
            if wait_s:
                await asyncio.sleep(wait_s)
        return await call(samples)

    return wait_and_call


def on_event_loop(reward: RewardFunction, task: TaskSection, *, concurrency: int) -> Call:
    """Return calls of an async function on the event loop of their caller, so many of them at once."""
    slots = asyncio.Semaphore(concurrency)

    async def call(samples: Sequence[Sample]) -> list[Outcome]:
        async with slots:
            try:
                # The time runs from here: a call that waits for its turn is not late.
                async with asyncio.timeout(task.reward_timeout_s):
                    return await reward.outcomes_async(samples, task.reward_weights)
            except TimeoutError:
                return [timed_out(task.reward_timeout_s, was_killed=False)] * len(samples)
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    raise
                # The function awaited a task of its own that another call, for example, had cancelled at its time limit.
                return [Failure(True, "CancelledError: something that the function awaited was cancelled")] * len(samples)

    return call


class WorkerProcesses:
    """Runs a plain function in processes that are killed at the time limit."""

    def __init__(self, task: TaskSection, *, num_workers: int) -> None:
        self._task = task
        self._num_workers = num_workers
        # Pebble sends SIGTERM first, which workers survive, and SIGKILL this much later.
        CONSTS.term_timeout = 0.0
        # What waits for a place leaves the line when its group is cancelled; the pool would still do it.
        self._places = asyncio.Semaphore(num_workers)
        self._pool = self._make_pool()
        self._is_closed = False

    async def call(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the outcome of each sample, in order."""
        for _ in range(MAX_BROKEN_POOLS):
            try:
                async with self._places:
                    return await self._result(samples)
            except BrokenProcessPool:
                # No process had begun with these samples: new ones are asked.
                continue
            except TimeoutError:
                failure = timed_out(self._task.reward_timeout_s, was_killed=True)
            except ProcessExpired as error:
                failure = Failure(False, f"the reward ended its process, exit code {error.exitcode}")
            except asyncio.CancelledError:
                raise
            # What cannot be sent to the process or back is the user's: a row, or an exception's argument. An interrupt is
            # caught, too: raised in this thread, it would end the rewards of all groups.
            except BaseException as error:  # noqa: BLE001
                failure = Failure(False, one_line(error))
            return [failure] * len(samples)
        return [Failure(True, f"the reward processes died {MAX_BROKEN_POOLS} times")] * len(samples)

    def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        self._pool.stop()
        self._pool.join()

    async def _result(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the outcomes from a process. Raise `BrokenProcessPool` when the processes died before one took the samples."""
        # A worker that dies while it is idle breaks pebble's pool for good.
        if not self._pool.active and not self._is_closed:
            logger.warning("the reward processes died; starting new ones")
            self._pool = self._make_pool()
        pool = self._pool
        arguments = self._task.reward, tuple(samples), self._task.reward_weights
        future = asyncio.wrap_future(pool.schedule(_outcomes, arguments, timeout=self._task.reward_timeout_s))
        # Waiting leaves the call as it is when this task is cancelled: to cancel it would kill its process, which other groups
        # wait for. A pool that breaks in the moment of the call may never answer.
        while not (await asyncio.wait([future], timeout=POOL_LOOK_S))[0]:
            if not pool.active and not self._is_closed:
                future.cancel()
                raise BrokenProcessPool
        return future.result()

    def _make_pool(self) -> ProcessPool:
        # Started first: it deletes the pool's semaphores if this process is killed while it makes them.
        resource_tracker.ensure_running()
        # Spawned: a fork of a process that runs an engine's threads can hang.
        pool = ProcessPool(
            self._num_workers,
            initializer=_prepare_worker,
            initargs=(os.getpid(),),
            context=multiprocessing.get_context("spawn"),
        )
        # Starts the workers, and imports the function before the first group's time runs.
        pool.schedule(_load_once, (self._task.reward,))
        return pool


def _prepare_worker(parent_pid: int) -> None:
    # A scheduler that takes a machine away sends SIGTERM to every process, and a leaving actor still needs this one.
    become_child(parent_pid, ignored=[signal.SIGTERM])
    guard_session()
    sys.stdout, sys.stderr = PrintedText(sys.stdout), PrintedText(sys.stderr)


@functools.cache
def _load_once(path: str) -> RewardFunction:
    return load_reward(path)


def _outcomes(path: str, samples: tuple[Sample, ...], weights: Mapping[str, float]) -> list[Outcome]:
    """Return the outcome of each sample, one after another. Runs in a worker."""
    return _load_once(path).outcomes(samples, weights)


def timed_out(timeout_s: float, *, was_killed: bool) -> Failure:
    """Return the failure of a call that was ended at its time limit."""
    detail = f"it took longer than task.reward_timeout_s = {timeout_s:g}"
    return Failure(is_transient=True, detail=detail, is_timeout=True, was_killed=was_killed)
