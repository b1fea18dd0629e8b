"""Retries with growing delays up to a deadline, a breaker for times in which most calls fail, and a limit on their rate."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from offbeat.actor.rewards.calling import at_rate
from offbeat.actor.rewards.functions import Outcome
from offbeat.actor.rewards.retries import (
    MIN_FAILURES,
    PROBE_S,
    WINDOW_S,
    Breaker,
    Failures,
    RateLimiter,
    Retries,
    back_off_s,
)
from offbeat.actor.rewards.samples import Sample
from offbeat.protocols.messages import RewardTrouble
from tests.actor.rewards.reward_harness import samples


def test_back_off_doubles_up_to_its_bound_and_half_of_it_is_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    assert [back_off_s(failures) for failures in (1, 2, 3, 6, 7, 1000)] == [0.5, 1.0, 2.0, 16.0, 30.0, 30.0]
    monkeypatch.setattr("random.uniform", lambda low, high: low)
    assert [back_off_s(failures) for failures in (1, 2, 1000)] == [0.25, 0.5, 15.0]


def test_next_attempt_comes_after_its_delay_unless_that_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    failures = Failures()
    for now, again_at in ((10.0, 10.5), (10.5, 11.5), (11.5, 13.5), (13.5, None)):
        failures.add("down", now, retry_s=4.0)
        assert failures.again_at == again_at
    assert (failures.num, failures.since) == (4, 10.0)


def new_retries(retry_s: float = 60.0) -> Retries[tuple[int, int]]:
    """Return retries of episodes, whose keys are a lease and a number."""
    return Retries("episodes", retry_s, lambda key: key[0])


def test_what_failed_is_due_once_for_each_failure() -> None:
    retries = new_retries()
    retries.fail((7, 0), "the tool is down", now=0.0)
    assert retries.take_due(0.0) == []
    assert retries.take_due(100.0) == [(7, 0)]
    assert retries.take_due(200.0) == []


def test_what_was_forgotten_is_not_tried_again() -> None:
    retries = new_retries()
    retries.fail((7, 0), "the tool is down", now=0.0)
    retries.forget((7, 0))
    assert retries.take_due(100.0) == []
    assert retries.trouble(now=6.0) is None


def test_trouble_is_the_newest_problem_since_the_first_failure_and_names_each_lease_once() -> None:
    retries = new_retries()
    retries.fail((7, 0), "old", now=1.0)
    retries.fail((8, 0), "other", now=2.0)
    retries.fail((8, 1), "other", now=3.0)
    retries.fail((7, 0), "new", now=4.0)
    assert retries.trouble(now=6.0) == RewardTrouble(waiting_s=5.0, problem="new", lease_ids=(8, 7))
    for key in ((7, 0), (8, 1), (8, 0)):
        assert retries.trouble(now=6.0) is not None
        retries.succeed(key, now=5.0)
    assert retries.trouble(now=6.0) is None


def test_what_is_given_up_is_no_trouble_any_more(caplog: pytest.LogCaptureFixture) -> None:
    retries = new_retries(retry_s=0.0)
    assert retries.fail((7, 0), "down", now=0.0).again_at is None
    assert retries.trouble(now=6.0) is None
    assert caplog.records == [], "nothing waits"


@pytest.mark.parametrize("pause_s", [0.0, 2.0])
def test_calls_are_spaced_to_keep_the_rate_and_a_pause(pause_s: float) -> None:
    limiter = RateLimiter(4.0, clock=lambda: 100.0)
    limiter.pause(pause_s)
    waits = [limiter.take_turn(num_calls) for num_calls in (1, 1, 8, 1)]
    assert waits == [pause_s, pause_s + 0.25, pause_s + 0.5, pause_s + 2.5]
    assert limiter.take_turn(longest_wait_s=pause_s + 2.7) is None, "2.75 s are too long"
    assert limiter.take_turn(longest_wait_s=pause_s + 2.75) == pause_s + 2.75, "the turn that was refused is still free"


def test_calls_without_a_rate_start_at_once() -> None:
    now = itertools.count(100.0, 0.5)
    limiter = RateLimiter(None, clock=lambda: next(now))
    assert [limiter.take_turn(5), limiter.take_turn()] == [0.0, 0.0]


def test_calls_that_are_cancelled_while_they_wait_take_no_turns() -> None:
    limiter = RateLimiter(1.0, clock=lambda: 100.0)

    async def call(_: Sequence[Sample]) -> list[Outcome]:
        return []

    async def queue_and_cancel() -> None:
        limited = at_rate(call, limiter, len)
        await limited(samples(["at once"]))
        waiting = [asyncio.ensure_future(limited(samples(["late"]))) for _ in range(100)]
        await asyncio.sleep(0)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(queue_and_cancel())
    assert limiter.take_turn() == 2.0, "only the first of those that waited had a turn"


def test_half_of_the_last_minute_opens_it_and_one_success_closes_it() -> None:
    breaker = Breaker()
    for second in range(5):
        breaker.succeed(second)
    for second in range(5, 9):
        breaker.fail(second)
        assert not breaker.is_open, "fewer failures than successes"
    breaker.fail(9)
    assert breaker.is_open
    breaker.succeed(10)
    assert not breaker.is_open
    # What was before the success is no reason to open again.
    breaker.fail(11)
    assert not breaker.is_open


def test_old_outcomes_and_few_failures_do_not_count() -> None:
    breaker = Breaker()
    for _ in range(100):
        breaker.succeed(0)
    for number in range(MIN_FAILURES):
        assert not breaker.is_open
        breaker.fail(WINDOW_S + 1 + number)
    assert breaker.is_open


def test_open_breaker_lets_one_trial_through_at_a_time() -> None:
    breaker = Breaker()
    assert all(breaker.may_try(0) for _ in range(9))
    for _ in range(MIN_FAILURES):
        breaker.fail(0)
    trials = [now for now in range(20) for _ in range(3) if breaker.may_try(now)]
    assert trials == [PROBE_S, 2 * PROBE_S, 3 * PROBE_S]
