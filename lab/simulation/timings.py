"""Inputs of a simulation: the times that stand for the compute, the fleet of actors, and how values are drawn."""

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

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


class Draws(Generic[T]):
    """Values drawn with replacement, many at a time: one by one, numpy takes a microsecond and more for each."""

    def __init__(self, generator: np.random.Generator, values: Sequence[T]) -> None:
        self._generator = generator
        self._values = values
        self._drawn: Iterator[int] = iter(())

    def draw(self) -> T:
        """Return the next value."""
        for index in self._drawn:
            return self._values[index]
        self._drawn = iter(self._generator.integers(len(self._values), size=DRAWN_AT_ONCE).tolist())
        return self._values[next(self._drawn)]
