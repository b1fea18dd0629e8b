"""Spans sent to a collector by OTLP over HTTP; headers, certificates and timeouts are `OTEL_EXPORTER_OTLP_*` variables.

Ids are hashes of the run and the span's place in it: spans that are sent again, of a run that has gone on, keep theirs.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import xxhash

from offbeat.common.errors import SettingError
from offbeat.lab.tracing.run_trace import Trace
from offbeat.lab.tracing.spans import Process, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

_NS = 1_000_000_000


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


def _of_process(run_id: str, process: Process) -> Iterator["ReadableSpan"]:
    from opentelemetry.sdk.resources import Resource

    resource = Resource({"service.name": f"offbeat {process.name}", "offbeat.run": run_id})
    for span in process.spans:
        key = f"{run_id}/{process.name}/{span.name}/{span.start!r}"
        yield from _spans(span, key, xxhash.xxh3_128_intdigest(key.encode()), None, resource)


def _spans(span: Span, key: str, trace_id: int, parent_id: int | None, resource: "Resource") -> Iterator["ReadableSpan"]:
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
