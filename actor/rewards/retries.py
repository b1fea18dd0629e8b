"""Retries and rates: when something that failed may be tried again, and when the next call may start.

Rewards, episodes and the judge fail for causes that may pass: a server is down, busy, or slow. All three wait and try again as
`Failures` says. `Retries` adds what an actor needs to know about all its rewards, or all its episodes, together.

    failure -> `Retries.fail` -> time of the next attempt, or None: give up
                             `-> `Breaker`: most fail, so the actor takes one lease at a time
                             `-> `trouble`: what the learner reports, and for which leases it waits longer
"""

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

from offbeat.protocols.messages import RewardTrouble

logger = logging.getLogger(__name__)

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
"""Bounds of the time before a failed call is tried again; the time doubles with each attempt."""
WINDOW_S = 60.0
"""Seconds of outcomes that a breaker looks at."""
MIN_FAILURES = 4
"""Failures in the window below which chance may have made them."""
PROBE_S = 5.0
"""Seconds between two trials while the breaker is open."""

Key = TypeVar("Key")


def back_off_s(num_failures: int) -> float:
    """Return the seconds to wait after this many failures: doubled each time, half of it at random.

    Without chance, all groups that a short outage met would come back in the same moment.
    """
    longest_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_failures - 1, 30))
    return longest_s * random.uniform(0.5, 1.0)


@dataclass
class Failures:
    """The failures of one thing that is tried again, and the time of its next attempt."""

    num: int = 0
    since: float = 0.0
    """Time of the first failure."""
    problem: str = ""
    """The newest failure; one line."""
    again_at: float | None = None
    """Time of the next attempt; None to give up, or when that attempt is at work."""

    def add(self, problem: str, now: float, *, retry_s: float = math.inf) -> None:
        """Add a failure, and set the time of the next attempt unless it is later than `retry_s` after the first failure."""
        if not self.num:
            self.since = now
        self.num += 1
        self.problem = problem
        again_at = now + back_off_s(self.num)
        self.again_at = again_at if again_at <= self.since + retry_s else None


class Retries(Generic[Key]):
    """Everything of one kind that is tried again, by key; any thread may call it."""

    def __init__(self, kind: str, retry_s: float, lease_of: Callable[[Key], int]) -> None:
        """`kind` names what fails in the log; `retry_s` is `task.reward_retry_s`; `lease_of` returns the lease of a key."""
        self._kind = kind
        self._retry_s = retry_s
        self._lease_of = lease_of
        self._lock = threading.Lock()
        self._failing: dict[Key, Failures] = {}
        """Failures by key, the newest last; without those given up."""
        self._breaker = Breaker()
        self._has_shown_mistake = False

    @property
    def is_failing(self) -> bool:
        """True while most attempts fail for causes that may pass."""
        return self._breaker.is_open

    def fail(self, key: Key, problem: str, now: float) -> Failures:
        """Note a failed attempt; return all failures of this key, which say when to try again."""
        with self._lock:
            is_first = not self._failing
            failures = self._failing.pop(key, None) or Failures()
            failures.add(problem, now, retry_s=self._retry_s)
            self._breaker.fail(now)
            if failures.again_at is not None:
                self._failing[key] = failures
                if is_first:
                    limit = f"tried again with back-off for {self._retry_s:g} s (task.reward_retry_s)"
                    logger.warning("%s are unavailable; %s: %s", self._kind, limit, problem)
            return failures

    def succeed(self, key: Key, now: float) -> None:
        """Note a success."""
        self._breaker.succeed(now)
        self.forget(key)

    def show_mistake(self, traceback: str) -> None:
        """Log the traceback of the first mistake, which no attempt would mend; empty where there is none."""
        if traceback and not self._has_shown_mistake:
            self._has_shown_mistake = True
            logger.error("the function of the %s failed; it is shown in full only this once:\n%s", self._kind, traceback)

    def forget(self, key: Key) -> None:
        """Forget a key that is not tried again."""
        with self._lock:
            if self._failing.pop(key, None) is not None and not self._failing:
                logger.info("no group waits for unavailable %s any more", self._kind)

    def take_due(self, now: float) -> list[Key]:
        """Return the keys to try again now, each once; while most fail only one now and then."""
        due: list[Key] = []
        with self._lock:
            for key, failures in self._failing.items():
                if failures.again_at is not None and failures.again_at <= now and self._breaker.may_try(now):
                    failures.again_at = None
                    due.append(key)
        return due

    def trouble(self, now: float) -> RewardTrouble | None:
        """Return what is unavailable; None while nothing is."""
        with self._lock:
            failing = dict(self._failing)
        if not failing:
            return None
        # A reward's thread may have noted its failure after the caller read the clock.
        waiting_s = max(0.0, now - min(failures.since for failures in failing.values()))
        lease_ids = tuple(dict.fromkeys(map(self._lease_of, failing)))
        return RewardTrouble(waiting_s=waiting_s, problem=[*failing.values()][-1].problem, lease_ids=lease_ids)


class Breaker:
    """Opens when at least half of the last minute's outcomes were failures, and closes at the first success after that."""

    def __init__(self) -> None:
        self._outcomes: deque[tuple[float, bool]] = deque()
        self._probed_at = 0.0
        self.is_open = False

    def succeed(self, now: float) -> None:
        """Note a success."""
        if self.is_open:
            self._outcomes.clear()
            self.is_open = False
        self._note(now, is_failure=False)

    def fail(self, now: float) -> None:
        """Note a failure for a cause that may pass."""
        self._note(now, is_failure=True)
        num_failures = sum(is_failure for _, is_failure in self._outcomes)
        if not self.is_open and num_failures >= MIN_FAILURES and 2 * num_failures >= len(self._outcomes):
            self.is_open = True
            self._probed_at = now

    def may_try(self, now: float) -> bool:
        """Return whether something may be tried now; while the breaker is open this is True once in `PROBE_S`."""
        if not self.is_open:
            return True
        if now < self._probed_at + PROBE_S:
            return False
        self._probed_at = now
        return True

    def _note(self, now: float, *, is_failure: bool) -> None:
        self._outcomes.append((now, is_failure))
        while self._outcomes[0][0] < now - WINDOW_S:
            self._outcomes.popleft()


class RateLimiter:
    """Spaces the starts of calls, in one process or, with numbers in a shared file, in many."""

    def __init__(
        self,
        calls_per_s: float | None,
        numbers: Callable[[], AbstractContextManager[list[float]]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`calls_per_s` is None for no bound. `numbers` returns a context with two numbers, and keeps what is set there."""
        self._interval_s = 0.0 if calls_per_s is None else 1.0 / calls_per_s
        own = nullcontext([0.0, 0.0])
        self._numbers = numbers or (lambda: own)
        self._clock = clock

    def take_turn(self, num_calls: int = 1, longest_wait_s: float = math.inf) -> float | None:
        """Reserve the next moment for some calls, and return the seconds until then.

        Return None, and reserve nothing, when the wait would exceed `longest_wait_s`.
        """
        with self._numbers() as numbers:
            now = self._clock()
            starts_at = max(now, *numbers)
            if starts_at > now + longest_wait_s:
                return None
            numbers[0] = starts_at + num_calls * self._interval_s
            return starts_at - now

    def pause(self, seconds: float) -> None:
        """Let no call start for some time, as a server has asked."""
        with self._numbers() as numbers:
            numbers[1] = max(numbers[1], self._clock() + seconds)
