"""The pulse of an event loop, felt from another thread."""

import asyncio

_BEAT_S = 0.1
_LONGEST_LOOK_S = 1.0
"""Most seconds that are counted between two looks at the pulse: the process may have been suspended."""


class Pulse:
    """Shows another thread that an event loop runs: a loop that is blocked by a call cannot end that call at its time limit."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._num_beats = self._seen_beats = 0
        self._silent_s = 0.0
        self._looked_at: float | None = None

    async def beat(self) -> None:
        """Count beats for as long as the loop runs."""
        while True:
            self._num_beats += 1
            await asyncio.sleep(_BEAT_S)

    def is_blocked(self, now: float) -> bool:
        """Return True once for every `limit_s` without a beat."""
        looked_s = 0.0 if self._looked_at is None else min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        if self._num_beats != self._seen_beats:
            self._seen_beats, self._silent_s = self._num_beats, 0.0
            return False
        self._silent_s += looked_s
        if self._silent_s < self._limit_s:
            return False
        self._silent_s = 0.0
        return True
