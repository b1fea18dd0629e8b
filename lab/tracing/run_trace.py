"""`offbeat trace`: the lives of some groups of a run, with the learner's work at that time.

rollout log -> lives -> spans -> file, or collector
metrics.jsonl -> learner's work -^

The file is in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import CommitRow, OtherRow, PullRow, Row, StepRow, WeightsRow
from offbeat.common.records.run_folder import LOG, read_run_config
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.lab.tracing.lives import choose, life_span, read_lives
from offbeat.lab.tracing.spans import Process, Span, within
from offbeat.learner.leases.events import Trained
from offbeat.learner.leases.log_reading import read_log

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


_METRICS = ("reward/mean", "lag/mean", "time/train_s", "time/wait_rollouts_s")


class Work:
    """The learner's time and weight updates, read from the rows."""

    def __init__(self, rows: Iterable[Row | OtherRow]) -> None:
        self._steps: dict[int, StepRow] = {}
        self._updates: list[Span] = []
        self._of_actors: defaultdict[str, list[Span]] = defaultdict(list)
        for row in rows:
            match row:
                case StepRow():
                    self._steps[row.policy_version] = row
                case WeightsRow():
                    told = {"actors": row.num_members, "excluded": row.num_excluded}
                    self._updates.append(_ended(f"publish weights {row.policy_version}", row.time, row.publish_s, **told))
                case PullRow():
                    name = f"pull weights {row.policy_version}"
                    self._of_actors[row.actor].append(_ended(name, row.time, row.pull_s, bytes=row.sent_bytes))
                case CommitRow():
                    name = f"commit weights {row.policy_version}"
                    self._of_actors[row.actor].append(_ended(name, row.time, row.stall_s))
                case _:
                    pass

    def processes(self, batches: Sequence[Trained]) -> list[Process]:
        """Return the learner's tracks and those of the actors' weights."""
        of_actors = [Process(f"{name}: weights", tuple(spans)) for name, spans in sorted(self._of_actors.items())]
        updates = [Process("learner: weights", tuple(self._updates))] if self._updates else []
        return [Process("learner", tuple(self._batches(batches))), *updates, *of_actors]

    def _batches(self, batches: Sequence[Trained]) -> Iterable[Span]:
        """Yield the wait for each batch and the training on it, in order."""
        reached = float("-inf")
        for batch in batches:
            versions = range(batch.policy_version + 1, batch.policy_version + batch.num_steps + 1)
            steps = [self._steps[version] for version in versions if version in self._steps]
            selected = max(reached, batch.selected_at)
            waited_s = sum(step.number("time/wait_rollouts_s") or 0.0 for step in steps)
            if waited_s:
                yield Span("wait for rollouts", max(reached, selected - waited_s), selected)
            reached = max(selected, batch.at)
            last = batch.policy_version + batch.num_steps
            name = f"step {last}" if batch.num_steps == 1 else f"steps {batch.policy_version + 1} to {last}"
            numbers = {metric: value for metric in _METRICS if steps and (value := steps[-1].number(metric)) is not None}
            yield Span(name, selected, reached, {"groups": len(batch.lease_ids), **numbers})


def _ended(name: str, end: float, seconds: float, **attributes: int) -> Span:
    return Span(name, end - max(0.0, seconds), end, attributes)


TRACE_FILE = "trace.json"


class Request(NamedTuple):
    """The groups to show: of one lease, of one step, or the slowest ones."""

    lease: int | None
    step: int | None
    slowest: int


class Trace(NamedTuple):
    """Some groups of a run with what else happened then."""

    run_id: str
    processes: tuple[Process, ...]


def read_trace(run: Path, request: Request) -> Trace:
    """Return the trace that is asked for; raise `SettingError` for a run without a log or such groups."""
    config = read_run_config(run)
    if not (run / LOG).is_dir():
        raise SettingError("RUN", str(run), "it has no rollout log", "Runs with log.enabled=true can be traced.")
    lives = read_lives((record.event for record in read_log(run / LOG)), config.train.groups_per_step)
    of_actors: defaultdict[str, list[Span]] = defaultdict(list)
    for life in choose(lives, lease=request.lease, step=request.step, slowest=request.slowest):
        of_actors[life.granted.actor].append(life_span(life))
    shown = [span for spans in of_actors.values() for span in spans]
    start, end = min(span.start for span in shown), max(span.end for span in shown)
    rows = run / ROWS_FILE
    work = Work(read_rows(rows) if rows.is_file() else ()).processes(lives.batches)
    beside = [Process(name, tuple(span for span in spans if within(span, start, end))) for name, spans in work]
    groups = [Process(name, tuple(spans)) for name, spans in sorted(of_actors.items())]
    return Trace(lives.run_id, tuple(process for process in (*beside, *groups) if process.spans))


def write_trace(trace: Trace, out: Path) -> Path:
    """Write the trace as a file for Perfetto, and return its path."""
    try:
        out.write_bytes(trace_file(trace.processes))
    except OSError as error:
        raise SettingError("--out", str(out), f"it cannot be written ({error.strerror})", "Name another file.") from error
    return out
