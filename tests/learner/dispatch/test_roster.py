"""Actors join and send heartbeats; each lease goes to the actor that uses the least of its credit."""

from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.records.rows import ActorRow, CommitRow
from offbeat.learner.dispatch.roster import MAX_ACTOR_ROWS_PER_S, MAX_BARRED, LeaseTurns, Member, Mismatch
from offbeat.protocols.keys import NO_KEYS, Sender
from offbeat.protocols.messages import (
    ActorStats,
    Credit,
    Goodbye,
    LearnerHeartbeat,
    Refused,
    SayHello,
    Welcome,
)
from tests.learner.dispatch.dispatch_desk import (
    CONTRACT,
    DEAD_AFTER_S,
    Actor,
    Desk,
    make_hello,
)


def test_hello_is_answered_with_the_contract() -> None:
    desk = Desk(policy_version=3)
    actor = Actor(desk, "a")
    actor.hello()
    (outgoing,) = desk.dispatcher.take_outgoing()
    assert outgoing.peer == actor.peer
    assert outgoing.message == Welcome(
        run_id="run", learner_incarnation=77, max_message_bytes=1 << 20, layout=CONTRACT.layout, policy_version=3
    )
    assert outgoing.arrays[0].tolist() == [1, 2, 3]
    assert desk.joined == [actor.peer]
    assert desk.dispatcher.members() == [(actor.peer, "a", None, None)]


def test_second_hello_is_welcomed_and_changes_nothing() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    held = tuple(lease.lease_id for lease in actor.leases())
    assert len(held) == 2
    actor.hello(lease_ids=held)
    assert len(actor.heard(Welcome)) == 2
    assert desk.joined == [actor.peer]
    assert desk.dispatcher.members() == [(actor.peer, "a", 0, None)]
    assert actor.leases() == []


def test_hellos_that_queued_while_the_learner_loaded_are_welcomed_once_and_take_back_no_lease() -> None:
    desk = Desk()
    actor = Actor(desk, "a")
    for _ in range(3):
        actor.hello()
    assert len(actor.heard(Welcome)) == 1
    actor.credit(2)
    actor.commit(0)
    held = actor.leases()
    actor.hello()
    assert len(held) == 2
    assert desk.dispatcher.counts().expired == 0, "it was said before the leases arrived"


def test_hello_of_an_actor_that_did_not_get_its_welcome_is_answered_again() -> None:
    desk = Desk()
    actor = Actor(desk, "a")
    actor.hello()
    desk.tick(1.0)
    actor.hello()
    assert len(actor.heard(Welcome)) == 2


def test_actor_that_does_not_keep_to_the_contract_is_refused_with_the_reason_and_counted() -> None:
    desk = Desk()
    actor = Actor(desk, "a")
    for _ in range(3):
        actor.hello(reward="others:solved")
    refused = actor.heard(Refused)
    assert len(refused) == 3
    assert "task.reward" in refused[0].reason
    assert desk.dispatcher.members() == []
    assert desk.joined == []
    assert len(desk.events("actor_refused")) == 1, "told once, counted three times"
    (number,) = desk.status().rejected.values()
    assert number == 3


def test_actor_with_other_code_of_the_reward_than_the_first_is_refused_until_that_one_has_left() -> None:
    desk = Desk()
    first, second = Actor(desk, "a"), Actor(desk, "b")
    first.hello(sources={"rewards.py": "old"})
    first.hello(sources={"rewards.py": "new"})
    assert first.heard(Refused) == [], "its own former word is nobody else's"
    second.hello(sources={"rewards.py": "new"})
    (refused,) = second.heard(Refused)
    assert "not that of actor a: rewards.py (hash new, not old)" in refused.reason
    first.say(Goodbye(reason="SIGTERM"))
    second.hello(sources={"rewards.py": "new"})
    assert second.heard(Refused) == []


def test_harmless_difference_is_recorded_when_the_actor_joins() -> None:
    desk = Desk()
    Actor(desk, "a").hello(software="0.9")
    assert [event.detail for event in desk.events("actor_joined")] == [
        "vllm 1 float32 on cpu; offbeat 0.9, the learner has 1.0"
    ]


def test_more_actors_than_the_run_takes_are_refused_and_those_in_it_stay() -> None:
    desk = Desk("hub.max_actors=1")
    first = Actor(desk, "a").join(capacity=1)
    second = Actor(desk, "b")
    second.hello()
    assert "hub.max_actors = 1" in second.heard(Refused)[0].reason
    desk.tick(1.0)
    first.hello()
    assert len(first.heard(Welcome)) == 2
    assert [name for _, name, *_ in desk.dispatcher.members()] == ["a"]


