"""Spans arrive at an OTLP collector as they are, under ids that stay the same."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from offbeat.common.errors import SettingError
from offbeat.lab.tracing import Trace, TraceProcess, TraceSpan, send_trace

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

LEASE = TraceSpan("lease 1", 1.7e9, 1.7e9 + 2, {"lease": 1, "actor": "a"}, (TraceSpan("wait", 1.7e9, 1.7e9 + 2, {}),))
TRACE = Trace("the-run", (TraceProcess("learner", (TraceSpan("step 1", 1.7e9, 1.7e9 + 1),)), TraceProcess("a", (LEASE,))))


class Collector(HTTPServer):
    """Takes requests to /v1/traces and keeps their bodies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.status = 200


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        self.send_response(self.server.status if self.path == "/v1/traces" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_collector_gets_every_span_with_its_parent_times_and_attributes(collector: Collector) -> None:
    assert send_trace(TRACE, collector.url) == 3
    assert send_trace(TRACE, f"{collector.url}/") == 3
    first, second = (service.ExportTraceServiceRequest.FromString(body) for body in collector.bodies)
    found = {}
    for of_resource in first.resource_spans:
        resource = {one.key: one.value.string_value for one in of_resource.resource.attributes}
        assert resource["offbeat.run"] == "the-run"
        for span in (span for scope in of_resource.scope_spans for span in scope.spans):
            found[span.name] = resource["service.name"], span
    assert {name: of for name, (of, _) in found.items()} == {
        "step 1": "offbeat learner",
        "lease 1": "offbeat a",
        "wait": "offbeat a",
    }
    lease, wait, step = found["lease 1"][1], found["wait"][1], found["step 1"][1]
    assert (lease.start_time_unix_nano, lease.end_time_unix_nano) == (1_700_000_000 * 10**9, 1_700_000_002 * 10**9)
    assert (lease.parent_span_id, wait.parent_span_id) == (b"", lease.span_id)
    assert wait.trace_id == lease.trace_id != step.trace_id
    assert {one.key: one.value.int_value or one.value.string_value for one in lease.attributes} == {
        "offbeat.lease": 1,
        "offbeat.actor": "a",
    }
    assert first == second, "ids are the same at every time"


def test_collector_that_refuses_or_is_not_there_is_a_mistake(collector: Collector) -> None:
    collector.status = 400
    with pytest.raises(SettingError, match="no collector took the spans"):
        send_trace(TRACE, collector.url)
