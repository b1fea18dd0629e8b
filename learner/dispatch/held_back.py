"""The time in which staleness alone kept an actor with room from a lease."""


class HeldBackTimer:
    """Adds up the time between ticks after which such an actor was there."""

    def __init__(self, now: float) -> None:
        self._ticked_at = now
        self._is_held_back = False
        self._seconds = 0.0

    def tick(self, now: float, is_held_back: bool) -> None:
        """Count the time since the last tick if an actor was held back then; `is_held_back` says whether one is now."""
        if self._is_held_back:
            self._seconds += now - self._ticked_at
        self._ticked_at = now
        self._is_held_back = is_held_back

    def take_s(self) -> float:
        """Return the seconds counted since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
