"""Ready-made environments: the model calls functions until it answers, or takes the steps of a class with `reset` and `step`.

    play = tools([add, search], reward=is_right)          task.environment = "my_task:play"
    play = gym(Maze)

    tools: turn of the model -> tool calls -> their answers, as messages -> turn ... -> a turn without a call -> reward
    gym:   observation -> turn of the model -> action -> step -> reward, observation -> turn ... -> the episode's end

Classes are like those of Gymnasium, OpenEnv and TextArena. Plain functions of the user's run in threads: one that blocks holds
up nobody's episode.
"""

import asyncio
import contextlib
import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from offbeat.actor.environments.chat import Chat
from offbeat.actor.environments.mcp_servers import McpServer, McpSession
from offbeat.actor.environments.tool_calls import ToolCall
from offbeat.common.errors import one_line
from offbeat.common.user_code.environment_function import ToolSchema
from offbeat.common.user_code.environment_host.host import is_transient

NUM_THREADS = 64
"""Plain functions that run at once in one process."""
ROW = "row"
"""A parameter of this name gets the prompt's row. The model neither sees nor gives it."""
Row = dict[str, Any]

RewardOfAnswer = Callable[[str, Row], object]
"""Takes the text of the last turn and the row; returns a number, named parts, or an awaitable of either."""


def gym(
    make: Callable[[], Any],
    *,
    action: Callable[[str], Any] = str,
    observation: Callable[[Any], str] = str,
    max_turns: int = 1000,
) -> Callable[[Chat, Row], Awaitable[None]]:
    """Return an environment in which each turn of the model is a step.

    Args:
        make: The class of an environment, or a function that makes one: `reset(seed=, options=)` returns an observation and a
            dict, `step(action)` an observation, a reward, whether the episode has terminated, whether it was truncated, and a
            dict. `options` is the prompt's row; `seed` is the row's `seed`, else `chat.seed`. `close()` is called at the end of
            every episode. Methods may be plain, then they run in threads, or async.
        action: Makes an action of a turn's text. What a `ValueError` says is the observation then, and the step is not taken.
        observation: Makes a text of an observation.
        max_turns: Turns of the model after which the episode is truncated.
    """

    async def play(chat: Chat, row: Row) -> None:
        opened: list[Any] = []
        # One thread: its calls come one after the other, `close` behind a `step` that a cancelled episode has left at work.
        thread = ThreadPoolExecutor(1, thread_name_prefix="gym")
        try:
            await in_thread(lambda: opened.append(make()), thread)
            (environment,) = opened
            first, _ = await in_thread(partial(environment.reset, seed=row.get("seed", chat.seed), options=row), thread)
            if observation(first) != chat.prompt:
                chat.add("user", observation(first))
            for turn in range(1, max_turns + 1):
                reply = await chat.sample()
                chat.metric("turns", turn)
                try:
                    taken = action(reply.text)
                except ValueError as error:
                    chat.add("user", f"Error: {error}")
                    continue
                seen, reward, terminated, truncated, _ = await in_thread(partial(environment.step, taken), thread)
                chat.reward(reward)
                if terminated or truncated:
                    return
                chat.add("user", observation(seen))
        finally:
            await in_thread(lambda: opened and opened[0].close(), thread)
            thread.shutdown(wait=False)

    return play


def tools(
    functions: Sequence[Callable[..., object] | McpServer],
    *,
    reward: RewardOfAnswer,
    max_turns: int = 8,
    max_result_tokens: int = 1024,
) -> "ToolUse":
    """Return an environment in which the model may call these functions before it answers.

    Args:
        functions: Plain or async, with type hints and a docstring that describes each parameter (Google style): the model reads
            them. A parameter `row` gets the prompt's row instead. Plain ones run in threads. `mcp(...)` gives a server's.
        reward: Judges the text of the last turn: `reward(answer, row)`, plain or async.
        max_turns: Turns of the model; the last one is judged, whatever it is.
        max_result_tokens: Longest answer of a tool, in tokens; what is cut is marked.
    """
    own = [FunctionTool(function) for function in functions if not isinstance(function, McpServer)]
    servers = [server for server in functions if isinstance(server, McpServer)]
    _require_different([tool.name for tool in own])
    return ToolUse({tool.name: tool for tool in own}, servers, reward, max_turns, max_result_tokens)


