"""The rewards of groups, computed beside the actor's loop. A call that fails in passing is tried again within a time limit.

    submit(group) -> calls of the function (`reward_backends`) -> all rewarded        -> `Rewarded`
                         ^ back-off <- some cannot be had now -> `trouble`
                                       a mistake in the function                      -> `RewardFailure` at once
                                       not to be had for `task.reward_retry_s`        -> `RewardFailure`

Completions that have their reward keep it while the others of their group are tried again.
"""

import asyncio
import logging
import queue
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

from offbeat.actor.rewards.attempts import Attempts, MistakeError, RewardLimits
from offbeat.actor.rewards.backends import Backend, EventLoop, WorkerProcesses
from offbeat.actor.rewards.breaker import Breaker
from offbeat.actor.rewards.failures import Failure
from offbeat.actor.rewards.functions import load_reward
from offbeat.actor.rewards.samples import Sample
from offbeat.actor.rewards.values import Reward
from offbeat.common.errors import ServiceError, one_line

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


FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
"""Bounds of the time before a failed call is tried again; the time doubles with each attempt."""
MAX_KILLED_ATTEMPTS = 3
"""Attempts at a group in which its process had to be killed; each keeps a process busy for the whole time limit."""
BLOCKED_LOOP_GRACE_S = 1.0
"""Seconds after the time limit of an async reward until the event loop counts as blocked."""


class Rewarded(NamedTuple):
    """The rewards of one group."""

    key: int
    rewards: tuple[Reward, ...]
    """One reward per completion, in the order of the completions."""


class RewardFailure(NamedTuple):
    """A group without rewards."""

    key: int
    reason: Literal["reward_error", "reward_timeout", "reward_unavailable"]
    """`reward_error`: the function has a mistake. `reward_timeout`: the last attempt ended at the time limit.
    `reward_unavailable`: the last attempt failed for another cause that may pass."""
    detail: str
    """One line: exception, message, file and line."""


class UnavailableRewards(NamedTuple):
    """Rewards that cannot be had at the moment and are tried again."""

    since: float
    """Time of the first failure of the group that waits longest, on `time.monotonic`."""
    problem: str
    """The newest failure; one line."""
    keys: tuple[int, ...]
    """The groups that wait."""


class _Waiting(NamedTuple):
    """A group of which an attempt failed; it will be tried again."""

    key: int
    since: float
    problem: str


