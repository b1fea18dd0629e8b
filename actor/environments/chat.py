"""Give an environment function a conversation with the model that is being trained, one for each episode.

    async def play(chat, row):
        reply = await chat.sample()
        chat.add("tool", look_up(row, reply.text))
        reply = await chat.sample()
        return float(reply.text == row["answer"])

`import offbeat` imports nothing from here; a function only uses the object that it is called with.

History is never rendered again, because text that is tokenized anew need not give the tokens that were sampled. The next
prompt is the tokens so far, then a bridge: the difference between two renderings of a made-up conversation.

    render(user, assistant)                     ... <end> \\n
    render(user, assistant, added messages)     ... <end> \\n <start> tool 7 <end> \\n <start> assistant \\n
                                                     ^ the bridge begins behind the end of the assistant's turn
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from offbeat.actor.environments.messages import PROMPT, PlayEpisode, SampleTurn, TurnSampled, Withdraw, digest_of
from offbeat.actor.environments.tool_calls import ToolCall, TurnParser
from offbeat.common.errors import SettingError
from offbeat.common.models.folders import encode_prompt
from offbeat.common.settings.config import Config, max_episode_tokens
from offbeat.common.user_code.environment_function import ToolSchema
from offbeat.common.user_code.requests import Message

SETTING = "data.chat_template"
_CURE = (
    "Use a template that only appends, or set data.chat_template=false and write the marks of turns yourself in add(). "
    "Templates that drop the reasoning of earlier turns often keep it under an argument (data.template_arguments)."
)
_DUMMY = ({"role": "user", "content": "one"}, {"role": "assistant", "content": "two"})
_PROBE = {"role": "user", "content": "three"}


def checked_message(message: object) -> Message:
    """Return a message with its content as text; raise `TypeError` where it is none."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"a message has a role, and {message!r} has none")
    # OpenAI has null where a message only calls tools.
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise TypeError(f"the content of a {message['role']!r} message is a text, not {content!r}")
    return {**message, "content": content}


class ChatFormat:
    """Turns added messages into the tokens that the model reads before its next turn."""

    def __init__(self, tokenizer: Any, template_arguments: Mapping[str, Any], *, has_chat_template: bool) -> None:
        """Raise `SettingError` when the tokenizer's template does not let turns be appended."""
        self._tokenizer = tokenizer
        self._arguments = dict(template_arguments)
        self._has_chat_template = has_chat_template
        self._end: list[int] = []
        """The token that ends a turn of the assistant; empty without a template."""
        self._prefix: list[int] = []
        """The rendering of the made-up conversation, up to and with that token."""
        if has_chat_template:
            self._prepare()

    def context(self, messages: Sequence[Message], *, last_token: int | None) -> list[int]:
        """Return the tokens of these messages; `last_token` is the last sampled one, None before the first turn.

        Raise `ValueError` for messages that cannot stand there.
        """
        if not self._has_chat_template:
            text = "".join(message["content"] for message in messages)
            return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []
        if last_token is None:
            if messages:
                raise ValueError(
                    "add() before the first sample(): the prompt already ends where the model speaks; put it into the row, or "
                    "among the messages of restart()"
                )
            return []
        rendered = self._render([*_DUMMY, *messages], opens_turn=True)
        if rendered[: len(self._prefix)] != self._prefix:
            raise ValueError(f"the chat template changes earlier turns when a {messages[-1]['role']!r} message follows")
        bridge = rendered[len(self._prefix) :]
        # A turn that was cut has no end yet: the model reads it as context.
        return bridge if [last_token] == self._end else [*self._end, *bridge]

    def cut(self, text: str, max_tokens: int) -> str:
        """Return a text of at most `max_tokens` tokens, with a mark where its end was cut."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(token_ids) <= max_tokens:
            return text
        # A character may have been cut in its middle.
        kept = self._tokenizer.decode(token_ids[:max_tokens]).rstrip("\ufffd")
        return f"{kept}\n[{len(token_ids) - max_tokens} more tokens]"

    def opening(self, messages: str | Sequence[Message], tools: Sequence[Message] | None = None) -> list[int]:
        """Return the tokens of a conversation up to where the model speaks; a text is one message of the user.

        `tools` (JSON schemas) take the place of the environment's. Without a template, return the tokens of the contents, as of
        a prompt. Raise `ValueError` for messages that cannot be written.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        messages = [checked_message(message) for message in messages]
        if not self._has_chat_template:
            opening = encode_prompt(self._tokenizer, "".join(message["content"] for message in messages))
        else:
            opening = self._render(messages, opens_turn=True, **({} if tools is None else {"tools": list(tools) or None}))
        if not opening:
            raise ValueError("a sequence begins with at least one token")
        return opening

    def _prepare(self) -> None:
        if self._tokenizer.chat_template is None:
            raise SettingError(SETTING, True, "the tokenizer has no chat template", "Set it to false.")
        closed = self._render(_DUMMY, opens_turn=False)
        ends = [index for index, token in enumerate(closed) if token == self._tokenizer.eos_token_id]
        if not ends:
            problem = f"the template does not end a turn with {self._tokenizer.eos_token!r}, at which sampling stops"
            raise SettingError(SETTING, True, problem, "Give the tokenizer the eos_token with which its template ends turns.")
        self._end = [closed[ends[-1]]]
        self._prefix = closed[: ends[-1] + 1]
        first = self._render([*_DUMMY, _PROBE], opens_turn=True)
        if first != self._render([*_DUMMY, _PROBE], opens_turn=True):
            raise SettingError(SETTING, True, "the template gives another text each time: a date, or a random id", _CURE)
        if first[: len(self._prefix)] != self._prefix:
            raise SettingError(SETTING, True, "the template changes earlier turns when a message follows", _CURE)

    def _render(self, messages: Sequence[Message], *, opens_turn: bool, **more: Any) -> list[int]:
        arguments = {**self._arguments, **more}
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=opens_turn, return_dict=False, **arguments
            )
        # Templates are programs, and raise what they like.
        except Exception as error:
            raise ValueError(f"the chat template cannot write these messages: {error}") from error
        return [int(token) for token in rendered]


