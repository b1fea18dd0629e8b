"""The gate's promises, in a simulation of leases, weights and training whose order hypothesis chooses."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import Config, StalenessSection, TrainSection, WeightsSection
from common.setting_checks import check
from common.settings import SettingError
from learner.groups import Group, Rollout
from learner.staleness import StalenessGate
from protocols.messages import Segment


def make_group(lease_id: int, policy_version: int) -> Group:
    rollout = Rollout(np.zeros(1, np.int32), np.zeros(1, np.float32), 0.0, "stop", (Segment(policy_version, 0),))
    return Group(lease_id, 0, np.zeros(1, np.int32), (rollout,), "actor-0", 0.0)


def make_gate(
    max_staleness: int, steps_per_batch: int, *, groups_per_step: int = 2, num_steps: int = 8, hard: int | None = None
) -> StalenessGate:
    return StalenessGate(
        max_staleness=max_staleness,
        hard_max_staleness=hard,
        groups_per_step=groups_per_step,
        steps_per_batch=steps_per_batch,
        num_steps=num_steps,
    )


@dataclass
class Run:
    """A learner and its actors in a few lines: grant, generate, train, as `learner.dispatcher` does."""

    gate: StalenessGate
    groups_per_step: int
    num_steps: int
    policy_version: int = 0
    open: dict[int, Group | None] = field(default_factory=dict)
    """By lease, oldest first."""
    min_versions: dict[int, int] = field(default_factory=dict)
    num_trained: int = 0
    num_dropped: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    next_lease_id: int = 0

    @property
    def generating(self) -> list[int]:
        return [lease_id for lease_id, group in self.open.items() if group is None]

    def grant(self) -> None:
        for _ in range(self.gate.capacity(self.policy_version, len(self.open))):
            self.min_versions[self.next_lease_id] = self.gate.min_policy_version(self.policy_version, len(self.open))
            self.open[self.next_lease_id] = None
            self.next_lease_id += 1
        assert self.num_trained + len(self.open) <= self.num_steps * self.groups_per_step
        assert self.gate.capacity(self.policy_version, len(self.open)) == 0

    def finish(self, lease_id: int, weights_behind: int) -> None:
        """A group comes back, sampled under weights as old as the lease permits, at most `weights_behind` old."""
        sampled_at = max(self.policy_version - weights_behind, self.min_versions[lease_id])
        assert sampled_at <= self.policy_version, "the lease asks for weights that do not exist yet"
        self.open[lease_id] = make_group(lease_id, sampled_at)

    def train(self) -> bool:
        ready = [group for group in self.open.values() if group is not None]
        selected, too_stale = self.gate.select(ready, self.policy_version)
        for group in too_stale:
            del self.open[group.lease_id]
            self.num_dropped += 1
        if not selected:
            return False
        assert [group.lease_id for group in selected] == sorted(group.lease_id for group in selected)
        left = {group.lease_id for group in ready} - {group.lease_id for group in (*selected, *too_stale)}
        assert all(lease_id > selected[-1].lease_id for lease_id in left), "a younger lease was preferred"
        for index, group in enumerate(selected):
            self.lags[group.policy_lag(self.policy_version + index // self.groups_per_step)] += 1
            del self.open[group.lease_id]
        self.num_trained += len(selected)
        self.policy_version += len(selected) // self.groups_per_step
        return True


SHAPES = st.tuples(
    st.integers(0, 4),  # max_staleness
    st.integers(1, 3),  # steps_per_batch
    st.integers(1, 3),  # groups_per_step
    st.integers(1, 4),  # batches in the run
).filter(lambda shape: shape[1] <= shape[0] + 1)


def play(shape: tuple[int, int, int, int], data: st.DataObject, *, in_order: bool, hard: int | None = None) -> Run:
    """Until the run is over, or nothing moves any more; whatever does not finish in order is finished at last."""
    max_staleness, steps_per_batch, groups_per_step, num_batches = shape
    num_steps = steps_per_batch * num_batches
    gate = make_gate(max_staleness, steps_per_batch, groups_per_step=groups_per_step, num_steps=num_steps, hard=hard)
    run = Run(gate, groups_per_step, num_steps)
    run.grant()
    for _ in range(40 * num_steps * groups_per_step):
        if run.policy_version == num_steps:
            return run
        generating = run.generating
        assert generating, f"deadlock at version {run.policy_version} of {num_steps}"
        lease_id = generating[0] if in_order else data.draw(st.sampled_from(generating))
        run.finish(lease_id, data.draw(st.integers(0, 5)))
        if run.train() or run.num_dropped:
            run.grant()
    raise AssertionError(f"no end: version {run.policy_version} of {num_steps}, {run.num_dropped} dropped")


@settings(deadline=None)
@given(SHAPES, st.data())
def test_groups_that_finish_in_order_never_exceed_max_staleness(shape: tuple[int, int, int, int], data: st.DataObject) -> None:
    assert max(play(shape, data, in_order=True).lags) <= shape[0]


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_max_staleness_0_trains_at_lag_0_exactly_whatever_the_order(
    groups_per_step: int, num_steps: int, data: st.DataObject
) -> None:
    run = play((0, 1, groups_per_step, num_steps), data, in_order=False)
    assert run.lags == {0: num_steps * groups_per_step}


@settings(deadline=None)
@given(SHAPES, st.data())
def test_every_run_ends_whatever_the_order(shape: tuple[int, int, int, int], data: st.DataObject) -> None:
    run = play(shape, data, in_order=False)
    assert run.num_trained == run.num_steps * run.groups_per_step
    assert run.num_trained == run.next_lease_id


@settings(deadline=None)
@given(SHAPES, st.integers(0, 2), st.data())
def test_hard_bound_is_never_exceeded_and_the_run_ends(
    shape: tuple[int, int, int, int], slack: int, data: st.DataObject
) -> None:
    # Below `steps_per_batch - 1` the last step of a batch could never be trained.
    hard = shape[1] - 1 + slack
    run = play(shape, data, in_order=False, hard=hard)
    assert max(run.lags) <= hard
    assert run.num_trained + run.num_dropped == run.next_lease_id


@pytest.mark.parametrize(("max_staleness", "steps_per_batch"), itertools.product(range(5), range(1, 6)))
def test_a_batch_can_be_granted_if_and_only_if_the_bound_allows_its_last_step(max_staleness: int, steps_per_batch: int) -> None:
    gate = make_gate(max_staleness, steps_per_batch, num_steps=60)
    assert (gate.capacity(0, 0) >= 2 * steps_per_batch) == (steps_per_batch <= max_staleness + 1)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_bound_that_the_settings_demand_is_the_least_under_which_the_run_ends(
    steps_per_batch: int, weights_interval: int, groups_per_step: int
) -> None:
    least = next(bound for bound in range(20) if is_allowed(bound, steps_per_batch, weights_interval))
    shape = (steps_per_batch, weights_interval, groups_per_step)
    assert [ends(bound, *shape) for bound in range(least + 3)] == [bound >= least for bound in range(least + 3)]


def is_allowed(max_staleness: int, steps_per_batch: int, weights_interval: int) -> bool:
    """Whether `common.setting_checks` lets a run with these settings start."""
    config = Config(
        staleness=StalenessSection(max_staleness=max_staleness),
        train=TrainSection(steps_per_batch=steps_per_batch, num_steps=12 * steps_per_batch),
        weights=WeightsSection(interval=weights_interval),
    )
    with pytest.raises(SettingError) as caught:
        check(config)
    # Without the bound's fault, the first one is that there is no model.
    return caught.value.setting != "staleness.max_staleness"


def ends(max_staleness: int, steps_per_batch: int, weights_interval: int, groups_per_step: int) -> bool:
    """Whether a run whose actors always have the newest weights sent gets to its last step."""
    num_steps = 12 * steps_per_batch
    gate = make_gate(max_staleness, steps_per_batch, groups_per_step=groups_per_step, num_steps=num_steps)
    version = sent = lease_id = 0
    ready: list[Group] = []
    while version < num_steps:
        while gate.capacity(version, len(ready)) and gate.min_policy_version(version, len(ready)) <= sent:
            ready.append(make_group(lease_id, sent))
            lease_id += 1
        selected = gate.select(ready, version).selected
        if not selected:
            return False
        ready = ready[len(selected) :]
        before, version = version, version + steps_per_batch
        if version // weights_interval > before // weights_interval:
            sent = version
    return True


def test_capacity_counts_down_with_open_leases_and_up_with_versions() -> None:
    gate = make_gate(1, 1)
    assert [gate.capacity(0, num_open) for num_open in range(6)] == [4, 3, 2, 1, 0, 0]
    assert gate.capacity(1, 2) == 2


def test_capacity_ends_with_the_run() -> None:
    gate = make_gate(4, 1, num_steps=3)
    assert gate.capacity(0, 0) == 6
    assert gate.capacity(2, 1) == 1
    assert gate.capacity(3, 0) == 0


def test_min_policy_version_follows_the_place_in_line() -> None:
    gate = make_gate(1, 1)
    assert [gate.min_policy_version(0, num_open) for num_open in range(4)] == [0, 0, 0, 0]
    assert [gate.min_policy_version(5, num_open) for num_open in range(4)] == [4, 4, 5, 5]


def test_selection_waits_for_a_whole_batch() -> None:
    gate = make_gate(4, 2)
    groups = [make_group(lease_id, 0) for lease_id in range(5)]
    assert gate.select(groups[:3], 0) == ([], [])
    assert gate.select(groups, 0).selected == groups[:4]


def test_group_above_the_hard_bound_is_dropped_and_replaced_by_the_next() -> None:
    gate = make_gate(4, 1, hard=1)
    stale, *fresh = make_group(0, 1), make_group(1, 2), make_group(2, 3)
    assert gate.select([stale, *fresh], 3) == (fresh, [stale])


def test_hard_bound_counts_the_steps_inside_a_batch() -> None:
    gate = make_gate(4, 2, hard=1)
    groups = [make_group(lease_id, policy_version=2) for lease_id in range(6)]
    # Trained at versions 3, 3, 4, 4: the second step of the batch is one too late for all of them.
    assert gate.select(groups, 3) == ([], groups[2:])


def test_lag_counts_the_oldest_segment_of_any_completion() -> None:
    versions = [(5,), (3, 6), (6,)]
    rollouts = tuple(
        Rollout(np.zeros(4, np.int32), np.zeros(4, np.float32), 0.0, "stop", tuple(map(Segment, each, range(len(each)))))
        for each in versions
    )
    assert Group(0, 0, np.zeros(1, np.int32), rollouts, "actor-0", 0.0).policy_lag(7) == 4