class FunctionTool:
    """A function of the user's that the model may call."""

    def __init__(self, function: Callable[..., object]) -> None:
        """Raise `TypeError` for a function whose parameters cannot be given by name, or have no types."""
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
        self.name = function.__name__
        self._function = function
        self._takes_row = ROW in parameters
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        for name, parameter in parameters.items():
            if name == ROW:
                continue
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name not in hints:
                raise TypeError(f"the parameter {name!r} of the tool {self.name} needs a name and a type hint")
            has_default = parameter.default is not parameter.empty
            # Which value it is does not matter: only what the model gave is passed on.
            fields.append((name, hints[name], msgspec.UNSET) if has_default else (name, hints[name]))
        self._arguments = msgspec.defstruct(self.name, fields, kw_only=True, forbid_unknown_fields=True)

    async def schema(self) -> ToolSchema:
        """Return the function as the model sees it."""
        # transformers takes a second to import, and every process of the user's module would pay for it.
        from transformers.utils.chat_template_utils import get_json_schema

        return get_json_schema(_without_row(self._function))

    async def call(self, arguments: str, row: Row) -> object:
        """Call the function with arguments as JSON. Raise `msgspec.ValidationError` where they do not fit it."""
        given = msgspec.json.decode(arguments or "{}", type=self._arguments)
        values = {name: value for name in given.__struct_fields__ if (value := getattr(given, name)) is not msgspec.UNSET}
        if self._takes_row:
            values[ROW] = row
        return await in_thread(partial(self._function, **values))


@dataclass(eq=False)
class ToolUse:
    """Plays episodes in which the model calls tools."""

    _tools: Mapping[str, FunctionTool]
    _servers: Sequence[McpServer]
    _reward: RewardOfAnswer
    _max_turns: int
    _max_result_tokens: int
    _served: dict[str, McpServer] = field(default_factory=dict)
    """The servers' tools, once they have been asked for their schemas."""

    async def schemas(self) -> list[ToolSchema]:
        """Return the schema of each tool, and remember which server has which."""
        schemas = [await tool.schema() for tool in self._tools.values()]
        for server in self._servers:
            offered = await server.schemas()
            schemas += offered
            self._served |= {schema["function"]["name"]: server for schema in offered}
        _require_different([schema["function"]["name"] for schema in schemas])
        return schemas

    async def __call__(self, chat: Chat, row: Row) -> object:
        """Play one episode; return the reward of its answer."""
        async with contextlib.AsyncExitStack() as stack:
            sessions = {server: await stack.enter_async_context(server.session()) for server in self._servers}
            return await self._play(chat, row, sessions)

    async def _play(self, chat: Chat, row: Row, sessions: Mapping[McpServer, McpSession]) -> object:
        for turn in range(1, self._max_turns + 1):
            reply = await chat.sample()
            chat.metric("turns", turn)
            if not reply.tool_calls or turn == self._max_turns:
                return await in_thread(partial(self._reward, reply.text, row))
            answers = await asyncio.gather(*(self._answer(call, row, sessions) for call in reply.tool_calls))
            for call, answer in zip(reply.tool_calls, answers, strict=True):
                message = {"role": "tool", "content": answer, "tool_call_id": call.id, "name": call.name}
                chat.add(message, max_tokens=self._max_result_tokens)
        raise AssertionError("max_turns is at least 1")

    async def _answer(self, call: ToolCall, row: Row, sessions: Mapping[McpServer, McpSession]) -> str:
        """Return a tool's answer as the model reads it; a mistake of model or tool is one too."""
        try:
            if call.name in self._served:
                arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
                return await sessions[self._served[call.name]].call(call.name, arguments)
            if call.name in self._tools:
                return _text(await self._tools[call.name].call(call.arguments, row))
            return f"Error: there is no tool {call.name!r}. Tools: {', '.join([*self._tools, *self._served])}"
        except Exception as error:
            # A service that is down says nothing about the model: the episode is played again.
            if is_transient(error):
                raise
            return f"Error: {error}" if isinstance(error, msgspec.MsgspecError) else f"Error: {one_line(error)}"


def _require_different(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"two tools have the same name: {', '.join(names)}")


def _text(result: object) -> str:
    return result if isinstance(result, str) else msgspec.json.encode(result, enc_hook=str).decode()


def _without_row(function: Callable[..., object]) -> Callable[..., object]:
    """Return a stand-in for a function's description without the parameter `row`."""
    signature = inspect.signature(function)
    if ROW not in signature.parameters:
        return function
    parameters = [parameter for name, parameter in signature.parameters.items() if name != ROW]

    def described() -> None: ...

    described.__name__ = function.__name__
    described.__doc__ = function.__doc__
    described.__annotations__ = {name: hint for name, hint in typing.get_type_hints(function).items() if name != ROW}
    vars(described)["__signature__"] = signature.replace(parameters=parameters)
    return described


async def in_thread(call: Callable[[], object], executor: ThreadPoolExecutor | None = None) -> Any:
    """Make a call of a plain function in a thread, that of an async one here; return what it returns."""
    if inspect.iscoroutinefunction(call):
        return await call()
    returned = await asyncio.get_running_loop().run_in_executor(executor or _executor(), call)
    return await returned if inspect.isawaitable(returned) else returned


@functools.cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="environment")
