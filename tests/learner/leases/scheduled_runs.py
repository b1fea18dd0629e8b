"""A small run driven by the scheduler, which counts versions and steps one by one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from hypothesis import strategies as st

from offbeat.common.settings.config import StalenessSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.learner.leases.evaluation import Evaluations, Round
from offbeat.learner.leases.groups import Group, LagOf, Rollout
from offbeat.learner.leases.scheduler import RolloutScheduler
from offbeat.learner.leases.staleness import StalenessPolicy
from offbeat.protocols.payload import Segment


def make_group(lease_id: int, policy_version: int) -> Group:
    rollout = Rollout(np.zeros(1, np.int32), np.zeros(1, np.float32), 0.0, "stop", (Segment(policy_version, 0),))
    return Group(lease_id, 0, np.zeros(1, np.int32), (rollout,), "actor-0", 0.0)


def make_policy(
    max_staleness: int,
    steps_per_batch: int = 1,
    epochs_per_batch: int = 1,
    *,
    groups_per_step: int = 2,
    num_steps: int = 8,
    hard: int | None = None,
    staleness_policy: Literal["gate", "drop", "abort"] = "gate",
    lag_of: LagOf = "oldest_token",
) -> StalenessPolicy:
    bounds = StalenessSection(
        max_staleness=max_staleness, hard_max_staleness=hard, staleness_policy=staleness_policy, lag_of=lag_of
    )
    train = TrainSection(
        groups_per_step=groups_per_step,
        steps_per_batch=steps_per_batch,
        epochs_per_batch=epochs_per_batch,
        num_steps=num_steps,
    )
    return StalenessPolicy(bounds, train)


class InFlight(NamedTuple):
    """A lease whose group is being generated."""

    lease_id: int
    oldest_version: int


@dataclass
class Shelf:
    """Hand-made accounts of leases."""

    in_flight: list[InFlight] = field(default_factory=list)
    ready: list[Group] = field(default_factory=list)
    num_training: int = 0

    @property
    def num_open(self) -> int:
        return len(self.in_flight) + len(self.ready) + self.num_training

    @property
    def num_ready(self) -> int:
        return len(self.ready)

    def generating(self) -> list[InFlight]:
        return self.in_flight

    def ready_groups(self) -> Sequence[Group]:
        return list(self.ready)


class Shape(NamedTuple):
    """The settings of a run."""

    max_staleness: int
    steps_per_batch: int
    epochs_per_batch: int
    groups_per_step: int
    num_batches: int

    @property
    def batch_steps(self) -> int:
        return self.steps_per_batch * self.epochs_per_batch

    @property
    def num_steps(self) -> int:
        return self.batch_steps * self.num_batches

    @property
    def num_groups(self) -> int:
        return self.steps_per_batch * self.groups_per_step * self.num_batches


@dataclass
class Run:
    """A learner, its accounts and its actors, which always have room and the newest weights.

    The run counts versions and steps one by one, as a model to compare policy and scheduler with.
    """

    policy: StalenessPolicy
    shape: Shape
    policy_version: int = 0
    open: dict[int, Group | None] = field(default_factory=dict)
    """By lease, oldest first."""
    min_versions: dict[int, int] = field(default_factory=dict)
    num_trained: int = 0
    num_dropped: int = 0
    num_aborted: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    next_lease_id: int = 0

    def __post_init__(self) -> None:
        evaluations = Evaluations(interval=0, num_prompts=0)
        self.scheduler: RolloutScheduler[Group] = RolloutScheduler(self.policy, evaluations, self)
        endless = self.shape._replace(num_batches=1000)
        self.most_open = make_policy(*endless[:3], groups_per_step=endless[3], num_steps=endless.num_steps).admit(0, 0)

    # The books

    @property
    def num_open(self) -> int:
        return len(self.open)

    @property
    def num_ready(self) -> int:
        return len(self.ready_groups())

    def generating(self) -> list[InFlight]:
        return [InFlight(lease_id, self.min_versions[lease_id]) for lease_id, group in self.open.items() if group is None]

    def ready_groups(self) -> Sequence[Group]:
        return [group for group in self.open.values() if group is not None]

    # The actors

    def lease_evaluation(self, round_: Round) -> bool:
        raise AssertionError("no evaluation is due")

    def lease_training(self, min_policy_version: int) -> bool:
        self.min_versions[self.next_lease_id] = min_policy_version
        self.open[self.next_lease_id] = None
        self.next_lease_id += 1
        return True

    def finish(self, lease_id: int, weights_behind: int) -> None:
        """Return a group sampled under weights as old as the lease permits, at most `weights_behind` old."""
        sampled_at = max(self.policy_version - weights_behind, self.min_versions[lease_id])
        assert sampled_at <= self.policy_version, "the lease asks for weights that do not exist yet"
        self.open[lease_id] = make_group(lease_id, sampled_at)

    # The learner

    def grant(self) -> None:
        self.scheduler.grant(self.policy_version, self)
        assert self.num_trained + len(self.open) <= self.shape.num_groups
        assert len(self.open) <= self.most_open
        assert self.policy.admit(self.policy_version, len(self.open)) == 0
        is_last_granted = self.num_trained + len(self.open) == self.shape.num_groups
        assert self.scheduler.is_held_back(self.policy_version) == (not is_last_granted)

    def abort(self) -> None:
        for lease_id in self.scheduler.abort(self.policy_version):
            del self.open[lease_id]
            self.num_aborted += 1

    def train(self) -> None:
        selected = self.scheduler.select(self.policy_version, self._drop)
        if not selected:
            return
        ready = self.ready_groups()
        assert selected == ready[: len(selected)], "another order than the one asked for"
        shape = self.shape
        assert len(selected) == shape.steps_per_batch * shape.groups_per_step
        for epoch in range(shape.epochs_per_batch):
            for step in range(shape.steps_per_batch):
                for group in selected[step * shape.groups_per_step :][: shape.groups_per_step]:
                    if epoch == shape.epochs_per_batch - 1:
                        self.lags[group.policy_lag(self.policy_version)] += 1
                self.policy_version += 1
        for group in selected:
            del self.open[group.lease_id]
        self.num_trained += len(selected)

    def _drop(self, group: Group) -> None:
        del self.open[group.lease_id]
        self.num_dropped += 1


SHAPES = st.builds(
    Shape,
    max_staleness=st.integers(0, 7),
    steps_per_batch=st.integers(1, 3),
    epochs_per_batch=st.integers(1, 3),
    groups_per_step=st.integers(1, 3),
    num_batches=st.integers(1, 4),
).filter(lambda shape: shape.batch_steps <= shape.max_staleness + 1)


def play(
    shape: Shape,
    data: st.DataObject,
    *,
    in_order: bool,
    hard: int | None = None,
    staleness_policy: Literal["gate", "drop", "abort"] = "gate",
) -> Run:
    """Play a run to its end; fail when it makes no progress. Without `in_order` groups finish in any order."""
    policy = make_policy(
        *shape[:3],
        groups_per_step=shape.groups_per_step,
        num_steps=shape.num_steps,
        hard=hard,
        staleness_policy=staleness_policy,
    )
    run = Run(policy, shape)
    run.grant()
    for _ in range(40 * shape.num_steps * shape.groups_per_step):
        if run.policy_version == shape.num_steps:
            return run
        generating = [lease.lease_id for lease in run.generating()]
        assert generating, f"deadlock at version {run.policy_version} of {shape.num_steps}"
        lease_id = generating[0] if in_order else data.draw(st.sampled_from(generating))
        run.finish(lease_id, data.draw(st.integers(0, 5)))
        run.train()
        run.abort()
        run.grant()
    raise AssertionError(f"no end: version {run.policy_version} of {shape.num_steps}, {run.num_dropped} dropped")
