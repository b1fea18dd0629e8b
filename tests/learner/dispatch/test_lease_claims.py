"""Leases when the learner itself stops, or another learner process takes over."""

from offbeat.learner.leases.ledger import Ledger
from offbeat.learner.leases.prompt_stream import PromptStream
from offbeat.protocols.messages import (
    Cancel,
    Credit,
    Lease,
)
from tests.learner.dispatch.dispatch_desk import (
    DEAD_AFTER_S,
    LEASE_TIMEOUT_S,
    Actor,
    Desk,
    make_recovered,
)


def test_actors_are_not_taken_for_dead_when_the_learner_itself_was_stopped() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    leases = actor.leases()
    desk.jump(3600.0)
    assert len(desk.dispatcher.members()) == 1
    assert desk.dispatcher.counts().expired == 0
    desk.tick(DEAD_AFTER_S - 1)
    assert len(desk.dispatcher.members()) == 1
    assert [actor.answer(lease.lease_id).outcome for lease in leases] == ["accepted", "accepted"]
    desk.tick(DEAD_AFTER_S + 1)
    assert desk.dispatcher.members() == [], "its silence from now on is its own"


def test_lease_has_the_time_that_was_left_when_the_learner_was_stopped() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    actor.leases()
    desk.tick(LEASE_TIMEOUT_S - 10, actor)
    desk.jump(3600.0)
    desk.tick(9, actor)
    assert desk.dispatcher.counts().expired == 0
    desk.tick(2, actor)
    assert desk.dispatcher.counts().expired == 1


def test_actor_heard_on_waking_up_is_not_thought_alive_for_as_long_as_the_learner_slept() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    desk.tick()
    # The hub thread reads before it ticks.
    desk.now += 3600.0
    actor.say(Credit(capacity=1))
    desk.jump(0.0)
    assert desk.status().members[0].last_seen_s == 0.0
    desk.tick(DEAD_AFTER_S + 1)
    assert desk.dispatcher.members() == []


def restarted(desk: Desk) -> Desk:
    """Return the next learner process, which knows all leases of the process of `desk`."""
    state = desk.dispatcher.state()
    stream = PromptStream.from_state(state.stream)
    return Desk(recovered=make_recovered()._replace(stream=stream, ledger=Ledger.from_state(state.ledger)))


def test_leases_of_the_learner_before_go_on_at_their_actors() -> None:
    before = Desk()
    actor = Actor(before, "a").join(capacity=2)
    first, second = actor.leases()
    actor.desk = desk = restarted(before)
    actor.join(capacity=2, lease_ids=[first.lease_id, second.lease_id])
    assert actor.heard(Cancel) == []
    assert actor.leases() == [], "its credit is used by what it holds"
    assert actor.answer(first.lease_id).outcome == "accepted"
    desk.tick(LEASE_TIMEOUT_S + 1, actor)
    assert desk.dispatcher.counts().expired == 1, "the time to answer begins anew"
    assert actor.answer(second.lease_id).outcome == "duplicate"


def test_lease_that_its_actor_does_not_have_after_the_learners_restart_goes_on_at_once() -> None:
    before = Desk()
    actor = Actor(before, "a").join(capacity=2)
    first, second = actor.leases()
    actor.desk = desk = restarted(before)
    actor.join(capacity=3, lease_ids=[second.lease_id])
    assert actor.leases()[0].prompt_id == first.prompt_id
    assert desk.dispatcher.counts().expired == 1


def test_leases_of_actors_that_do_not_come_back_after_the_learners_restart_go_to_others() -> None:
    before = Desk()
    leases = Actor(before, "gone").join(capacity=2).leases()
    desk = restarted(before)
    other = Actor(desk, "other").join(capacity=9)
    desk.tick(DEAD_AFTER_S - 1, other)
    assert {lease.prompt_id for lease in other.heard(Lease)}.isdisjoint(lease.prompt_id for lease in leases)
    desk.tick(2, other)
    assert desk.dispatcher.counts().expired == 2
    assert [lease.prompt_id for lease in other.heard(Lease)] == [lease.prompt_id for lease in leases]
    late = Actor(desk, "gone")
    late.hello(lease_ids=tuple(lease.lease_id for lease in leases))
    assert late.heard(Cancel) == [Cancel(lease_ids=tuple(lease.lease_id for lease in leases))]


def test_another_actor_cannot_claim_the_leases_of_the_learner_before() -> None:
    before = Desk()
    (lease,) = Actor(before, "holder").join(capacity=1).leases()
    desk = restarted(before)
    thief = Actor(desk, "thief").join(capacity=0, lease_ids=[lease.lease_id])
    assert thief.answer(lease.lease_id).outcome == "unknown"
    holder = Actor(desk, "holder").join(capacity=1, lease_ids=[lease.lease_id])
    assert holder.answer(lease.lease_id).outcome == "accepted"


def test_groups_under_weights_of_the_learner_before_are_not_from_the_future() -> None:
    desk = Desk(policy_version=2, recovered=make_recovered(newest_version=5))
    actor = Actor(desk, "a").join(capacity=2, policy_version=2)
    first, second = actor.leases()
    assert actor.answer(first.lease_id, policy_version=5).outcome == "accepted"
    assert actor.answer(second.lease_id, policy_version=6).outcome == "rejected"
    assert desk.dispatcher.state().newest_version == 5


def test_leases_wait_for_their_actors_as_long_after_the_learner_itself_was_stopped() -> None:
    before = Desk()
    Actor(before, "a").join(capacity=2).leases()
    desk = restarted(before)
    desk.jump(3600.0)
    assert desk.dispatcher.counts().expired == 0
    desk.tick(DEAD_AFTER_S + 1)
    assert desk.dispatcher.counts().expired == 2


def test_unclaimed_lease_that_has_become_too_stale_is_aborted_and_not_given_up_again() -> None:
    before = Desk("train.groups_per_step=1")
    (lease,) = Actor(before, "gone").join(capacity=1).leases()
    state = before.dispatcher.state()
    stream = PromptStream.from_state(state.stream)
    recovered = make_recovered()._replace(stream=stream, ledger=Ledger.from_state(state.ledger))
    settings = ("train.groups_per_step=1", "staleness.max_staleness=1", "staleness.staleness_policy=abort")
    desk = Desk(*settings, policy_version=2, recovered=recovered)
    desk.dispatcher.begin()
    assert [event.lease_id for event in desk.events("lease_aborted")] == [lease.lease_id]
    desk.tick(DEAD_AFTER_S + 1)
    counts = desk.dispatcher.counts()
    assert (counts.dropped, counts.expired, counts.in_flight) == ({"aborted": 1}, 0, 0)
