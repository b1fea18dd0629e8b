"""Places where reward functions run: processes that are killed at the time limit, or the event loop."""

import asyncio
import functools
import logging
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Protocol

from pebble import CONSTS, ProcessExpired, ProcessFuture, ProcessPool

from offbeat.actor.rewards.failures import Failure
from offbeat.actor.rewards.functions import Outcome, RewardFunction, load_reward
from offbeat.actor.rewards.guard import guard_session
from offbeat.actor.rewards.samples import Sample
from offbeat.common.errors import one_line
from offbeat.common.processes.shutdown import die_with_parent

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """Calls a reward function."""

    num_slots: int
    """Calls that run at the same time at most."""

    async def outcomes(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the outcome of each sample, in order. Ends at the time limit."""
        ...

    def close(self) -> None:
        """End all calls."""
        ...


def timed_out(timeout_s: float, *, was_killed: bool) -> Failure:
    """Return the failure of a call that was ended at its time limit."""
    detail = f"it took longer than task.reward_timeout_s = {timeout_s:g}"
    return Failure(is_transient=True, detail=detail, is_timeout=True, was_killed=was_killed)


class EventLoop:
    """Runs an async function on the event loop of its caller."""

    def __init__(self, reward: RewardFunction, weights: Mapping[str, float], *, timeout_s: float, concurrency: int) -> None:
        self.num_slots = concurrency
        self._reward = reward
        self._weights = weights
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(concurrency)

    async def outcomes(self, samples: Sequence[Sample]) -> list[Outcome]:
        async with self._slots:
            try:
                # The time runs from here: a call that waits for its turn is not late.
                async with asyncio.timeout(self._timeout_s):
                    return await self._reward.outcomes_async(samples, self._weights)
            except TimeoutError:
                return [timed_out(self._timeout_s, was_killed=False)] * len(samples)

    def close(self) -> None:
        pass


class WorkerProcesses:
    """Runs a plain function in processes that are killed at the time limit."""

    def __init__(self, path: str, weights: Mapping[str, float], *, num_workers: int, timeout_s: float) -> None:
        self.num_slots = num_workers
        self._path = path
        self._weights = dict(weights)
        self._timeout_s = timeout_s
        # Pebble sends SIGTERM first, which workers survive, and SIGKILL this much later.
        CONSTS.term_timeout = 0.0
        self._pool = self._make_pool()

    async def outcomes(self, samples: Sequence[Sample]) -> list[Outcome]:
        try:
            # Shielded: to cancel the call would kill its process, which other groups wait for.
            return await asyncio.shield(asyncio.wrap_future(self._start(samples)))
        except TimeoutError:
            failure = timed_out(self._timeout_s, was_killed=True)
        except ProcessExpired as error:
            failure = Failure(False, f"the reward ended its process, exit code {error.exitcode}")
        except asyncio.CancelledError:
            raise
        # What cannot be sent to the process or back is the user's: a row, or an exception's argument. An interrupt is caught,
        # too: raised in this thread, it would end the rewards of all groups.
        except BaseException as error:  # noqa: BLE001
            failure = Failure(False, one_line(error))
        return [failure] * len(samples)

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()

    def _start(self, samples: Sequence[Sample]) -> ProcessFuture:
        # A worker that dies while it is idle breaks pebble's pool for good.
        if not self._pool.active:
            logger.warning("the reward processes died; starting new ones")
            self._pool = self._make_pool()
        return self._pool.schedule(_outcomes, (self._path, tuple(samples), self._weights), timeout=self._timeout_s)

    def _make_pool(self) -> ProcessPool:
        # Spawned: a fork of a process that runs an engine's threads can hang.
        pool = ProcessPool(
            self.num_slots,
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
    # A scheduler that takes a machine away sends SIGTERM to every process, and a leaving actor still needs this one. A handler,
    # not SIG_IGN: programs that the reward starts would inherit that.
    signal.signal(signal.SIGTERM, lambda *_: None)


@functools.cache
def _load_once(path: str) -> RewardFunction:
    return load_reward(path)


def _outcomes(path: str, samples: tuple[Sample, ...], weights: Mapping[str, float]) -> list[Outcome]:
    """Return the outcome of each sample, one after another. Runs in a worker."""
    return _load_once(path).outcomes(samples, weights)
