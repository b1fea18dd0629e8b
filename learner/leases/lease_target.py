"""The lease target keeps groups young: leases are granted just early enough that the learner does not wait for rollouts.

The staleness bound is a promise, not a goal. Where actors generate faster than the learner trains, granting all that the bound
admits only lets finished groups grow old in the buffer. Two batches suffice there: one that is trained on, and one that is
generated meanwhile, with a lag of one batch.

    the learner waited for the batch     more leases, by the groups that were missing when it asked, at least one
    groups to spare in each of the       fewer leases, by the groups that were always to spare; never less than two batches
    last `WINDOW` batches

Taking leases away and waiting again means that the spare groups were needed: each such mistake doubles the window.
"""

from collections import deque

from offbeat.learner.leases.staleness import StalenessPolicy

WINDOW = 8
"""Batches without a wait before the number of leases falls."""
LONGEST_WINDOW = 64
WAIT_SHARE = 0.01
"""Share of the time of a batch above which the learner counts as having waited."""


class LeaseTarget:
    """Limits the open leases of a run below what its bound admits. All times are in seconds of the caller's clock."""

    def __init__(self, policy: StalenessPolicy) -> None:
        self._policy = policy
        self._least = 2 * policy.batch_groups
        self._limit = self._least
        self._window = WINDOW
        self._spare: deque[int] = deque()
        """Groups to spare at each batch since the limit changed or the learner waited."""
        self._has_fallen = False
        self._asked_at: float | None = None
        self._num_ready = 0
        """Groups that were ready when the learner asked for the next batch."""
        self._taken_at: float | None = None

    @property
    def limit(self) -> int:
        """Largest number of leases that are granted and neither trained nor dropped."""
        return min(self._limit, self._policy.most_open)

    def min_policy_version(self, policy_version: int, num_open: int) -> int:
        """Return the oldest weights for a lease that has `num_open` before it in line, so that the limit keeps groups young.

        Without it, leases that are free at the end of a step would all be generated under the weights before that step.
        """
        batches_ahead = -(-self.limit // self._policy.batch_groups) - 1
        return max(0, self._policy.trained_at(policy_version, num_open) - batches_ahead * self._policy.batch_steps)

    def ask(self, num_ready: int, at: float) -> None:
        """Note that the learner is free for a batch, with this many groups ready; repeated until it gets one."""
        if self._asked_at is None:
            self._asked_at = at
            self._num_ready = num_ready

    def take(self, at: float) -> None:
        """Note that the learner got its batch, and move the limit."""
        assert self._asked_at is not None, "the learner takes a batch without having asked"
        before, self._taken_at = self._taken_at, at
        waited_s, self._asked_at = at - self._asked_at, None
        # The learner always waits for its first batch.
        if before is None:
            return
        missing = self._policy.batch_groups - self._num_ready
        if missing > 0 and waited_s > WAIT_SHARE * (at - before):
            self._rise(missing)
        else:
            self._spare.append(max(0, -missing))
            if len(self._spare) >= self._window:
                self._fall(min(self._spare))

    def _rise(self, missing: int) -> None:
        if self._has_fallen:
            self._window = min(2 * self._window, LONGEST_WINDOW)
        self._has_fallen = False
        self._spare.clear()
        # What the bound does not admit would only delay a later fall.
        self._limit = min(self._limit + missing, max(self._least, self._policy.most_open))

    def _fall(self, num_spare: int) -> None:
        self._spare.popleft()
        lower = max(self._least, self.limit - num_spare)
        if lower < self._limit:
            self._limit = lower
            self._has_fallen = True
            self._spare.clear()
