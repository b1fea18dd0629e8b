"""The staleness policy's formulas, against versions counted by hand."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.common.errors import SettingError
from offbeat.common.settings.checks import check
from offbeat.common.settings.config import Config, StalenessSection, WeightsSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.learner.leases.groups import Group, LagOf, Rollout
from offbeat.protocols.payload import Segment
from tests.learner.leases.scheduled_runs import InFlight, make_group, make_policy

LAGS: tuple[LagOf, ...] = ("oldest_token", "token_mean", "last_segment")


@pytest.mark.parametrize(("max_staleness", "steps_per_batch"), itertools.product(range(5), range(1, 6)))
def test_a_batch_can_be_granted_if_and_only_if_the_bound_allows_its_last_step(max_staleness: int, steps_per_batch: int) -> None:
    policy = make_policy(max_staleness, steps_per_batch, num_steps=60)
    assert (policy.admit(0, 0) >= 2 * steps_per_batch) == (steps_per_batch <= max_staleness + 1)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 3))
def test_bound_that_the_settings_demand_is_the_least_under_which_the_run_ends(
    steps_per_batch: int, epochs_per_batch: int, weights_interval: int, groups_per_step: int
) -> None:
    shape = (steps_per_batch, epochs_per_batch, weights_interval)
    least = next(bound for bound in range(40) if is_allowed(bound, *shape))
    does_end = [ends(bound, *shape, groups_per_step) for bound in range(least + 3)]
    assert does_end == [bound >= least for bound in range(least + 3)]


def is_allowed(max_staleness: int, steps_per_batch: int, epochs_per_batch: int, weights_interval: int) -> bool:
    """Return True if `common.settings.checks` accepts these settings."""
    batch_steps = steps_per_batch * epochs_per_batch
    config = Config(
        staleness=StalenessSection(max_staleness=max_staleness),
        train=TrainSection(steps_per_batch=steps_per_batch, epochs_per_batch=epochs_per_batch, num_steps=12 * batch_steps),
        weights=WeightsSection(interval=weights_interval),
    )
    with pytest.raises(SettingError) as caught:
        check(config)
    # Among others: there is no model.
    return not any(text.startswith("staleness.max_staleness = ") for text in caught.value.texts)


def ends(max_staleness: int, steps_per_batch: int, epochs_per_batch: int, weights_interval: int, groups_per_step: int) -> bool:
    """Return True if a run whose actors always have the newest published weights reaches its last step."""
    batch_steps = steps_per_batch * epochs_per_batch
    num_steps = 12 * batch_steps
    policy = make_policy(max_staleness, steps_per_batch, epochs_per_batch, groups_per_step=groups_per_step, num_steps=num_steps)
    version = sent = lease_id = 0
    ready: list[Group] = []
    while version < num_steps:
        while policy.admit(version, len(ready)) and policy.min_policy_version(version, len(ready)) <= sent:
            ready.append(make_group(lease_id, sent))
            lease_id += 1
        selected = policy.select(ready)
        if not selected:
            return False
        ready = ready[len(selected) :]
        before, version = version, version + batch_steps
        if version // weights_interval > before // weights_interval:
            sent = version
    return True


def test_capacity_counts_down_with_open_leases_and_up_with_versions() -> None:
    policy = make_policy(1, 1)
    assert [policy.admit(0, num_open) for num_open in range(6)] == [4, 3, 2, 1, 0, 0]
    assert policy.admit(1, 2) == 2


def test_capacity_ends_with_the_run() -> None:
    policy = make_policy(4, 1, num_steps=3)
    assert policy.admit(0, 0) == 6
    assert policy.admit(2, 1) == 1
    assert policy.admit(3, 0) == 0


def test_first_admission_is_the_most_that_may_be_open_at_once() -> None:
    # Batches of 2 x 2 groups, trained for the last time 2 and 3 steps after the batch begins, a batch every 4 steps.
    assert [make_policy(bound, 2, 2, num_steps=40).admit(0, 0) for bound in range(1, 9)] == [0, 2, 4, 4, 4, 6, 8, 8]
    assert make_policy(4, 1).admit(0, 0) == 10


def test_a_group_is_trained_for_the_last_time_in_the_last_epoch_of_its_batch() -> None:
    policy = make_policy(7, steps_per_batch=2, epochs_per_batch=2, groups_per_step=2)
    assert [policy.trained_at(8, index) for index in range(9)] == [10, 10, 11, 11, 14, 14, 15, 15, 18]


def test_abort_takes_what_would_be_dropped_if_it_were_finished_now() -> None:
    in_flight = [InFlight(lease_id, lease_id) for lease_id in range(6)]
    assert make_policy(2, staleness_policy="abort").abort(in_flight, 5) == [0, 1, 2]
    assert make_policy(3, 1, 2, staleness_policy="abort").abort(in_flight, 6) == [0, 1, 2, 3]
    assert make_policy(2, staleness_policy="drop").abort(in_flight, 5) == []


def test_bounds_that_are_replaced_hold_at_once() -> None:
    policy = make_policy(4)
    policy.bounds = msgspec.structs.replace(policy.bounds, max_staleness=1, staleness_policy="drop")
    assert policy.admit(0, 0) == 4
    assert policy.evict([make_group(0, 0)], 2) == [make_group(0, 0)]


def test_min_policy_version_follows_the_place_in_line() -> None:
    policy = make_policy(1, 1)
    assert [policy.min_policy_version(0, num_open) for num_open in range(4)] == [0, 0, 0, 0]
    assert [policy.min_policy_version(5, num_open) for num_open in range(4)] == [4, 4, 5, 5]


def test_selection_waits_for_a_whole_batch() -> None:
    policy = make_policy(4, 2)
    groups = [make_group(lease_id, 0) for lease_id in range(5)]
    assert policy.select(groups[:3]) == []
    assert policy.select(groups) == groups[:4]


def test_group_above_the_hard_bound_is_dropped_and_replaced_by_the_next() -> None:
    policy = make_policy(4, 1, hard=1)
    stale, *fresh = make_group(0, 1), make_group(1, 2), make_group(2, 3)
    assert policy.evict([stale, *fresh], 3) == [stale]


def test_hard_bound_counts_the_steps_inside_a_batch() -> None:
    policy = make_policy(4, 2, hard=1)
    groups = [make_group(lease_id, policy_version=2) for lease_id in range(6)]
    # Trained at versions 3, 3, 4, 4: the second step of the batch is one too late for all of them.
    assert policy.evict(groups, 3) == groups[2:]


def test_lag_counts_the_oldest_segment_of_any_completion() -> None:
    versions = [(5,), (3, 6), (6,)]
    rollouts = tuple(
        Rollout(np.zeros(4, np.int32), np.zeros(4, np.float32), 0.0, "stop", tuple(map(Segment, each, range(len(each)))))
        for each in versions
    )
    group = Group(0, 0, np.zeros(1, np.int32), rollouts, "actor-0", 0.0)
    assert group.policy_lag(7) == group.lag_of("oldest_token", 7) == 4


def test_lag_of_the_token_mean_weighs_segments_by_their_tokens_and_of_the_last_segment_takes_the_stalest_completion() -> None:
    # Four tokens under 3, 6, 6, 6, and two under 5.
    switched = Rollout(np.zeros(4, np.int32), np.zeros(4, np.float32), 0.0, "stop", (Segment(3, 0), Segment(6, 1)))
    steady = Rollout(np.zeros(2, np.int32), np.zeros(2, np.float32), 0.0, "stop", (Segment(5, 0),))
    group = Group(0, 0, np.zeros(1, np.int32), (switched, steady), "actor-0", 0.0)
    assert group.lag_of("token_mean", 7) == pytest.approx(7 - (3 + 3 * 6 + 2 * 5) / 6)
    assert group.lag_of("last_segment", 7) == 2
    assert [group.lag_of(measured, 2) for measured in ("oldest_token", "token_mean", "last_segment")] == [0, 0, 0]


def test_a_group_is_dropped_by_the_lag_that_is_measured() -> None:
    switched = Rollout(np.zeros(4, np.int32), np.zeros(4, np.float32), 0.0, "stop", (Segment(3, 0), Segment(6, 1)))
    group = Group(0, 0, np.zeros(1, np.int32), (switched,), "actor-0", 0.0)
    dropped = {measured: make_policy(2, groups_per_step=1, staleness_policy="drop", lag_of=measured) for measured in LAGS}
    # At version 7 the lags are 4, 1.75 and 1.
    assert [lag_of for lag_of, policy in dropped.items() if policy.evict([group], 7)] == ["oldest_token"]
    assert [lag_of for lag_of, policy in dropped.items() if policy.count_over_bound([group], 8)] == [
        "oldest_token",
        "token_mean",
    ]
