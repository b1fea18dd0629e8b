"""An endpoint on a real socket, with sequences whose turns a test writes."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx2

from offbeat.actor.environments.chat import NoRoom, Reply
from offbeat.actor.environments.endpoint.server import Endpoint
from offbeat.actor.environments.endpoint.session import AgentSession
from offbeat.actor.environments.tool_calls import ToolCall
from offbeat.common.settings.config import EnvironmentSection
from offbeat.common.user_code.requests import Message

WAIT_S = 60.0
"""Longest wait for an answer. The server, which imports its packages at the first call, shares its thread with the client."""


class FakeConversation:
    """A sequence whose tokens are characters. `<call>look{"key": "a"}</call>` calls a tool."""

    def __init__(self, game: "Game", messages: Sequence[Message]) -> None:
        self.game = game
        self.text = render(messages)
        self.sampled: list[str] = []

    def fork(self) -> "FakeConversation":
        fork = FakeConversation(self.game, [])
        fork.text, fork.sampled = self.text, list(self.sampled)
        self.game.begun.append(fork)
        return fork

    @property
    def num_tokens(self) -> int:
        return len(self.text)

    def add(self, message: Message) -> None:
        self.text += render([message])

    async def sample(self, max_new_tokens: int | None = None) -> Reply:
        self.game.num_started += 1
        if len(self.text) >= self.game.max_length:
            raise NoRoom("the prompt has too many")
        self.game.longest = max_new_tokens
        text = await self.game.turns.get()
        cut = text[:max_new_tokens]
        self.text += cut
        self.sampled.append(cut)
        found = enumerate(re.findall(r"<call>(\w+)(.*?)</call>", cut))
        calls = tuple(ToolCall(f"call{self.game.num_started}{index}", *one) for index, one in found)
        return Reply(cut.partition("<call>")[0], tuple(range(len(cut))), "stop" if cut == text else "length", "", calls)


class Game:
    """An episode: `turns` is what the model writes, one after the other."""

    key = "7/0/0"

    def __init__(self, endpoint: Endpoint, max_length: int) -> None:
        self.endpoint = endpoint
        self.turns: asyncio.Queue[str] = asyncio.Queue()
        self.max_length = max_length
        self.begun: list[FakeConversation] = []
        self.tools: list[Sequence[Any]] = []
        self.num_started = 0
        self.longest: int | None = None
        self.session = AgentSession(cast(Any, self), max_length)
        self.url = endpoint.open(self.session)

    def close(self) -> None:
        self.endpoint.close(self.session)

    def restart(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> FakeConversation:
        self.begun.append(FakeConversation(self, messages))
        self.tools.append(tools or ())
        return self.begun[-1]

    def write(self, *turns: str) -> None:
        for turn in turns:
            self.turns.put_nowait(turn)

    @property
    def sampled(self) -> list[list[str]]:
        """The turns of each sequence, without those that another one goes on from."""
        paths = [conversation.sampled for conversation in self.begun]
        return [one for one in paths if not any(one != other and one == other[: len(one)] for other in paths)]


def render(messages: Sequence[Message]) -> str:
    """Write messages as a chat template does, with tool calls as JSON."""
    text = ""
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        text += f"<{message['role']}>{message['content']}{json.dumps(calls) if calls else ''}"
    return text


@asynccontextmanager
async def playing(
    *,
    temperature: float = 1.0,
    ignores: bool = False,
    samples_again: bool = False,
    parses_tools: bool = True,
    max_length: int = 1000,
) -> AsyncIterator[Game]:
    """Open an endpoint for one episode."""
    settings = EnvironmentSection(
        sampling="override" if ignores else "refuse",
        identical_requests="sample_again" if samples_again else "answer_again",
        tool_parser="hermes" if parses_tools else "",
    )
    game = Game(Endpoint(temperature, settings), max_length)
    try:
        yield game
    finally:
        game.close()


def plain_client() -> httpx2.AsyncClient:
    """Return a client that is none of a model's. It loads no certificates (30 ms): the endpoint speaks plain HTTP."""
    return httpx2.AsyncClient(timeout=WAIT_S, verify=False)


async def until(claim: Any) -> None:
    """Wait until a claim holds."""
    deadline = time.monotonic() + WAIT_S
    while not claim():
        assert time.monotonic() < deadline, "it never held"
        await asyncio.sleep(0.002)
