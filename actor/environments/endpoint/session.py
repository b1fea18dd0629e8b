"""The calls of one episode's agents: each becomes a turn of one of the episode's sequences.

    call -> MessageTree: which sequence -> its new messages -> sample() -> answer

Consumes: calls. Waits for: the actor's turns. Unblocked by: the end of the episode, after which every call is refused with 410.
"""

import asyncio
import functools
import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from offbeat.actor.environments.chat import Chat, NoRoom, Reply
from offbeat.actor.environments.endpoint.calls import Call, ModelAnswer
from offbeat.common.user_code.requests import CallRefused, Message, arguments_of, for_template, function_call

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_OPEN_CALLS = 64
"""Most calls of an episode that wait at once. More are asked to come again (429), which clients do by themselves."""


@dataclass
class _Exchange:
    """A call and its answer."""

    digest: bytes
    task: "asyncio.Task[ModelAnswer] | None" = None
    num_waiting: int = 0
    """Clients that wait for the answer."""
    is_delivered: bool = False

    @property
    def is_abandoned(self) -> bool:
        """True when every client has hung up before it had the answer."""
        return not self.is_delivered and self.num_waiting == 0


@dataclass
class _Turn:
    after: Chat
    """The place behind the turn; only forks of it go on."""
    exchange: _Exchange


