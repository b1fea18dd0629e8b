"""The user's environment function: loaded and looked at."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from offbeat.actor.environments.chat import Chat
from offbeat.common.settings import SettingError
from offbeat.common.user_functions import load_function

SETTING = "task.environment"

PlayFunction = Callable[[Chat, dict[str, Any]], Awaitable[object]]
"""Plays one episode with the prompt's row, and returns its reward: a number, named parts, or None."""


def load_environment(path: str) -> PlayFunction:
    """Return the function `module:function`; raise `SettingError` unless it is async and takes a chat and a row."""
    function = load_function(path, setting=SETTING, parameters=("chat", "row"))
    if not inspect.iscoroutinefunction(function):
        raise SettingError(SETTING, path, "the function is not async", "Write it as `async def`.")
    return function
