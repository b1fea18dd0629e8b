"""One scheduler serves the live learner, the simulation and the replay of a log, so that predictions follow the real rules.

    grant    evaluation prompts that are due --> training leases, while the bound admits one and an actor takes it
    abort    leases whose group would be dropped if it were finished now                   (new policy version, new bound)
    select   a batch is ready --> drop groups past the hard bound --> the next batch       (the learner is free)
               dropped groups and aborted leases make room: grant again

`StalenessPolicy` answers single questions about versions. `RolloutScheduler` asks them in the order above. Its callers differ
only in the books and actors that they pass in.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from offbeat.learner.leases.evaluation import Evaluations, Round
from offbeat.learner.leases.lease_target import LeaseTarget
from offbeat.learner.leases.ledger import Selection
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

    def ready_groups(self, order: Selection) -> Sequence[ReadyGroup]:
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


class RolloutScheduler(Generic[G]):
    """Drives a `StalenessPolicy` over the books of one run; has no clock, no sockets and no state."""

    def __init__(
        self, policy: StalenessPolicy, evaluations: Evaluations, books: Books[G], target: LeaseTarget | None = None
    ) -> None:
        """Without a `target`, as many leases are open as the bound admits."""
        self.policy = policy
        """The bound that the rounds go by."""
        self._evaluations = evaluations
        self._books = books
        self.target = target

    def grant(self, policy_version: int, actors: LeaseTakers) -> None:
        """Lease prompts to actors, those of a due evaluation first.

        Consumes: prompts of the current evaluation round, and training leases that the bound admits at `policy_version`.
        Waits for: nothing; ends when the bound admits no more or no actor takes the next one.
        Unblocked by: an actor with new room or newer weights, a lease that ended, a new policy version or bound.
        """
        round_ = self._evaluations.begin()
        while round_ is not None and round_.has_prompt and actors.lease_evaluation(round_):
            pass
        num_open = self._books.num_open
        # The place in line decides when a group is trained, and so which weights it may be generated under.
        for place in range(num_open, num_open + self.policy.admit(policy_version, num_open)):
            min_version = self.policy.min_policy_version(policy_version, place)
            if self.target is not None:
                if place >= self.target.limit:
                    return
                min_version = max(min_version, self.target.min_policy_version(policy_version, place))
            if not actors.lease_training(min_version):
                return

    def is_held_back(self, policy_version: int) -> bool:
        """Return whether, after `grant`, staleness alone keeps a lease from an actor that still has room.

        True when the run has more leases to come: the bound admits no more of them, or only under newer weights. False while
        the target is narrower than the bound.
        """
        is_bound = self.target is None or self.target.limit >= self.policy.most_open
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
        return self.policy.select(self._ready())

    def evict(self, policy_version: int, drop: Callable[[G], None]) -> None:
        """Call `drop` with every group that the next batch would hold and that is past the hard bound.

        Without a whole batch at hand nothing is dropped: a group's lag counts only when its turn has come.
        """
        if not self.has_batch():
            return
        for group in self.policy.evict(self._ready(), policy_version):
            drop(group)

    def _ready(self) -> Sequence[G]:
        return self._books.ready_groups(self.policy.bounds.selection)
