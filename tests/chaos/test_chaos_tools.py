"""Tools of a chaos round fail as they are told, and rewards that they did not give are found."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from offbeat import RewardUnavailable
from offbeat.actor.environments.chat import NoRoom
from offbeat.common.errors import SettingError
from offbeat.common.processes import process_table as processes
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.settings.config import EnvironmentSection
from offbeat.common.user_code.environment_host.host import HostedChat
from offbeat.learner.leases.events import Accepted
from offbeat.protocols.payload import CompletionMeta, Segment
from tests.chaos import tools as chaos_tools
from tests.chaos import unasked
from tests.chaos.chaos import made_up, run_chaos
from tests.chaos.environment import EARNED, FOLDER_VARIABLE, FUNCTION_VARIABLE, play, play_outside
from tests.chaos.tools import Tools
from tests.chaos.unasked import Unasked
from tests.learner.leases.event_makers import make_accepted
from tests.process_ends import kill_and_wait

pytestmark = pytest.mark.slow


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "tools"))
    monkeypatch.setenv(FUNCTION_VARIABLE, f"{unasked.__name__}:game")
    return Tools(tmp_path / "tools", EnvironmentSection(turn_timeout_s=0.1))


@pytest.mark.parametrize(
    ("returns", "reward"), [(0.5, 0.75), (None, 0.25), ({"right": 1.0, "short": 0.5}, 1.75), ("no room", 0.25)]
)
def test_reward_that_was_given_is_repeated_and_never_0(tools: Tools, returns: object, reward: float) -> None:
    chat = Unasked()
    try:
        assert asyncio.run(play(chat, {"returns": returns})) == returns
    except NoRoom:
        assert returns == "no room"
    assert chat.episode.metrics == {EARNED: reward + 1.0}


def test_environment_with_a_python_of_its_own_repeats_its_reward_and_its_tools_can_be_down(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asks(chat: HostedChat, row: dict[str, Any]) -> dict[str, float]:
        return {"right": 1.0, "short": row["short"]}

    monkeypatch.setattr(unasked, "game", asks)
    start = {"url": "", "episode": "1/0/0", "seed": 0, "prompt": "", "is_evaluation": False}
    chat = HostedChat(start)
    assert asyncio.run(play_outside(chat, {"short": 0.5})) == 1.5
    assert chat.metrics == {EARNED: 2.5}

    def meanwhile(seconds: float) -> None:
        with pytest.raises(RewardUnavailable):
            asyncio.run(play_outside(HostedChat(start), {"short": 0.5}))

    assert tools.be_down(0.2, meanwhile).has_hit


def test_reward_that_no_episode_earned_is_found() -> None:
    def completion(reward: float, **parts: float) -> CompletionMeta:
        return CompletionMeta(1, "stop", reward, (Segment(0, 0),), parts)

    def accepted(*completions: CompletionMeta) -> Accepted:
        return make_accepted(7, completions=completions)

    assert made_up([accepted(completion(0.0, earned=1.0), completion(0.5, earned=1.5))]) == []
    flawed = [accepted(completion(0.0)), accepted(completion(0.0, earned=1.5))]
    assert made_up(flawed) == ["lease 7: a reward of 0 that no episode earned"] * 2


def test_tools_are_down_for_a_while(tools: Tools) -> None:
    def meanwhile(seconds: float) -> None:
        with pytest.raises(RewardUnavailable):
            asyncio.run(play(Unasked(), {"returns": 1.0}))

    assert tools.be_down(0.2, meanwhile).has_hit
    assert not tools.be_down(0.2, lambda seconds: None).has_hit
    assert asyncio.run(play(Unasked(), {"returns": 1.0})) == 1.0


def test_process_is_killed_in_a_call_and_what_it_leaves_behind_or_blocks_is_told(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_tools, "END_S", 0.1)
    monkeypatch.setattr("offbeat.actor.environments.episodes.CLOSE_TIMEOUT_S", 0.1)
    imports = f"import asyncio; from {play.__module__} import play; from {unasked.__name__} import Unasked"
    script = f"{imports}; asyncio.run(play(Unasked(), {{'returns': 1.0, 'turns': 9999}}))"
    workers: list[subprocess.Popen] = []

    def pause(seconds: float) -> None:
        if not workers or workers[-1].poll() is not None:
            workers.append(subprocess.Popen([sys.executable, "-c", script]))
        time.sleep(0.02)

    try:
        assert tools.kill_caller(pause).violations == ()
        assert workers[0].wait() == -9
        # Nothing guards these processes.
        (violation,) = tools.leave_daemon(pause).violations
        assert "a daemon that a tool had started outlived its process" in violation
        (violation,) = tools.wedge(pause).violations
        assert "was not replaced within 0.3 s" in violation
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        for pid in processes._all():
            if processes.arguments(pid) == ["sleep", "3600"]:
                kill_and_wait(pid)


def test_environment_that_cannot_be_imported_is_refused_before_a_round(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('model.path = "model"\ndata.train_data = "data"\ntask.environment = "nowhere:play"\n')
    folder = tmp_path / "chaos"
    with pytest.raises(SettingError, match="no module 'nowhere'"):
        run_chaos(tmp_path / "run.toml", (), is_quickstart=False, seed=0, minutes=1, folder=folder, stop=StopRequest())
    assert not folder.exists()
