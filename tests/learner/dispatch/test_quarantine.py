"""Actors with wrong weights are put in quarantine; when all are, the learner is doubted and the run ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.learner.dispatch.quarantine import MAX_MISMATCHES, MAX_QUARANTINES, RECENT
from offbeat.learner.dispatch.run_state import RunFailedError
from offbeat.protocols.messages import Cancel, Goodbye, Lease, Refused, Welcome
from tests.learner.dispatch.dispatch_desk import Actor, Desk

FLAW = "its log-probs of the canary differ by 0.0051 at version 0 (tolerance 0.001)"


def test_actor_with_wrong_weights_gets_no_lease_until_they_are_right() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    held = tuple(lease.lease_id for lease in actor.leases())
    desk.dispatcher.judge_canary("a", 0, "they differ")
    assert actor.heard(Cancel) == [Cancel(lease_ids=held)]
    assert desk.distrusted == [(actor.peer, "a", "they differ")]
    assert desk.dispatcher.members() == [(actor.peer, "a", None, None)], "it needs weights"
    assert desk.status().members[0].state == "quarantined"
    assert actor.leases() == []
    other = Actor(desk, "other").join(capacity=2)
    assert len(other.leases()) == 2
    actor.commit(0)
    desk.dispatcher.judge_canary("a", 0, "they differ")
    actor.commit(0)
    assert actor.leases() == [], "it says that it has them: that is not enough"
    desk.dispatcher.judge_canary("a", 0, None)
    assert len(actor.leases()) == 2
    assert [event.actor for event in desk.events("actor_released")] == ["a"]


@pytest.mark.parametrize("drop", [True, False])
def test_groups_sampled_since_the_last_good_weights_are_dropped_or_flagged(drop: bool) -> None:
    desk = Desk("staleness.max_staleness=2", f"weights.on_canary_mismatch={'drop' if drop else 'flag'}")
    actor = Actor(desk, "a").join(capacity=4)
    honest = Actor(desk, "honest").join(capacity=1)
    desk.tick()
    leases, (other,) = actor.heard(Lease), honest.heard(Lease)
    desk.dispatcher.judge_canary("a", 0, None)
    desk.versions.newest = 1
    actor.answer(leases[0].lease_id, policy_version=0)
    actor.answer(leases[1].lease_id, policy_version=1)
    honest.answer(other.lease_id, policy_version=1)
    desk.dispatcher.judge_canary("a", 1, "they differ")
    counts = desk.dispatcher.counts()
    assert counts.dropped == ({"quarantined": 1} if drop else {})
    assert [event.detail for event in desk.events("groups_doubtful")] == [
        f"{'dropped' if drop else 'kept (weights.on_canary_mismatch)'}: leases {leases[1].lease_id}"
    ]
    ready = [group.lease_id for group in desk.ledger.ready_groups()]
    doubtful = [] if drop else [leases[1].lease_id]
    assert sorted(ready) == sorted([leases[0].lease_id, *doubtful, other.lease_id])
    if drop:
        honest.credit(9)
        assert leases[1].prompt_id in {lease.prompt_id for lease in honest.leases()}


def test_groups_under_weights_that_missed_once_are_dropped_when_the_next_version_confirms_it() -> None:
    desk = Desk("staleness.max_staleness=4", "train.groups_per_step=4")
    actor = Actor(desk, "a").join(capacity=6)
    desk.tick()
    leases = actor.heard(Lease)
    desk.dispatcher.judge_canary("a", 0, None)
    actor.answer(leases[0].lease_id, policy_version=0)
    desk.versions.newest = 2
    desk.dispatcher.judge_canary("a", 1, None, is_certain=False)
    actor.answer(leases[1].lease_id, policy_version=1)
    assert desk.status().members[0].state == "working"
    desk.dispatcher.judge_canary("a", 2, "they differ")
    assert [group.lease_id for group in desk.ledger.ready_groups()] == [leases[0].lease_id]
    assert desk.dispatcher.counts().dropped == {"quarantined": 1}


def test_actor_that_is_quarantined_while_its_group_is_trained_on_leaves_that_group_alone() -> None:
    desk = Desk("train.groups_per_step=1")
    actor = Actor(desk, "a").join(capacity=2)
    for lease in actor.leases():
        actor.answer(lease.lease_id)
    batch = desk.batch()
    assert batch is not None
    desk.dispatcher.judge_canary("a", 0, "wrong")
    desk.dispatcher.finish_batch(batch, 1)
    counts = desk.dispatcher.counts()
    assert (counts.trained, counts.dropped) == (1, {"quarantined": 1})


def test_judgement_about_an_actor_that_left_changes_nothing() -> None:
    desk = Desk()
    desk.dispatcher.judge_canary("gone", 0, "they differ")
    assert desk.rows == []
    assert desk.distrusted == []


def test_two_actors_that_differ_alike_end_the_run_with_the_learner_named_after_a_bounded_number_of_pulls() -> None:
    desk = Desk()
    for name in ("a", "b"):
        Actor(desk, name).join(capacity=2)
    for _ in range(MAX_MISMATCHES - 1):
        desk.dispatcher.judge_canary("a", 0, FLAW, ["b"])
        desk.dispatcher.judge_canary("b", 0, FLAW, ["a"])
        assert desk.batch() is None, "pulling again may still help"
    desk.dispatcher.judge_canary("a", 0, FLAW, ["b"])
    assert desk.batch() is None, "b may be right the next time"
    desk.dispatcher.judge_canary("b", 0, FLAW, ["a"])
    with pytest.raises(RunFailedError) as failed:
        desk.batch()
    assert str(failed.value).startswith(
        f"4 times in a row every actor's log-probs of the canary differ from the learner's (a: {FLAW}; b: {FLAW}). "
        "a, b agree with each other, so it is the learner that is wrong. "
    )
    assert "weights.canary_tolerance" in str(failed.value)
    (told,) = desk.events("learner_doubted")
    assert FLAW in told.detail
    assert any("the run is ending: 4 times in a row every actor" in problem for problem in desk.status().problems)


def test_one_right_comparison_starts_the_count_anew_and_a_trusted_actor_keeps_the_run_going() -> None:
    desk = Desk()
    for name in ("a", "b"):
        Actor(desk, name).join(capacity=2)
    for _ in range(MAX_MISMATCHES):
        desk.dispatcher.judge_canary("a", 0, FLAW)
    assert desk.batch() is None, "b is trusted: a is what is wrong"
    for _ in range(MAX_MISMATCHES - 1):
        desk.dispatcher.judge_canary("b", 0, FLAW)
    desk.dispatcher.judge_canary("b", 0, None)
    for _ in range(MAX_MISMATCHES - 1):
        desk.dispatcher.judge_canary("b", 0, FLAW)
    assert desk.batch() is None
    assert len(desk.events("learner_doubted")) == 2, "once in each of the two times"


def test_actor_that_has_not_been_compared_yet_keeps_the_run_going_until_it_leaves() -> None:
    desk = Desk()
    Actor(desk, "a").join(capacity=2)
    newcomer = Actor(desk, "new").join(capacity=2, policy_version=None)
    for _ in range(MAX_MISMATCHES):
        desk.dispatcher.judge_canary("a", 0, FLAW)
    assert desk.batch() is None
    newcomer.say(Goodbye(reason="x"))
    desk.dispatcher.judge_canary("a", 0, FLAW)
    with pytest.raises(RunFailedError, match="every actor's log-probs"):
        desk.batch()


def test_only_the_first_few_of_many_actors_are_named() -> None:
    desk = Desk()
    for index in range(6):
        Actor(desk, f"actor-{index}").join(capacity=1)
    for index in range(6):
        desk.dispatcher.judge_canary(f"actor-{index}", 0, FLAW)
    (told,) = desk.events("learner_doubted")
    assert "actor-3" in told.detail
    assert "actor-4" not in told.detail
    assert "and 2 more" in told.detail


@given(st.lists(st.booleans(), max_size=3 * RECENT))
def test_quarantines_of_one_process_are_bounded_and_others_are_not_dismissed(are_right: list[bool]) -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    trusted = Actor(desk, "trusted").join(capacity=2)
    begins: list[bool] = []
    was_right = True
    for is_right in are_right:
        begins.append(was_right and not is_right)
        was_right = is_right
        desk.dispatcher.judge_canary("a", 0, None if is_right else FLAW)
        is_dismissed = sum(begins[-RECENT:]) == MAX_QUARANTINES
        assert {name for _, name, _, _ in desk.dispatcher.members()} == ({"trusted"} if is_dismissed else {"a", "trusted"})
        if is_dismissed:
            break
    assert len(desk.events("actor_quarantined")) == are_right[: len(begins)].count(False)
    assert bool(actor.heard(Refused)) == (sum(begins[-RECENT:]) == MAX_QUARANTINES)
    assert desk.batch() is None
    assert len(trusted.leases()) == 2


def alternate(desk: Desk, name: str) -> None:
    """Judge an actor wrong and right in turn until it has left."""
    for _ in range(RECENT):
        desk.dispatcher.judge_canary(name, 0, FLAW)
        desk.dispatcher.judge_canary(name, 0, None)


def test_actor_that_is_wrong_every_other_time_ends_with_the_reason_and_only_a_new_process_may_join() -> None:
    desk = Desk("staleness.max_staleness=3")
    actor = Actor(desk, "a").join(capacity=2)
    other = Actor(desk, "other").join(capacity=2)
    prompts = {lease.prompt_id for lease in actor.leases()}
    other.heard(Lease)
    alternate(desk, "a")
    (refused,) = actor.heard(Refused)
    assert refused.reason.startswith(
        f"quarantined 4 times within 7 comparisons of the canary, and right in between: {FLAW}. Restart it; "
    )
    assert "weights.canary_tolerance" in refused.reason
    assert [event.detail for event in desk.events("actor_lost")] == ["dismissed for its weights"]
    assert len(desk.distrusted) == MAX_QUARANTINES - 1, "its last pull would be for nothing"
    (told,) = [reason for reason in desk.status().rejected if reason.startswith("a: ")]
    assert "quarantined 4 times within 7 comparisons" in told
    other.credit(4)
    assert {lease.prompt_id for lease in other.leases()} == prompts

    actor.hello()
    assert actor.heard(Refused) == [refused]
    assert actor.heard(Welcome)[1:] == []
    restarted = Actor(desk, "a", incarnation=2).join(capacity=2)
    assert len(restarted.leases()) == 2
    desk.dispatcher.judge_canary("a", 0, FLAW)
    assert restarted.heard(Refused) == [], "its count begins anew"


def test_rare_quarantines_are_forgiven() -> None:
    desk = Desk()
    Actor(desk, "a").join(capacity=2)
    for _ in range(2 * MAX_QUARANTINES):
        desk.dispatcher.judge_canary("a", 0, FLAW)
        for _ in range(RECENT // (MAX_QUARANTINES - 1)):
            desk.dispatcher.judge_canary("a", 0, None)
    assert [name for _, name, _, _ in desk.dispatcher.members()] == ["a"]
