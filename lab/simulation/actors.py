"""Simulated actors: which one takes the next lease, when its groups end, and under which weights they were sampled.

lease -> group drawn, begins -> [crowding, swaps] -> end_groups -> (hand-off, by the caller) -> release
                                                  -> cancel, release
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import assert_never

import numpy as np

from offbeat.lab.simulation.timings import Fleet, Timings, WorkClock, draw
from offbeat.learner.leases.groups import LagOf


@dataclass(slots=True)
class SimulatedGroup:
    """A group in the simulation, with what the staleness policy asks of a `learner.leases.groups.Group`."""

    lease_id: int
    actor: int
    drawn: int
    """Row of `Timings.completions_s`."""
    generate_s: float
    """Seconds that its generation would take on an actor of its own."""
    is_evaluation: bool
    oldest_version: int
    started: float
    """Progress of its actor when the group began."""
    is_generated: bool = False
    """True when the group is on its way to the learner, or there."""
    is_cancelled: bool = False
    mean_version: float = 0.0
    last_version: int = 0
    """The newest weights in the completion that ended first."""

    def lag_of(self, measured: LagOf, policy_version: int) -> float:
        """Return the lag as `learner.leases.groups.Group.lag_of` does."""
        match measured:
            case "oldest_token":
                return max(0, policy_version - self.oldest_version)
            case "token_mean":
                return max(0.0, policy_version - self.mean_version)
            case "last_segment":
                return max(0, policy_version - self.last_version)
            case _:
                assert_never(measured)


class Slots:
    """The free slots of all actors; chooses as `learner.dispatch.roster.LeaseTurns` does, without a look at each actor."""

    def __init__(self, num_actors: int, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free: list[int] = []
        self._newest: list[int] = []
        """Turn at which each actor took its newest slot."""
        self._turns = count()
        self._retired: set[int] = set()
        self._waiting: list[tuple[int, int, int]] = []
        """A heap of what `_entry` returned for the actors. Entries of an earlier state are out of date."""
        self.num_free = 0
        """Free slots of the actors that take leases."""
        for _ in range(num_actors):
            self.add()

    def take(self) -> int | None:
        """Take a slot of the actor with the most room, of equals the one that waits longest; None when no slot is free."""
        while self._waiting:
            entry = heapq.heappop(self._waiting)
            actor = entry[2]
            if entry == self._entry(actor):
                self._newest[actor] = next(self._turns)
                self._set_free(actor, self._free[actor] - 1)
                return actor
        return None

    def give_back(self, actor: int) -> None:
        """Free a slot of this actor."""
        if actor not in self._retired:
            self._set_free(actor, self._free[actor] + 1)

    def add(self) -> int:
        """Add an actor, all of whose slots are free; return its index."""
        self._free.append(0)
        self._newest.append(-1)
        self._set_free(len(self._free) - 1, self._num_slots)
        return len(self._free) - 1

    def retire(self, actor: int) -> None:
        """Let an actor take no slot any more."""
        self._set_free(actor, 0)
        self._retired.add(actor)

    def _entry(self, actor: int) -> tuple[int, int, int]:
        return -self._free[actor], self._newest[actor], actor

    def _set_free(self, actor: int, free: int) -> None:
        self.num_free += free - self._free[actor]
        self._free[actor] = free
        if free:
            heapq.heappush(self._waiting, self._entry(actor))
        if len(self._waiting) > 4 * len(self._free):
            self._waiting = [self._entry(one) for one, left in enumerate(self._free) if left]
            heapq.heapify(self._waiting)


@dataclass(slots=True)
class Actor:
    """One actor. Its groups all progress alike, so they are kept by the progress at which they end."""

    ends: list[tuple[float, int, SimulatedGroup]] = field(default_factory=list)
    """A heap: progress at the end, lease id, group. Cancelled groups stay until they come up."""
    num_held: int = 0
    """Number of leases: groups that are being generated, or on their way to the learner."""
    num_running: int = 0
    """Number of groups that are being generated."""
    company: float = 0.0
    """Number of groups that are being generated, where a group of evaluation counts by its share of a whole group's size."""
    progress: float = 0.0
    """Seconds of generation done per group, at `since`."""
    since: float = 0.0
    """Time of `progress` on the work clock; in the future while new weights are being committed."""
    slowness: float = 1.0
    """Seconds of work per second of progress."""
    next_end: float = math.inf
    """Time on the work clock at which the next group ends; an event of another time is out of date."""
    commits: list[tuple[float, int]] = field(default_factory=list)
    """Progress at which each policy version was committed, oldest first."""
    is_leaving: bool = False
    is_gone: bool = False

    def progress_at(self, clock: float) -> float:
        """Return the progress made by this time."""
        return self.progress + max(0.0, clock - self.since) / self.slowness

    def settle(self, clock: float) -> None:
        """Bring `progress` up to this time, before anything changes how fast it grows."""
        if clock > self.since:
            self.progress, self.since = self.progress_at(clock), clock