class NoRoom(Exception):  # noqa: N818, a state and no mistake of the program
    """Raised when no more token fits (`model.max_length`). Not caught, it ends the episode with its rewards so far."""


class Reply(NamedTuple):
    """One turn of the model."""

    text: str
    """The sampled text without special tokens; with a parser also without reasoning and tool calls."""
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    """`stop`: the model ended its turn. `length`: it was cut at `max_new_tokens`, or where no more tokens fit."""
    reasoning: str = ""
    """Read by `environment.reasoning_parser`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Read by `environment.tool_parser`. A turn that was cut calls no tool."""


class ChatEpisode:
    """One episode in the process that plays it."""

    def __init__(
        self,
        play: PlayEpisode,
        config: Config,
        send: Callable[[SampleTurn | Withdraw], None],
        open_url: Callable[["ChatEpisode"], str],
    ) -> None:
        """`config` bounds the tokens of each sequence, and of all; `send` reaches the actor."""
        self.play = play
        self.max_length = config.model.max_length
        self.rewards = 0.0
        """The sum of the rewards given so far."""
        self.turn_rewards: dict[int, float] = {}
        """Rewards given after the first turn was requested, by the number of the newest requested turn."""
        self.branch_rewards: dict[int, float] = {}
        """Rewards given to a sequence that had a turn, by the number of its last one."""
        self.newest_turns: dict[str, int] = {}
        """The last turn of each agent that the endpoint knows by a name."""
        self.metrics: dict[str, float] = {}
        """The metrics given so far."""
        self.num_calls = 0
        """The number of tool calls so far, in all sequences."""
        self._send = send
        self._open_url = open_url
        self._num_asked = 0
        """Turns asked for, which is the number of the next one."""
        self._replies: dict[int, asyncio.Future[TurnSampled]] = {}
        self.room = max_episode_tokens(config) - play.num_prompt_tokens
        """Tokens that still fit into all sequences, without those that turns may get which are being sampled."""
        self._has_ended = False

    @cached_property
    def url(self) -> str:
        """The base URL of the episode's endpoint, which is opened for it."""
        return self._open_url(self)

    def require_open(self, call: str) -> None:
        """Raise `RuntimeError`, which names the call, after the end of the episode."""
        if self._has_ended:
            raise RuntimeError(f"{call} after the end of the episode: its function has returned, or was cancelled")

    async def sample(self, continues: int | None, context: list[int], max_new_tokens: int) -> tuple[int, TurnSampled]:
        """Return the number of a new turn, and its tokens; `continues` is the number of a turn, `PROMPT`, or None for nothing.

        A call that is cancelled leaves no tokens.
        """
        self.require_open("sample()")
        number, taken = self._num_asked, len(context) + max_new_tokens
        back = 0 if continues is None else number - continues
        self._send(SampleTurn(episode=self.play.episode, back=back, context=context, max_new_tokens=max_new_tokens))
        self._num_asked += 1
        self.room -= taken
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            sampled = await reply
        except asyncio.CancelledError:
            self.room += taken
            if not self._has_ended:
                self._send(Withdraw(episode=self.play.episode, turn=number))
            raise
        finally:
            del self._replies[number]
        self.room += max_new_tokens - len(sampled.token_ids)
        return number, sampled

    def reward(self, value: float, branch: int | None) -> None:
        """Add to the reward of the episode, of the turn asked for last, and of the sequence that ends with the turn `branch`.

        What it depends on was asked for by now, in any sequence.
        """
        self.rewards += value
        if self._num_asked:
            last = self._num_asked - 1
            self.turn_rewards[last] = self.turn_rewards.get(last, 0.0) + value
        if branch is not None and branch != PROMPT:
            self.branch_rewards[branch] = self.branch_rewards.get(branch, 0.0) + value

    def take(self, sampled: TurnSampled) -> None:
        """Hand the actor's answer to the call that waits."""
        reply = self._replies.get(sampled.turn)
        if reply is not None and not reply.done():
            reply.set_result(sampled)

    def end(self) -> None:
        """Cancel the calls that still wait: the function has returned without them, or nobody waits for it any more."""
        self._has_ended = True
        for reply in self._replies.values():
            reply.cancel()