class AgentSession:
    """The calls of one episode."""

    def __init__(self, chat: Chat, max_length: int) -> None:
        """Begin no sequence yet: those of the calls are restarts of `chat`. `max_length` is `model.max_length`."""
        self._chat = chat
        self._max_length = max_length
        self._tree: MessageTree[_Turn] = MessageTree()
        self._exchanges: dict[bytes, _Exchange] = {}
        """Requests and answers by digest, kept until the agent has used the answer."""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_answers = 0
        self.num_open = 0
        """Calls whose clients wait."""
        self.is_out_of_room = False
        """True when the last call was refused because no token fitted."""
        self.num_overrides = 0
        """Calls in which fields were ignored (`environment.sampling = "override"`)."""
        self.num_repeated = 0
        """Calls that got an answer which had been delivered before."""

    async def answer(self, call: Call, digest: bytes, *, is_first_try: bool, agent: str = "") -> ModelAnswer:
        """Return the model's turn. Raise `CallRefused`.

        A call that was made before gets the answer it had, or will have, as long as the agent has not gone on from that:
        clients repeat what a broken connection or a time limit has lost. A turn whose client has hung up is sampled to its end
        and kept, because leaving out turns that took too long would train on short ones.

        Args:
            digest: Of the request: the same for repeated ones.
            is_first_try: The client says that it does not repeat. Then the agent asks twice on purpose, unless it has hung up
                before.
            agent: The name that the agent gives itself, for rewards of its own; empty for none.
        """
        if self._over.done():
            raise over()
        if self.num_open >= MAX_OPEN_CALLS:
            raise CallRefused(f"{MAX_OPEN_CALLS} calls of this episode wait already; try again later", status=429)
        exchange = self._exchanges.get(digest)
        if exchange is None or (is_first_try and not exchange.is_abandoned):
            exchange = self._exchanges[digest] = _Exchange(digest)
            exchange.task = asyncio.get_running_loop().create_task(self._sample(call, exchange, agent))
            # An answer that nobody waits for any more may be a refusal.
            exchange.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        elif exchange.is_delivered:
            self.num_repeated += 1
            _warn_of_repeated()
        assert exchange.task is not None
        exchange.num_waiting += 1
        self.num_open += 1
        try:
            await asyncio.wait((exchange.task, self._over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            exchange.num_waiting -= 1
            self.num_open -= 1
        if self._over.done() or exchange.task.cancelled():
            raise over()
        exchange.is_delivered = True
        return exchange.task.result()

    def end(self) -> None:
        """Refuse the calls that wait and those that come: the episode is over."""
        if not self._over.done():
            self._over.set_result(None)
        for exchange in self._exchanges.values():
            if exchange.task is not None:
                exchange.task.cancel()

    async def _sample(self, call: Call, exchange: _Exchange, agent: str) -> ModelAnswer:
        try:
            conversation, reply = await self._next_turn(call, agent)
        except NoRoom as error:
            self._forget(exchange)
            self.is_out_of_room = True
            # In the words that agents look for: OpenAI's and Anthropic's.
            problem = f"prompt is too long. This model's maximum context length is {self._max_length} tokens: {error}"
            raise CallRefused(problem, field="messages", code="context_length_exceeded") from error
        except ValueError as error:
            self._forget(exchange)
            raise CallRefused(str(error), field="messages") from error
        self.is_out_of_room = False
        if agent:
            conversation.belong_to(agent)
        message = _message(reply)
        self._tree.put(call.messages, call.tools, message, _Turn(conversation, exchange), agent)
        self._num_answers += 1
        return ModelAnswer(
            name=f"{self._chat.key.replace('/', '-')}-{self._num_answers}",
            created=int(time.time()),
            message=message,
            finish="tool_calls" if reply.tool_calls else reply.finish_reason,
            num_prompt_tokens=conversation.num_tokens - len(reply.token_ids),
            num_sampled_tokens=len(reply.token_ids),
        )

    async def _next_turn(self, call: Call, agent: str) -> tuple[Chat, Reply]:
        turn, num_known = self._tree.find(call.messages, call.tools, agent)
        if turn is not None:
            # Nobody repeats the call whose answer is in this one.
            self._forget(turn.exchange)
            conversation = turn.after.fork()
            for message in call.messages[num_known:]:
                conversation.add(for_template(message))
            try:
                return conversation, await conversation.sample(call.max_new_tokens)
            except ValueError:
                # The template cannot put these messages behind a turn: a system message, say. It may write them from the start.
                pass
        conversation = self._chat.restart([for_template(message) for message in call.messages], call.tools or None)
        return conversation, await conversation.sample(call.max_new_tokens)

    def _forget(self, exchange: _Exchange) -> None:
        if self._exchanges.get(exchange.digest) is exchange:
            del self._exchanges[exchange.digest]


@functools.cache
def _warn_of_repeated() -> None:
    """Warn once in this process."""
    logger.warning(
        "an agent has sent a request again, and got the answer that it had got: without a retry counter it cannot be told from "
        "a client that lost it. If the agent samples several answers to one request, set environment.identical_requests = "
        '"sample_again", or let it send the header `x-stainless-retry-count: 0`, as the SDKs of OpenAI and Anthropic do. Later '
        "ones are only counted (reward_part/repeated_requests)"
    )


def _message(reply: Reply) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [function_call(one.id, one.name, one.arguments) for one in reply.tool_calls]
    return message


def over() -> CallRefused:
    """Return the refusal of a call to an episode that has ended."""
    return CallRefused("this episode is over: its function has returned, or it was cancelled", status=410, code="episode_over")


@dataclass
class _Node(Generic[T]):
    children: dict[bytes, "_Node[T]"] = field(default_factory=dict)
    turns: dict[str, T] = field(default_factory=dict)
    """The model's turns that this message is, by the agent that asked for them, the newest last."""


class MessageTree(Generic[T]):
    """The messages of an episode's requests, which say which of the model's turns a request continues.

        request 1   user ─ A1
        request 2   user ─ A1 ─ tool ─ A2                   continues A1
        request 3   user ─ A1 ─ other ─ A3                  continues A1 too: two sequences with one beginning
        request 4   user ─ edited ─ tool ─ A4               a history that the model has not written: a new sequence
        request 5   system' ─ user' ─ A5                    a sub-agent: a new sequence

    A node is a message; one that the model wrote keeps the tokens that were sampled, behind which a request goes on.
    """

    def __init__(self) -> None:
        self._roots: dict[bytes, _Node[T]] = {}
        """One root for each set of tools, because templates write tools in front of all messages."""

    def find(self, messages: Sequence[Message], tools: Sequence[Any], agent: str = "") -> tuple[T | None, int]:
        """Return the model's last turn in these messages with a history that is known, and the number of messages up to it.

        Of turns that are the same message, it is the agent's own, else the newest.
        """
        node = self._roots.get(digest(tools))
        found: tuple[T | None, int] = None, 0
        for number, message in enumerate(messages, start=1):
            node = node.children.get(key_of(message)) if node is not None else None
            if node is None:
                break
            if node.turns:
                found = node.turns.get(agent, [*node.turns.values()][-1]), number
        return found

    def put(self, messages: Sequence[Message], tools: Sequence[Any], reply: Message, turn: T, agent: str = "") -> None:
        """Note that the model has answered these messages with `reply`, in this turn."""
        node = self._roots.setdefault(digest(tools), _Node())
        for message in (*messages, reply):
            node = node.children.setdefault(key_of(message), _Node())
        node.turns.pop(agent, None)
        node.turns[agent] = turn


def key_of(message: Message) -> bytes:
    """Return what two messages have in common that are the same to the model.

    Agents send a reply back in another spelling: white space around its text trimmed, arguments of a tool call with other
    spaces or in another order, without reasoning, with other ids.
    """
    role, content = message["role"], message.get("content") or ""
    if role != "assistant":
        return digest([role, content, message.get("name")])
    calls = [
        (call["function"]["name"], arguments_of(call["function"]["arguments"])) for call in message.get("tool_calls") or ()
    ]
    return digest([role, content.strip(), calls])


def digest(value: object) -> bytes:
    """Return a hash of a JSON value that does not depend on the order of its keys."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).digest()
