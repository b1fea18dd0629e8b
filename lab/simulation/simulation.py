"""A run under a simulated clock: the learner's own staleness policy decides, distributions of times stand for the compute.

    grant -> group drawn -> [actor] -> ready -> evict, select -> [learner] -> new version -> [sync] -> actors commit -> grant
      ^ StalenessPolicy.admit            StalenessPolicy.evict, select           StalenessPolicy.abort

What is assumed (`ASSUMPTIONS` says the same to the user):

- An actor with `n` groups in flight generates each of them `1 + crowding * (n - 1)` times slower than one alone.
- Where processes share cores, all that are busy get equal shares: actors that generate, or swap and check weights, and the
  learner while it trains.
- New weights are at all actors a sync time after the optimizer step; a version made meanwhile follows when they have committed.
  An actor generates nothing while it swaps and checks them, then goes on with what was in flight.
- Every group can be trained on; no actor, lease or message is lost.
"""

import heapq
import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from offbeat.learner.leases.evaluation import Evaluations
from offbeat.learner.leases.groups import LagOf
from offbeat.learner.leases.staleness import InFlight, StalenessPolicy

ASSUMPTIONS = (
    "group times are independent draws; with n groups in flight an actor takes 1 + crowding * (n - 1) times as long for each",
    "busy processes that share cores get equal parts of them",
    "new weights reach all actors at once, a sync time after the step; transfers follow one another",
    "every group can be trained on: no failures, no filtering",
)

DRAWN_AT_ONCE = 4096

(
    _GROUP_ENDS,
    _GROUPS_ARRIVE,
    _STEPS_END,
    _WEIGHTS_ARRIVE,
    _WEIGHTS_ARE_COMMITTED,
    _WEIGHTS_ARE_CHECKED,
    _REST_IS_OVER,
) = range(7)


class Timings(NamedTuple):
    """What the parts of a run take, in seconds of a process that has a core (or a device) to itself."""

    completions_s: NDArray[np.float64]
    """`[num_groups, group_size]`: generation times of the completions of groups that had their actor to themselves. Drawn from
    with replacement; a group takes the time of its longest."""
    train_s: NDArray[np.float64]
    """Optimizer steps; drawn from."""
    sync_s: NDArray[np.float64]
    """From the end of an optimizer step until the actors have its weights beside their engines; drawn from."""
    crowding: float = 0.0
    """How much longer a group takes for each other group on its actor, as a share of its time alone: 0 for an engine with room,
    1 for one that works on them in turn."""
    handoff_s: float = 0.0
    """From a group's last token until the learner has it, and its slot is free for the next lease: rewards, messages."""
    swap_s: float = 0.0
    """An actor samples nothing for so long until the new weights are in its engine."""
    check_s: float = 0.0
    """Nor for so long afterwards, while it scores the canary."""
    rest_s: float = 0.0
    """Between an optimizer step and the learner's next look at the buffer: snapshot, rows, checkpoint."""
    load: float = 1.0
    """Cores that a busy process takes with its threads and helpers."""


class Fleet(NamedTuple):
    """What there is to work with."""

    num_actors: int
    max_inflight_groups: int
    """Of each actor."""
    cores: int | None = None
    """Shared by all actors and the learner; None: each has its own."""


class Totals(NamedTuple):
    """Sums from the start of the run."""

    leased: int
    trained: int
    dropped: int
    """Evicted: too old when their turn came."""
    aborted: int
    """Cancelled while they were generated."""
    in_flight: int
    """Leases being generated, buffered or trained on, now."""
    generated_s: float
    """Generation of all groups, evaluation included, those cancelled as far as they came."""
    wasted_s: float
    """The part that went into groups never trained on."""
    wait_leases_s: float
    """Actor seconds without a group in flight, the policy admitting none (or not enough for all)."""
    wait_weights_s: float
    """The same while leases wait for newer weights."""
    slots_s: float
    """Integral over time of leases that actors hold, those for evaluation left out."""
    open_s: float
    """Integral over time of groups begun and not yet trained on: its mean is the L of Little's law."""


class Batch(NamedTuple):
    """The optimizer steps on one selection."""

    policy_version: int
    """After its last step."""
    ended_at: float
    """Seconds since the start."""
    waited_s: float
    """The learner's wait for the batch."""
    lags: dict[int, int]
    """Groups by policy lag of their oldest token, when they are trained for the last time."""
    num_over_bound: int
    """Groups over `max_staleness`, as `staleness.lag_of` measures it."""
    totals: Totals
    """When it ended."""


