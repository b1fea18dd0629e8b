"""Tools of MCP servers, for `tools`: `tools([mcp(["python", "server.py"])], reward=is_right)`.

A session with a server is held by a task of its own. One that breaks ends the attempts of the episodes that use it, which are
played again with a new one: what the model reads never says that a server was down.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.common.errors import SettingError, one_line
from offbeat.common.user_code.environment_function import SETTING, ToolSchema

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import ContentBlock

MISTAKES_OF_THE_MODEL = (-32602, -32601)
"""JSON-RPC's codes for parameters and methods that do not exist."""


def mcp(
    server: str | Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    per_episode: bool = False,
    start_timeout_s: float = 30.0,
    call_timeout_s: float = 30.0,
) -> "McpServer":
    """Return the tools of an MCP server, to be offered beside functions.

    Args:
        server: The URL of a server (streamable HTTP), or the command and arguments of one that talks over its standard streams.
        env: Environment variables for the command, beside PATH, HOME and the like.
        per_episode: Begin a session, and with a command a process, for every episode. For servers that remember things: the
            episodes of a group must not see each other's. Otherwise all episodes of a process share one session.
        start_timeout_s: Longest time in which a session begins, in seconds.
        call_timeout_s: Longest time of a call, in seconds.
    """
    return McpServer(server, env, per_episode, start_timeout_s, call_timeout_s)


class McpSession:
    """A connection to a server, begun at once."""

    def __init__(self, client: "Client", server: str, start_timeout_s: float, call_timeout_s: float) -> None:
        self._server = server
        self._call_timeout_s = call_timeout_s
        self._start_timeout_s = start_timeout_s
        self._is_over = asyncio.Event()
        self._begun: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(client))

    @property
    def is_open(self) -> bool:
        """False once it has been closed, or has broken."""
        return not self._is_over.is_set()

    async def client(self) -> "Client":
        """Return the client once it is connected. Raise `ConnectionError` or `TimeoutError`."""
        async with asyncio.timeout(self._start_timeout_s):
            return await asyncio.shield(self._begun)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a tool's answer as text. Raise `ConnectionError` or `TimeoutError` when the server does not give one."""
        from mcp import MCPError

        try:
            client = await self.client()
            async with asyncio.timeout(self._call_timeout_s):
                result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code in MISTAKES_OF_THE_MODEL:
                return f"Error: {error.message}"
            self._end()
            raise ConnectionError(f"the MCP server {self._server} did not answer {name}: {error.message}") from error
        except TimeoutError as error:
            self._end()
            raise TimeoutError(f"the MCP server {self._server} did not answer {name} in time") from error
        text = "\n".join(map(_text_of, result.content))
        if not text and result.structured_content is not None:
            text = msgspec.json.encode(result.structured_content).decode()
        return f"Error: {text}" if result.is_error else text

    async def close(self) -> None:
        """End it, and the process of a command."""
        self._end()
        await asyncio.wait([self._task])

    def _end(self) -> None:
        self._is_over.set()
        if not self._begun.done():
            # It waits for the server, and would not look.
            self._task.cancel()

    async def _hold(self, client: "Client") -> None:
        """Enter and leave the client in one task, as its library demands."""
        try:
            async with client:
                self._begun.set_result(client)
                await self._is_over.wait()
        # Its library raises groups of whatever its tasks have raised.
        except Exception as error:  # noqa: BLE001
            self._is_over.set()
            if not self._begun.done():
                self._begun.set_exception(ConnectionError(f"no session with the MCP server {self._server}: {one_line(error)}"))


def _text_of(block: "ContentBlock") -> str:
    """Return a part of an answer as the model reads it; what is no text is its address, or its kind, in brackets."""
    from mcp.types import TextResourceContents

    match block.type:
        case "text":
            return block.text
        case "resource":
            # The text of a file, say, which some servers send beside a sentence about it.
            return block.resource.text if isinstance(block.resource, TextResourceContents) else f"[{block.resource.uri}]"
        case "resource_link":
            return f"[{block.uri}]"
        case kind:
            return f"[{kind}]"


@dataclass(eq=False)
class McpServer:
    """A server whose tools the model may call; see `mcp`."""

    _server: str | Sequence[str]
    _env: Mapping[str, str] | None
    _per_episode: bool
    _start_timeout_s: float
    _call_timeout_s: float
    _shared: McpSession | None = None

    async def schemas(self) -> list[ToolSchema]:
        """Ask the server for its tools, in a session for this alone."""
        session = self._begin()
        try:
            client = await session.client()
            async with asyncio.timeout(self._start_timeout_s):
                page = await client.list_tools()
                listed = [*page.tools]
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    listed += page.tools
        finally:
            await session.close()
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
            }
            for tool in listed
        ]

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[McpSession]:
        """Give an episode its session."""
        if self._per_episode:
            own = self._begin()
            try:
                yield own
            finally:
                await own.close()
            return
        if self._shared is None or not self._shared.is_open:
            self._shared = self._begin()
        yield self._shared

    def _begin(self) -> McpSession:
        try:
            from mcp import Client, StdioServerParameters
        except ImportError as error:
            raise SettingError(SETTING, "mcp(...)", f"it needs mcp ({error})", "Install offbeat[mcp].") from error

        if isinstance(self._server, str):
            name, target = self._server, self._server
        else:
            command, *arguments = name_parts = list(self._server)
            name = " ".join(name_parts)
            target = StdioServerParameters(command=command, args=arguments, env=dict(self._env or {}))
        return McpSession(Client(target), name, self._start_timeout_s, self._call_timeout_s)
