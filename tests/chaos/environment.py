"""The environment of a chaos round: the run's own, with a tool call after every turn of the model.

A call takes a moment. At a fault's command (`tests.chaos.tools`) it takes longer, fails, blocks the event loop, or leaves a
daemon behind. The reward that was really given is repeated as a named part, so that an invented one shows.
"""

import asyncio
import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any, cast

from offbeat.actor.environments.chat import Chat, NoRoom
from offbeat.actor.rewards.functions import reward_of
from offbeat.actor.rewards.samples import RewardUnavailable
from offbeat.common.user_code.environment_function import load_environment

ENVIRONMENT = f"{__name__}:play"
"""This environment, as `task.environment` names it."""
OUTSIDE = f"{__name__}:play_outside"
"""This is the name where the run's environment has a Python of its own."""
FUNCTION_VARIABLE = "CHAOS_ENVIRONMENT"
"""Environment variable with the run's own `task.environment`. Environments outside get none that begins with "OFFBEAT_"."""
FOLDER_VARIABLE = "CHAOS_TOOLS"
"""Environment variable with the folder in which faults leave their commands."""
USUAL_S = 0.02
"""Seconds that a call takes: episodes are open at any time."""
BLOCKED_S = 3600.0
EARNED = "earned"
"""The part that repeats a reward, plus 1: it is never 0."""


async def play(chat: Any, row: dict[str, Any]) -> object:
    """Play an episode of the run's own environment."""
    function = load_environment(os.environ[FUNCTION_VARIABLE])
    given: list[float] = []
    try:
        returned = await function(cast(Chat, _Tooled(chat, given)), row)
    except NoRoom:
        chat.metric(EARNED, 1.0 + sum(given))
        raise
    total = reward_of(0.0 if returned is None else returned, {}).total
    chat.metric(EARNED, 1.0 + (total + sum(given)))
    return returned


async def play_outside(chat: Any, row: dict[str, Any]) -> float:
    """Play an episode of the run's own environment, which asks the model itself, between two tool calls."""
    function = load_environment(os.environ[FUNCTION_VARIABLE])
    folder = Path(os.environ[FOLDER_VARIABLE])
    await _call_tool(folder)
    reward = reward_of(await function(chat, row), {}).total
    await _call_tool(folder)
    chat.metric(EARNED, 1.0 + reward)
    return reward


class _Tooled:
    """A chat whose every turn is followed by a tool call, and whose rewards are noted in `given`."""

    def __init__(self, chat: Chat, given: list[float]) -> None:
        self._chat = chat
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chat, name)

    async def sample(self, *args: Any, **kwargs: Any) -> Any:
        reply = await self._chat.sample(*args, **kwargs)
        await _call_tool(Path(os.environ[FOLDER_VARIABLE]))
        return reply

    def reward(self, value: float) -> None:
        self._given.append(float(value))
        self._chat.reward(value)

    def fork(self) -> "_Tooled":
        return _Tooled(self._chat.fork(), self._given)

    def restart(self, *args: Any, **kwargs: Any) -> "_Tooled":
        return _Tooled(self._chat.restart(*args, **kwargs), self._given)


async def _call_tool(folder: Path) -> None:
    if (folder / "down").exists():
        (folder / "refused").touch()
        raise RewardUnavailable("the tool is down")
    if _take(folder / "wedge"):
        (folder / "wedged").write_text(str(os.getpid()))
        time.sleep(BLOCKED_S)
    if _take(folder / "daemon"):
        # Renamed into place: its reader must not find it empty.
        script = (
            f"setsid sleep {BLOCKED_S:g} & echo {os.getpid()} $! > {folder}/daemon.new; mv {folder}/daemon.new {folder}/left"
        )
        subprocess.run(["sh", "-c", script], check=True)
    # Read at once: it may be taken back at any moment.
    with contextlib.suppress(FileNotFoundError):
        slow = (folder / "slow").read_text()
        (folder / "called").write_text(str(os.getpid()))
        await asyncio.sleep(float(slow or USUAL_S))
    await asyncio.sleep(USUAL_S)


def _take(command: Path) -> bool:
    """Return whether this call is the one that obeys a command."""
    try:
        command.unlink()
    except FileNotFoundError:
        return False
    return True
