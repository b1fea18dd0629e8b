"""Tools that an environment offers the model: their schemas, which the chat template writes into the prompt.

The learner renders prompts, and the actors' environment processes what follows; both ask the environment's object here.
"""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec.structs import replace

from offbeat.common.errors import SettingError, one_line
from offbeat.common.settings.config import TaskSection
from offbeat.common.user_code.functions import load_function

SETTING = "task.environment"

ToolSchema = Mapping[str, Any]
"""A tool as chat templates and OpenAI clients know it: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""


@runtime_checkable
class OffersTools(Protocol):
    """An environment that has tools."""

    async def schemas(self) -> Sequence[ToolSchema]:
        """Return the schema of each tool, always in the same order."""
        ...


async def tool_schemas(environment: object, path: str) -> list[ToolSchema]:
    """Return the schemas of the tools of `task.environment`; raise `SettingError` with the reason when they cannot be made."""
    if not isinstance(environment, OffersTools):
        return []
    try:
        return list(await environment.schemas())
    # They are made of the user's signatures, or come from a server.
    except Exception as error:
        problem = f"its tools cannot be described ({one_line(error)})"
        raise SettingError(SETTING, path, problem, "Correct the tool, or start its server.") from error


def with_tools(task: TaskSection) -> TaskSection:
    """Return the task with the tools of its environment as the template's argument `tools`, unless it has one already."""
    if not (task.environment and task.chat_template) or "tools" in task.template_arguments:
        return task
    schemas = _schemas_of(task.environment)
    return replace(task, template_arguments={**task.template_arguments, "tools": list(schemas)}) if schemas else task


@functools.cache
def _schemas_of(path: str) -> tuple[ToolSchema, ...]:
    return tuple(asyncio.run(tool_schemas(load_function(path, setting=SETTING), path)))
