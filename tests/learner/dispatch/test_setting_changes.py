"""Settings that an operator changes during the run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.learner.leases.events import Tuned
from offbeat.protocols.keys import Sender
from offbeat.protocols.messages import (
    CreditLimit,
    LiveSettingsReport,
    LiveSettingsRequest,
    Refused,
)
from tests.learner.dispatch.dispatch_desk import (
    OPERATOR,
    Actor,
    Desk,
    WillingLog,
    make_recovered,
)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[WillingLog]:
    log = WillingLog(tmp_path / "log")
    yield log
    log.close()


def test_wider_bound_is_leased_by_at_once_and_a_narrower_one_holds_back() -> None:
    desk = Desk("staleness.max_staleness=0", "train.groups_per_step=2")
    actor = Actor(desk, "a").join(capacity=10)
    assert len(actor.leases()) == 2
    report = desk.tune(staleness__max_staleness="2")
    assert [(change.before, change.after) for change in report.changed] == [("0", "2")]
    assert len(actor.leases()) == 4
    desk.tune(staleness__max_staleness="1")
    for lease_id in range(2):
        actor.answer(lease_id)
    desk.train()
    actor.commit(1)
    # Four are open, as many as a bound of 1 admits.
    assert actor.leases() == []


def test_target_that_is_changed_decides_the_next_leases_in_either_direction() -> None:
    desk = Desk("staleness.target=auto", "staleness.max_staleness=4", "train.groups_per_step=1", "train.num_steps=50")
    actor = Actor(desk, "a").join(capacity=10)
    assert len(actor.leases()) == 2
    desk.tune(staleness__target='"bound"')
    assert desk.dispatcher.lease_limit() == 5
    assert len(actor.leases()) == 3
    desk.tune(staleness__target='"auto"')
    assert desk.dispatcher.lease_limit() == 2
    actor.answer(0)
    desk.train()
    actor.commit(1)
    assert actor.leases() == [], "four are open"


def test_target_that_is_changed_while_the_learner_waits_for_a_batch_knows_of_the_wait() -> None:
    desk = Desk("staleness.max_staleness=4", "train.groups_per_step=1")
    actor = Actor(desk, "a").join(capacity=1)
    for version in range(2):
        (lease,) = actor.leases()
        assert desk.batch() is None
        desk.tick(1.0, actor)
        actor.answer(lease.lease_id, policy_version=version)
        if version:
            desk.tune(staleness__target='"auto"')
        desk.train()
        actor.commit(version + 1)
    assert desk.dispatcher.lease_limit() == 3, "one group was missing"


def test_bound_that_was_lowered_drops_what_waits_in_the_buffer() -> None:
    desk = Desk("staleness.max_staleness=3", "staleness.staleness_policy=drop", "train.groups_per_step=1")
    actor = Actor(desk, "a").join(capacity=2)
    first, second = (lease.lease_id for lease in actor.leases())
    actor.answer(first)
    desk.train()
    actor.answer(second)
    desk.tune(staleness__max_staleness="0")
    assert desk.batch() is None
    assert desk.dispatcher.counts().dropped == {"stale": 1}


def test_change_is_recorded_with_who_and_when_in_rows_log_and_checkpoint(log: WillingLog) -> None:
    desk = Desk("staleness.max_staleness=4", log=log, policy_version=5)
    desk.tune(OPERATOR, staleness__max_staleness="8", train__learning_rate="1e-3")
    settings = {"staleness.max_staleness": "8", "train.learning_rate": "0.001"}
    event = Tuned(at=7.0, settings=settings, who="me@host (key ops)", reason="", policy_version=5)
    assert log.events() == [event]
    assert desk.dispatcher.state().tuned == dict.fromkeys(settings, event)
    rows = desk.events("setting_changed")
    assert [(row.setting, row.before, row.after) for row in rows] == [
        ("staleness.max_staleness", "4", "8"),
        ("train.learning_rate", "1e-06", "0.001"),
    ]
    assert {(row.who, row.policy_version) for row in rows} == {("me@host (key ops)", 5)}
    assert rows[0].detail == "staleness.max_staleness = 8, was 4; by me@host (key ops)"
    assert desk.dispatcher.settings().train.learning_rate == 1e-3
    assert [(change.setting, change.after, change.who) for change in desk.status(OPERATOR).changed_settings] == [
        ("staleness.max_staleness", "8", "me@host (key ops)"),
        ("train.learning_rate", "0.001", "me@host (key ops)"),
    ]


def test_refused_change_changes_nothing_and_says_why(log: WillingLog) -> None:
    desk = Desk("staleness.max_staleness=4", log=log)
    before = desk.dispatcher.settings()
    report = desk.tune(train__learning_rate="1e-3", staleness__hard_max_staleness="3")
    assert (report.changed, report.policy_version) == ((), 0)
    assert report.error.startswith("staleness.hard_max_staleness = 3: it is below staleness.max_staleness = 4")
    assert "These can:" in desk.tune(train__num_steps="5").error
    assert (desk.dispatcher.settings(), log.events(), desk.events("setting_changed")) == (before, [], [])
    assert desk.tune(staleness__max_staleness="4") == LiveSettingsReport(policy_version=0)
    assert log.events() == []


def test_change_that_a_restart_could_not_know_of_is_refused(log: WillingLog) -> None:
    desk = Desk("staleness.max_staleness=4", log=log)
    log.will_append = False
    assert "no space left" in desk.tune(staleness__max_staleness="8").error
    assert desk.dispatcher.settings().staleness.max_staleness == 4
    log.will_append = True
    assert not desk.tune(staleness__max_staleness="8").error


def test_actors_key_cannot_change_settings() -> None:
    desk = Desk()
    actor = Actor(desk, "a", sender=Sender("a", "actor"))
    actor.join(capacity=2)
    actor.say(LiveSettingsRequest(settings={"staleness.max_staleness": "8"}, who="operator@host"))
    assert "role operator" in actor.heard(Refused)[0].reason
    assert desk.dispatcher.settings().staleness.max_staleness == 1


def test_concurrency_is_told_to_every_actor_also_to_one_that_comes_later() -> None:
    desk = Desk()
    first = Actor(desk, "a").join(capacity=2)
    desk.tune(staleness__max_staleness="3")
    assert first.heard(CreditLimit) == []
    desk.tune(actor__max_inflight_groups="5")
    assert first.heard(CreditLimit) == [CreditLimit(capacity=5)]
    late = Actor(desk, "b").join(capacity=2)
    assert late.heard(CreditLimit) == [CreditLimit(capacity=5)]
    # Back to the config's: an actor whose own config says another number is to know.
    desk.tune(actor__max_inflight_groups="16")
    assert Actor(desk, "c").join(capacity=2).heard(CreditLimit) == [CreditLimit(capacity=16)]


def test_restarted_learner_leases_by_the_bound_that_was_set() -> None:
    event = Tuned(at=0.0, settings={"staleness.max_staleness": "2"}, who="me", reason="", policy_version=0)
    recovered = make_recovered()._replace(tuned={"staleness.max_staleness": event})
    desk = Desk("staleness.max_staleness=0", recovered=recovered)
    assert len(Actor(desk, "a").join(capacity=10).leases()) == 6
    assert desk.dispatcher.state().tuned == {"staleness.max_staleness": event}


def test_operator_changes_how_many_actors_are_wanted_and_an_ended_run_wants_none() -> None:
    desk = Desk("launch.num_actors=3")
    assert desk.status().actors_wanted == 3
    desk.dispatcher.tune({"scale.actors": "8"}, "me@host")
    assert desk.status().actors_wanted == 8
    assert "hub.max_actors = 100" in desk.tune(scale__actors="101").error, "their learner would refuse them"
    assert desk.status().actors_wanted == 8
    desk.dispatcher.stop("finished")
    assert desk.status().actors_wanted == 0
