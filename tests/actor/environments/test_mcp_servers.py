"""Tools of a real MCP server: what it says is read, and when it dies or hangs, the episode is played again, not scored."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from offbeat.actor.environments.tool_calls import ToolCall
from offbeat.common.processes import process_table as processes
from offbeat.environments import mcp, tools
from tests.actor.environments.scripted_chat import ScriptedChat

pytestmark = pytest.mark.slow

SERVER = """
import os, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
notes = []

@server.tool()
def note(text: str) -> int:
    "Keep a note; return how many there are."
    notes.append(text)
    return len(notes)

@server.tool()
def die() -> str:
    "Die."
    os._exit(3)

@server.tool()
def hang() -> str:
    "Hang."
    time.sleep(600)

server.run("stdio")
"""

PAGED = """
import asyncio
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

NAMES = ["read", "size", "draw"]

async def list_tools(context, params):
    page = int(params.cursor or 0)
    tool = types.Tool(name=NAMES[page], input_schema={"type": "object"})
    return types.ListToolsResult(tools=[tool], next_cursor=str(page + 1) if page + 1 < len(NAMES) else None)

async def call_tool(context, params):
    file = types.TextResourceContents(uri="file:///notes", text="eggs, milk")
    blob = types.BlobResourceContents(uri="file:///photo", blob="aGk=")
    match params.name:
        case "read":
            content = [types.TextContent(text="one file:"), *(types.EmbeddedResource(resource=one) for one in (file, blob))]
            return types.CallToolResult(content=content)
        case "size":
            return types.CallToolResult(content=[], structured_content={"bytes": 10})
        case "draw":
            return types.CallToolResult(content=[types.ImageContent(data="aGk=", mime_type="image/png")])

async def serve():
    server = Server("paged", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as streams:
        await server.run(*streams, server.create_initialization_options())

asyncio.run(serve())
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    return [sys.executable, str(file)]


def call(name: str, arguments: str = "{}") -> list[ToolCall]:
    return [ToolCall("call00000", name, arguments)]


def score(answer: str, row: dict[str, Any]) -> float:
    return 1.0


def servers_running(command: list[str]) -> int:
    return sum(processes.arguments(pid)[-1:] == command[-1:] for pid in processes.descendants(os.getpid()))


def test_episodes_share_a_server_that_is_replaced_when_it_dies_or_hangs(command: list[str]) -> None:
    server = mcp(command)
    environment = tools([server], reward=score)

    async def episode(*turns: str | list[ToolCall]) -> list[str]:
        chat = ScriptedChat(*turns)
        await environment(chat, {})  # type: ignore[arg-type]
        return chat.answers

    async def all_episodes() -> None:
        (note, *_) = await environment.schemas()
        assert note["function"]["name"] == "note"
        assert note["function"]["description"].startswith("Keep a note")
        assert note["function"]["parameters"]["required"] == ["text"]
        assert await episode(call("note", '{"text": "a"}'), call("note", '{"text": "b"}'), "done") == ["1", "2"]
        (wrong,) = await episode(call("note", '{"words": 3}'), "done")
        assert wrong.startswith("Error: ")
        assert await episode(call("note", '{"text": "c"}'), "done") == ["3"]
        assert await episode(call("note", "[1]"), "done") == ["Error: Expected `object`, got `array`"]
        assert servers_running(command) == 1
        with pytest.raises(ConnectionError, match=r"the MCP server .*server\.py did not answer die"):
            await episode(call("die"), "done")
        assert await episode(call("note", '{"text": "again"}'), "done") == ["1"]
        session = server._shared
        assert session is not None
        session._call_timeout_s = 0.2
        with pytest.raises(TimeoutError, match=r"the MCP server .*server\.py did not answer hang in time"):
            await episode(call("hang"), "done")
        assert not session.is_open
        await session.close()
        assert servers_running(command) == 0

    asyncio.run(all_episodes())


def test_episode_may_have_a_server_of_its_own_which_ends_with_it(command: list[str]) -> None:
    server = mcp(command, per_episode=True)
    environment = tools([server], reward=score)
    environment._served = {"note": server}

    async def all_episodes() -> list[list[str]]:
        chats = [ScriptedChat(call("note", '{"text": "a"}'), "done") for _ in range(2)]
        await asyncio.gather(*(environment(chat, {}) for chat in chats))  # type: ignore[arg-type]
        return [chat.answers for chat in chats]

    assert asyncio.run(all_episodes()) == [["1"], ["1"]]
    assert servers_running(command) == 0


def test_all_pages_of_tools_are_offered_and_their_answers_read_whole(tmp_path: Path) -> None:
    (tmp_path / "paged.py").write_text(PAGED)

    async def call_all() -> dict[str, str]:
        server = mcp([sys.executable, str(tmp_path / "paged.py")], per_episode=True)
        names = [schema["function"]["name"] for schema in await server.schemas()]
        async with server.session() as session:
            return {name: await session.call(name, {}) for name in names}

    assert asyncio.run(call_all()) == {
        "read": "one file:\neggs, milk\n[file:///photo]",
        "size": '{"bytes":10}',
        "draw": "[image]",
    }


def test_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="no session with the MCP server /nowhere/server"):
        asyncio.run(mcp(["/nowhere/server"]).schemas())


def test_shared_server_that_never_begins_is_ended_at_its_time_limit() -> None:
    command = ["sleep", "617.5"]

    async def try_twice() -> None:
        server = mcp(command, start_timeout_s=0.2)
        for _ in range(2):
            async with server.session() as session:
                with pytest.raises(TimeoutError, match="did not answer note in time"):
                    await session.call("note", {})
            # The library gives a server some time to end by itself.
            await asyncio.wait([session._task], timeout=30)
            assert servers_running(command) == 0

    asyncio.run(try_twice())
