"""A judge on loopback whose answers a test decides."""

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """One answer of the server."""

    text: str | None = "Score: 7"
    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012
    delay_s: float = 0.0
    after_byte: Callable[[], None] | None = None
    """Called after each byte of the answer, which then has a packet of its own."""
    body: bytes | None = None
    """Sent instead of a chat completion."""
    tokens: int | None = 10


class FakeJudge:
    """Serves `answer(number, request)`, number counted from 0."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], Answer]) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.num_at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        judge = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(200, {}, json.dumps({"data": [{"id": "grader"}]}).encode())

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with judge._lock:
                    number = len(judge.requests)
                    judge.requests.append(request)
                    judge.headers.append(dict(self.headers))
                    judge.times.append(time.monotonic())
                    judge.num_at_once += 1
                    judge.most_at_once = max(judge.most_at_once, judge.num_at_once)
                answer = judge.answer(number, request)
                time.sleep(answer.delay_s)
                with judge._lock:
                    judge.num_at_once -= 1
                choices = [{"message": {"role": "assistant", "content": answer.text}}]
                usage = {} if answer.tokens is None else {"usage": {"total_tokens": answer.tokens}}
                body = json.dumps({"choices": choices, **usage}).encode() if answer.body is None else answer.body
                self._send(answer.status, answer.headers, body, answer.after_byte)

            def _send(
                self, status: int, headers: dict[str, str], body: bytes, after_byte: Callable[[], None] | None = None
            ) -> None:
                try:
                    self.send_response(status)
                    for name, value in {**headers, "Content-Length": str(len(body))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    if after_byte is None:
                        self.wfile.write(body)
                        return
                    for start in range(len(body)):
                        self.wfile.write(body[start : start + 1])
                        after_byte()
                except ConnectionError:
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                """Stay silent."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@contextmanager
def serving(answer: Callable[[int, dict[str, Any]], Answer]) -> Iterator[FakeJudge]:
    """Serve a judge until the end of the context."""
    judge = FakeJudge(answer)
    threading.Thread(target=judge.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield judge
    finally:
        judge.server.shutdown()
        judge.server.server_close()
