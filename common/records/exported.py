"""Numbers that a service exports to Prometheus at /metrics: their table's rows, and the text made of them.

Docs, dashboard and alert rules are written from the services' tables (`docs.generate.monitoring`).
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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


class _Collector:
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Family]:
        return self._families


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


def exposition(families: Iterable[Family]) -> bytes:
    """Return the numbers in Prometheus's text format."""
    registry = CollectorRegistry()
    # The library's type of a collector; only `collect` is asked.
    collector: Any = _Collector(families)
    registry.register(collector)
    return generate_latest(registry)
