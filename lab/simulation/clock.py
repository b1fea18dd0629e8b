"""Simulated time: a clock of work, the events ahead of it, and the cores that busy processes share."""

import heapq
from enum import Enum, auto
from itertools import count


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
    ACTOR_ENDS = auto()
    """An actor is taken away, as spot instances are."""


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