class SimulatedActors:
    """All actors of a run."""

    def __init__(
        self,
        clock: WorkClock,
        timings: Timings,
        fleet: Fleet,
        *,
        evaluation_group_size: int,
        lag_of: LagOf,
        generator: np.random.Generator,
    ) -> None:
        self._clock = clock
        self._crowding = timings.crowding
        self._completions_s = timings.completions_s
        self._group_s: list[float] = timings.completions_s.max(axis=1).tolist()
        self._evaluated_s: list[float] = timings.completions_s[:, :evaluation_group_size].max(axis=1).tolist()
        self._evaluation_share = evaluation_group_size / timings.completions_s.shape[1]
        self._needs_commits = lag_of != "oldest_token"
        """True when lags are measured by more than a group's oldest version."""
        self._rows = draw(generator, range(len(self._group_s)))
        self._lease_ids = count()
        self._slots = Slots(fleet.num_actors, fleet.max_inflight_groups)
        self._actors = [Actor() for _ in range(fleet.num_actors)]
        self._staying = list(range(fleet.num_actors))
        """Actors that were not asked to leave, oldest first."""
        self._changed: set[int] = set()
        """Actors whose next group may end at another time than was scheduled."""
        self._num_swaps = 0
        """Number of versions that all actors are swapping in or checking; each keeps all of them busy."""
        self.num_idle = fleet.num_actors
        """Actors without a lease."""

    # Joining and leaving

    @property
    def num_staying(self) -> int:
        """Actors that take leases."""
        return len(self._staying)

    @property
    def num_free(self) -> int:
        """Free slots of the actors that take leases."""
        return self._slots.num_free

    def join(self, policy_version: int) -> None:
        """Add an actor with these weights."""
        self._staying.append(self._slots.add())
        self._actors.append(Actor(commits=[(0.0, policy_version)], since=self._clock.now))
        self.num_idle += 1
        if self._num_swaps:
            self._clock.change_busy(1)

    def leave(self) -> None:
        """Let the newest actor take no more leases, and go when it has handed over those it has."""
        index = self._staying.pop()
        self._slots.retire(index)
        actor = self._actors[index]
        actor.is_leaving = True
        if not actor.num_held:
            self._go(actor)

    def _go(self, actor: Actor) -> None:
        self.num_idle -= 1
        actor.is_gone = True
        if self._num_swaps:
            self._clock.change_busy(-1)

    # Leases

    def lease(self, policy_version: int, *, is_evaluation: bool) -> SimulatedGroup | None:
        """Begin a group under these weights on the actor whose turn it is, or return None when no slot is free."""
        index = self._slots.take()
        if index is None:
            return None
        actor = self._actors[index]
        if not actor.num_held:
            self.num_idle -= 1
        actor.num_held += 1
        drawn = next(self._rows)
        group = SimulatedGroup(
            lease_id=next(self._lease_ids),
            actor=index,
            drawn=drawn,
            generate_s=(self._evaluated_s if is_evaluation else self._group_s)[drawn],
            is_evaluation=is_evaluation,
            oldest_version=policy_version,
            started=actor.progress_at(self._clock.now),
        )
        heapq.heappush(actor.ends, (group.started + group.generate_s, group.lease_id, group))
        self._change_running(actor, group, 1)
        self._changed.add(index)
        return group

    def release(self, group: SimulatedGroup) -> None:
        """Free the slot of a group that the learner has or does not want."""
        actor = self._actors[group.actor]
        actor.num_held -= 1
        self._slots.give_back(group.actor)
        if not actor.num_held:
            self.num_idle += 1
            if actor.is_leaving:
                self._go(actor)

    def cancel(self, group: SimulatedGroup) -> float:
        """End a group that is being generated and return the seconds of generation that it had."""
        actor = self._actors[group.actor]
        done_s = actor.progress_at(self._clock.now) - group.started
        self._change_running(actor, group, -1)
        self._changed.add(group.actor)
        return done_s

    # Time

    def schedule_ends(self) -> None:
        """Add an event for every actor whose next group ends at another time than was scheduled."""
        for index in self._changed:
            actor = self._actors[index]
            while actor.ends and actor.ends[0][2].is_cancelled:
                heapq.heappop(actor.ends)
            if not actor.ends:
                actor.next_end = math.inf
                continue
            next_end = actor.since + (actor.ends[0][0] - actor.progress) * actor.slowness
            if next_end != actor.next_end:
                actor.next_end = next_end
                self._clock.schedule_groups_end(next_end, index)
        self._changed.clear()

    def ends_at(self, index: int, at: float) -> bool:
        """Return whether the actor's next group ends at this time: other events are out of date."""
        return self._actors[index].next_end == at

    def end_groups(self, index: int) -> list[SimulatedGroup]:
        """Return the actor's next group, now generated, with those that end at the same time. They keep their slots."""
        actor = self._actors[index]
        # The event is spent; should the next one fall on the same time, it needs an event too.
        actor.next_end = math.inf
        ending = actor.ends[0][0]
        ended: list[SimulatedGroup] = []
        while actor.ends and actor.ends[0][0] == ending:
            group = heapq.heappop(actor.ends)[2]
            if group.is_cancelled:
                continue
            group.is_generated = True
            self._change_running(actor, group, -1)
            if self._needs_commits:
                completions_s = self._completions_s[group.drawn].tolist()
                group.mean_version, group.last_version = sampled_versions(actor.commits, group.started, completions_s)
            ended.append(group)
        self._changed.add(index)
        return ended

    def _change_running(self, actor: Actor, group: SimulatedGroup, change: int) -> None:
        """Let an actor generate one group more (1), or less (-1)."""
        if not self._num_swaps and (not actor.num_running or not actor.num_running + change):
            self._clock.change_busy(change)
        actor.num_running += change
        if self._crowding:
            actor.settle(self._clock.now)
            actor.company += change * (self._evaluation_share if group.is_evaluation else 1.0)
            actor.slowness = 1.0 + self._crowding * max(0.0, actor.company - 1.0)

    # Weights

    def begin_swap(self, policy_version: int, pause_s: float) -> None:
        """Stop all sampling for `pause_s` from now on; what is in flight goes on under this version afterwards."""
        if pause_s:
            if not self._num_swaps:
                self._clock.change_busy(self._num_not_generating)
            self._num_swaps += 1
        elif not self._needs_commits:
            return
        for index, actor in enumerate(self._actors):
            actor.settle(self._clock.now)
            actor.since += pause_s
            if self._needs_commits:
                if not actor.num_running:
                    actor.commits.clear()
                actor.commits.append((actor.progress, policy_version))
            self._changed.add(index)

    def end_swap(self) -> None:
        """End a pause."""
        self._num_swaps -= 1
        if not self._num_swaps:
            self._clock.change_busy(-self._num_not_generating)

    @property
    def _num_not_generating(self) -> int:
        return sum(not actor.num_running and not actor.is_gone for actor in self._actors)


def sampled_versions(commits: Sequence[tuple[float, int]], started: float, completions_s: Sequence[float]) -> tuple[float, int]:
    """Return the mean policy version over a group's tokens, and the last version of the completion that ended first.

    `commits` are its actor's, by progress. The group began at progress `started`, and each of its completions went on for
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
