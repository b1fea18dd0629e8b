"""A judge that the rewards of a chaos round ask over HTTP, and that is down at times.

The reward function runs in the actors' processes, the judge in that of chaos.
"""

import http.server
import json
import logging
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger(f"offbeat.{__name__}")

URL_VARIABLE = "OFFBEAT_CHAOS_JUDGE"
"""Environment variable with the judge's address."""
REWARD = f"{__name__}:judged"
"""The reward function, as `task.reward` names it."""
TIMEOUT_S = 3.0
"""Longest wait for the judge's answer, in seconds."""
SLOW_S = 0.5
"""Seconds that a slow judge takes for an answer."""


def judged(group: Sequence[Any]) -> list[float]:
    """Ask the judge for the rewards of a group; see `offbeat.actor.rewards.functions` for the form."""
    pairs = [(sample.completion, str(sample.row["answer"])) for sample in group]
    request = urllib.request.Request(os.environ[URL_VARIABLE], data=json.dumps(pairs).encode())
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


class Judge(http.server.ThreadingHTTPServer):
    """Serves rewards from a thread: 1 for the row's answer, else 0."""

    daemon_threads = True

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), _Handler)
        self.is_down = False
        """True while every request is answered with 503."""
        self.is_slow: Callable[[], bool] = lambda: False
        """Asked before each answer, in a thread of the server's: whether it shall take `SLOW_S`."""
        self.num_refusals = 0
        """Number of requests that were answered with 503."""
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The judge's address."""
        return f"http://{self.server_address[0]}:{self.server_port}"

    def be_down(self, seconds: float, pause: Callable[[float], None]) -> None:
        """Answer every request with 503 for this many seconds; `pause` does the waiting."""
        self.is_down = True
        try:
            pause(seconds)
        finally:
            self.is_down = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Actors are killed while they wait for an answer."""
        logger.debug("an actor hung up", exc_info=True)

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Answer with a reward per pair of completion and answer."""
        pairs = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        judge = self.server
        assert isinstance(judge, Judge)
        if judge.is_down:
            judge.num_refusals += 1
            self.send_error(503)
            return
        if judge.is_slow():
            time.sleep(SLOW_S)
        body = json.dumps([float(completion.strip() == answer.strip()) for completion, answer in pairs]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log."""
