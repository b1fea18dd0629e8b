"""The example of callbacks and a notebook does what its README says."""

import json
import math
import sys
import threading
import urllib.request
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.deploy.local import notebook
from offbeat.deploy.local.notebook import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook"
COMMAND = """
import json, sys, time
from pathlib import Path
Path("arguments").write_text(json.dumps(sys.argv[1:]))
file = Path(json.loads(sys.argv[-1].removeprefix("run.dir="))) / "metrics.jsonl"
rows = [
    {"kind": "event", "event": "run_started", "detail": ""},
    {"kind": "step", "policy_version": 1, "reward/mean": 0.25},
    {"kind": "eval", "policy_version": 1, "reward": 0.5},
    {"kind": "step", "policy_version": 2, "reward/mean": 0.75},
    {"kind": "final", "policy_version": 2, "outcome": "stopped", "detail": "metrics.callback: enough"},
]
file.write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "callbacks", raising=False)
    import callbacks  # pyright: ignore[reportMissingImports]

    return callbacks


def evaluation(reward: float | None) -> dict[str, Any]:
    return {"kind": "eval", "policy_version": 10, "reward": reward}


def test_early_stopping_stops_when_the_held_out_reward_has_not_risen_for_long_enough(callbacks: Any) -> None:
    stopping = callbacks.EarlyStopping(patience=2)
    for reward in (0.5, 0.5, None, 0.75, 0.25):
        stopping(evaluation(reward))
        stopping({"kind": "step", "policy_version": 10, "reward/mean": -math.inf})
    with pytest.raises(offbeat.StopRun, match=r"not risen above 0\.750 for 2 evaluations"):
        stopping(evaluation(0.75))


def test_alert_posts_health_and_the_end_to_the_webhook(callbacks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[str] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(json.loads(body)["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    rows = [
        {"kind": "event", "event": "health", "detail": "the gradient is 0"},
        {"kind": "event", "event": "actor_joined", "detail": "actor-0"},
        {"kind": "final", "outcome": "stopped", "detail": "SIGINT"},
    ]
    monkeypatch.setattr(urllib.request, "_opener", urllib.request.build_opener(urllib.request.ProxyHandler({})))
    callbacks.alert(rows[0])
    with HTTPServer(("127.0.0.1", 0), Webhook) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("WEBHOOK", f"http://127.0.0.1:{server.server_port}/")
        for row in rows:
            callbacks.watch(row)
        server.shutdown()
    assert received == ["health: the gradient is 0", "stopped: SIGINT"]


def test_notebook_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "command.py").write_text(COMMAND)
    (tmp_path / "run.toml").write_text((EXAMPLE / "run.toml").read_text())
    monkeypatch.chdir(tmp_path)
    start = notebook.start

    def start_stand_in(config: str | Path | None, settings: Mapping[str, object]) -> Run:
        return start(config, settings, (sys.executable, "command.py"))

    monkeypatch.setattr(notebook, "start", start_stand_in)
    cells = json.loads((EXAMPLE / "run.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "saved without outputs"
            exec("".join(cell["source"]), names)
    assert 'callback="callbacks:watch"' in json.loads((tmp_path / "arguments").read_text())
    assert capsys.readouterr().out == (
        "version 1: held-out reward 0.500\nstopped at step 2 -- metrics.callback: enough\nrewards: 0.25 ... 0.75\n"
    )
