"""`offbeat trace`: the histories of some leases of a run, with the learner's work at that time.

rollout log -> lease histories -> spans -> file, or OpenTelemetry collector
metrics.jsonl -> learner's work ---^

All times are stamps of the learner's clock. Of what happened on an actor only the length is known; it is placed back from the
moment at which the group was received. The rest of that time is the way of lease and group, and the wait for weights.

The file is in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xxhash

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import CommitRow, PullRow, StepRow, WeightsRow
from offbeat.common.records.run_folder import LOG
from offbeat.common.records.writer import ROWS_FILE, read_rows_of
from offbeat.lab.lease_history import LeaseHistories, LeaseHistory
from offbeat.lab.run_summary import read_settings
from offbeat.learner.leases.events import Trained
from offbeat.learner.leases.log_reading import read_log

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

TRACE_FILE = "trace.json"
_US = 1e6
_NS = 1_000_000_000
_METRICS = ("reward/mean", "lag/mean", "time/train_s", "time/wait_rollouts_s")


class TraceSpan(NamedTuple):
    """One stretch of time. Its children lie within it, in order."""

    name: str
    start: float
    """Start in seconds since the epoch, by the learner's clock."""
    end: float
    """At least `start`."""
    attributes: Mapping[str, str | int | float] = {}
    children: tuple["TraceSpan", ...] = ()


class TraceProcess(NamedTuple):
    """The spans of one service. Those of an actor overlap."""

    name: str
    spans: tuple[TraceSpan, ...]


class Trace(NamedTuple):
    """Some groups of a run with what else happened then."""

    run_id: str
    processes: tuple[TraceProcess, ...]


def read_trace(run: Path, *, lease: int | None, step: int | None, slowest: int) -> Trace:
    """Return the trace of the groups that `choose` returns; raise `SettingError` for a run without a log or such groups."""
    if not (run / LOG).is_dir():
        raise SettingError("RUN", str(run), "it has no rollout log", "Runs with log.enabled=true can be traced.")
    epochs = int(read_settings(run).number("train", "epochs_per_batch") or 1)
    leases = LeaseHistories((record.event for record in read_log(run / LOG)), epochs=epochs)
    of_actors: defaultdict[str, list[TraceSpan]] = defaultdict(list)
    for chosen in choose(leases, lease=lease, step=step, slowest=slowest):
        of_actors[chosen.actor].append(lease_span(chosen))
    shown = [span for spans in of_actors.values() for span in spans]
    start, end = min(span.start for span in shown), max(span.end for span in shown)
    work = learner_work(read_rows_of(run / ROWS_FILE, StepRow, WeightsRow, PullRow, CommitRow), leases.batches)
    beside = [
        TraceProcess(name, tuple(span for span in spans if span.end >= start and span.start <= end)) for name, spans in work
    ]
    groups = [TraceProcess(name, tuple(spans)) for name, spans in sorted(of_actors.items())]
    return Trace(leases.run_id, tuple(process for process in (*beside, *groups) if process.spans))


def write_trace(trace: Trace, out: Path) -> Path:
    """Write the trace as a file for Perfetto, and return its path."""
    try:
        out.write_bytes(trace_file(trace.processes))
    except OSError as error:
        raise SettingError("--out", str(out), f"it cannot be written ({error.strerror})", "Name another file.") from error
    return out


# Leases


def choose(leases: LeaseHistories, *, lease: int | None, step: int | None, slowest: int) -> list[LeaseHistory]:
    """Return one lease, the groups of one step, or the slowest trained groups, by their grant; `SettingError` without any."""
    granted = {lease_id: history for lease_id, history in leases.by_lease.items() if history.granted is not None}
    if lease is not None:
        if lease not in granted:
            raise SettingError("--lease", lease, "the log has no such lease", "It keeps log.retain_mb of the newest groups.")
        return [granted[lease]]
    # A group that was not trained on has no steps.
    trained = [history for history in granted.values() if history.steps and (step is None or step in history.steps)]
    if not trained:
        option = ("--slowest", slowest) if step is None else ("--step", step)
        raise SettingError(*option, "the log has no group that was trained on then", "Name a step that the log still has.")
    if step is None:
        trained = sorted(trained, key=lambda history: -history.duration_s)[:slowest]
    return sorted(trained, key=lambda history: history.granted_at)


