"""Events that go to the program's log and to metrics.jsonl, and counts of repeated ones: texts, rejected messages."""

import logging
from collections import Counter

from offbeat.common.records.rows import EventRow, Recorder

logger = logging.getLogger(__name__)


# A lost actor, or a new version, brings one such event for each of its leases.
_FREQUENT = ("lease_expired", "lease_aborted")


def report(record: Recorder, row: EventRow) -> None:
    """Log an event and record its row."""
    _log(row, logging.DEBUG if row.event in _FREQUENT else logging.WARNING if row.event == "health" else logging.INFO)
    record(row)


class RepeatedEvents:
    """Events that may come by the hundred with the same text: people are told the first ones, then how many there are."""

    SHOWN = 3
    """Events of a text that are logged one by one; after them the 10th, the 100th and so on."""
    MAX_TEXTS = 1000
    """Texts that are told apart; further ones count as one."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._counts: Counter[tuple[str, str]] = Counter()

    def report(self, row: EventRow) -> None:
        """Record an event's row, and log it unless its text is known well enough."""
        key = (row.event, row.detail)
        if key not in self._counts and len(self._counts) >= self.MAX_TEXTS:
            key = (row.event, "")
        self._counts[key] += 1
        count = self._counts[key]
        if count <= self.SHOWN:
            _log(row, logging.INFO)
        elif count >= 10 and str(count).rstrip("0") == "1":
            logger.info("%s: %d times so far: %s", row.event, count, row.detail)
        self._record(row)


def _log(row: EventRow, level: int) -> None:
    about = (row.rule, row.actor, row.peer, row.lease_id, row.after_s)
    logger.log(level, "%s: %s", " ".join([row.event, *(str(value) for value in about if value is not None)]), row.detail)


MAX_ENTRIES = 1000
"""Pairs of sender and reason that are counted apart; further ones share one count, since senders choose their names."""

OTHERS = "others"


class Rejections:
    """Refusals since the start of this process."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, sender: str, reason: str) -> bool:
        """Count a refusal. Return True for the first, tenth, hundredth... of its kind, which is worth a line."""
        key = f"{sender[:64]}: {reason[:80]}"
        if key not in self._counts and len(self._counts) >= MAX_ENTRIES:
            key = OTHERS
        self._counts[key] += 1
        number = self._counts[key]
        return number == 10 ** (len(str(number)) - 1)

    def counts(self) -> dict[str, int]:
        """Return the counts by `sender: reason`."""
        return dict(self._counts)
