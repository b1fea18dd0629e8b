"""Gymnasium's environments and OpenEnv's servers, of the released packages, are played with scripted answers."""

import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from offbeat.common.settings.config import Environment
from offbeat.common.user_code.external_environment import environment_rows, host_command

GYMNASIUM = os.environ.get("OFFBEAT_TEST_VERIFIERS", "")
"""A Python that has `gymnasium` beside `verifiers`; `.ci/extras` makes one."""
OPENENV = os.environ.get("OFFBEAT_TEST_OPENENV", "")
"""A Python that has `openenv`, which excludes the `mcp` of `verifiers`."""

pytestmark = [pytest.mark.slow, pytest.mark.extras]

SERVER = """
import random
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Guess(Action):
    guess: int

class Seen(Observation):
    text: str = ""

class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.number = 4
        return Seen(text="Guess a number.", done=False, reward=None)

    def step(self, action, timeout_s=None, **options):
        is_right = action.guess == self.number
        return Seen(text="right" if is_right else "higher", done=is_right, reward=float(is_right))

    @property
    def state(self):
        return State()

app = create_app(Guessing, Guess, Seen, env_name="guess", max_concurrent_envs=1)
"""


@pytest.fixture
def model() -> Iterator["Model"]:
    model = Model()
    yield model
    model.shutdown()


class Model(ThreadingHTTPServer):
    """Answers every request with the next of its texts, and keeps what it has read."""

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
        answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": model.texts.pop(0)}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

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


@pytest.mark.skipif(not GYMNASIUM, reason="OFFBEAT_TEST_VERIFIERS names no Python with gymnasium")
def test_frozen_lake_is_crossed_by_numbers_in_text(model: Model) -> None:
    arguments = {"make": {"is_slippery": False}, "max_turns": 9, "without_action": -0.25}
    environment = Environment("gymnasium:FrozenLake-v1", GYMNASIUM, arguments=arguments)
    (row,) = environment_rows(environment, "task-environment:train?size=1", "data.train_data")
    assert row["prompt"].splitlines()[1:] == ["*S*FFF", "FHFH", "FFFH", "HFFG"]
    # 0: left, 1: down, 2: right. The second answer is no action, and takes a turn.
    model.texts = ["I go 1", "down", "1", "2", "2", "1", "2"]
    (end,), _ = play(environment, row, model.url)
    assert (end["type"], end["reward"]) == ("end", {"reward": 0.75})
    assert end["metrics"] == {"turns": 7.0, "without_action": 1.0}
    assert "Answer with an action, 0 to 3." in model.read[2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "guessing.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [OPENENV, "-m", "uvicorn", "guessing:app", "--port", str(port)]
    process = subprocess.Popen(command, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/schema").close()
                break
            except urllib.error.URLError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not OPENENV, reason="OFFBEAT_TEST_OPENENV names no Python with openenv")
def test_server_of_openenv_is_played_by_its_own_client(model: Model, server: str) -> None:
    environment = Environment("openenv:guess", OPENENV, arguments={"url": server, "rules": "Guess."})
    (row,) = environment_rows(environment, "task-environment:train?size=1", "data.train_data")
    model.texts = ["3", "no idea", '```json\n{"guess": 4}\n```']
    (end,), printed = play(environment, row, model.url)
    assert end.get("reward") == {"reward": 1.0}, printed
    assert end["metrics"] == {"turns": 3.0, "without_action": 1.0}
    assert model.read[:2] == ["Guess.\nGuess a number.", "higher"]


@pytest.mark.skipif(not OPENENV, reason="OFFBEAT_TEST_OPENENV names no Python with openenv")
def test_episodes_wait_for_each_other_where_a_server_of_openenv_has_room_for_one(model: Model, server: str) -> None:
    environment = Environment("openenv:guess", OPENENV, arguments={"url": server, "without_action": -0.5})
    model.texts = ["no idea", "4", "4", "4"]
    ends, printed = play(environment, {"seed": 1}, model.url, num_episodes=3)
    assert [end.get("reward") for end in ends] == [{"reward": 0.5}, {"reward": 1.0}, {"reward": 1.0}], printed
    assert printed.count("raise max_concurrent_envs") == 1
