"""A run under a simulated clock: the learner's own scheduler decides, distributions of times stand for the compute.

    grant -> [actors] -> account: ready -> select -> [learner] -> new version -> [transfer] -> newer weights -> grant
    grant, select and abort (at every new version) are those of learner.leases.scheduler

What is assumed (`ASSUMPTIONS` says the same to the user):

- An actor with `n` groups in flight generates each of them `1 + crowding * (n - 1)` times slower than one alone.
- Where processes share cores, all that are busy get equal shares: actors that generate, or swap and check weights, and the
  learner while it trains.
- New weights are at all actors a sync time after the optimizer step; a version made meanwhile follows when they have committed.
  An actor generates nothing while it swaps and checks them, then goes on with what was in flight.
- Every group can be trained on; no actor, lease or message is lost.
- A group of episodes waits for its environment once, after the generation of its turns.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import NamedTuple, assert_never

import numpy as np

from offbeat.lab.simulation.account import Account, Scaling, Totals
from offbeat.lab.simulation.actors import SimulatedActors, SimulatedGroup
from offbeat.lab.simulation.timings import EventKind, Fleet, Timings, WorkClock, draw
from offbeat.learner.leases.evaluation import Evaluations, Round
from offbeat.learner.leases.scheduler import LeaseTarget, RolloutScheduler
from offbeat.learner.leases.staleness import StalenessPolicy


class WeightTransfer:
    """Sends the newest published version to all actors at once, one transfer after another.

    publish -> WEIGHTS_ARRIVE (all sampling stops) -> WEIGHTS_ARE_COMMITTED -> WEIGHTS_ARE_CHECKED (sampling goes on)
    """

    def __init__(
        self, clock: WorkClock, actors: SimulatedActors, sync_s: Iterator[float], *, swap_s: float, check_s: float
    ) -> None:
        self._clock = clock
        self._actors = actors
        self._sync_s = sync_s
        self._swap_s = swap_s
        self._check_s = check_s
        self._published_version = 0
        self._sending_version: int | None = None
        self.committed_version: int | None = None
        """The version in the actors' engines; None before the first."""

    def publish(self, policy_version: int) -> None:
        """Send this version, after the transfer that is under way."""
        self._published_version = policy_version
        if self._sending_version is None:
            self._send()

    def arrive(self) -> None:
        """Stop the actors and swap the version in that arrived."""
        assert self._sending_version is not None
        pause_s = self._swap_s + self._check_s
        if pause_s:
            self._clock.schedule_after(pause_s, EventKind.WEIGHTS_ARE_CHECKED)
        self._actors.begin_swap(self._sending_version, pause_s)
        self._clock.schedule_after(self._swap_s, EventKind.WEIGHTS_ARE_COMMITTED)

    def commit(self) -> None:
        """Let leases begin under the version that was swapped in, and send the next one that is published."""
        self.committed_version, self._sending_version = self._sending_version, None
        assert self.committed_version is not None
        if self.committed_version < self._published_version:
            self._send()

    def _send(self) -> None:
        self._sending_version = self._published_version
        self._clock.schedule_after(next(self._sync_s), EventKind.WEIGHTS_ARRIVE)


ASSUMPTIONS = (
    "group times are independent draws; with n groups in flight an actor takes 1 + crowding * (n - 1) times as long for each",
    "busy processes that share cores get equal parts of them",
    "new weights reach all actors at once, a sync time after the step; transfers follow one another",
    "every group can be trained on: no failures, no filtering",
)
OF_EPISODES = "a group waits for its environment once, after its turns are generated; the wait grows with nothing"
"""The assumption of runs with an environment, which the user is told besides."""


class SimulatedBatch(NamedTuple):
    """The optimizer steps on one selection."""

    policy_version: int
    """Policy version after the last of these steps."""
    ended_at: float
    """Time of the end, in seconds since the start."""
    waited_s: float
    """Seconds that the learner waited for the batch."""
    lags: dict[int, int]
    """Groups by policy lag of their oldest token, when they are trained for the last time."""
    num_over_bound: int
    """Number of groups whose lag, measured by `staleness.lag_of`, exceeds `max_staleness`."""
    totals: Totals
    """Sums of the run at the end of the batch."""