@pytest.mark.parametrize(
    ("max_actors", "max_peers", "limit"), [(2, None, "hub.max_actors = 2"), (100, 2, "too few files for more than 2 actors")]
)
def test_full_run_takes_the_restart_of_its_own_actor(max_actors: int, max_peers: int | None, limit: str) -> None:
    desk = Desk(f"hub.max_actors={max_actors}", contract=CONTRACT._replace(max_peers=max_peers))
    for name in ("a", "b"):
        Actor(desk, name, incarnation=1).join(capacity=1)
    restarted = Actor(desk, "b", incarnation=2)
    restarted.hello()
    assert len(restarted.heard(Welcome)) == 1
    stranger = Actor(desk, "c")
    stranger.hello()
    assert limit in stranger.heard(Refused)[0].reason
    assert [name for _, name, *_ in desk.dispatcher.members()] == ["a", "b"]


def test_newer_incarnation_replaces_the_older_one_and_its_leases_go_on() -> None:
    desk = Desk()
    older = Actor(desk, "a", incarnation=1).join(capacity=2)
    before = older.leases()
    newer = Actor(desk, "a", incarnation=2).join(capacity=2)
    assert desk.dispatcher.members() == [(newer.peer, "a", 0, None)]
    after = newer.leases()
    assert [lease.prompt_id for lease in after] == [lease.prompt_id for lease in before]
    assert {lease.lease_id for lease in after}.isdisjoint(lease.lease_id for lease in before)
    older.say(Credit(capacity=2))
    assert older.heard(SayHello) == [SayHello()]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_of_two_actors_with_one_name_the_one_that_came_last_stays(before: int, after: int) -> None:
    # Incarnations are random numbers: which one is larger says nothing.
    desk = Desk()
    first = Actor(desk, "a", incarnation=before).join(capacity=2)
    last = Actor(desk, "a", incarnation=after).join(capacity=2)
    first.hello()
    assert "actor.name" in first.heard(Refused)[0].reason
    assert desk.dispatcher.members() == [(last.peer, "a", 0, None)]
    assert len(last.leases()) == 2


def test_replaced_actor_is_refused_for_good_and_remembered_among_many() -> None:
    desk = Desk()
    Actor(desk, "a", incarnation=0).hello()
    for incarnation in range(1, MAX_BARRED + 1):
        Actor(desk, "a", incarnation=incarnation).hello()
    first = Actor(desk, "a", incarnation=0)
    first.hello()
    assert len(first.heard(Refused)) == 1
    Actor(desk, "a", incarnation=MAX_BARRED + 1).hello()
    first.hello()
    assert first.heard(Refused) == [], "one more than are remembered: the first is forgotten"


def test_heartbeat_is_recorded_and_answered_with_the_newest_lease() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=0)
    stats = ActorStats(num_generated_tokens=7, seconds={"generate": 1.0})
    actor.beat(policy_version=1, stats=stats)
    assert actor.heard(LearnerHeartbeat) == [LearnerHeartbeat(newest_lease_id=-1)]
    (row,) = desk.rows_of(ActorRow)
    assert (row.actor, row.policy_version, row.num_generated_tokens) == ("a", 1, 7)
    assert row.seconds == {"generate": 1.0}
    actor.credit(2)
    held = [lease.lease_id for lease in actor.leases()]
    actor.beat(*held)
    assert actor.heard(LearnerHeartbeat) == [LearnerHeartbeat(newest_lease_id=held[-1])]


def test_flood_of_heartbeats_is_no_flood_of_rows() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=0)
    for _ in range(100):
        actor.beat()
    assert len(actor.heard(LearnerHeartbeat)) == 100
    assert len(desk.rows_of(ActorRow)) == 1


def test_commit_of_weights_that_were_not_published_is_distrusted_and_counts_for_nothing() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    actor.commit(1)
    assert desk.dispatcher.members() == [(actor.peer, "a", 0, None)]
    assert [actor for _, actor, _ in desk.distrusted] == ["a"]
    assert "claims to have weights 1" in desk.distrusted[0][2]
    assert len(desk.events("actor_lied")) == 1
    assert [message.policy_version for _, message in desk.weights] == [0]
    assert desk.rows_of(CommitRow)[-1].policy_version == 0


def test_actor_is_who_its_key_says() -> None:
    desk = Desk()
    fleet = Actor(desk, "gpu-7", sender=Sender("gpu-*", "actor"))
    fleet.hello()
    assert len(fleet.heard(Welcome)) == 1
    impostor = Actor(desk, "cpu-1", sender=Sender("gpu-*", "actor"))
    impostor.hello()
    assert "actor.name" in impostor.heard(Refused)[0].reason
    assert [name for _, name, *_ in desk.dispatcher.members()] == ["gpu-7"]


def test_many_actors_write_a_bounded_number_of_rows_between_them() -> None:
    desk = Desk("hub.max_actors=1000")
    actors = [Actor(desk, f"a{index}").join(capacity=0) for index in range(10 * MAX_ACTOR_ROWS_PER_S)]
    for _ in range(21):
        desk.now += 1.0
        for actor in actors:
            actor.beat()
    # 500 actors at 50 rows a second: one row each in 10 s, and the first at once.
    assert len(desk.rows_of(ActorRow)) == 3 * len(actors)


