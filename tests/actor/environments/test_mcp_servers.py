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
