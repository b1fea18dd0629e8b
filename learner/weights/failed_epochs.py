"""Collectives that failed although every member was ready: after two in a row the members pull, instead of failing for ever.

A member that died in a broadcast is named by the next one, for which it does not get ready. What is left are failures that no
single member explains: two processes on one GPU, a firewall between the machines, a transport that hangs.
"""

import time
from collections.abc import Callable, Collection, Set

MAX_SAME = 2
"""Failures in a row of the same members after which they pull."""
MAX_IN_A_ROW = 4
"""Failures in a row after which all actors pull, whoever took part: members may die of what makes their collectives fail."""
FIRST_PAUSE_S = 60.0
LONGEST_PAUSE_S = 3600.0


class FailedEpochs:
    """The failures since the last success, and the pause that follows them. Not thread-safe: the publisher holds its lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members: Set[bytes] = frozenset()
        """The members of the failures that nobody explains."""
        self._num_same = 0
        """Failures in a row of these members."""
        self._num_in_a_row = 0
        """Failures since the last success."""
        self._last_error = ""
        self._paused_until = 0.0

    def note(self, members: Collection[bytes], error: str) -> None:
        """Note that a collective of these members failed, although all of them were ready."""
        if not self._members <= set(members):
            self.explain()
        if not self._num_same:
            self._members = frozenset(members)
        self._num_same += 1
        self._num_in_a_row += 1
        self._last_error = error
        excess = max(self._num_same - MAX_SAME, self._num_in_a_row - MAX_IN_A_ROW)
        if excess >= 0:
            self._paused_until = self._clock() + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**excess)

    def explain(self) -> None:
        """Note that one of the members explains the failures: it is absent, or has left. The others may do without it."""
        self._members, self._num_same = frozenset(), 0
        if self._num_in_a_row < MAX_IN_A_ROW:
            self._paused_until = 0.0

    def settle(self, live: Set[bytes]) -> None:
        """Look for members that are no longer among the live actors."""
        if not self._members <= live:
            self.explain()

    def clear(self) -> None:
        """Forget the failures: a collective succeeded."""
        self.explain()
        self._num_in_a_row, self._paused_until = 0, 0.0

    def pause(self) -> str | None:
        """Return why the actors pull now, one line; None when they may try a collective."""
        seconds = self._paused_until - self._clock()
        if seconds <= 0:
            return None
        return (
            f"{self._num_in_a_row} collective updates in a row failed although every member was ready: actors pull the "
            f"weights, and try again in {seconds:.0f} s. The last error: {self._last_error}"
        )
