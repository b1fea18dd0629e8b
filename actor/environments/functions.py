"""The user's environment function: loaded and looked at."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from offbeat.actor.environments.chat import Chat
from offbeat.common.errors import SettingError
from offbeat.common.user_code.functions import load_function
from offbeat.common.user_code.tools import SETTING, tool_schemas

PlayFunction = Callable[[Chat, dict[str, Any]], Awaitable[object]]
"""Plays one episode with the prompt's row, and returns its reward: a number, named parts, or None."""


def load_environment(path: str) -> PlayFunction:
    """Return the function `module:function`; raise `SettingError` unless it is async and takes a chat and a row."""
    function = load_function(path, setting=SETTING, parameters=("chat", "row"))
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        raise SettingError(SETTING, path, "the function is not async", "Write it as `async def`.")
    return function


async def offer_tools(
    function: PlayFunction, path: str, template_arguments: Mapping[str, Any], tool_parser: str
) -> dict[str, Any]:
    """Return the template's arguments with the tools of an environment, as the learner has them in its prompts.

    Raise `SettingError` when no parser would read the model's calls.
    """
    schemas = await tool_schemas(function, path)
    if schemas and not tool_parser:
        problem = "task.environment has tools, and nothing reads the model's calls"
        raise SettingError("environment.tool_parser", tool_parser, problem, 'Name their form, such as "hermes".')
    return {"tools": schemas, **template_arguments} if schemas else dict(template_arguments)
