"""Gymnasium's environments and OpenEnv's servers, of the released packages, are played with scripted answers."""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.common.settings.config import Environment
from offbeat.common.user_code.external_environment import environment_rows
from tests.actor.environments.scripted_model import Model, play

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
    hint: str | None = None

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


@pytest.mark.skipif(not GYMNASIUM, reason="OFFBEAT_TEST_VERIFIERS names no Python with gymnasium")
def test_steps_before_the_turn_that_no_longer_fits_keep_their_rewards(model: Model) -> None:
    """Running out of room is not worth more than the steps of an episode that is completed."""
    environment = Environment("gymnasium:CliffWalking-v1", GYMNASIUM, arguments={"without_action": -2.0})
    model.texts = ["0", "no idea", "0"]
    (end,), printed = play(environment, {"seed": 1}, model.url)
    assert end.get("reward") == {"reward": -4.0}, printed
    assert end["metrics"] == {"turns": 3.0, "without_action": 1.0}


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
def test_turns_at_a_server_of_openenv_keep_their_rewards_where_the_next_does_not_fit(model: Model, server: str) -> None:
    environment = Environment("openenv:guess", OPENENV, arguments={"url": server, "without_action": -0.5})
    model.texts = ["3", "no idea"]
    (end,), printed = play(environment, {"seed": 1}, model.url)
    assert end.get("reward") == {"reward": -0.5}, printed
    assert end["metrics"] == {"turns": 2.0, "without_action": 1.0}


@pytest.mark.skipif(not OPENENV, reason="OFFBEAT_TEST_OPENENV names no Python with openenv")
def test_episodes_wait_for_each_other_where_a_server_of_openenv_has_room_for_one(model: Model, server: str) -> None:
    environment = Environment("openenv:guess", OPENENV, arguments={"url": server, "without_action": -0.5})
    model.texts = ["no idea", "4", "4", "4"]
    ends, printed = play(environment, {"seed": 1}, model.url, num_episodes=3)
    assert [end.get("reward") for end in ends] == [{"reward": 0.5}, {"reward": 1.0}, {"reward": 1.0}], printed
    assert printed.count("raise max_concurrent_envs") == 1
