"""How old a rollout may be: one object answers who is admitted, under which weights, and what is selected, evicted or aborted.

Groups are trained in the order of their leases: a batch of `groups_per_step * steps_per_batch` makes so many optimizer steps,
once per epoch over it. So it is known in advance at which policy version the n-th lease from now on is trained for the last
time (`StalenessPolicy.trained_at`), and a lease granted under weights of at least that version minus `max_staleness` is trained
with a lag of at most `max_staleness`: that is admission, and all of the policy `gate`. A straggler that misses its turn is
trained later than that, and counted; `drop` and `hard_max_staleness` drop it when its turn comes, `abort` while it is still
being generated.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from offbeat.common.config import StalenessSection, TrainSection
from offbeat.learner.leases.groups import LagOf


class Aged(Protocol):
    """What the policy must know of a group."""

    def lag_of(self, measured: LagOf, policy_version: int) -> float:
        """Optimizer steps between `policy_version` and what is measured of the group, at least 0."""
        ...


class InFlight(NamedTuple):
    """A lease whose group is being generated."""

    lease_id: int
    oldest_version: int
    """No token of it is older."""


G = TypeVar("G", bound=Aged)


class StalenessPolicy:
    """Admission, selection, eviction and abortion under `[staleness]`; without clock, sockets or memory of its own.

    Unless said otherwise `policy_version` is the learner's, at the start of a batch.
    """

    def __init__(self, bounds: StalenessSection, train: TrainSection) -> None:
        self.bounds = bounds
        """May be replaced while the run goes on; every method answers by it from then on."""
        self._groups_per_step = train.groups_per_step
        self._steps_per_epoch = train.steps_per_batch
        self._num_batches = train.num_steps // (train.steps_per_batch * train.epochs_per_batch)
        self.batch_steps = train.steps_per_batch * train.epochs_per_batch
        """Optimizer steps on one selection."""
        self.batch_groups = train.groups_per_step * train.steps_per_batch
        """Groups in one selection."""

    @property
    def required_capacity(self) -> int:
        """The most leases that are ever open at once: with fewer slots, the actors hold training back before the bound does."""
        return self._num_admitted()

    @property
    def largest_lag(self) -> int | None:
        """No group is trained that lags by more; None: admission alone bounds it, and stragglers may exceed that."""
        if self.bounds.staleness_policy == "gate":
            return self.bounds.hard_max_staleness
        return self.bounds.max_staleness

    def trained_at(self, policy_version: int, index: int) -> int:
        """The policy version at which the `index`-th group in line from now on is trained for the last time."""
        batch, place = divmod(index, self.batch_groups)
        first_epoch = policy_version + batch * self.batch_steps + place // self._groups_per_step
        return first_epoch + self.batch_steps - self._steps_per_epoch

    def admit(self, policy_version: int, num_open: int) -> int:
        """How many more leases may be granted now.

        `num_open` leases are granted and neither trained nor dropped: generating, or buffered.
        """
        return max(0, min(self._num_admitted(), self.left_in_run(policy_version)) - num_open)

    def left_in_run(self, policy_version: int) -> int:
        """Groups that the run still trains, those of open leases included."""
        return (self._num_batches - policy_version // self.batch_steps) * self.batch_groups

    def min_policy_version(self, policy_version: int, num_open: int) -> int:
        """The oldest weights under which the next lease may be generated."""
        return max(0, self.trained_at(policy_version, num_open) - self.bounds.max_staleness)

    def evict(self, ready: Sequence[G], policy_version: int) -> list[G]:
        """Those of the groups at hand, in the order they would be trained in, that are past the hard bound: to be dropped."""
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
        """The next batch from what `evict` has left, or nothing while it is not complete."""
        return list(itertools.islice(ready, self.batch_groups)) if len(ready) >= self.batch_groups else []

    def abort(self, in_flight: Iterable[InFlight], policy_version: int) -> list[int]:
        """Leases whose group, were it finished now, would be dropped: to be cancelled, and their prompts leased again."""
        if self.bounds.staleness_policy != "abort":
            return []
        oldest = self.trained_at(policy_version, 0) - self.bounds.max_staleness
        return [lease.lease_id for lease in in_flight if lease.oldest_version < oldest]

    def count_over_bound(self, groups: Iterable[G], policy_version: int) -> int:
        """Those of the groups whose lag exceeds `max_staleness` in an optimizer step from `policy_version`."""
        return sum(self._lag(group, policy_version) > self.bounds.max_staleness for group in groups)

    def _num_admitted(self) -> int:
        """Leases whose turn comes early enough for the bound, were they generated under the weights of now."""
        # The groups of a batch's first step are trained for the last time so many steps after the batch begins.
        slack = self.bounds.max_staleness - (self.batch_steps - self._steps_per_epoch)
        if slack < 0:
            return 0
        batches, steps = divmod(slack, self.batch_steps)
        return batches * self.batch_groups + min(steps + 1, self._steps_per_epoch) * self._groups_per_step

    def _lag(self, group: Aged, trained_at: int) -> float:
        return group.lag_of(self.bounds.lag_of, trained_at)
