"""The breaker of an actor: while most of what it plays or has judged fails for causes that may pass, it takes no more work."""

from collections import deque

WINDOW_S = 60.0
MIN_FAILURES = 4
"""Failures in the window below which chance may have made them."""
PROBE_S = 5.0
"""Seconds between two trials while the breaker is open."""


class Breaker:
    """Opens when at least half of the last minute's outcomes were failures, and closes at the first success after that."""

    def __init__(self) -> None:
        self._outcomes: deque[tuple[float, bool]] = deque()
        self._probed_at = 0.0
        self.is_open = False

    def succeed(self, now: float) -> None:
        """Note a success."""
        if self.is_open:
            self._outcomes.clear()
            self.is_open = False
        self._note(now, is_failure=False)

    def fail(self, now: float) -> None:
        """Note a failure for a cause that may pass."""
        self._note(now, is_failure=True)
        num_failures = sum(is_failure for _, is_failure in self._outcomes)
        if not self.is_open and num_failures >= MIN_FAILURES and 2 * num_failures >= len(self._outcomes):
            self.is_open = True
            self._probed_at = now

    def may_try(self, now: float) -> bool:
        """Return whether something may be tried now; while the breaker is open this is True once in `PROBE_S`."""
        if not self.is_open:
            return True
        if now < self._probed_at + PROBE_S:
            return False
        self._probed_at = now
        return True

    def _note(self, now: float, *, is_failure: bool) -> None:
        self._outcomes.append((now, is_failure))
        while self._outcomes[0][0] < now - WINDOW_S:
            self._outcomes.popleft()
