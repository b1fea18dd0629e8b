"""Warnings and errors that repeat within a minute are shown once, with their count."""

import logging
import re
import time
from collections.abc import Callable

REPEAT_S = 60.0
"""Seconds in which a message that was shown is only counted."""
MAX_MESSAGES = 1000
"""Messages remembered at once; the oldest is forgotten first."""

_NUMBERS = re.compile(r"\d+")


class CollapsingHandler(logging.Handler):
    """Hands records to another handler, but of warnings and errors that differ in numbers alone only the first one.

    The number of the others follows once `REPEAT_S` are over and something is logged, or at the end of the process.
    """

    def __init__(self, shown_by: logging.Handler, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._shown_by = shown_by
        self._clock = clock
        self._repeated: dict[tuple[str, int, str], _Repeated] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Show the record, or count it."""
        now = self._clock()
        for key in [key for key, repeated in self._repeated.items() if now - repeated.shown_at >= REPEAT_S]:
            self._tell(self._repeated.pop(key))
        if record.levelno >= logging.WARNING:
            key = record.name, record.levelno, _NUMBERS.sub("#", record.getMessage())
            repeated = self._repeated.get(key)
            if repeated is not None:
                repeated.last, repeated.count = record, repeated.count + 1
                return
            if len(self._repeated) >= MAX_MESSAGES:
                self._tell(self._repeated.pop(next(iter(self._repeated))))
            self._repeated[key] = _Repeated(record, now)
        self._shown_by.handle(record)

    def close(self) -> None:
        """Show the counts that are left."""
        while self._repeated:
            _, repeated = self._repeated.popitem()
            self._tell(repeated)
        super().close()

    def _tell(self, repeated: "_Repeated") -> None:
        if not repeated.count:
            return
        last = repeated.last
        counted = logging.makeLogRecord({**last.__dict__, "args": (), "exc_info": None, "exc_text": None})
        counted.msg = f"{repeated.count} more like this, the last one: %s"
        counted.args = (last.getMessage(),)
        self._shown_by.handle(counted)


class _Repeated:
    """A message that was shown, and its repetitions since."""

    def __init__(self, record: logging.LogRecord, shown_at: float) -> None:
        self.last = record
        self.shown_at = shown_at
        self.count = 0
