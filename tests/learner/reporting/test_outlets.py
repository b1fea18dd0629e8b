"""Rows pass the health watch on their way, and what is not well is known at any time."""

from offbeat.common.records.rows import EventRow, Row, StepRow
from offbeat.learner.diagnostics.health import CLEAR_STEPS
from offbeat.learner.reporting.outlets import NUM_RECENT_STEPS, HealthWatch
from offbeat.protocols.messages import Vitals


def test_events_of_the_rules_follow_the_step_that_brings_them() -> None:
    rows: list[Row] = []
    watch = HealthWatch(rows.append)
    bad = StepRow(policy_version=1, metrics={"loss/policy": None})
    watch.record(bad)
    assert rows[0] is bad
    assert isinstance(rows[1], EventRow)
    assert (rows[1].event, rows[1].rule) == ("health", "not_finite")
    assert watch.vitals().health == (rows[1].detail,)
    for version in range(2, 2 + CLEAR_STEPS):
        watch.record(StepRow(policy_version=version, metrics={"loss/policy": 0.1}))
    assert [row.event for row in rows if isinstance(row, EventRow)] == ["health", "health_cleared"]
    assert watch.vitals().health == ()


def test_late_batch_is_a_trouble_until_it_comes_and_other_events_are_none() -> None:
    watch = HealthWatch(lambda row: None)
    watch.record(EventRow(event="actor_joined", detail="x", actor="a"))
    watch.record(EventRow(event="health", detail="nobody", rule="no_actor"))
    assert watch.vitals().health == ("nobody",)
    watch.record(EventRow(event="health_cleared", detail="", rule="no_actor"))
    assert watch.vitals().health == ()


def test_operator_is_told_the_newest_step_and_the_mean_duration_of_the_last_ones() -> None:
    watch = HealthWatch(lambda row: None)
    assert watch.vitals() == Vitals()
    for version in range(1, NUM_RECENT_STEPS + 4):
        metrics = {
            "reward/mean": version / 10,
            "reward_by_task/sums": version / 5,
            "curriculum/sums": version / 20,
            "lag/mean": 1.5,
            "lag/max": 3,
            "staleness/bound": 4,
            "time/step_s": version,
        }
        watch.record(StepRow(policy_version=version, metrics=metrics))
    # The last ten of thirteen steps took 4 to 13 seconds.
    assert watch.vitals() == Vitals(
        reward=1.3, lag_mean=1.5, lag_max=3, bound=4, step_s=8.5, reward_by_task={"sums": 2.6}, share_by_task={"sums": 0.65}
    )