# The choice of the next lease's actor

# Capacity, leases held, policy version, reachable, quarantined.
members = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(-1, 3), st.booleans(), st.booleans()), max_size=6
)


def make_members(actors: list[tuple[int, int, int, bool, bool]]) -> list[Member]:
    made: list[Member] = []
    for index, (capacity, num_held, policy_version, is_reachable, is_quarantined) in enumerate(actors):
        member = Member(peer=b"%d" % index, hello=make_hello(), last_heard=0.0, capacity=capacity)
        member.policy_version = policy_version if policy_version >= 0 else None
        member.lease_ids.update(range(-num_held, 0))
        member.is_reachable = is_reachable
        member.mismatches = [Mismatch("wrong")] if is_quarantined else []
        made.append(member)
    return made


@given(members, st.lists(st.integers(0, 3), max_size=20).map(sorted))
def test_lease_goes_to_the_least_used_of_the_actors_whose_weights_are_new_enough(
    actors: list[tuple[int, int, int, bool, bool]], versions: list[int]
) -> None:
    made = make_members(actors)
    turns = LeaseTurns(made)
    for lease_id, min_policy_version in enumerate(versions):
        able = [member for member in made if member.takes_leases and member.free > 0 and member.has_version(min_policy_version)]
        chosen = turns.take(min_policy_version)

        def place(member: Member) -> tuple[float, int]:
            return len(member.lease_ids) / member.capacity, -1 if member.newest_lease_id is None else member.newest_lease_id

        assert chosen is min(able, key=place, default=None)
        if chosen is not None:
            chosen.lease_ids.add(lease_id)
            chosen.newest_lease_id = lease_id


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 3), st.randoms(use_true_random=False)), min_size=30, max_size=30),
)
def test_every_actor_that_holds_nothing_gets_one_of_the_next_leases_as_many_as_there_are_actors(
    credits: list[int], rounds: list[tuple[int, Random]]
) -> None:
    made = make_members([(credit, 0, 0, True, False) for credit in credits])
    idle_turns = [0] * len(made)
    lease_ids = count()
    for num_leases, random in rounds:
        turns = LeaseTurns(made)
        for _ in range(num_leases):
            member = turns.take(0)
            if member is None:
                break
            for index, other in enumerate(made):
                idle_turns[index] = 0 if other is member or other.lease_ids else idle_turns[index] + 1
            assert max(idle_turns) < len(made)
            member.newest_lease_id = next(lease_ids)
            member.lease_ids.add(member.newest_lease_id)
        # Any of them answer, however unlike their speed.
        for member in made:
            for lease_id in [one for one in member.lease_ids if random.random() < 0.5]:
                member.lease_ids.discard(lease_id)


def test_actor_with_less_credit_is_not_starved_by_one_with_more() -> None:
    # The bound admits two leases a step; the larger actor answers them at once.
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=1")
    large, small = Actor(desk, "large").join(capacity=16), Actor(desk, "small").join(capacity=4)
    num_small = 0
    for version in range(1, 6):
        for lease in large.leases():
            large.answer(lease.lease_id, policy_version=version - 1)
        for lease in small.leases():
            num_small += 1
            small.answer(lease.lease_id, policy_version=version - 1)
        desk.train()
        large.commit(version)
        small.commit(version)
    assert num_small >= 2


def test_actor_beyond_the_limit_on_open_files_is_refused_by_name_with_the_cure() -> None:
    desk = Desk(contract=CONTRACT._replace(max_peers=1))
    Actor(desk, "first").join(capacity=1)
    late = Actor(desk, "late")
    late.hello()
    (refused,) = late.heard(Refused)
    assert "too few files for more than 1 actors: raise the limit of its machine (ulimit -Hn)" in refused.reason
    assert [row.actor for row in desk.events("actor_refused")] == ["late"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5).map(lambda quarters: quarters * DEAD_AFTER_S / 4)), max_size=30))
def test_silent_members_are_those_not_heard_for_too_long(heard: list[tuple[int, float]]) -> None:
    """Each step lets time pass and hears a member, or a new one in the place of one that was silent."""
    desk = Desk()
    roster, last_heard = desk.roster, dict[bytes, float]()
    for index, seconds in heard:
        desk.now += seconds
        silent = {member.peer: silent_s for member, silent_s in roster.silent(desk.now)}
        assert silent == {peer: desk.now - at for peer, at in last_heard.items() if desk.now - at > DEAD_AFTER_S}
        for peer in silent:
            member = roster.find(peer)
            assert member is not None
            roster.remove(member)
            del last_heard[peer]
        peer = b"%d" % index
        if roster.hear(peer, desk.now) is None:
            roster.add(peer, make_hello(), NO_KEYS, desk.now)
        last_heard[peer] = desk.now
