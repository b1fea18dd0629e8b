"""Time the actor's loop spends on each activity."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal, get_args

Activity = Literal["generate", "commit_weights", "wait_leases", "wait_weights", "wait_rewards"]


class LoopSeconds:
    """Sums the seconds spent on each activity since the start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._totals: dict[str, float] = dict.fromkeys(get_args(Activity), 0.0)

    @contextlib.contextmanager
    def spent_on(self, activity: Activity) -> Iterator[None]:
        """Add the time inside the `with` block to `activity`."""
        started = self._clock()
        yield
        self._totals[activity] += self._clock() - started

    def totals(self) -> dict[str, float]:
        """Return a copy of the seconds by activity."""
        return dict(self._totals)
