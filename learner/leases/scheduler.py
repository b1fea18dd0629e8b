"""One scheduler serves the live learner, the simulation and the replay of a log, so that predictions follow the real rules.

    grant    evaluation prompts that are due --> training leases, while the bound admits one and an actor takes it
    abort    leases whose group would be dropped if it were finished now                   (new policy version, new bound)
    select   a batch is ready --> drop groups past the hard bound --> the next batch       (the learner is free)
               dropped groups and aborted leases make room: grant again

`StalenessPolicy` answers single questions about versions, and `LeaseTarget` says how far ahead of need to go.
`RolloutScheduler` asks them in the order above. Its callers differ only in the books and actors that they pass in.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from offbeat.common.settings.checks import steps_behind
from offbeat.learner.leases.evaluation import Evaluations, Round
from offbeat.learner.leases.staleness import Aged, Generating, StalenessPolicy

G = TypeVar("G", bound=Aged)
ReadyGroup = TypeVar("ReadyGroup", bound=Aged, covariant=True)


class Books(Protocol[ReadyGroup]):
    """The account of training leases that the scheduler reads; `learner.leases.ledger.Ledger` is one."""

    @property
    def num_open(self) -> int:
        """Leases granted and neither trained nor dropped: generating, ready or in the batch being trained on."""
        ...

    @property
    def num_ready(self) -> int:
        """Groups that a batch can be selected from."""
        ...

    def ready_groups(self) -> Sequence[ReadyGroup]:
        """Return the groups that a batch can be selected from, first the one to train on first."""
        ...

    def generating(self) -> Iterable[Generating]:
        """Return the leases whose group has not arrived, oldest first."""
        ...


class LeaseTakers(Protocol):
    """The actors as the scheduler sees them: each call leases one prompt to one of them."""

    def lease_evaluation(self, round_: Round) -> bool:
        """Lease the round's next prompt, or return False when no actor with the round's weights has room."""
        ...

    def lease_training(self, min_policy_version: int) -> bool:
        """Lease the next training prompt and enter it in the books, or return False when no actor can take it.

        An actor can take a lease when it has room, and weights of at least `min_policy_version`.
        """
        ...


WINDOW = 8
"""Batches without a wait before the number of leases falls."""
LONGEST_WINDOW = 64
WAIT_SHARE = 0.01
"""Share of the time of a batch above which the learner counts as having waited."""


class LeaseTarget:
    """Keeps groups young: leases are granted just early enough that the learner does not wait for rollouts.

    The staleness bound is a promise, not a goal. Where actors generate faster than the learner trains, granting all that the
    bound admits only lets finished groups grow old in the buffer. Two batches suffice there: one in training, and one that is
    generated meanwhile, with a lag of one batch.

        the learner waited for its batch     more leases, by the groups that were missing when it asked
        groups to spare in each of the       fewer leases, by the groups that were always to spare; never less than two
        last `WINDOW` batches                batches

    A wait after a fall means that the spare groups were needed: it doubles the window. Times are in seconds of the caller's
    clock.
    """

    def __init__(self, policy: StalenessPolicy, weights_interval: int) -> None:
        """`weights_interval` is the number of optimizer steps between updates of the actors' weights."""
        self._policy = policy
        self._steps_behind = steps_behind(weights_interval, policy.batch_steps)
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
        # By whole batches, and never newer than published weights are for certain: no others come before the next batch.
        num_newer = num_open // self._policy.batch_groups - batches_ahead
        return max(0, policy_version + num_newer * self._policy.batch_steps - self._steps_behind)

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


class RolloutScheduler(Generic[G]):
    """Drives a `StalenessPolicy` over the books of one run. It has no clock, no sockets, and no state but its target's."""

    def __init__(
        self, policy: StalenessPolicy, evaluations: Evaluations, books: Books[G], target: LeaseTarget | None = None
    ) -> None:
        """Create a scheduler. The bound alone limits the leases without a `target`, or while `staleness.target` is not auto."""
        self.policy = policy
        """The bound that the rounds go by."""
        self._evaluations = evaluations
        self._books = books
        self._target = target

    @property
    def lease_limit(self) -> int:
        """Largest number of leases that are granted and neither trained nor dropped."""
        target = self._target_in_force
        return self.policy.most_open if target is None else target.limit

    def ask(self, at: float) -> None:
        """Note that the learner is free for a batch at this time; repeated until it gets one."""
        if self._target is not None:
            self._target.ask(self._books.num_ready, at)

    def take(self, at: float) -> None:
        """Note that the learner got its batch at this time, in seconds of the caller's clock."""
        if self._target is not None:
            self._target.take(at)

    def grant(self, policy_version: int, actors: LeaseTakers) -> None:
        """Lease prompts to actors, those of a due evaluation first.

        Consumes: prompts of the current evaluation round, and training leases that the bound admits at `policy_version`.
        Waits for: nothing; ends when the bound admits no more or no actor takes the next one.
        Unblocked by: an actor with new room or newer weights, a lease that ended, a new policy version or bound.
        """
        round_ = self._evaluations.begin()
        while round_ is not None and round_.has_prompt and actors.lease_evaluation(round_):
            pass
        num_open, target = self._books.num_open, self._target_in_force
        # The place in line decides when a group is trained, and so which weights it may be generated under.
        for place in range(num_open, num_open + self.policy.admit(policy_version, num_open)):
            min_version = self.policy.min_policy_version(policy_version, place)
            if target is not None:
                if place >= target.limit:
                    return
                min_version = max(min_version, target.min_policy_version(policy_version, place))
            if not actors.lease_training(min_version):
                return

    def is_held_back(self, policy_version: int) -> bool:
        """Return whether, after `grant`, staleness alone keeps a lease from an actor that still has room.

        True when the run has more leases to come: the bound admits no more of them, or only under newer weights. False while
        the target is narrower than the bound.
        """
        is_bound = self.lease_limit >= self.policy.most_open
        return is_bound and self.policy.left_in_run(policy_version) > self._books.num_open

    def abort(self, policy_version: int) -> list[int]:
        """Return the leases to cancel, by ascending id: their groups, finished now, would be dropped.

        Only a new policy version or bound can make a lease one of them: ask after each.
        """
        return sorted(self.policy.abort(self._books.generating(), policy_version))

    def has_batch(self) -> bool:
        """Return whether enough groups are ready for a batch, before any is dropped."""
        return self._books.num_ready >= self.policy.batch_groups

    def select(self, policy_version: int, drop: Callable[[G], None]) -> list[G]:
        """Return the next batch in the order to train in, or nothing while it is not complete.

        Calls `drop` first with every group that is past the hard bound (`evict`); `grant` may then admit new leases. Must not
        be called while a batch is being trained on.
        """
        if not self.has_batch():
            return []
        self.evict(policy_version, drop)
        return self.policy.select(self._books.ready_groups())

    def evict(self, policy_version: int, drop: Callable[[G], None]) -> None:
        """Call `drop` with every group that the next batch would hold and that is past the hard bound.

        Without a whole batch at hand nothing is dropped: a group's lag counts only when its turn has come.
        """
        if not self.has_batch():
            return
        for group in self.policy.evict(self._books.ready_groups(), policy_version):
            drop(group)

    @property
    def _target_in_force(self) -> LeaseTarget | None:
        # `staleness.target` may change during the run. The target is told of every batch, so that it can take over at any time.
        return self._target if self.policy.bounds.target == "auto" else None
