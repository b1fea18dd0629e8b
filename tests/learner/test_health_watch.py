"""Rows pass the health watch on their way, and what is not well is known at any time."""

from offbeat.common.rows import EventRow, Row, StepRow
from offbeat.learner.diagnostics.health import CLEAR_STEPS
from offbeat.learner.health_watch import NUM_RECENT_STEPS, HealthWatch


def test_events_of_the_rules_follow_the_step_that_brings_them() -> None:
    rows: list[Row] = []
    watch = HealthWatch(rows.append)
    bad = StepRow(policy_version=1, metrics={"loss/policy": None})
    watch.record(bad)
    assert rows[0] is bad
    assert isinstance(rows[1], EventRow)
    assert (rows[1].event, rows[1].rule) == ("health", "not_finite")
    assert watch.troubles() == {"not_finite": rows[1].detail}
    for version in range(2, 2 + CLEAR_STEPS):
        watch.record(StepRow(policy_version=version, metrics={"loss/policy": 0.1}))
    assert [row.event for row in rows if isinstance(row, EventRow)] == ["health", "health_cleared"]
    assert watch.troubles() == {}


def test_late_batch_is_a_trouble_until_it_comes_and_other_events_are_none() -> None:
    watch = HealthWatch(lambda row: None)
    watch.record(EventRow(event="actor_joined", detail="x", actor="a"))
    watch.record(EventRow(event="health", detail="nobody", rule="no_actor"))
    assert watch.troubles() == {"no_actor": "nobody"}
    watch.record(EventRow(event="health_cleared", detail="", rule="no_actor"))
    assert watch.troubles() == {}


def test_newest_steps_are_kept() -> None:
    watch = HealthWatch(lambda row: None)
    for version in range(NUM_RECENT_STEPS + 3):
        watch.record(StepRow(policy_version=version, metrics={}))
    assert [step.policy_version for step in watch.recent_steps()] == list(range(3, NUM_RECENT_STEPS + 3))
