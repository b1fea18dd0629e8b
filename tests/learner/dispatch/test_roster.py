"""Who gets the next lease."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.learner.dispatch.roster import Member, Members, Room
from offbeat.protocols.messages import EngineInfo, Hello, ModelHashes

HELLO = Hello(
    actor="actor",
    incarnation=1,
    engine=EngineInfo("vllm", "1", "float32", "cpu", 100, ModelHashes("", "", "")),
    temperature=1.0,
    reward="",
    software="",
)

# Capacity, leases held, policy version, reachable, quarantined.
members = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(-1, 3), st.booleans(), st.booleans()), max_size=6
)


def make_members(actors: list[tuple[int, int, int, bool, bool]]) -> Members:
    made = Members()
    for index, (capacity, num_held, policy_version, is_reachable, is_quarantined) in enumerate(actors):
        member = Member(peer=b"%d" % index, hello=HELLO, last_heard=0.0, capacity=capacity, policy_version=policy_version)
        member.lease_ids.update(range(-num_held, 0))
        member.is_reachable, member.is_quarantined = is_reachable, is_quarantined
        made.add(member)
    return made


@given(members, st.lists(st.integers(0, 3), max_size=20).map(sorted))
def test_each_lease_goes_to_the_actor_with_most_room_whose_weights_are_new_enough(
    actors: list[tuple[int, int, int, bool, bool]], versions: list[int]
) -> None:
    made = make_members(actors)
    room = Room(made)
    for lease_id, min_policy_version in enumerate(versions):
        able = [
            member
            for member in made
            if member.is_reachable
            and not member.is_quarantined
            and member.free > 0
            and member.policy_version >= min_policy_version
        ]
        chosen = room.take(min_policy_version)
        assert chosen is max(able, key=lambda member: member.free, default=None)
        if chosen is not None:
            chosen.lease_ids.add(lease_id)
