"""The user's environment: its function, and the schemas of the tools that it offers the model.

The chat template writes the schemas into the prompt. The learner renders prompts, and the actors' environment processes what
follows; both ask the environment's object here.
"""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec.structs import replace

from offbeat.common.errors import SettingError, one_line
from offbeat.common.settings.config import Config, DataSection, Environment
from offbeat.common.user_code.functions import load_function

SETTING = "task.environment"

ToolSchema = Mapping[str, Any]
"""A tool as chat templates and OpenAI clients know it: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""


PlayFunction = Callable[[Any, dict[str, Any]], Awaitable[object]]
"""Plays one episode with a `Chat` and the prompt's row, and returns its reward: a number, named parts, or None."""


def load_environment(path: str) -> PlayFunction:
    """Return the function `module:function`; raise `SettingError` unless it is async and takes a chat and a row."""
    function = load_function(path, setting=SETTING, parameters=("chat", "row"))
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        raise SettingError(SETTING, path, "the function is not async", "Write it as `async def`.")
    return function


async def tool_schemas(environment: object, path: str) -> list[ToolSchema]:
    """Return the schemas of the tools of `task.environment`, an object with `async schemas()` where it has tools.

    Raise `SettingError` with the reason when they cannot be made.
    """
    schemas = getattr(environment, "schemas", None)
    if schemas is None:
        return []
    try:
        return list(await schemas())
    # They are made of the user's signatures, or come from a server.
    except Exception as error:
        problem = f"its tools cannot be described ({one_line(error)})"
        raise SettingError(SETTING, path, problem, "Correct the tool, or start its server.") from error


async def offer_tools(function: PlayFunction, config: Config) -> dict[str, Any]:
    """Return the template's arguments with the tools of an environment, as the learner has them in its prompts.

    Raise `SettingError` when no parser would read the model's calls.
    """
    schemas, arguments = await tool_schemas(function, config.task.environment), config.data.template_arguments
    if schemas and not config.environment.tool_parser:
        problem = "task.environment has tools, and nothing reads the model's calls"
        raise SettingError("environment.tool_parser", "", problem, 'Name their form, such as "hermes".')
    return {"tools": schemas, **arguments} if schemas else arguments


def with_tools(data: DataSection, environment: Environment) -> DataSection:
    """Return the settings with the environment's tools as the template's argument `tools`, unless it has one already.

    One that has a Python of its own offers its tools with each request.
    """
    is_own = environment.function and not environment.is_external
    if not (is_own and data.chat_template) or "tools" in data.template_arguments:
        return data
    schemas = _schemas_of(environment.function)
    return replace(data, template_arguments={**data.template_arguments, "tools": list(schemas)}) if schemas else data


@functools.cache
def _schemas_of(path: str) -> tuple[ToolSchema, ...]:
    return tuple(asyncio.run(tool_schemas(load_function(path, setting=SETTING), path)))
