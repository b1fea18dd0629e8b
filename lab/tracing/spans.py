"""Stretches of a run's time: named, nested, with attributes."""

from collections.abc import Mapping
from typing import NamedTuple


class Span(NamedTuple):
    """One stretch of time. Its children lie within it, in order."""

    name: str
    start: float
    """In seconds since the epoch, by the learner's clock."""
    end: float
    """At least `start`."""
    attributes: Mapping[str, str | int | float] = {}
    children: tuple["Span", ...] = ()


class Process(NamedTuple):
    """The spans of one service. Those of an actor overlap."""

    name: str
    spans: tuple[Span, ...]


def within(span: Span, start: float, end: float) -> bool:
    """Return whether a part of the span lies between two times."""
    return span.end >= start and span.start <= end
