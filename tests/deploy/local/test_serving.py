"""`offbeat serve` finds the model of a run, starts the engine's server, and leaves none of its processes behind."""

import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx2
import pytest

from offbeat.actor.engines.openai_server import vllm_arguments
from offbeat.common.errors import SettingError
from offbeat.common.processes import process_table as processes
from offbeat.common.processes.environment import BROKEN_VARIABLE
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.rows import FinalRow, LedgerSums
from offbeat.common.records.writer import MetricsWriter
from offbeat.common.settings.loading import resolved_toml
from offbeat.deploy.local import serving
from offbeat.deploy.local.launcher import free_port
from offbeat.deploy.local.serving import Served, check_address, model_folder, serve
from tests.families import LARGER, make_family
from tests.learner.training.trainer_cases import make_config

VLLM_STUB = """
import os, subprocess, sys, types

def serve():
    from http.server import BaseHTTPRequestHandler, HTTPServer
    if "--fail" in sys.argv:
        sys.exit(5)
    child = subprocess.Popen(["sleep", "600"], start_new_session="--daemon" in sys.argv)
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(str(child.pid).encode())
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()

for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.launchers", "vllm.entrypoints.launchers.api_server"):
    sys.modules[name] = types.ModuleType(name)
entry = sys.modules["vllm.entrypoints.launchers.api_server.entry"] = types.ModuleType("entry")
entry.main = serve
from offbeat.actor.engines import openai_server
openai_server.import_model_class = lambda: None
openai_server.main()
"""
PROGRAM = (sys.executable, "-c", VLLM_STUB)


def until(claim: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_server_is_announced_once_it_answers_and_a_signal_ends_it_with_all_that_it_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The look for broken packages would import torch.
    monkeypatch.setenv(BROKEN_VARIABLE, "")
    stop, port, statuses = StopRequest(), free_port("127.0.0.1"), list[int]()
    served = Served(Path("a/model"), "vllm", "127.0.0.1", port, ())
    with caplog.at_level("INFO"):
        thread = threading.Thread(target=lambda: statuses.append(serve(served, stop, PROGRAM)))
        thread.start()
        until(lambda: f'serving at http://127.0.0.1:{port}/v1; the model is called "a/model"' in caplog.text)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            grandchild = int(answer.read())
        assert not processes.has_ended(grandchild)
        stop.ask("SIGINT")
        thread.join(60)
    assert statuses == [0]
    until(lambda: processes.has_ended(grandchild))


@pytest.mark.vllm
@pytest.mark.engine
@pytest.mark.serving
@pytest.mark.timeout(360)
def test_language_model_of_qwen3_5_is_served(tiny_model: Path, tmp_path: Path) -> None:
    make_family(tmp_path, "Qwen3.5", tiny_model, LARGER | {"linear_key_head_dim": 128, "linear_value_head_dim": 128})
    stop, port = StopRequest(), free_port("127.0.0.1")
    served = Served(tmp_path, "vllm", "127.0.0.1", port, vllm_arguments(str(tmp_path), "bfloat16", {}))
    thread = threading.Thread(target=serve, args=(served, stop))
    thread.start()
    try:
        until(lambda: not thread.is_alive() or serving._answers(served), limit_s=300)
        request = {"model": str(tmp_path), "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        answer = httpx2.post(f"{served.url}/completions", json=request, trust_env=False, timeout=60).json()
    finally:
        stop.ask("SIGINT")
        thread.join(60)
    assert answer["usage"]["completion_tokens"] == 4


def test_server_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port('127.0.0.1')}")
    monkeypatch.setattr(serving, "LOOK_S", 5.0)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        server.timeout = 5.0
        thread.start()
        answers = serving._answers(Served(Path("a/model"), "vllm", "127.0.0.1", server.server_port, ()))
        thread.join()
    assert answers


def test_status_of_a_server_that_fails_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BROKEN_VARIABLE, "")
    served = Served(Path("a/model"), "vllm", "127.0.0.1", free_port("127.0.0.1"), ("--fail",))
    assert serve(served, StopRequest(), PROGRAM) == 5


def test_finished_run_is_served_as_it_ended_and_another_by_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, checkpoint = tmp_path / "run", tmp_path / "run/checkpoints/step-00000003"
    (run / "model").mkdir(parents=True)
    (run / "config.toml").write_text(resolved_toml(make_config(tmp_path)))
    exported: list[Path] = []

    def export(run: Path, *, step: int | None, out: Path, only_adapter: bool) -> Path:
        exported.append(out)
        out.mkdir()
        return out

    monkeypatch.setattr(serving, "find_checkpoint", lambda run, step: checkpoint)
    monkeypatch.setattr(serving, "export", export)
    checkpoint.mkdir(parents=True)
    time.sleep(0.01)
    of_step = run / "model-step-00000003"
    assert model_folder(run, None)[0] == of_step, "a run that goes on has an old model, or none"
    write_end(run, "stopped")
    assert model_folder(run, None)[0] == of_step
    assert exported == [of_step], "it is exported once"
    time.sleep(0.01)
    checkpoint.touch()
    assert model_folder(run, None)[0] == of_step
    assert len(exported) == 2, "the step was made again"
    write_end(run, "finished")
    assert model_folder(run, None)[0] == run / "model"
    assert model_folder(run, 3)[0] == of_step


def test_folder_of_neither_a_run_nor_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="neither the folder of a run nor that of a model"):
        model_folder(tmp_path, None)
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(tmp_path, None) == (tmp_path, None)
    with pytest.raises(SettingError, match=r"--step = 3: .* is not the folder of a run"):
        model_folder(tmp_path, 3)


def test_address_that_others_reach_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serving.KEY_VARIABLE, raising=False)
    port = free_port("127.0.0.1")
    with pytest.raises(SettingError, match=rf"--host = .*Set the environment variable {serving.KEY_VARIABLE}"):
        check_address("0.0.0.0", port, "vllm")
    monkeypatch.setenv(serving.KEY_VARIABLE, "secret")
    check_address("0.0.0.0", port, "vllm")
    with pytest.raises(SettingError, match="Its server knows no keys"):
        check_address("0.0.0.0", port, "transformers")
    check_address("127.0.0.1", port, "transformers")


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_address_may_have_brackets_and_has_them_in_the_url(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serving.KEY_VARIABLE, raising=False)
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
            port = listener.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")
    check_address(host, port, "transformers")
    assert Served(Path("a/model"), "transformers", host, port, ()).url == f"http://[::1]:{port}/v1"
    with pytest.raises(SettingError, match="Its server knows no keys"):
        check_address("::", port, "transformers")


def test_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=rf"--port = {port}: it cannot be used \(Address already in use\)"):
            check_address("127.0.0.1", port, "vllm")


def write_end(run: Path, outcome: str) -> None:
    with MetricsWriter(run) as metrics:
        ledger = LedgerSums(0, 0, {}, 0, 0)
        metrics.write(FinalRow(policy_version=3, wall_s=1.0, ledger=ledger, outcome=outcome, detail=""))
