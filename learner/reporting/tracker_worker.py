"""The process that hands a run's rows to one tracker, whose library may wait, retry and hang without holding training up.

learner -> stdin: an `Opening`, then lines of metrics.jsonl -> the tracker
learner <- pipe: `TrackerHealth`, whenever it changes
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable

import msgspec

from offbeat.common.formats import without_logins
from offbeat.common.processes.child import join_parent
from offbeat.common.records.rows import FinalRow, OtherRow, decode_row
from offbeat.learner.reporting.trackers import OPEN, Opening, OpenTracker, Tracker
from offbeat.protocols.text import plain

RETRY_S = 60.0
"""Seconds until a tracker that could not be opened is tried again."""
SLOW_S = 30.0
"""Seconds after which a call of a tracker that has not returned is reported."""
MAX_DETAIL = 500
"""Characters of an error that are reported."""


class TrackerHealth(msgspec.Struct, frozen=True):
    """A message of the worker to the learner: the tracker fails from now on, or works again."""

    problem: str | None = None
    """The error; None: it works again."""
    num_lost: int = 0
    """Rows that the tracker has refused so far."""


class Attempts:
    """Calls of a tracker's library, which report when they begin to fail or to hang, and when they work again."""

    def __init__(self, report: Callable[[TrackerHealth], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._is_failing = False
        self._num_lost = 0

    def make(self, call: Callable[[], object], *, costs_a_row: bool = False) -> bool:
        """Call, and return whether it went well."""
        watch = threading.Timer(SLOW_S, self._note, [f"no answer for {SLOW_S:g} s; it goes on trying"])
        watch.daemon = True
        watch.start()
        try:
            call()
        # Each tracker's library has errors of its own, and may leave by `sys.exit`.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            print(without_logins(traceback.format_exc()), file=sys.stderr, flush=True)
            self._num_lost += costs_a_row
            self._note(without_logins(" ".join(f"{type(error).__name__}: {error}".split())))
            return False
        finally:
            watch.cancel()
        self._note(None)
        return True

    def _note(self, problem: str | None) -> None:
        """Report a change: a tracker that begins to fail with this problem, or that works again."""
        with self._lock:
            was_failing, self._is_failing = self._is_failing, problem is not None
            if was_failing != self._is_failing:
                self._report(
                    TrackerHealth(num_lost=self._num_lost) if problem is None else TrackerHealth(plain(problem, MAX_DETAIL))
                )


def track(opening: Opening, lines: Iterable[bytes], report: Callable[[TrackerHealth], None], open_tracker: OpenTracker) -> None:
    """Hand the rows in `lines` to a tracker until they end. Waits for: rows, the tracker. Unblocked by: the end of `lines`."""
    attempts = Attempts(report)
    opened: list[Tracker] = []
    while not attempts.make(lambda: opened.append(open_tracker(opening))):
        time.sleep(RETRY_S)
    (tracker,) = opened
    outcome: str | None = None
    for line in lines:
        row = decode_row(line)
        if isinstance(row, FinalRow):
            outcome = row.outcome
        elif row is not None and not isinstance(row, OtherRow):
            attempts.make(lambda row=row: tracker.add(row), costs_a_row=True)
    attempts.make(lambda: tracker.close(outcome))


def main() -> None:
    """Serve the learner that has started this process."""
    reports = join_parent()

    def report(health: TrackerHealth) -> None:
        os.write(reports, msgspec.json.encode(health) + b"\n")

    opening = msgspec.json.decode(sys.stdin.buffer.readline(), type=Opening)
    track(opening, sys.stdin.buffer, report, OPEN[opening.kind])


if __name__ == "__main__":
    main()