def lease_span(lease: LeaseHistory) -> TraceSpan:
    """Return a lease's history as a span, with its stages as children. The log must have its grant."""
    granted, accepted = lease.granted, lease.accepted
    assert granted is not None
    stages: list[tuple[str, float, Mapping[str, str | int | float]]] = []
    if accepted is not None:
        rewarded_from = accepted.at - accepted.reward_s
        stages += [("wait", rewarded_from - accepted.generate_s, {}), ("generate", rewarded_from, _generated(lease))]
        stages += [("reward", accepted.at, {})] if accepted.reward_s else []
    if lease.trained is not None:
        stages += [("queue", lease.trained.selected_at, {}), ("train", lease.trained.at, {"step": lease.step or 0})]
    elif lease.over is not None:
        stages.append(("queue" if accepted is not None else "wait", lease.over.at, {}))
    spans: list[TraceSpan] = []
    now = granted.at
    for name, end, about in stages:
        # No stage ends before it begins: a learner that moved may have another clock.
        spans.append(TraceSpan(name, now, max(now, end), about))
        now = spans[-1].end
    attributes: dict[str, str | int | float] = {
        "lease": granted.lease_id,
        "prompt": granted.prompt_id,
        "epoch": granted.epoch,
        "actor": granted.actor,
        "outcome": lease.outcome,
        "granted_at_version": granted.policy_version,
    }
    if lease.over is not None and lease.trained is None:
        attributes["reason"] = lease.over.reason
    if lease.policy_lag is not None:
        attributes["policy_lag"] = lease.policy_lag
    return TraceSpan(f"lease {granted.lease_id}", granted.at, now, attributes, tuple(spans))


def _generated(lease: LeaseHistory) -> dict[str, str | int | float]:
    lengths = lease.lengths
    attributes: dict[str, str | int | float] = {
        "policy_versions": ", ".join(map(str, lease.policy_versions)),
        "completions": len(lengths),
        "tokens": sum(lengths),
        "longest_completion": max(lengths),
        "mean_reward": sum(lease.rewards) / len(lengths),
    }
    if lease.num_turns:
        attributes["turns"] = lease.num_turns
        attributes["longest_environment_s"] = lease.environment_s
    return attributes


# The learner


def learner_work(
    rows: Iterable[StepRow | WeightsRow | PullRow | CommitRow], batches: Sequence[Trained]
) -> Iterator[TraceProcess]:
    """Yield the learner's tracks and those of the actors' weights; a track may be empty."""
    steps: dict[int, StepRow] = {}
    updates: list[TraceSpan] = []
    of_actors: defaultdict[str, list[TraceSpan]] = defaultdict(list)
    for row in rows:
        match row:
            case StepRow():
                steps[row.policy_version] = row
            case WeightsRow():
                told = {"actors": row.num_members, "excluded": row.num_excluded}
                updates.append(_ended(f"publish weights {row.policy_version}", row.time, row.publish_s, **told))
            case PullRow():
                name = f"pull weights {row.policy_version}"
                of_actors[row.actor].append(_ended(name, row.time, row.pull_s, bytes=row.sent_bytes))
            case CommitRow():
                of_actors[row.actor].append(_ended(f"commit weights {row.policy_version}", row.time, row.stall_s))
    yield TraceProcess("learner", tuple(_batches(batches, steps)))
    yield TraceProcess("learner: weights", tuple(updates))
    for name, spans in sorted(of_actors.items()):
        yield TraceProcess(f"{name}: weights", tuple(spans))


