"""The breaker opens when half of the last minute failed, lets one trial through now and then, and closes at a success."""

from offbeat.actor.rewards.breaker import MIN_FAILURES, PROBE_S, WINDOW_S, Breaker


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
