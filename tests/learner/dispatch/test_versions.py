"""The learner's policy versions, after a learner process that died with weights that no checkpoint holds."""

from offbeat.learner.dispatch.run_state import Versions
from tests.learner.dispatch.dispatch_desk import Actor, Desk, make_recovered


def test_newest_version_is_never_older_than_the_current_one_and_never_falls() -> None:
    assert Versions(current=3, newest=0).newest == 3
    versions = Versions(current=3, newest=5)
    newest = []
    for version in (4, 5, 6):
        versions.advance(version)
        newest.append(versions.newest)
    assert newest == [5, 5, 6]


def test_group_sampled_under_weights_of_a_dead_learner_is_accepted_until_training_has_passed_them() -> None:
    desk = Desk("train.groups_per_step=1", recovered=make_recovered(newest_version=5), policy_version=3)
    actor = Actor(desk, "a").join(capacity=3, policy_version=3)
    first, second, *_ = actor.leases()
    actor.answer(first.lease_id, policy_version=5)
    desk.train()
    assert desk.versions.current == 4
    assert actor.answer(second.lease_id, policy_version=5).outcome == "accepted"
    assert desk.dispatcher.state().newest_version == 5
