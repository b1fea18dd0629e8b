"""Calls that reward completions of several groups at once, for functions that are fastest on many."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from offbeat.actor.rewards.failures import Failure
from offbeat.actor.rewards.functions import Outcome
from offbeat.actor.rewards.samples import Sample


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
