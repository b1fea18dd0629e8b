"""Leases wait, within bounds, for unavailable rewards, and the operator is told so."""

import logging
from pathlib import Path

import pytest

from offbeat.common.records.rows import EventRow
from offbeat.learner.dispatch.reports import RepeatedEvents
from offbeat.protocols.messages import ActorHeartbeat, ActorStats, LeaseFailed, RewardTrouble
from offbeat.protocols.payload import CompletionMeta, Segment
from tests.learner.dispatch.dispatch_desk import LEASE_TIMEOUT_S, Actor, Desk, WillingLog

RETRY_S = 60.0
DOWN = "HTTPError: 503 (judge.py:7)"


def beat(actor: Actor, *lease_ids: int, waiting_s: float | None) -> None:
    """Send a heartbeat of an actor whose leases wait for their rewards; None: rewards can be had."""
    trouble = None if waiting_s is None else RewardTrouble(waiting_s=waiting_s, problem=DOWN, lease_ids=lease_ids)
    heartbeat = ActorHeartbeat(
        policy_version=0, stats=ActorStats(), lease_ids=lease_ids, seen_lease_id=max(lease_ids), reward_trouble=trouble
    )
    actor.say(heartbeat)


def waiting_lease(desk: Desk, actor: Actor) -> int:
    """Return a lease that waits for its reward just before its time is over."""
    (lease,) = actor.leases()
    desk.tick(LEASE_TIMEOUT_S - 1, actor)
    beat(actor, lease.lease_id, waiting_s=20.0)
    return lease.lease_id


def test_lease_that_waits_for_its_reward_gets_more_time_once() -> None:
    desk = Desk(f"task.reward_retry_s={RETRY_S}")
    actor = Actor(desk, "a").join(capacity=1)
    lease_id = waiting_lease(desk, actor)
    desk.tick(RETRY_S, actor)
    beat(actor, lease_id, waiting_s=80.0)
    assert desk.dispatcher.counts().expired == 0
    desk.tick(2.0, actor)
    assert desk.dispatcher.counts().expired == 1, "the time is bounded, whatever the actor says"


def test_lease_that_waits_for_its_reward_gives_no_time_to_later_leases() -> None:
    desk = Desk(f"task.reward_retry_s={10 * LEASE_TIMEOUT_S}")
    actor = Actor(desk, "a").join(capacity=1)
    waiting_lease(desk, actor)
    desk.tick(2.0, actor)
    stuck = Actor(desk, "b").join(capacity=1)
    (lease,) = stuck.leases()
    desk.tick(LEASE_TIMEOUT_S + 1, actor, stuck)
    assert lease.lease_id not in desk.lease_desk.deadlines


def test_lease_that_waits_for_its_reward_keeps_its_time_when_the_full_log_has_room_again(tmp_path: Path) -> None:
    log = WillingLog(tmp_path / "log")
    desk = Desk(f"task.reward_retry_s={3 * LEASE_TIMEOUT_S}", log=log)
    actor = Actor(desk, "a").join(capacity=1)
    lease_id = waiting_lease(desk, actor)
    log.has_room = False
    desk.tick(1.0, actor)
    log.has_room = True
    desk.tick(2 * LEASE_TIMEOUT_S, actor)
    assert lease_id in desk.lease_desk.deadlines
    log.close()


def test_group_that_has_waited_for_its_reward_is_accepted() -> None:
    desk = Desk(f"task.reward_retry_s={RETRY_S}")
    actor = Actor(desk, "a").join(capacity=1)
    lease_id = waiting_lease(desk, actor)
    desk.tick(RETRY_S, actor)
    assert actor.answer(lease_id).outcome == "accepted"
    counts = desk.dispatcher.counts()
    assert (counts.expired, sum(counts.dropped.values())) == (0, 0)


def test_lease_of_another_actor_gets_no_time() -> None:
    desk = Desk(f"task.reward_retry_s={RETRY_S}", "staleness.max_staleness=0")
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    other = Actor(desk, "b").join(capacity=1)
    desk.tick(LEASE_TIMEOUT_S - 1, actor, other)
    beat(other, lease.lease_id, waiting_s=20.0)
    desk.tick(2.0, actor, other)
    assert lease.lease_id not in desk.lease_desk.deadlines


def test_operator_is_told_of_rewards_that_fail_for_long_and_of_their_return() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    beat(actor, lease.lease_id, waiting_s=2.0)
    assert desk.events("rewards_failing") == []
    assert desk.status().problems == ()
    for waiting_s in (5.5, 30.0):
        desk.tick(1.0)
        beat(actor, lease.lease_id, waiting_s=waiting_s)
    (event,) = desk.events("rewards_failing")
    assert event.detail == f"rewards are failing for 6 s, 1 groups wait: {DOWN}"
    report = desk.status()
    problem = f"a: rewards are failing for 30 s, 1 groups wait: {DOWN}"
    assert report.problems == (problem,)
    assert report.waiting_for == f"0 of 2 groups ready; {problem}"
    desk.tick(1.0)
    beat(actor, lease.lease_id, waiting_s=None)
    assert [event.actor for event in desk.events("rewards_back")] == ["a"]
    assert desk.status().problems == ()


def test_evaluation_leases_say_so() -> None:
    desk = Desk("evaluation.interval=1", 'data.eval_data="held_out.jsonl"')
    actor = Actor(desk, "a").join(capacity=10)
    assert {lease.is_evaluation for lease in actor.leases() if lease.prompt.startswith("train")} == {False}
    assert {lease.is_evaluation for lease in actor.leases() if lease.prompt.startswith("held-out")} <= {True}


def test_same_failure_is_told_three_times_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rows: list[EventRow] = []
    events = RepeatedEvents(rows.append)  # pyright: ignore[reportArgumentType], only events are reported
    for lease_id in range(120):
        events.report(EventRow(event="reward_error", detail="KeyError: 'answer'", lease_id=lease_id))
    events.report(EventRow(event="reward_error", detail="another", lease_id=120))
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "reward_error 0: KeyError: 'answer'",
        "reward_error 1: KeyError: 'answer'",
        "reward_error 2: KeyError: 'answer'",
        "reward_error: 10 times so far: KeyError: 'answer'",
        "reward_error: 100 times so far: KeyError: 'answer'",
        "reward_error 120: another",
    ]
    assert len(rows) == 121


def test_failures_with_ever_other_texts_take_no_more_memory_and_are_still_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    events = RepeatedEvents(lambda row: None)
    for number in range(RepeatedEvents.MAX_TEXTS + 100):
        events.report(EventRow(event="reward_error", detail=str(number)))
    assert len([record for record in caplog.records if "so far" in record.getMessage()]) == 2


def test_failed_lease_that_ends_the_run_names_the_cure_for_its_reason() -> None:
    desk = Desk("run.max_failed_leases=1")
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    actor.say(LeaseFailed(lease_id=lease.lease_id, reason="reward_unavailable", detail=DOWN))
    assert "raise task.reward_retry_s" in str(desk.failures.error)


@pytest.mark.parametrize(("value", "outcome"), [(0.5, "accepted"), (float("nan"), "rejected"), (float("inf"), "rejected")])
def test_parts_of_rewards_must_be_finite(value: float, outcome: str) -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    meta = CompletionMeta(1, "stop", 1.0, (Segment(0, 0),), {"format": value})
    assert actor.send_completions(lease.lease_id, meta, meta).outcome == outcome
