"""The learner's health as the run goes on: the rules over its steps, and what is not well now."""

import threading
from collections import deque

from offbeat.common.rows import EventRow, Recorder, Row, StepRow
from offbeat.learner.diagnostics.health import Health, update_troubles
from offbeat.learner.dispatch.reports import report

NUM_RECENT_STEPS = 10
"""Steps over which the duration of a step is a mean."""


class HealthWatch:
    """Passes rows on, and watches the steps and the health events among them. Any thread may call it."""

    def __init__(self, record: Recorder) -> None:
        """`record` takes every row to where rows are kept."""
        self._record = record
        self._lock = threading.Lock()
        """Never held while a row is recorded."""
        self._health = Health()
        self._steps: deque[StepRow] = deque(maxlen=NUM_RECENT_STEPS)
        self._troubles: dict[str, str] = {}

    def record(self, row: Row) -> None:
        """Record a row, and after a step the events of the health rules that begin or cease to hold."""
        self._record(row)
        events: list[EventRow] = []
        with self._lock:
            match row:
                case StepRow():
                    self._steps.append(row)
                    events = self._health.take(row)
                case EventRow():
                    update_troubles(self._troubles, row)
                case _:
                    pass
        for event in events:
            report(self.record, event)

    def troubles(self) -> dict[str, str]:
        """Return what is not well now: reasons with hints, by rule."""
        with self._lock:
            return dict(self._troubles)

    def recent_steps(self) -> list[StepRow]:
        """Return the newest steps, at most `NUM_RECENT_STEPS`, oldest first."""
        with self._lock:
            return list(self._steps)