def _batches(batches: Sequence[Trained], rows: Mapping[int, StepRow]) -> Iterator[TraceSpan]:
    """Yield the wait for each batch and the training on it, in order; `rows` are the steps' by the versions they made."""
    reached = float("-inf")
    for batch in batches:
        last = batch.policy_version + batch.num_steps
        steps = [rows[version] for version in range(batch.policy_version + 1, last + 1) if version in rows]
        selected = max(reached, batch.selected_at)
        waited_s = sum(step.number("time/wait_rollouts_s") or 0.0 for step in steps)
        if waited_s:
            yield TraceSpan("wait for rollouts", max(reached, selected - waited_s), selected)
        reached = max(selected, batch.at)
        name = f"step {last}" if batch.num_steps == 1 else f"steps {batch.policy_version + 1} to {last}"
        numbers = {metric: value for metric in _METRICS if steps and (value := steps[-1].number(metric)) is not None}
        yield TraceSpan(name, selected, reached, {"groups": len(batch.lease_ids), **numbers})


def _ended(name: str, end: float, seconds: float, **attributes: int) -> TraceSpan:
    return TraceSpan(name, end - max(0.0, seconds), end, attributes)


# The file


def trace_file(processes: Sequence[TraceProcess]) -> bytes:
    """Return the file: a process of the viewer for each of ours, and as many threads as its spans overlap.

    Times are microseconds since the first span.
    """
    first = min(span.start for process in processes for span in process.spans)
    events: list[dict[str, Any]] = []
    for pid, process in enumerate(processes, start=1):
        placed = list(_in_lanes(process.spans))
        events.append(_named("process_name", pid, 0, process.name))
        events += (_named("thread_name", pid, tid, process.name) for tid in sorted({tid for tid, _ in placed}))
        for tid, span in placed:
            events += _events(span, pid, tid, first)
    # The viewers sort; people who read the file need not.
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"epoch_s_of_0": first}})


def _events(span: TraceSpan, pid: int, tid: int, first: float) -> Iterator[dict[str, Any]]:
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


def _in_lanes(spans: Sequence[TraceSpan]) -> Iterator[tuple[int, TraceSpan]]:
    """Yield the spans by their start, each in the first lane, from 1, that is free: the events of a thread must nest."""
    ends: dict[int, float] = {}
    for span in sorted(spans, key=lambda span: span.start):
        lane = next((lane for lane, end in ends.items() if end <= span.start), len(ends) + 1)
        ends[lane] = span.end
        yield lane, span


# OpenTelemetry


def send_trace(trace: Trace, collector: str) -> int:
    """Send all spans to `collector`, such as http://localhost:4318, and return their number.

    Raises `SettingError` without the extra `otel`, and where the collector does not take them.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ModuleNotFoundError as error:
        raise SettingError("--otlp", collector, f"it needs {error.name}", 'Install it: pip install "offbeat[otel]".') from error
    exporter = OTLPSpanExporter(endpoint=f"{collector.rstrip('/')}/v1/traces")
    spans = [made for process in trace.processes for made in _of_process(trace.run_id, process)]
    try:
        result = exporter.export(spans)
    finally:
        exporter.shutdown()
    if result is not SpanExportResult.SUCCESS:
        raise SettingError("--otlp", collector, "no collector took the spans there", "Name the address of one, without a path.")
    return len(spans)


def _of_process(run_id: str, process: TraceProcess) -> Iterator["ReadableSpan"]:
    from opentelemetry.sdk.resources import Resource

    resource = Resource({"service.name": f"offbeat {process.name}", "offbeat.run": run_id})
    for span in process.spans:
        key = f"{run_id}/{process.name}/{span.name}/{span.start!r}"
        yield from _spans(span, key, xxhash.xxh3_128_intdigest(key.encode()), None, resource)


def _spans(span: TraceSpan, key: str, trace_id: int, parent_id: int | None, resource: "Resource") -> Iterator["ReadableSpan"]:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, TraceFlags

    def context(span_id: int) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    span_id = xxhash.xxh3_64_intdigest(key.encode())
    yield ReadableSpan(
        span.name,
        context=context(span_id),
        parent=None if parent_id is None else context(parent_id),
        resource=resource,
        attributes={f"offbeat.{name}": value for name, value in span.attributes.items()},
        start_time=round(span.start * _NS),
        end_time=round(span.end * _NS),
    )
    for index, child in enumerate(span.children):
        yield from _spans(child, f"{key}/{index}", trace_id, span_id, resource)
