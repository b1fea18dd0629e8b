"""A model that answers with given texts at an endpoint, and a host that plays an environment with it."""

import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from offbeat.common.settings.config import Environment
from offbeat.common.user_code.external_environment import host_command


class Model(ThreadingHTTPServer):
    """Answers every request with the next of its texts, and keeps what it has read. No request fits after the last text."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.texts: list[str] = []
        self.read: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        model = self.server
        assert isinstance(model, Model)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        model.read.append(body["messages"][-1]["content"])
        if model.texts:
            status, answer = 200, {"choices": [{"message": {"role": "assistant", "content": model.texts.pop(0)}}]}
        else:
            status, answer = 400, {"error": {"message": "prompt is too long", "code": "context_length_exceeded"}}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: object) -> None:
        pass


def play(environment: Environment, row: dict[str, Any], url: str, num_episodes: int = 1) -> tuple[list[dict[str, Any]], str]:
    """Return the host's messages at the ends of episodes that start together, and what it has printed."""
    process = subprocess.Popen(host_command(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert json.loads(process.stdout.readline()) == {"type": "ready"}
        for index in range(num_episodes):
            start = {"type": "start", "episode": f"1/{index}/0", "url": url, "row": row, "prompt": "", "seed": 1}
            process.stdin.write(json.dumps({**start, "is_evaluation": False}).encode() + b"\n")
        process.stdin.flush()
        ends = [json.loads(process.stdout.readline()) for _ in range(num_episodes)]
    finally:
        process.kill()
        printed = process.communicate()[1].decode()
    return ends, printed
