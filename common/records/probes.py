"""The answers of a service to monitors: whether it works, whether it is ready, and its numbers."""

from offbeat.common.records.exported import Family, exposition
from offbeat.common.records.web import Response

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
    """Answer with numbers for Prometheus."""
    return Response(exposition(families), "text/plain; version=0.0.4; charset=utf-8")
