"""Episodes that did not end well: which of them are played again, and when.

An attempt that ran out of time or lost its process is repeated at once, `environment.max_retries` times. One whose judge
or tool is down is repeated with back-off for `task.reward_retry_s`, as rewards are, and its group keeps its place meanwhile.
While most fail so, only one is tried now and then, because each attempt costs the turns before its failure.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.actor.rewards.breaker import Breaker
from offbeat.actor.rewards.runner import UnavailableRewards, back_off_s


class Member(NamedTuple):
    """One episode of a group, over all its attempts."""

    lease_id: int
    number: int
    """In the group."""


@dataclass
class _History:
    num_begun: int = 0
    num_lost: int = 0
    """Attempts that ran out of time or lost their process."""
    num_unavailable: int = 0
    """Attempts since `since` that failed for a cause that may pass."""
    since: float = 0.0
    problem: str = ""


class Retries:
    """The attempts at each episode."""

    def __init__(self, *, max_lost: int, retry_s: float) -> None:
        """`max_lost` attempts may run out of time or lose their process; other causes may last for `retry_s`."""
        self._max_lost = max_lost
        self._retry_s = retry_s
        self._histories: defaultdict[Member, _History] = defaultdict(_History)
        self._put_off: dict[Member, float] = {}
        """Episodes of which no attempt is at work, with the time of the next."""
        self._breaker = Breaker()

    @property
    def is_failing(self) -> bool:
        """True while most episodes fail for causes that may pass."""
        return self._breaker.is_open

    def begin(self, member: Member) -> int:
        """Count an attempt; return its number, from 0."""
        history = self._histories[member]
        history.num_begun += 1
        return history.num_begun - 1

    def lose(self, member: Member) -> str | None:
        """Count an attempt that ran out of time or lost its process. Return None when another may begin, else how many did."""
        history = self._histories[member]
        history.num_lost += 1
        return None if history.num_lost <= self._max_lost else f"played {history.num_begun} times"

    def put_off(self, member: Member, problem: str, now: float) -> str | None:
        """Put off the next attempt at a failing episode. Return None, or how long it was tried when that is over."""
        history = self._histories[member]
        if not history.num_unavailable:
            history.since = now
        history.num_unavailable += 1
        history.problem = problem
        self._breaker.fail(now)
        delay_s = back_off_s(history.num_unavailable)
        if now + delay_s > history.since + self._retry_s:
            return f"played {history.num_begun} times in {now - history.since:.0f} s"
        self._put_off[member] = now + delay_s
        return None

    def take_due(self, now: float) -> list[Member]:
        """Return the episodes to begin again now, each once."""
        # The one that was put off first comes first.
        due = [member for member, again_at in self._put_off.items() if again_at <= now and self._breaker.may_try(now)]
        for member in due:
            del self._put_off[member]
        return due

    def succeed(self, member: Member, now: float) -> None:
        """Note that an episode has ended well."""
        self._breaker.succeed(now)
        self.end(member)

    def end(self, member: Member) -> None:
        """Forget an episode that has ended."""
        self._histories.pop(member, None)
        self._put_off.pop(member, None)

    def trouble(self) -> UnavailableRewards | None:
        """Return what the episodes wait for whose newest attempts failed for a cause that may pass; None when none does."""
        failing = {member: one for member, one in self._histories.items() if one.num_unavailable}
        if not failing:
            return None
        oldest = min(failing.values(), key=lambda one: one.since)
        return UnavailableRewards(oldest.since, oldest.problem, tuple({member.lease_id: None for member in failing}))
