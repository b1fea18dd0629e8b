"""Numbers that a service exports to Prometheus at /metrics: their table's rows, and the text made of them.

Docs, dashboard and alert rules are written from the services' tables (`docs.generate.monitoring`).
"""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from offbeat.common.records.web import Response

Family = GaugeMetricFamily | CounterMetricFamily
"""One number as the library takes it, with all its values."""

Values = Mapping[str, float]
"""Values by their label; the empty label where the number has none."""


class Exported(NamedTuple):
    """One number with its name, unit in the name, and meaning. A name that ends with `_total` is a counter, another a gauge."""

    name: str
    meaning: str
    label: str = ""
    """Name of the label that tells its values apart; empty: one value."""


def one(value: float) -> Values:
    """Return the values of a number without a label."""
    return {"": value}


def family(exported: Exported, values: Values) -> Family:
    """Return a number with its values."""
    kind = CounterMetricFamily if exported.name.endswith("_total") else GaugeMetricFamily
    made = kind(exported.name, exported.meaning, labels=[exported.label] if exported.label else None)
    for label, value in values.items():
        made.add_metric([label] if exported.label else [], value)
    return made


def families_of(table: Iterable[Exported], values: Mapping[str, Values]) -> list[Family]:
    """Return the numbers of a table that have values, which are there by the number's name."""
    return [family(exported, values[exported.name]) for exported in table if exported.name in values]


TURNED_WITHIN_S = 30.0
"""Longest silence of a healthy service's loop."""


def health(loop: str, silence_s: float) -> Response:
    """Answer 200 while a service's loop turns. Unreachable peers do not make a service unhealthy."""
    is_well = silence_s <= TURNED_WITHIN_S
    return Response(f"{loop} turned {silence_s:.1f} s ago\n".encode(), status=200 if is_well else 503)


def readiness(state: str, *, is_ready: bool) -> Response:
    """Answer 200 once a service can do its work; `state` says why it can, or cannot."""
    return Response(f"{state}\n".encode(), status=200 if is_ready else 503)


def numbers(families: list[Family]) -> Response:
    """Answer with numbers in Prometheus's text format."""
    # Of a registry only `collect` is asked.
    registry: Any = SimpleNamespace(collect=lambda: families)
    return Response(generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8")
