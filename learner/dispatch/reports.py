"""Events told twice: to people in the program's log, and as rows of metrics.jsonl."""

import logging

from offbeat.common.rows import EventRow, Recorder

logger = logging.getLogger(__name__)

# A lost actor, or a new version, brings one such event for each of its leases.
_FREQUENT = ("lease_expired", "lease_aborted")


def report(record: Recorder, row: EventRow) -> None:
    """Log an event and record its row."""
    level = logging.DEBUG if row.event in _FREQUENT else logging.WARNING if row.event == "health" else logging.INFO
    about = (row.rule, row.actor, row.peer, row.lease_id, row.after_s)
    logger.log(level, "%s: %s", " ".join([row.event, *(str(value) for value in about if value is not None)]), row.detail)
    record(row)
