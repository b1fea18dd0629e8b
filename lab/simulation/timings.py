"""Inputs of a simulation: the times that stand for the compute, the fleet of actors, how values are drawn, and its clock.

The clock counts work: while busy processes outnumber the cores, work passes more slowly than time.
"""

import heapq
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from itertools import count
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

DRAWN_AT_ONCE = 4096


class Timings(NamedTuple):
    """Durations of a run's parts, in seconds of a process that has a core (or a device) to itself."""

    completions_s: NDArray[np.float64]
    """`[num_groups, group_size]`: generation times of the completions of groups that had their actor to themselves.

    The simulation draws groups with replacement; a group takes the time of its longest completion.
    """
    train_s: NDArray[np.float64]
    """Durations of optimizer steps, from which the simulation draws."""
    sync_s: NDArray[np.float64]
    """Times from the end of an optimizer step until the actors have its weights beside their engines, to draw from."""
    crowding: float = 0.0
    """Slowdown of a group by each other group on its actor, as a share of its time alone: 0 for an engine with room, 1 for one
    that works on its groups in turn."""
    handoff_s: float = 0.0
    """Time from a group's last token until the learner has it and its slot is free: rewards and messages."""
    swap_s: float = 0.0
    """Pause of an actor's sampling until the new weights are in its engine."""
    check_s: float = 0.0
    """Further pause after the swap, while the actor scores the canary."""
    rest_s: float = 0.0
    """Time between an optimizer step and the learner's next look at the buffer: snapshot, rows, checkpoint."""
    load: float = 1.0
    """Cores that a busy process takes with its threads and helpers."""
    environment_s: NDArray[np.float64] | None = None
    """`[num_groups]`: time in which a group waits for its environment, beside the generation of its turns; None without one.

    Meanwhile it holds its slot and nothing of the engine. The simulation lets it wait once, after the generation.
    """


class Fleet(NamedTuple):
    """The actors of a run, and the cores they run on."""

    num_actors: int
    max_inflight_groups: int
    """Slots of each actor."""
    cores: int | None = None
    """Cores that all actors and the learner share; None: each has its own."""


T = TypeVar("T")


def draw(generator: np.random.Generator, values: Sequence[T]) -> Iterator[T]:
    """Yield values drawn with replacement, endlessly. Many are drawn at once: a call of numpy takes a microsecond and more."""
    while True:
        for index in generator.integers(len(values), size=DRAWN_AT_ONCE).tolist():
            yield values[index]


class EventKind(Enum):
    """Kind of an event."""

    GROUPS_END = auto()
    """An actor has generated its next group."""
    GROUPS_ARRIVE = auto()
    """The learner has groups that were handed over."""
    STEPS_END = auto()
    """The optimizer steps on a batch are done."""
    REST_ENDS = auto()
    """The learner looks for its next batch."""
    WEIGHTS_ARRIVE = auto()
    """The actors have new weights beside their engines."""
    WEIGHTS_ARE_COMMITTED = auto()
    """The actors have the new weights in their engines."""
    WEIGHTS_ARE_CHECKED = auto()
    """The actors sample again after a swap."""
    ACTOR_JOINS = auto()
    """An actor that was started has its weights."""


# Python 3.11 takes 0.3 microseconds to look up a member of an enum, and this event comes with every group.
_GROUPS_END = EventKind.GROUPS_END
Event = tuple[float, int, EventKind, int | None]
"""Time on the work clock, order among events of one time, kind, and the actor whose groups end."""


class WorkClock:
    """Counts the seconds of work of a process that has a core to itself.

    While busy processes outnumber the cores, simulated seconds pass faster than seconds of work. So no event ahead moves when a
    process becomes busy or idle.
    """

    def __init__(self, cores: int | None, load: float) -> None:
        self._cores = cores
        self._load = load
        self._num_busy = 0
        self._seconds_per_work = 1.0
        self._events: list[Event] = []
        """A heap of the events ahead."""
        self._order = count()
        self.now = 0.0
        """Seconds of work since the start."""
        self.seconds = 0.0
        """Simulated seconds since the start."""

    def schedule_groups_end(self, at: float, actor: int) -> None:
        """Add the end of an actor's groups at this time of the work clock."""
        heapq.heappush(self._events, (at, next(self._order), _GROUPS_END, actor))

    def schedule_after(self, work_s: float, kind: EventKind) -> None:
        """Add an event after this much work; events of one time come in the order they were added."""
        heapq.heappush(self._events, (self.now + work_s, next(self._order), kind, None))

    def pop(self) -> Event:
        """Remove the next event and return it; the clock stays where it is."""
        return heapq.heappop(self._events)

    def advance(self, at: float) -> float:
        """Move to this time of the work clock and return the simulated seconds that passed."""
        # Rounding may put the end of a group a hair before now.
        if at <= self.now:
            return 0.0
        elapsed = (at - self.now) * self._seconds_per_work
        self.now = at
        self.seconds += elapsed
        return elapsed

    def change_busy(self, change: int) -> None:
        """Count this many more busy processes, or fewer."""
        self._num_busy += change
        if self._cores is not None:
            self._seconds_per_work = max(1.0, self._num_busy * self._load / self._cores)
