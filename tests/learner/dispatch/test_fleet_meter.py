"""Numbers about the use that a run makes of its actors, as the policy of `scale.auto` gets them."""

import pytest

from offbeat.protocols.messages import ActorStats
from tests.learner.dispatch.dispatch_desk import Actor, Desk


def test_spare_is_the_share_of_slots_without_a_lease_over_time() -> None:
    desk = Desk("staleness.max_staleness=0", "train.groups_per_step=2")
    actor = Actor(desk, "a").join(capacity=4)
    assert len(actor.leases()) == 2
    desk.tick(1.0)
    desk.dispatcher.take_fleet_use()
    desk.tick(1.0)
    actor.credit(8)
    desk.tick(3.0)
    desk.tick(1.0)
    use = desk.dispatcher.take_fleet_use()
    # 2 of 4 for four seconds, until the next look; then 6 of 8 for one.
    assert use.spare == pytest.approx((2 * 4 + 6 * 1) / (4 * 4 + 8 * 1))
    assert (use.num_actors, use.slots) == (1, 8.0)
    assert desk.dispatcher.take_fleet_use().spare == 0.0


def test_actors_that_take_no_leases_are_not_counted_and_new_and_troubled_ones_are_told() -> None:
    desk = Desk()
    Actor(desk, "leaving").join(capacity=0)
    Actor(desk, "new").join(capacity=2, policy_version=None)
    Actor(desk, "works").join(capacity=2)
    desk.tick(1.0)
    use = desk.dispatcher.take_fleet_use()
    assert (use.num_actors, use.num_new, use.slots, use.is_troubled) == (1, 1, 2.0, False)
    desk.dispatcher.judge_canary("works", 0, "wrong")
    use = desk.dispatcher.take_fleet_use()
    assert (use.num_actors, use.is_troubled) == (0, True)


def test_waits_are_the_share_of_the_loops_in_which_engines_waited_for_rewards() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    actor.beat(stats=ActorStats(seconds={"generate": 6.0, "wait_rewards": 2.0}))
    assert desk.dispatcher.take_fleet_use().waits == 0.0
    desk.tick(2.0)
    actor.beat(stats=ActorStats(seconds={"generate": 7.0, "wait_rewards": 5.0}))
    assert desk.dispatcher.take_fleet_use().waits == 0.75
    assert desk.dispatcher.take_fleet_use().waits == 0.0
