"""Give an environment function a conversation with the model that is being trained, one for each episode.

    async def play(chat, row):
        reply = await chat.sample()
        chat.add("tool", look_up(row, reply.text))
        reply = await chat.sample()
        return float(reply.text == row["answer"])

`import offbeat` imports nothing from here; a function only uses the object that it is called with.
"""

import asyncio
from collections.abc import Callable
from typing import Literal, NamedTuple

from offbeat.actor.environments.chat_format import ChatFormat, Message, checked_message
from offbeat.actor.environments.messages import Play, Sample, Sampled
from offbeat.actor.environments.tool_calls import ToolCall, TurnParser


class NoRoom(Exception):  # noqa: N818, a state and no mistake of the program
    """No token fits any more (`model.max_length`). An episode whose function lets it pass ends with its rewards so far."""


class Reply(NamedTuple):
    """One turn of the model."""

    text: str
    """Without special tokens; with a parser also without reasoning and tool calls."""
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    """`stop`: the model ended its turn. `length`: it was cut at `max_new_tokens`, or where no more tokens fit."""
    reasoning: str = ""
    """Read by `environment.reasoning_parser`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Read by `environment.tool_parser`. A turn that was cut calls no tool."""


class Chat:
    """An episode as its function sees it."""

    def __init__(
        self,
        play: Play,
        chat_format: ChatFormat,
        parser: TurnParser,
        max_length: int,
        send: Callable[[Sample], None],
    ) -> None:
        """`max_length` bounds the tokens of the episode; `send` asks the actor for a turn."""
        self.key: str = play.episode
        """Lease, index in the group and attempt: the same episode never has another key, nor two attempts the same one."""
        self.seed: int = play.seed
        """Every episode of a group has the same seed, so that all of them play in the same world."""
        self.prompt: str = play.prompt
        """The prompt as text."""
        self.is_evaluation: bool = play.is_evaluation
        self._format = chat_format
        self._max_length = max_length
        self._send = send
        self._num_tokens = play.num_prompt_tokens
        self._parser = parser
        self._num_calls = 0
        self._added: list[Message] = []
        self._last_token: int | None = None
        self._reply: asyncio.Future[Sampled] | None = None
        self.rewards = 0.0
        """The sum of the rewards given so far."""
        self.metrics: dict[str, float] = {}
        """The metrics given so far."""

    @property
    def room(self) -> int:
        """Tokens that still fit, without what was added since the last turn."""
        return self._max_length - self._num_tokens

    def add(self, message: str | Message, content: str = "", *, max_tokens: int | None = None) -> None:
        """Add a message that the model reads before its next turn: a role and a text, or a whole message.

            chat.add("tool", "7")
            chat.add({"role": "tool", "content": "7", "tool_call_id": call.id, "name": call.name})

        Without a chat template the model reads the content as it is. The end of a content of more than `max_tokens` tokens is
        cut, and a mark says so.
        """
        checked = checked_message({"role": message, "content": content} if isinstance(message, str) else message)
        if max_tokens is not None:
            checked = {**checked, "content": self._format.cut(checked["content"], max_tokens)}
        self._added.append(checked)

    async def sample(self, max_new_tokens: int | None = None) -> Reply:
        """Return the model's next turn, of at most `max_new_tokens` tokens (`rollout.max_new_tokens`).

        Raise `NoRoom` when no token fits any more. While it waits, nothing of the engine is held.
        """
        if self._reply is not None:
            raise RuntimeError("sample() while another sample() of this episode waits: an episode has one history")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, less than 1")
        context = self._format.context(self._added, last_token=self._last_token)
        if self.room - len(context) < 1:
            raise NoRoom(f"{self._num_tokens} tokens, {len(context)} added ones, and model.max_length is {self._max_length}")
        self._added.clear()
        self._reply = asyncio.get_running_loop().create_future()
        try:
            self._send(Sample(episode=self.key, context=context, max_new_tokens=max_new_tokens))
            sampled = await self._reply
        finally:
            self._reply = None
        self._num_tokens += len(context) + len(sampled.token_ids)
        self._last_token = sampled.token_ids[-1]
        finish: Literal["stop", "length"] = "stop" if sampled.finish_reason == "stop" else "length"
        parsed = self._parser.parse(sampled.token_ids, finish, num_calls=self._num_calls)
        self._num_calls += len(parsed.tool_calls)
        return Reply(parsed.text, tuple(sampled.token_ids), finish, parsed.reasoning, parsed.tool_calls)

    def reward(self, value: float) -> None:
        """Add to the reward of the episode."""
        self.rewards += float(value)

    def metric(self, name: str, value: float) -> None:
        """Give a number of the episode; steps show its mean as `reward_part/NAME`."""
        self.metrics[name] = float(value)

    def take(self, sampled: Sampled) -> None:
        """Hand the actor's answer to the function that waits."""
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(sampled)