class RewardRunner:
    """Computes rewards of groups on an event loop of its own, beside the thread that submits them.

    Only `submit`, `poll`, `cancel`, `trouble` and `close` are for that thread. Worker processes live as long as the loop.
    """

    def __init__(self, path: str, limits: RewardLimits, weights: dict[str, float] | None = None) -> None:
        """Load the reward that `path` names, as in `load_reward`. Raise `SettingError` if there is none.

        `weights` are those of the named parts of a reward: `task.reward_weights`.
        """
        reward = load_reward(path)
        self._limits = limits
        self._tasks: dict[int, Future[None]] = {}
        """Groups that `poll` has not returned."""
        self._waiting: dict[int, _Waiting] = {}
        self._news: queue.SimpleQueue[Rewarded | RewardFailure | _Waiting] = queue.SimpleQueue()
        """Results and troubles, on their way from the loop's thread to the one that submits."""
        self._breaker = Breaker()
        self._has_shown_mistake = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="rewards", daemon=True)
        self._thread.start()
        self._pulse = Pulse(limits.timeout_s + BLOCKED_LOOP_GRACE_S)
        self._backend: Backend = (
            EventLoop(reward, weights or {}, timeout_s=limits.timeout_s, concurrency=limits.concurrency)
            if reward.is_async
            else WorkerProcesses(path, weights or {}, num_workers=limits.num_workers, timeout_s=limits.timeout_s)
        )
        self._attempts = Attempts(reward, self._backend, limits)
        self._in_loop(self._pulse.beat())
        self._in_loop(self._attempts.run_batches())

    @property
    def num_pending(self) -> int:
        """Groups submitted and not yet returned by `poll`."""
        return len(self._tasks)

    @property
    def is_failing(self) -> bool:
        """True while most attempts at rewards fail for causes that may pass."""
        return self._breaker.is_open

    def submit(self, key: int, samples: Sequence[Sample]) -> None:
        """Start the rewards of a group; `key` names it in the results of `poll`."""
        self._tasks[key] = self._in_loop(self._reward(key, tuple(samples)))

    def poll(self) -> list[Rewarded | RewardFailure]:
        """Return the results of groups that ended since the last call, each once. Never waits."""
        if not self._thread.is_alive():
            raise ServiceError("the thread of the rewards has ended; its traceback is above")
        outcomes: list[Rewarded | RewardFailure] = []
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, _Waiting):
                self._note_trouble(news)
            else:
                if isinstance(news, Rewarded):
                    self._breaker.succeed(time.monotonic())
                outcomes.append(news)
        if self._pulse.is_blocked(time.monotonic()) and isinstance(self._backend, EventLoop):
            detail = f"no result {self._limits.timeout_s:g} s after the start: an async reward must not make blocking calls"
            outcomes += [RewardFailure(key, "reward_timeout", detail) for key in self._tasks]
        return [outcome for outcome in outcomes if self._end(outcome.key)]

    def cancel(self, key: int) -> None:
        """Forget a group, if it is here; it is not tried again."""
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()
            self._end(key)

    def trouble(self) -> UnavailableRewards | None:
        """Return the state of rewards that cannot be had; None while all can be had."""
        if not self._waiting:
            return None
        waiting = list(self._waiting.values())
        return UnavailableRewards(min(group.since for group in waiting), waiting[-1].problem, tuple(self._waiting))

    def close(self) -> None:
        """End all rewards and their processes."""
        self._backend.close()
        self._in_loop(_cancel_others()).add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        # A loop that a reward blocks does not stop; its thread ends with the process.
        self._thread.join(BLOCKED_LOOP_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _in_loop(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _end(self, key: int) -> bool:
        """Forget a group; return False when it is not here."""
        if self._waiting.pop(key, None) is not None and not self._waiting:
            logger.info("no group waits for its reward any more")
        return self._tasks.pop(key, None) is not None

    def _note_trouble(self, waiting: _Waiting) -> None:
        if waiting.key not in self._tasks:
            return
        self._breaker.fail(time.monotonic())
        if not self._waiting:
            limit = f"tried again with back-off for {self._limits.retry_s:g} s (task.reward_retry_s)"
            logger.warning("the reward cannot be had; %s: %s", limit, waiting.problem)
        # Move it to the end: `trouble` tells the problem of the last one.
        self._waiting.pop(waiting.key, None)
        self._waiting[waiting.key] = waiting

    # In the loop's thread

    def _run_loop(self) -> None:
        while True:
            try:
                self._loop.run_forever()
            # asyncio hands these on from any task, of which a reward can start some of its own.
            except (KeyboardInterrupt, SystemExit) as error:
                logger.error("a task that the reward started raised %s; the rewards go on", one_line(error))
            else:
                return

    async def _reward(self, key: int, samples: tuple[Sample, ...]) -> None:
        try:
            self._news.put(await self._outcome(key, samples))
        except MistakeError as error:
            self._show_first(error.failure)
            self._news.put(RewardFailure(key, "reward_error", error.failure.detail))
        except asyncio.CancelledError:
            # `poll` passes it over unless the function itself has raised it.
            self._news.put(RewardFailure(key, "reward_error", "cancelled"))
            raise
        except Exception as error:
            logger.exception("the rewards of a group failed")
            self._news.put(RewardFailure(key, "reward_error", one_line(error)))

    def _show_first(self, failure: Failure) -> None:
        """Log the whole traceback of the first mistake."""
        if self._has_shown_mistake or not failure.traceback:
            return
        self._has_shown_mistake = True
        logger.error("the reward function failed; it is shown in full only this once:\n%s", failure.traceback)

    async def _outcome(self, key: int, samples: tuple[Sample, ...]) -> Rewarded | RewardFailure:
        """Try until every sample has its reward, or the time is over. Raises `MistakeError`."""
        rewards: dict[int, Reward] = {}
        since: float | None = None
        num_attempts = num_killed = 0
        while True:
            left = [index for index in range(len(samples)) if index not in rewards]
            outcomes = await self._attempts.make([samples[index] for index in left], key, is_first=not num_attempts)
            rewards |= {index: outcome for index, outcome in zip(left, outcomes, strict=True) if isinstance(outcome, Reward)}
            failure = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
            if failure is None:
                return Rewarded(key, tuple(rewards[index] for index in range(len(samples))))
            now = time.monotonic()
            since = now if since is None else since
            num_attempts += 1
            num_killed += failure.was_killed
            delay_s = back_off_s(num_attempts)
            if now + delay_s > since + self._limits.retry_s or num_killed >= MAX_KILLED_ATTEMPTS:
                detail = f"{failure.detail}; tried {num_attempts} times in {now - since:.0f} s"
                return RewardFailure(key, "reward_timeout" if failure.is_timeout else "reward_unavailable", detail)
            self._news.put(_Waiting(key, since, failure.detail))
            await asyncio.sleep(delay_s)


def back_off_s(num_attempts: int) -> float:
    """Return the seconds to wait after this many failed attempts: doubled each time, half of it at random.

    Without chance, all groups that a short outage met would come back in the same moment.
    """
    longest_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_attempts - 1, 30))
    return longest_s * random.uniform(0.5, 1.0)


async def _cancel_others() -> None:
    """Cancel every other task of the running loop and wait for their ends."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
