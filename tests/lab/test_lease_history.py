"""The history of a lease has what the log says of it, and no optimizer step that a restart undid."""

from offbeat.lab.lease_history import LeaseHistories
from offbeat.learner.leases.events import Dropped, Expired
from tests.lab.test_tracing import accepted, granted, started, trained


def test_history_has_the_group_its_step_and_its_lag() -> None:
    events = [granted(1, 0.0), granted(2, 0.0), accepted(1, 1.0, 1.0), accepted(2, 2.0, 1.0)]
    leases = LeaseHistories([*events, trained(5, 2, 1, selected_at=3.0, at=4.0, num_steps=2)])
    first, second = leases.by_lease[1], leases.by_lease[2]
    assert (first.outcome, first.step, first.policy_lag) == ("trained", 7, 4)
    assert (second.outcome, second.step, second.policy_lag) == ("trained", 6, 3)
    assert (first.policy_versions, first.lengths, first.rewards) == ([2, 3], (4, 6), (1.0, 0.0))
    assert (first.num_turns, first.environment_s, first.duration_s) == (3, 0.5, 4.0)
    assert [lease.lease_id for lease in leases.trained_groups()] == [2, 1]


def test_group_of_several_epochs_has_a_step_in_each_and_the_lag_of_the_last() -> None:
    events = [granted(1, 0.0), granted(2, 0.0), accepted(1, 1.0, 1.0), accepted(2, 2.0, 1.0)]
    # Two epochs of two steps each: 6 and 7, then 8 and 9.
    leases = LeaseHistories([*events, trained(5, 2, 1, selected_at=3.0, at=4.0, num_steps=4)], epochs=2)
    first, second = leases.by_lease[1], leases.by_lease[2]
    assert ([*first.steps], first.step, first.policy_lag) == ([7, 9], 9, 6)
    assert ([*second.steps], second.step, second.policy_lag) == ([6, 8], 8, 5)


def test_leases_without_a_group_have_ended_or_are_in_flight() -> None:
    ends = [Expired(at=2.0, lease_id=1, reason="late"), Dropped(at=3.0, lease_id=2, reason="stale", is_final=False)]
    leases = LeaseHistories([granted(1, 0.0), granted(2, 0.0), granted(3, 0.0), *ends])
    assert [lease.outcome for lease in leases.by_lease.values()] == ["expired", "dropped", "in flight"]
    assert {lease.policy_lag for lease in leases.by_lease.values()} == {None}
    assert leases.batches == []


def test_restart_takes_back_the_steps_after_its_checkpoint_and_only_those() -> None:
    events = [granted(1, 0.0), granted(2, 0.0), accepted(1, 1.0, 1.0), accepted(2, 1.0, 1.0)]
    steps = [trained(0, 1, selected_at=2.0, at=3.0), trained(1, 2, selected_at=4.0, at=5.0)]
    leases = LeaseHistories([*events, *steps, started(version=1, at=6.0)])
    assert leases.batches == steps[:1]
    assert [lease.outcome for lease in leases.by_lease.values()] == ["trained", "in flight"]
    leases.take(trained(1, 2, selected_at=7.0, at=8.0))
    assert [(lease.lease_id, lease.step) for lease in leases.trained_groups()] == [(1, 1), (2, 2)]


def test_log_that_lacks_its_beginning_tells_of_groups_without_their_prompt() -> None:
    leases = LeaseHistories([accepted(1, 1.0, 1.0), trained(4, 1, 9, selected_at=2.0, at=3.0, num_steps=2)])
    (group,) = leases.trained_groups()
    assert (group.actor, group.prompt_id, group.step) == ("a", None, 5)
    assert leases.run_id == ""