class Chat:
    """A sequence of an episode as its function sees it; `fork` and `restart` begin others of the same episode."""

    def __init__(
        self, episode: ChatEpisode, chat_format: ChatFormat, parser: TurnParser, tools: Sequence[ToolSchema] | None = None
    ) -> None:
        """Begin with the episode's prompt; `tools` take the place of the environment's."""
        self.key: str = episode.play.episode
        """Lease, index in the group and attempt: the same episode never has another key, nor two attempts the same one."""
        self.seed: int = episode.play.seed
        """Every episode of a group has the same seed, so that all of them play in the same world."""
        self.prompt: str = episode.play.prompt
        """The prompt as text."""
        self.is_evaluation: bool = episode.play.is_evaluation
        self._episode = episode
        self._format = chat_format
        self._parser = parser
        self._tools = tools
        self._continues: int | None = PROMPT
        """The turn that the next one continues; None for nothing, where a sequence was restarted."""
        self._num_tokens = episode.play.num_prompt_tokens
        """Tokens up to the end of that turn."""
        self._last_token: int | None = None
        """The last sampled one of them."""
        self._opening: list[int] = []
        """Tokens with which a restarted sequence begins, until its first turn."""
        self._added: list[Message] = []
        self._is_sampling = False

    @property
    def url(self) -> str:
        """The base URL of an endpoint for this episode, at which agents of OpenAI's and Anthropic's clients play it.

        It has sequences of its own, and works until the function returns.
        """
        return self._episode.url

    @property
    def room(self) -> int:
        """Tokens that still fit, without what was added since the last turn."""
        return min(self._episode.max_length - self._num_tokens, self._episode.room) - len(self._opening)

    @property
    def num_tokens(self) -> int:
        """Tokens of this sequence up to the end of its last turn."""
        return self._num_tokens

    def add(self, message: str | Message, content: str = "", *, max_tokens: int | None = None) -> None:
        """Add a message that the model reads before its next turn: a role and a text, or a whole message.

            chat.add("tool", "7")
            chat.add({"role": "tool", "content": "7", "tool_call_id": call.id, "name": call.name})

        Without a chat template the model reads the content as it is. The end of a content of more than `max_tokens` tokens is
        cut, and a mark says so.
        """
        self._episode.require_open("add()")
        checked = checked_message({"role": message, "content": content} if isinstance(message, str) else message)
        if max_tokens is not None:
            checked = {**checked, "content": self._format.cut(checked["content"], max_tokens)}
        self._added.append(checked)

    async def sample(self, max_new_tokens: int | None = None) -> Reply:
        """Return the model's next turn, of at most `max_new_tokens` tokens (`rollout.max_new_tokens`).

        Raise `NoRoom` when no token fits any more. While it waits, nothing of the engine is held. A call that is cancelled
        leaves no tokens, and what was added before it is still to be read.
        """
        if self._is_sampling:
            raise RuntimeError("sample() while another sample() of this sequence waits: take a fork() for each")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, less than 1")
        added = len(self._added)
        context = [*self._opening, *self._format.context(self._added, last_token=self._last_token)]
        room = self.room + len(self._opening) - len(context)
        if room < 1:
            raise NoRoom(
                f"{self._num_tokens} tokens and {len(context)} added ones; model.max_length is {self._episode.max_length}, and "
                f"all sequences of the episode have room for {self._episode.room}"
            )
        longest = min(max_new_tokens or room, self._episode.play.max_new_tokens, room)
        self._is_sampling = True
        try:
            number, sampled = await self._episode.sample(self._continues, context, longest)
        finally:
            self._is_sampling = False
        self._continues = number
        self._num_tokens += len(context) + len(sampled.token_ids)
        self._last_token = sampled.token_ids[-1]
        self._opening = []
        del self._added[:added]
        finish: Literal["stop", "length"] = "stop" if sampled.finish_reason == "stop" else "length"
        parsed = self._parser.parse(sampled.token_ids, finish, tools=self._tools, num_calls=self._episode.num_calls)
        self._episode.num_calls += len(parsed.tool_calls)
        return Reply(parsed.text, tuple(sampled.token_ids), finish, parsed.reasoning, parsed.tool_calls)

    def fork(self) -> Self:
        """Return a sequence of the same episode that goes on from here by itself, with what was added.

        Both may be sampled at once. Tokens up to here are trained once. A fork that is never sampled leaves no trace, so one
        that is kept is a place to come back to.
        """
        if self._is_sampling:
            raise RuntimeError("fork() while a sample() of this sequence waits")
        fork = type(self)(self._episode, self._format, self._parser, self._tools)
        fork._continues, fork._num_tokens, fork._last_token = self._continues, self._num_tokens, self._last_token
        fork._opening, fork._added = self._opening, [*self._added]
        return fork

    def restart(self, messages: str | Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> Self:
        """Return a sequence of the same episode that begins with these messages, and not with the prompt.

        They are written by the chat template, with `tools` (JSON schemas; None: this sequence's), up to where the model
        speaks. A text is one message of the user. Without a template the contents are read as they are.
        """
        tools = self._tools if tools is None else tools
        restarted = type(self)(self._episode, self._format, self._parser, tools)
        opening = self._format.opening(messages, tools)
        # The group shares the prompt's tokens; nothing is gained by a copy of them.
        if digest_of(opening) != self._episode.play.prompt_digest:
            restarted._continues, restarted._num_tokens, restarted._opening = None, 0, opening
        return restarted

    def reward(self, value: float, *, agent: str = "") -> None:
        """Add to the reward of the episode: a reward of the turn that was asked for last, and of this sequence.

        `advantage.turns = "to_go"` does not credit turns with the rewards that were given before they were asked for, and
        `"branch"` not with those given to other sequences. `agent`: give it to the sequence of the agent that asks `url` with
        this `X-Session-ID`; where it has asked nothing, the reward is the whole episode's.
        """
        self._episode.require_open("reward()")
        self._episode.reward(float(value), self._episode.newest_turns.get(agent) if agent else self._continues)

    def belong_to(self, agent: str) -> None:
        """Note that this sequence's last turn is this agent's."""
        assert self._continues is not None, "it has a turn"
        self._episode.newest_turns[agent] = self._continues

    def metric(self, name: str, value: float) -> None:
        """Give a number of the episode; steps show its mean as `reward_part/NAME`."""
        self._episode.require_open("metric()")
        self._episode.metrics[name] = float(value)
