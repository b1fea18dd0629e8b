"""How old a rollout may be: one object answers who is admitted, under which weights, and what is selected or dropped.

Groups are trained in the order of their leases, `groups_per_step` to an optimizer step. So the n-th group (counted from 0)
of a run is trained at policy version `n // groups_per_step`, and a lease for it, granted under weights of at least
`n // groups_per_step - max_staleness`, is trained with a lag of at most `max_staleness`: that is the whole gate. A straggler
that misses its turn is trained later than that; its excess is counted, and `hard_max_staleness` drops it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from learner.groups import Group


class Selection(NamedTuple):
    """What the gate decided about the groups at hand."""

    selected: list[Group]
    """A whole batch, oldest lease first, or nothing."""
    too_stale: list[Group]
    """Above the hard bound: to be dropped, their prompts leased again."""


class StalenessGate:
    """Admission and selection under `max_staleness` and `hard_max_staleness`."""

    def __init__(
        self,
        *,
        max_staleness: int,
        hard_max_staleness: int | None,
        groups_per_step: int,
        steps_per_batch: int,
        num_steps: int,
    ) -> None:
        self.max_staleness = max_staleness
        self._hard_max_staleness = hard_max_staleness
        self._groups_per_step = groups_per_step
        self.batch_groups = groups_per_step * steps_per_batch
        """Groups in one selection."""
        self._num_groups = groups_per_step * num_steps

    def capacity(self, policy_version: int, num_open: int) -> int:
        """How many more leases may be granted now.

        `num_open` leases are granted and neither trained nor dropped: generating, or buffered.
        """
        num_taken = policy_version * self._groups_per_step + num_open
        bound = min((policy_version + self.max_staleness + 1) * self._groups_per_step, self._num_groups)
        return max(0, bound - num_taken)

    def min_policy_version(self, policy_version: int, num_open: int) -> int:
        """The oldest weights under which the next lease may be generated."""
        trained_at = policy_version + num_open // self._groups_per_step
        return max(0, trained_at - self.max_staleness)

    def select(self, ready: Sequence[Group], policy_version: int) -> Selection:
        """A batch to train on from `ready`, which is in lease order."""
        too_stale: list[Group] = []
        selected: list[Group] = []
        for group in ready:
            trained_at = policy_version + len(selected) // self._groups_per_step
            if self._hard_max_staleness is not None and group.policy_lag(trained_at) > self._hard_max_staleness:
                too_stale.append(group)
            else:
                selected.append(group)
            if len(selected) == self.batch_groups:
                return Selection(selected, too_stale)
        return Selection([], too_stale)
