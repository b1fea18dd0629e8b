"""Names of the metrics in routing rows, for tests that look for names without a description."""

import re
from functools import cache

from offbeat.common.records.step_metrics import ROUTING_METRICS, Metric

_NAMES = {metric.name: metric for metric in ROUTING_METRICS}
_LAG = re.compile(r"(?<=^routing/lag_)\d{1,9}(?:_\d{1,9}|_up)?(?=_)")


@cache
def routing_metric(name: str) -> Metric | None:
    """Return what the table says of a routing row's metric, at whatever lag; None for a name that no routing row has."""
    return _NAMES.get(_LAG.sub("<lag>", name))
