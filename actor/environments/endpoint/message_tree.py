"""The messages of an episode's requests as a tree, which says which of the model's turns a request continues.

    request 1   user ─ A1
    request 2   user ─ A1 ─ tool ─ A2                   continues A1
    request 3   user ─ A1 ─ other ─ A3                  continues A1 too: two sequences with one beginning
    request 4   user ─ edited ─ tool ─ A4               a history that the model has not written: a new sequence
    request 5   system' ─ user' ─ A5                    a sub-agent: a new sequence

A node is a message; one that the model wrote keeps the tokens that were sampled, behind which a request goes on.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

Message = Mapping[str, Any]
"""A message in the form of OpenAI's chat completions: `role`, `content` as text, perhaps `tool_calls` and `tool_call_id`."""

T = TypeVar("T")


@dataclass
class _Node(Generic[T]):
    children: dict[bytes, "_Node[T]"] = field(default_factory=dict)
    turn: T | None = None
    """The model's turn that this message is."""


class MessageTree(Generic[T]):
    """The messages that are known, and which of them the model wrote."""

    def __init__(self) -> None:
        self._roots: dict[bytes, _Node[T]] = {}
        """One root for each set of tools, because templates write tools in front of all messages."""

    def find(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[T | None, int]:
        """Return the model's last turn in these messages with a history that is known, and the number of messages up to it."""
        node = self._roots.get(digest(tools))
        found: tuple[T | None, int] = None, 0
        for number, message in enumerate(messages, start=1):
            node = node.children.get(key_of(message)) if node is not None else None
            if node is None:
                break
            if node.turn is not None:
                found = node.turn, number
        return found

    def put(self, messages: Sequence[Message], tools: Sequence[Any], reply: Message, turn: T) -> None:
        """Note that the model has answered these messages with `reply`, in this turn."""
        node = self._roots.setdefault(digest(tools), _Node())
        for message in (*messages, reply):
            node = node.children.setdefault(key_of(message), _Node())
        node.turn = turn


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


def arguments_of(arguments: str) -> object:
    """Return the arguments of a tool call, which are JSON as a rule; the text itself where they are none."""
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        # The model may write arguments that are no JSON.
        return arguments
