"""The staleness bound limits which work is assigned, so that a rollout that would be too old is never sampled.

    admit    may one more lease be granted now?      select   which ready groups are trained on next?
    evict    which ready groups are too old?         abort    which groups in the making will be too old?

Groups are trained in the order of their leases. A batch of `groups_per_step * steps_per_batch` groups makes `steps_per_batch`
optimizer steps in each of its `epochs_per_batch` epochs. So the policy version at which the n-th lease from now on is trained
for the last time is known in advance (`StalenessPolicy.trained_at`). A lease granted under weights of at least that version
minus `max_staleness` is trained with a lag of at most `max_staleness`: that is admission, and all that the policy `gate` does.
A straggler that misses its turn is trained later, and counted; `drop` and `hard_max_staleness` drop it when its turn comes,
`abort` cancels it while it is being generated.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from offbeat.common.settings.config import StalenessSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.learner.leases.groups import LagOf


class Aged(Protocol):
    """A group, as far as the policy looks at it."""

    def lag_of(self, measured: LagOf, policy_version: int) -> float:
        """Return the group's lag at `policy_version`, in optimizer steps, at least 0."""
        ...


class Generating(Protocol):
    """A lease whose group is being generated, as far as the policy looks at it."""

    @property
    def lease_id(self) -> int:
        """The lease's id."""
        ...

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that a token of its group can have."""
        ...


G = TypeVar("G", bound=Aged)


class StalenessPolicy:
    """Admission, selection, eviction and abortion under `[staleness]`; has no clock, no sockets and no memory.

    Unless a method says otherwise, `policy_version` is the learner's at the start of a batch.
    """

    def __init__(self, bounds: StalenessSection, train: TrainSection) -> None:
        self._groups_per_step = train.groups_per_step
        self._steps_per_epoch = train.steps_per_batch
        self._num_batches = train.num_steps // (train.steps_per_batch * train.epochs_per_batch)
        self.batch_steps = train.steps_per_batch * train.epochs_per_batch
        """Optimizer steps on one selection."""
        self.batch_groups = train.groups_per_step * train.steps_per_batch
        """Groups in one selection."""
        self.bounds = bounds
        """The settings; may be replaced while the run goes on, and every method answers by them from then on."""

    @property
    def largest_lag(self) -> int | None:
        """The hard bound on a trained group's lag; None where admission alone bounds it and stragglers may exceed that."""
        if self.bounds.staleness_policy == "gate":
            return self.bounds.hard_max_staleness
        return self.bounds.max_staleness

    @property
    def most_open(self) -> int:
        """The largest number of leases that are granted and neither trained nor dropped.

        Their turn comes within the bound, were they generated under the newest weights.
        """
        # The groups of a batch's first step are trained for the last time `batch_steps - _steps_per_epoch` after it begins.
        slack = self.bounds.max_staleness - (self.batch_steps - self._steps_per_epoch)
        if slack < 0:
            return 0
        batches, steps = divmod(slack, self.batch_steps)
        return batches * self.batch_groups + min(steps + 1, self._steps_per_epoch) * self._groups_per_step

    def trained_at(self, policy_version: int, index: int) -> int:
        """Return the policy version at which the `index`-th group in line is trained for the last time."""
        batch, place = divmod(index, self.batch_groups)
        first_epoch = policy_version + batch * self.batch_steps + place // self._groups_per_step
        return first_epoch + self.batch_steps - self._steps_per_epoch

    def admit(self, policy_version: int, num_open: int) -> int:
        """Return the number of leases that may be granted now.

        `num_open` leases are granted and neither trained nor dropped: generating, or buffered.
        """
        return max(0, min(self.most_open, self.left_in_run(policy_version)) - num_open)

    def left_in_run(self, policy_version: int) -> int:
        """Return the number of groups that the run still trains, those of open leases included."""
        return (self._num_batches - policy_version // self.batch_steps) * self.batch_groups

    def min_policy_version(self, policy_version: int, num_open: int) -> int:
        """Return the oldest weights under which a lease that has `num_open` before it in line may be generated."""
        return max(0, self.trained_at(policy_version, num_open) - self.bounds.max_staleness)

    def evict(self, ready: Sequence[G], policy_version: int) -> list[G]:
        """Return the groups to drop: those of the next batch past the hard bound, and of the groups that move up for them.

        `ready` is in the order to train in.
        """
        if self.largest_lag is None:
            return []
        evicted: list[G] = []
        num_selected = 0
        for group in ready:
            if self._lag(group, self.trained_at(policy_version, num_selected)) > self.largest_lag:
                evicted.append(group)
            else:
                num_selected += 1
            if num_selected == self.batch_groups:
                break
        return evicted

    def select(self, ready: Sequence[G]) -> list[G]:
        """Return the next batch of the groups that `evict` has left, or nothing while it is not complete."""
        return list(ready[: self.batch_groups]) if len(ready) >= self.batch_groups else []

    def abort(self, in_flight: Iterable[Generating], policy_version: int) -> list[int]:
        """Return the leases whose group, finished now, would be dropped: cancel them and lease their prompts again."""
        if self.bounds.staleness_policy != "abort":
            return []
        oldest = self.trained_at(policy_version, 0) - self.bounds.max_staleness
        return [lease.lease_id for lease in in_flight if lease.oldest_version < oldest]

    def count_over_bound(self, groups: Iterable[G], policy_version: int) -> int:
        """Return how many of the groups lag by more than `max_staleness` in an optimizer step from `policy_version`."""
        return sum(self._lag(group, policy_version) > self.bounds.max_staleness for group in groups)

    def _lag(self, group: Aged, trained_at: int) -> float:
        return group.lag_of(self.bounds.lag_of, trained_at)