class Simulation:
    """The learner of a simulated run and the loop over its events. One seed gives one result."""

    def __init__(
        self,
        policy: StalenessPolicy,
        evaluations: Evaluations,
        timings: Timings,
        fleet: Fleet,
        *,
        evaluation_group_size: int,
        weights_interval: int,
        seed: int,
        scaling: Scaling | None = None,
    ) -> None:
        """`policy` and `evaluations` are production's own, made from the run's settings; so are the numbers.

        `scaling` moves the number of actors; None: it stays.
        """
        # Separate streams: under other bounds the same groups come in the same order.
        of_groups, of_steps, of_syncs = np.random.default_rng(seed).spawn(3)
        self._policy = policy
        self._evaluations = evaluations
        self._timings = timings
        self._weights_interval = weights_interval
        self._train_s = draw(of_steps, timings.train_s.tolist())
        self._clock = WorkClock(fleet.cores, timings.load)
        self._account = Account()
        self._scheduler: RolloutScheduler[SimulatedGroup] = RolloutScheduler(
            policy, evaluations, self._account, LeaseTarget(policy, weights_interval)
        )
        self._actors = SimulatedActors(
            self._clock,
            timings,
            fleet,
            evaluation_group_size=evaluation_group_size,
            lag_of=policy.bounds.lag_of,
            generator=of_groups,
        )
        self._transfer = WeightTransfer(
            self._clock, self._actors, draw(of_syncs, timings.sync_s.tolist()), swap_s=timings.swap_s, check_s=timings.check_s
        )
        self._scaling = scaling
        self._num_starting = 0
        """Actors that were started and have not joined."""
        self._policy_version = 0
        self._needs_weights = False
        """True while a lease could be granted if the actors had newer weights."""
        self._handed_over: list[tuple[float, int, list[SimulatedGroup]]] = []
        """A heap of the groups on their way from actors to the learner: arrival on the work clock, order, groups."""
        self._num_handed_over = count()
        self._is_learner_free = True
        self._free_since = 0.0
        self._waited_s = 0.0

    def run(self, num_steps: int, seconds: float = math.inf) -> list[SimulatedBatch]:
        """Return the batches of `num_steps` optimizer steps, or of `seconds` simulated seconds if those are over before.

        Consumes: the events of the clock, in order. Produces: a batch at each `STEPS_END`.
        After every event the learner grants what it can, and, if it is free, selects its next batch.
        """
        batches: list[SimulatedBatch] = []
        self._publish()
        self._grant()
        while self._policy_version < num_steps:
            self._actors.schedule_ends()
            at, _, kind, actor = self._clock.pop()
            if actor is not None and not self._actors.ends_at(actor, at):
                continue
            elapsed = self._clock.advance(at)
            self._account.pass_time(elapsed, self._actors.num_idle, needs_weights=self._needs_weights)
            if self._scaling is not None:
                self._scaling.pass_time(elapsed, self._actors)
            if self._clock.seconds > seconds:
                break
            match kind:
                case EventKind.GROUPS_END:
                    assert actor is not None
                    self._end_groups(actor)
                case EventKind.GROUPS_ARRIVE:
                    self._accept(heapq.heappop(self._handed_over)[2])
                case EventKind.STEPS_END:
                    batches.append(self._end_batch())
                case EventKind.REST_ENDS:
                    self._is_learner_free = True
                    self._free_since = self._clock.seconds
                    self._clock.change_busy(-1)
                case EventKind.WEIGHTS_ARRIVE:
                    self._transfer.arrive()
                case EventKind.WEIGHTS_ARE_COMMITTED:
                    self._transfer.commit()
                case EventKind.WEIGHTS_ARE_CHECKED:
                    self._actors.end_swap()
                case EventKind.ACTOR_JOINS:
                    self._num_starting -= 1
                    self._actors.join(self._transfer.committed_version or 0)
                case _:
                    assert_never(kind)
            self._grant()
            if self._is_learner_free:
                self._begin_batch()
        return batches

    # Leases

    def _grant(self) -> None:
        self._needs_weights = False
        self._scheduler.grant(self._policy_version, self)

    def lease_evaluation(self, round_: Round) -> bool:
        """Lease the round's next prompt: see `learner.leases.scheduler.LeaseTakers`."""
        version = self._transfer.committed_version
        if version is None or version < round_.policy_version:
            return False
        group = self._actors.lease(version, is_evaluation=True)
        if group is None:
            return False
        round_.next_prompt(group.lease_id)
        return True

    def lease_training(self, min_policy_version: int) -> bool:
        """Lease the next training prompt: see `learner.leases.scheduler.LeaseTakers`."""
        version = self._transfer.committed_version
        if version is None or version < min_policy_version:
            self._needs_weights = True
            return False
        group = self._actors.lease(version, is_evaluation=False)
        if group is None:
            return False
        self._account.grant(group)
        return True

    def _end_groups(self, actor: int) -> None:
        ended = self._actors.end_groups(actor)
        for group in ended:
            self._account.totals.generated_s += group.generate_s
        waits_s = self._timings.environment_s
        if waits_s is None:
            self._hand_over(ended, self._timings.handoff_s)
            return
        for group in ended:
            self._hand_over([group], self._timings.handoff_s + float(waits_s[group.drawn]))

    def _hand_over(self, groups: list[SimulatedGroup], after_s: float) -> None:
        if not after_s:
            self._accept(groups)
            return
        heapq.heappush(self._handed_over, (self._clock.now + after_s, next(self._num_handed_over), groups))
        self._clock.schedule_after(after_s, EventKind.GROUPS_ARRIVE)

    def _accept(self, groups: Sequence[SimulatedGroup]) -> None:
        for group in groups:
            if group.is_cancelled:
                continue
            self._actors.release(group)
            if group.is_evaluation:
                round_ = self._evaluations.current
                assert round_ is not None
                round_.complete(group.lease_id, ())
                if round_.is_finished:
                    self._evaluations.end()
            else:
                self._account.accept(group)

    def _abort(self) -> None:
        for lease_id in self._scheduler.abort(self._policy_version):
            group = self._account.abort(lease_id)
            group.is_cancelled = True
            self._actors.release(group)
            if group.is_generated:
                self._account.totals.wasted_s += group.generate_s
                continue
            done_s = self._actors.cancel(group)
            self._account.totals.generated_s += done_s
            self._account.totals.wasted_s += done_s

    # The learner

    def _begin_batch(self) -> None:
        num_dropped = self._account.totals.dropped
        self._scheduler.ask(self._clock.seconds)
        groups = self._scheduler.select(self._policy_version, self._account.drop)
        if groups:
            self._scheduler.take(self._clock.seconds)
            self._account.begin_batch(groups)
            self._is_learner_free = False
            self._waited_s = self._clock.seconds - self._free_since
            self._clock.change_busy(1)
            train_s = sum(islice(self._train_s, self._policy.batch_steps))
            self._clock.schedule_after(train_s, EventKind.STEPS_END)
        if self._account.totals.dropped > num_dropped:
            self._grant()

    def _end_batch(self) -> SimulatedBatch:
        groups = self._account.end_batch()
        began_at = self._policy_version
        self._policy_version += self._policy.batch_steps
        interval = self._weights_interval
        if self._policy_version // interval > began_at // interval:
            self._publish()
        self._abort()
        if self._scaling is not None:
            self._scaling.observe(self._clock.seconds, self._waited_s, self._policy, self._policy_version)
            self._reconcile(self._scaling)
        self._clock.schedule_after(self._timings.rest_s, EventKind.REST_ENDS)
        trained = [(group, self._policy.trained_at(began_at, index)) for index, group in enumerate(groups)]
        return SimulatedBatch(
            policy_version=self._policy_version,
            ended_at=self._clock.seconds,
            waited_s=self._waited_s,
            lags=dict(Counter(trained_at - group.oldest_version for group, trained_at in trained)),
            num_over_bound=sum(self._policy.count_over_bound([group], trained_at) for group, trained_at in trained),
            totals=replace(self._account.totals),
        )

    # Actors

    def _reconcile(self, scaling: Scaling) -> None:
        """Start actors, or let the newest leave, as a launcher does."""
        missing = scaling.wanted - self._actors.num_staying - self._num_starting
        for _ in range(missing):
            self._num_starting += 1
            self._clock.schedule_after(scaling.start_s, EventKind.ACTOR_JOINS)
        # Those that start cannot be called back here.
        for _ in range(min(-missing, self._actors.num_staying - 1)):
            self._actors.leave()

    def _publish(self) -> None:
        self._evaluations.reach(self._policy_version)
        self._transfer.publish(self._policy_version)
