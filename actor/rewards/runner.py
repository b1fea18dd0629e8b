"""The rewards of groups, computed beside the actor's loop. A call that fails in passing is tried again within a time limit.

    submit(group) -> calls of the function (`calling.py`) -> all rewarded                          -> `Rewarded`
                         ^ back-off <- some are unavailable -> `trouble`
                                       a mistake in the function                           -> `SamplingFailure` at once
                                       unavailable for longer than `task.reward_retry_s`   -> `SamplingFailure`

Completions that have their reward keep it while the others of their group are tried again.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from offbeat.actor.rewards.calling import MistakeError, RewardCalls
from offbeat.actor.rewards.failures import Failure, SamplingFailure
from offbeat.actor.rewards.functions import Reward
from offbeat.actor.rewards.retries import Retries
from offbeat.actor.rewards.samples import Sample
from offbeat.common.errors import ServiceError, one_line
from offbeat.common.settings.config import ActorSection, TaskSection

logger = logging.getLogger(__name__)

_BEAT_S = 0.1
_LONGEST_LOOK_S = 1.0
"""Most seconds that are counted between two looks at the pulse: the process may have been suspended."""


class Pulse:
    """Shows another thread that an event loop runs: a loop that is blocked by a call cannot end that call at its time limit."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._num_beats = self._seen_beats = 0
        self._silent_s = 0.0
        self._looked_at: float | None = None

    async def beat(self) -> None:
        """Count beats for as long as the loop runs."""
        while True:
            self._num_beats += 1
            await asyncio.sleep(_BEAT_S)

    def is_blocked(self, now: float) -> bool:
        """Return True once for every `limit_s` without a beat."""
        looked_s = 0.0 if self._looked_at is None else min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        if self._num_beats != self._seen_beats:
            self._seen_beats, self._silent_s = self._num_beats, 0.0
            return False
        self._silent_s += looked_s
        if self._silent_s < self._limit_s:
            return False
        self._silent_s = 0.0
        return True


MAX_KILLED_ATTEMPTS = 3
"""Attempts at a group in which its process had to be killed; each keeps a process busy for the whole time limit."""
BLOCKED_LOOP_GRACE_S = 1.0
"""Seconds after the time limit of an async reward until the event loop counts as blocked."""


class Rewarded(NamedTuple):
    """The rewards of one group."""

    lease_id: int
    rewards: tuple[Reward, ...]
    """One reward per completion, in the order of the completions."""


