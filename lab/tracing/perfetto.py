"""Spans as a file in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from offbeat.lab.tracing.spans import Process, Span

_US = 1e6


def trace_file(processes: Sequence[Process]) -> bytes:
    """Return the file: a process of the viewer for each of ours, and as many threads as its spans overlap.

    Times are microseconds since the first span.
    """
    first = min(span.start for process in processes for span in process.spans)
    events: list[dict[str, Any]] = []
    for pid, process in enumerate(processes, start=1):
        lanes = list(_lanes(process.spans))
        events.append(_named("process_name", pid, 0, process.name))
        for tid in sorted(set(lanes)):
            events.append(_named("thread_name", pid, tid, process.name))
        for tid, span in zip(lanes, _in_order(process.spans), strict=True):
            events += _events(span, pid, tid, first)
    # The viewers sort; people who read the file need not.
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"epoch_s_of_0": first}})


def _events(span: Span, pid: int, tid: int, first: float) -> Iterator[dict[str, Any]]:
    """Yield a span and its children as complete events. Ends are rounded, not lengths: children stay within their parents."""
    start, end = round((span.start - first) * _US), round((span.end - first) * _US)
    yield {
        "name": span.name,
        "cat": "offbeat",
        "ph": "X",
        "ts": start,
        "dur": end - start,
        "pid": pid,
        "tid": tid,
        "args": dict(span.attributes),
    }
    for child in span.children:
        yield from _events(child, pid, tid, first)


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _in_order(spans: Sequence[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: span.start)


def _lanes(spans: Sequence[Span]) -> Iterator[int]:
    """Yield the lane of each span in order of start, from 1: the first one that is free, as a thread's events must nest."""
    ends: list[float] = []
    for span in _in_order(spans):
        lane = next((lane for lane, end in enumerate(ends) if end <= span.start), None)
        if lane is None:
            lane = len(ends)
            ends.append(span.end)
        ends[lane] = span.end
        yield lane + 1