@dataclass(slots=True)
class Rollouts:
    """A group in the simulation: what the policy asks of `learner.leases.groups.Group`."""

    lease_id: int
    actor: int
    drawn: int
    """Row of `Timings.completions_s`."""
    generate_s: float
    """What it takes alone."""
    is_evaluation: bool
    oldest_version: int
    started: float
    """Progress of its actor when it began."""
    is_generated: bool = False
    """It is on its way to the learner, or there."""
    is_cancelled: bool = False
    mean_version: float = 0.0
    last_version: int = 0
    """The newest weights in the completion that ended first."""

    def lag_of(self, measured: LagOf, policy_version: int) -> float:
        """As `learner.leases.groups.Group.lag_of`."""
        match measured:
            case "oldest_token":
                return max(0, policy_version - self.oldest_version)
            case "token_mean":
                return max(0.0, policy_version - self.mean_version)
            case "last_segment":
                return max(0, policy_version - self.last_version)


class Slots:
    """Which actor takes the next lease: `learner.dispatch.roster.Room`'s choice, without looking at every actor each time."""

    def __init__(self, num_actors: int, num_slots: int) -> None:
        self._free = [num_slots] * num_actors
        # By number of free slots, the actors that have so many: as bits, the first actor the lowest.
        self._with_free = [0] * num_slots + [(1 << num_actors) - 1]
        self._most = num_slots

    def take(self) -> int | None:
        """The actor with the most room, the first of equals; None when no slot is free."""
        while self._most and not self._with_free[self._most]:
            self._most -= 1
        if not self._most:
            return None
        candidates = self._with_free[self._most]
        lowest = candidates & -candidates
        self._with_free[self._most] ^= lowest
        self._with_free[self._most - 1] |= lowest
        actor = lowest.bit_length() - 1
        self._free[actor] -= 1
        return actor

    def give_back(self, actor: int) -> None:
        """One of its groups ended."""
        free = self._free[actor]
        bit = 1 << actor
        self._with_free[free] ^= bit
        self._with_free[free + 1] |= bit
        self._free[actor] = free + 1
        self._most = max(self._most, free + 1)


@dataclass(slots=True)
class Actor:
    """One actor. Its groups all progress alike, so they are kept by the progress at which they end."""

    ends: list[tuple[float, int, Rollouts]] = field(default_factory=list)
    """A heap: progress at the end, lease id, group. Cancelled groups stay until they come up."""
    num_held: int = 0
    """Leases: groups that are generated, or on their way to the learner."""
    num_running: int = 0
    """Groups that are generated."""
    company: float = 0.0
    """The same, those of evaluation counted by their size."""
    progress: float = 0.0
    """Seconds of generation done per group, at `since`."""
    since: float = 0.0
    """On the work clock; in the future while new weights are being committed."""
    slowness: float = 1.0
    """Seconds of work per second of progress."""
    next_end: float = math.inf
    """When its next group ends; an event of another time is out of date."""
    commits: list[tuple[float, int]] = field(default_factory=list)
    """Progress at which each policy version was committed, oldest first."""

    def progress_at(self, clock: float) -> float:
        """The progress made by then."""
        return self.progress + max(0.0, clock - self.since) / self.slowness

    def settle(self, clock: float) -> None:
        """Before anything changes how fast it progresses."""
        if clock > self.since:
            self.progress, self.since = self.progress_at(clock), clock


T = TypeVar("T")


class Draws(Generic[T]):
    """Values drawn with replacement, many at a time: one by one numpy takes a microsecond and more for each."""

    def __init__(self, generator: np.random.Generator, values: Sequence[T]) -> None:
        self._generator = generator
        self._values = values
        self._drawn: Iterator[int] = iter(())

    def next(self) -> T:
        """The next value."""
        for index in self._drawn:
            return self._values[index]
        self._drawn = iter(self._generator.integers(len(self._values), size=DRAWN_AT_ONCE).tolist())
        return self._values[next(self._drawn)]