class RewardRunner:
    """Computes rewards of groups on an event loop of its own, beside the thread that submits them.

    Only `submit`, `poll`, `cancel` and `close` are for that thread. Worker processes live as long as the loop.
    """

    def __init__(self, task: TaskSection, actor: ActorSection) -> None:
        """Load the reward that `task.reward` names, as in `load_reward`. Raise `SettingError` if there is none."""
        self._calls = RewardCalls(task, actor)
        self._timeout_s = task.reward_timeout_s
        self._tasks: dict[int, Future[None]] = {}
        """Groups that `poll` has not returned."""
        self._ended: queue.SimpleQueue[Rewarded | SamplingFailure] = queue.SimpleQueue()
        """Results on their way from the loop's thread to the one that submits."""
        self.retries: Retries[int] = Retries("rewards", task.reward_retry_s, lambda lease_id: lease_id)
        """The groups whose rewards are tried again."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="rewards", daemon=True)
        self._thread.start()
        self._pulse = Pulse(self._timeout_s + BLOCKED_LOOP_GRACE_S)
        self._in_loop(self._pulse.beat())
        self._in_loop(self._calls.run_batches())

    @property
    def num_pending(self) -> int:
        """Groups submitted and not yet returned by `poll`."""
        return len(self._tasks)

    def submit(self, lease_id: int, samples: Sequence[Sample]) -> None:
        """Start the rewards of a group; `lease_id` names it in the results of `poll`."""
        self._tasks[lease_id] = self._in_loop(self._reward(lease_id, tuple(samples)))

    def poll(self) -> list[Rewarded | SamplingFailure]:
        """Return the results of groups that ended since the last call, each once. Never waits."""
        if not self._thread.is_alive():
            raise ServiceError("the thread of the rewards has ended; its traceback is above")
        outcomes: list[Rewarded | SamplingFailure] = []
        while not self._ended.empty():
            outcomes.append(self._ended.get())
        if self._pulse.is_blocked(time.monotonic()) and self._calls.is_async:
            detail = f"no result {self._timeout_s:g} s after the start: an async reward must not make blocking calls"
            outcomes += [SamplingFailure(lease_id, "reward_timeout", detail) for lease_id in self._tasks]
            for task in self._tasks.values():
                task.cancel()
        return [outcome for outcome in outcomes if self._tasks.pop(outcome.lease_id, None) is not None]

    def cancel(self, lease_id: int) -> None:
        """Forget a group, if it is here; it is not tried again."""
        task = self._tasks.pop(lease_id, None)
        if task is not None:
            task.cancel()
            self.retries.forget(lease_id)

    def close(self) -> None:
        """End all rewards and their processes."""
        self._calls.close()
        self._in_loop(_cancel_others()).add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        # A loop that a reward blocks does not stop; its thread ends with the process.
        self._thread.join(BLOCKED_LOOP_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _in_loop(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    # In the loop's thread

    def _run_loop(self) -> None:
        while True:
            try:
                self._loop.run_forever()
            # asyncio hands these on from any task, of which a reward can start some of its own.
            except (KeyboardInterrupt, SystemExit) as error:
                logger.error("a task that the reward started raised %s; rewards continue", one_line(error))
            else:
                return

    async def _reward(self, lease_id: int, samples: tuple[Sample, ...]) -> None:
        # `poll` passes it over unless the function itself has raised `CancelledError`.
        result: Rewarded | SamplingFailure = SamplingFailure(lease_id, "reward_error", "cancelled")
        try:
            result = await self._outcome(lease_id, samples)
        except MistakeError as error:
            self.retries.show_mistake(error.failure.traceback)
            result = SamplingFailure(lease_id, "reward_error", error.failure.detail)
        except Exception as error:
            logger.exception("the rewards of a group failed")
            result = SamplingFailure(lease_id, "reward_error", one_line(error))
        finally:
            # Also of a group that was cancelled while its attempt failed.
            self.retries.forget(lease_id)
            self._ended.put(result)

    async def _outcome(self, lease_id: int, samples: tuple[Sample, ...]) -> Rewarded | SamplingFailure:
        """Try until every sample has its reward, or the time is over. Raises `MistakeError`."""
        rewards: dict[int, Reward] = {}
        num_attempts = num_killed = 0
        while True:
            left = [index for index in range(len(samples)) if index not in rewards]
            outcomes = await self._calls.make([samples[index] for index in left], lease_id, is_first=not num_attempts)
            rewards |= {index: outcome for index, outcome in zip(left, outcomes, strict=True) if isinstance(outcome, Reward)}
            failure = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
            now = time.monotonic()
            if failure is None:
                self.retries.succeed(lease_id, now)
                return Rewarded(lease_id, tuple(rewards[index] for index in range(len(samples))))
            num_attempts += 1
            num_killed += failure.was_killed
            failures = self.retries.fail(lease_id, failure.detail, now)
            if failures.again_at is None or num_killed >= MAX_KILLED_ATTEMPTS:
                detail = f"{failure.detail}; tried {num_attempts} times in {now - failures.since:.0f} s"
                return SamplingFailure(lease_id, "reward_timeout" if failure.is_timeout else "reward_unavailable", detail)
            await asyncio.sleep(failures.again_at - now)


async def _cancel_others() -> None:
    """Cancel every other task of the running loop and wait for their ends."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
