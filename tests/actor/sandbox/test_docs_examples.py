"""The examples of docs/environments.md run."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from offbeat.actor.sandbox import Local, run_sync, use

TEXT = (Path(__file__).parents[3] / "docs/environments.md").read_text()
SECTION = TEXT.partition("## Running what the model wrote")[2].partition("\n## ")[0]
REWARD, REMOTE = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture(autouse=True)
def _own_sandbox() -> Iterator[None]:
    yield
    use(Local())


def test_reward_of_the_page_runs_the_completion() -> None:
    names: dict[str, Any] = {}
    exec(REWARD, names)
    row = {"stdin": "20 22", "stdout": "42"}
    programs = ["print(sum(map(int, input().split())))", "print(41)", "1 / 0"]
    assert [asyncio.run(names["solved"]("", program, row)) for program in programs] == [1.0, 0.0, 0.0]


class Server(BaseHTTPRequestHandler):
    """Runs nothing: answers with the order."""

    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fields = {"stderr": "", "is_timeout": False, "is_out_of_memory": False, "seconds": 0.5}
        answer = json.dumps({"exit_code": 0, "stdout": f"{order['code']}, {order['timeout_s']:g} s", **fields}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_remote_sandbox_of_the_page_asks_its_server() -> None:
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        exec(REMOTE.replace("http://sandboxes:8000/run", f"http://127.0.0.1:{server.server_port}/run"), {})
        assert run_sync("print(1)", timeout_s=3).stdout == "print(1), 3 s"
