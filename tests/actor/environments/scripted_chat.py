"""A stand-in for the chat of an episode, whose model says what a test has written down."""

from typing import Any

from offbeat.actor.environments.chat import Reply
from offbeat.actor.environments.tool_calls import ToolCall


class ScriptedChat:
    """Gives one turn after the other, and keeps what was added between them."""

    def __init__(self, *turns: str | list[ToolCall], prompt: str = "") -> None:
        self.seed = 7
        self.prompt = prompt
        self.metrics: dict[str, float] = {}
        self.rewards = 0.0
        self.added: list[dict[str, Any]] = []
        """Messages, with the limit of their tokens."""
        self._turns = iter(turns)

    async def sample(self) -> Reply:
        turn = next(self._turns)
        return Reply(turn, (), "stop") if isinstance(turn, str) else Reply("", (), "stop", "", tuple(turn))

    def add(self, message: Any, content: str = "", max_tokens: int | None = None) -> None:
        named = {"role": message, "content": content} if isinstance(message, str) else message
        self.added.append({**named, "max_tokens": max_tokens} if max_tokens else named)

    def metric(self, name: str, value: float) -> None:
        self.metrics[name] = value

    def reward(self, value: float) -> None:
        self.rewards += value

    @property
    def answers(self) -> list[str]:
        return [message["content"] for message in self.added]
