"""One attempt at the rewards of a group: divided into calls of the reward function, within the limits that the config sets."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from offbeat.actor.rewards.backends import Backend
from offbeat.actor.rewards.failures import Failure
from offbeat.actor.rewards.functions import Outcome, RewardFunction
from offbeat.actor.rewards.samples import Sample
from offbeat.common.settings.config import Config


class _Item(NamedTuple):
    key: int
    """The group."""
    sample: Sample
    outcome: asyncio.Future[Outcome]


class Batches:
    """Collects samples while all calls that may run at once are busy, and then calls with those that wait."""

    def __init__(
        self, call: Callable[[Sequence[Sample]], Awaitable[list[Outcome]]], *, batch_size: int, num_slots: int
    ) -> None:
        """`call` returns an outcome per sample; `batch_size` bounds the samples of one call, `num_slots` the calls."""
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


class RewardLimits(NamedTuple):
    """The bounds that a config sets to calls of the reward function."""

    timeout_s: float
    """Longest time of one call, in seconds; for a plain function of one completion, of the calls for a group."""
    retry_s: float
    """Seconds for which a group whose reward cannot be had is tried again."""
    num_workers: int
    """Processes for a plain function."""
    concurrency: int
    """Calls of an async function at the same time."""
    calls_per_s: float | None
    """Calls that may be started in a second; None for no bound."""
    batch_size: int
    """Completions in one call of a function that takes them of any prompts."""


def limits_of(config: Config) -> RewardLimits:
    """Return the limits that the settings name."""
    task, actor = config.task, config.actor
    return RewardLimits(
        timeout_s=task.reward_timeout_s,
        retry_s=task.reward_retry_s,
        num_workers=actor.reward_workers,
        concurrency=actor.reward_concurrency,
        calls_per_s=actor.reward_calls_per_s,
        batch_size=actor.reward_batch_size,
    )


class MistakeError(Exception):
    """The reward function has a mistake; no further attempt would help."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class Attempts:
    """Divides the samples of a group into calls of the reward function, by its form, and keeps to the rate."""

    def __init__(self, reward: RewardFunction, backend: Backend, limits: RewardLimits) -> None:
        self._reward = reward
        self._backend = backend
        self._pace = Pace(limits.calls_per_s)
        self._batches = Batches(self._call, batch_size=limits.batch_size, num_slots=backend.num_slots)

    async def run_batches(self) -> None:
        """Serve the calls that rewards of several groups share."""
        if self._reward.form == "samples":
            await self._batches.run()

    async def make(self, samples: Sequence[Sample], key: int, *, is_first: bool) -> list[Outcome]:
        """Return the outcome of each sample, in order; raise `MistakeError` as soon as one shows a mistake."""
        if self._reward.form == "samples":
            calls = [self._batches.outcome(key, sample) for sample in samples]
        elif self._reward.form == "group":
            return _without_mistakes(await self._call(samples))
        elif is_first and not self._reward.is_async:
            # One trip to a process for all: a cheap reward takes less time than the trip.
            return _without_mistakes(await self._call(samples))
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

    async def _call(self, samples: Sequence[Sample]) -> list[Outcome]:
        await self._pace.turn(self._reward.num_calls(samples))
        return await self._backend.outcomes(samples)


async def _checked(call: Coroutine[Any, Any, list[Outcome]]) -> list[Outcome]:
    return _without_mistakes(await call)


def _without_mistakes(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcomes, or raise `MistakeError` for the first that no further attempt would change."""
    for outcome in outcomes:
        if isinstance(outcome, Failure) and not outcome.is_transient:
            raise MistakeError(outcome)
    return outcomes


class Pace:
    """Spaces calls so that no more than `calls_per_s` start in a second."""

    def __init__(self, calls_per_s: float | None) -> None:
        self._calls_per_s = calls_per_s
        self._free_at = 0.0

    async def turn(self, num_calls: int) -> None:
        """Wait until these calls may start."""
        if self._calls_per_s is None:
            return
        now = time.monotonic()
        starts_at = max(now, self._free_at)
        self._free_at = starts_at + num_calls / self._calls_per_s
        await asyncio.sleep(starts_at - now)
