"""Rows of metrics.jsonl as tests write them: JSON objects."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from offbeat.common.records.rows import OtherRow, Row, decode_row


def row_from(fields: Mapping[str, Any]) -> Row:
    """Return the row that a reader makes of this JSON object, which must be whole."""
    row = decode_row(msgspec.json.encode(fields))
    assert row is not None and not isinstance(row, OtherRow), f"not a row: {fields}"
    return row


def rows_from(every: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return the rows that a reader makes of these JSON objects."""
    return [row_from(fields) for fields in every]