class Simulation:
    """See the module's docstring. One seed, one result.

    Work is timed by a clock that stands for a process with a core of its own; while busy processes outnumber the cores, that
    clock runs slower than time does. So no event moves when a process becomes busy or idle.
    """

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
    ) -> None:
        """`policy` and `evaluations` are production's own, of the run's settings, and so are the numbers."""
        self._policy = policy
        self._evaluations = evaluations
        self._timings = timings
        self._fleet = fleet
        self._weights_interval = weights_interval
        self._group_s: list[float] = timings.completions_s.max(axis=1).tolist()
        self._evaluation_share = evaluation_group_size / timings.completions_s.shape[1]
        self._evaluated_s: list[float] = timings.completions_s[:, :evaluation_group_size].max(axis=1).tolist()
        # Streams of their own: other bounds see the same groups in the same order.
        of_groups, of_steps, of_syncs = np.random.default_rng(seed).spawn(3)
        self._groups = Draws(of_groups, range(len(self._group_s)))
        self._train_s = Draws(of_steps, timings.train_s.tolist())
        self._sync_s = Draws(of_syncs, timings.sync_s.tolist())

        self._clock = 0.0
        self._seconds = 0.0
        self._events: list[tuple[float, int, int, int]] = []
        """A heap: time on the work clock, order, kind, actor."""
        self._order = count()
        self._num_busy = 0
        self._time_per_work = 1.0

        self._policy_version = 0
        self._published_version = 0
        self._committed_version = -1
        self._sending_version: int | None = None
        self._num_swaps = 0
        """Versions that the actors are swapping in, or checking: all of them alike, so that all are busy."""
        self._is_blocked = False
        """Leases could be granted, had the actors newer weights."""
        self._slots = Slots(fleet.num_actors, fleet.max_inflight_groups)
        self._actors = [Actor() for _ in range(fleet.num_actors)]
        self._num_idle = fleet.num_actors
        self._changed: set[int] = set()
        """Actors whose next group may end at another time than was scheduled."""
        self._lease_ids = count()
        self._in_flight: dict[int, Rollouts] = {}
        """Groups to train on that actors hold, by lease id, oldest first."""
        self._handed_over: deque[list[Rollouts]] = deque()
        """Those on their way."""
        self._ready: dict[int, Rollouts] = {}
        """By lease id, in the order they were finished."""
        self._training: list[Rollouts] = []
        self._is_learner_free = True
        self._free_since = 0.0
        self._waited_s = 0.0

        self._num_leased = self._num_trained = self._num_dropped = self._num_aborted = 0
        self._generated_s = self._wasted_s = self._wait_leases_s = self._wait_weights_s = self._slots_s = self._open_s = 0.0

    def run(self, num_steps: int, seconds: float = math.inf) -> list[Batch]:
        """The batches of so many optimizer steps, or of so many simulated seconds if those are over before."""
        batches: list[Batch] = []
        self._publish()
        self._grant()
        while self._policy_version < num_steps:
            for index in self._changed:
                self._reschedule(index)
            self._changed.clear()
            at, _, kind, index = heapq.heappop(self._events)
            if kind == _GROUP_ENDS and self._actors[index].next_end != at:
                continue
            self._advance(at)
            if self._seconds > seconds:
                break
            if kind == _GROUP_ENDS:
                self._end_groups(index)
            elif kind == _GROUPS_ARRIVE:
                self._accept(self._handed_over.popleft())
            elif kind == _STEPS_END:
                batches.append(self._end_batch())
            elif kind == _WEIGHTS_ARRIVE:
                self._swap_weights()
            elif kind == _WEIGHTS_ARE_COMMITTED:
                self._commit_weights()
            elif kind == _WEIGHTS_ARE_CHECKED:
                self._end_swap()
            else:
                self._rest_is_over()
            self._grant()
            if self._is_learner_free and len(self._ready) >= self._policy.batch_groups:
                self._begin_batch()
        return batches

    # Time

    def _advance(self, at: float) -> None:
        # Rounding may put the end of a group a hair before now.
        if at <= self._clock:
            return
        elapsed = (at - self._clock) * self._time_per_work
        self._clock = at
        self._seconds += elapsed
        num_in_flight = len(self._in_flight)
        self._slots_s += num_in_flight * elapsed
        self._open_s += (num_in_flight + len(self._ready)) * elapsed
        if self._is_blocked:
            self._wait_weights_s += self._num_idle * elapsed
        else:
            self._wait_leases_s += self._num_idle * elapsed

    def _after(self, work_s: float, kind: int) -> None:
        heapq.heappush(self._events, (self._clock + work_s, next(self._order), kind, -1))

    def _change_busy(self, change: int) -> None:
        self._num_busy += change
        if self._fleet.cores is not None:
            self._time_per_work = max(1.0, self._num_busy * self._timings.load / self._fleet.cores)

    # Leases

    def _grant(self) -> None:
        """What the dispatcher does after every message."""
        round_ = self._evaluations.begin()
        while round_ is not None and round_.has_prompt and round_.policy_version <= self._committed_version:
            index = self._slots.take()
            if index is None:
                break
            round_.next_prompt(self._start(index, is_evaluation=True).lease_id)
        num_open = len(self._in_flight) + len(self._ready) + len(self._training)
        self._is_blocked = False
        for _ in range(self._policy.admit(self._policy_version, num_open)):
            if self._policy.min_policy_version(self._policy_version, num_open) > self._committed_version:
                self._is_blocked = True
                break
            index = self._slots.take()
            if index is None:
                break
            group = self._start(index, is_evaluation=False)
            self._in_flight[group.lease_id] = group
            self._num_leased += 1
            num_open += 1

    def _start(self, index: int, *, is_evaluation: bool) -> Rollouts:
        actor = self._actors[index]
        self._num_idle -= not actor.num_held
        actor.num_held += 1
        drawn = self._groups.next()
        group = Rollouts(
            lease_id=next(self._lease_ids),
            actor=index,
            drawn=drawn,
            generate_s=(self._evaluated_s if is_evaluation else self._group_s)[drawn],
            is_evaluation=is_evaluation,
            oldest_version=self._committed_version,
            started=actor.progress_at(self._clock),
        )
        heapq.heappush(actor.ends, (group.started + group.generate_s, group.lease_id, group))
        self._crowd(actor, group, 1)
        self._changed.add(index)
        return group

    def _release(self, group: Rollouts) -> None:
        """Its actor holds the lease no longer."""
        actor = self._actors[group.actor]
        actor.num_held -= 1
        self._num_idle += not actor.num_held
        self._slots.give_back(group.actor)

    def _crowd(self, actor: Actor, group: Rollouts, change: int) -> None:
        """An actor generates one group more, or less."""
        if not self._num_swaps and (not actor.num_running or not actor.num_running + change):
            self._change_busy(change)
        actor.num_running += change
        if self._timings.crowding:
            actor.settle(self._clock)
            actor.company += change * (self._evaluation_share if group.is_evaluation else 1.0)
            actor.slowness = 1.0 + self._timings.crowding * max(0.0, actor.company - 1.0)

    def _reschedule(self, index: int) -> None:
        """Say when an actor's next group ends."""
        actor = self._actors[index]
        while actor.ends and actor.ends[0][2].is_cancelled:
            heapq.heappop(actor.ends)
        if not actor.ends:
            actor.next_end = math.inf
            return
        next_end = actor.since + (actor.ends[0][0] - actor.progress) * actor.slowness
        if next_end != actor.next_end:
            actor.next_end = next_end
            heapq.heappush(self._events, (next_end, next(self._order), _GROUP_ENDS, index))

    def _end_groups(self, index: int) -> None:
        """An actor's next group is generated, and those that end with it."""
        actor = self._actors[index]
        # The event is spent; should the next one fall on the same time, it needs one of its own.
        actor.next_end = math.inf
        ending = actor.ends[0][0]
        ended: list[Rollouts] = []
        while actor.ends and actor.ends[0][0] == ending:
            group = heapq.heappop(actor.ends)[2]
            if group.is_cancelled:
                continue
            group.is_generated = True
            self._crowd(actor, group, -1)
            self._generated_s += group.generate_s
            if self._policy.bounds.lag_of != "oldest_token":
                completions_s = self._timings.completions_s[group.drawn].tolist()
                group.mean_version, group.last_version = sampled_versions(actor.commits, group.started, completions_s)
            ended.append(group)
        self._changed.add(index)
        if self._timings.handoff_s:
            # All take the same time: they arrive in the order in which they leave.
            self._handed_over.append(ended)
            self._after(self._timings.handoff_s, _GROUPS_ARRIVE)
        else:
            self._accept(ended)

    def _accept(self, groups: Sequence[Rollouts]) -> None:
        for group in groups:
            if group.is_cancelled:
                continue
            self._release(group)
            if group.is_evaluation:
                round_ = self._evaluations.current
                assert round_ is not None
                round_.complete(group.lease_id, ())
                if round_.is_finished:
                    self._evaluations.end()
            else:
                self._ready[group.lease_id] = self._in_flight.pop(group.lease_id)

    def _abort(self) -> None:
        """Cancel what would be dropped; its slots are free again."""
        in_flight = (InFlight(group.lease_id, group.oldest_version) for group in self._in_flight.values())
        for lease_id in self._policy.abort(in_flight, self._policy_version):
            group = self._in_flight.pop(lease_id)
            group.is_cancelled = True
            self._num_aborted += 1
            self._release(group)
            if group.is_generated:
                self._wasted_s += group.generate_s
                continue
            actor = self._actors[group.actor]
            done_s = actor.progress_at(self._clock) - group.started
            self._generated_s += done_s
            self._wasted_s += done_s
            self._crowd(actor, group, -1)
            self._changed.add(group.actor)

    # The learner

    def _begin_batch(self) -> None:
        ready = list(self._ready.values())
        if self._policy.bounds.selection == "oldest_lease":
            ready.sort(key=lambda group: group.lease_id)
        evicted = self._policy.evict(ready, self._policy_version)
        for group in evicted:
            del self._ready[group.lease_id]
            self._wasted_s += group.generate_s
        if evicted:
            self._num_dropped += len(evicted)
            ready = [group for group in ready if group.lease_id in self._ready]
        selected = self._policy.select(ready)
        for group in selected:
            del self._ready[group.lease_id]
        if selected:
            self._training = selected
            self._is_learner_free = False
            self._waited_s = self._seconds - self._free_since
            self._change_busy(1)
            self._after(sum(self._train_s.next() for _ in range(self._policy.batch_steps)), _STEPS_END)
        if evicted:
            self._grant()

    def _end_batch(self) -> Batch:
        groups, self._training = self._training, []
        began_at = self._policy_version
        self._policy_version += self._policy.batch_steps
        self._num_trained += len(groups)
        interval = self._weights_interval
        if self._policy_version // interval > began_at // interval:
            self._publish()
        self._abort()
        self._after(self._timings.rest_s, _REST_IS_OVER)
        lags = (self._policy.trained_at(began_at, index) - group.oldest_version for index, group in enumerate(groups))
        return Batch(
            policy_version=self._policy_version,
            ended_at=self._seconds,
            waited_s=self._waited_s,
            lags=dict(Counter(lags)),
            num_over_bound=self._policy.count_over_bound(groups, began_at),
            totals=self._totals(),
        )

    def _rest_is_over(self) -> None:
        self._is_learner_free = True
        self._free_since = self._seconds
        self._change_busy(-1)

    # Weights

    def _publish(self) -> None:
        self._published_version = self._policy_version
        self._evaluations.reach(self._policy_version)
        self._send_weights()

    def _send_weights(self) -> None:
        if self._sending_version is None:
            self._sending_version = self._published_version
            self._after(self._sync_s.next(), _WEIGHTS_ARRIVE)

    def _swap_weights(self) -> None:
        assert self._sending_version is not None
        pause_s = self._timings.swap_s + self._timings.check_s
        if pause_s:
            if not self._num_swaps:
                self._change_busy(self._num_not_generating)
            self._num_swaps += 1
            self._after(pause_s, _WEIGHTS_ARE_CHECKED)
        are_commits_needed = self._policy.bounds.lag_of != "oldest_token"
        if pause_s or are_commits_needed:
            for index, actor in enumerate(self._actors):
                actor.settle(self._clock)
                actor.since += pause_s
                if are_commits_needed:
                    if not actor.num_running:
                        actor.commits.clear()
                    actor.commits.append((actor.progress, self._sending_version))
                self._changed.add(index)
        self._after(self._timings.swap_s, _WEIGHTS_ARE_COMMITTED)

    def _commit_weights(self) -> None:
        assert self._sending_version is not None
        self._committed_version, self._sending_version = self._sending_version, None
        if self._committed_version < self._published_version:
            self._send_weights()

    def _end_swap(self) -> None:
        self._num_swaps -= 1
        if not self._num_swaps:
            self._change_busy(-self._num_not_generating)

    @property
    def _num_not_generating(self) -> int:
        return sum(not actor.num_running for actor in self._actors)

    def _totals(self) -> Totals:
        return Totals(
            leased=self._num_leased,
            trained=self._num_trained,
            dropped=self._num_dropped,
            aborted=self._num_aborted,
            in_flight=len(self._in_flight) + len(self._ready) + len(self._training),
            generated_s=self._generated_s,
            wasted_s=self._wasted_s,
            wait_leases_s=self._wait_leases_s,
            wait_weights_s=self._wait_weights_s,
            slots_s=self._slots_s,
            open_s=self._open_s,
        )


def sampled_versions(commits: Sequence[tuple[float, int]], started: float, completions_s: Sequence[float]) -> tuple[float, int]:
    """The weights a group was sampled under: the mean over its tokens, and the last ones of the completion that ended first.

    `commits` are its actor's, by progress; the group began at progress `started`, and each of its completions went on for
    `completions_s`, at an even pace.
    """
    first = bisect_right(commits, started, key=lambda commit: commit[0]) - 1
    spans = [(max(at, started) - started, version) for at, version in commits[first:]]
    spans.append((math.inf, spans[-1][1]))
    sums = sum(
        version * max(0.0, min(end, completion_s) - begin)
        for (begin, version), (end, _) in pairwise(spans)
        for completion_s in completions_s
    )
    shortest = min(completions_s)
    return sums / sum(completions_s), next(version for begin, version in reversed(spans[:-1]) if begin < shortest)
