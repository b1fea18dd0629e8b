"""Calls of agents as every API has them: a dialect reads its own JSON into a call, and writes the answer as its own JSON."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from offbeat.actor.environments.endpoint.message_tree import Message

PIECE = 256
"""Characters of a turn in one event of a stream."""

Body = Mapping[str, Any]
"""The JSON object of a request."""


class Refused(Exception):  # noqa: N818, an answer to an agent and no mistake of the program
    """A call that gets an error; the text says what to change."""

    def __init__(self, problem: str, *, field: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(problem)
        self.field = field
        self.status = status
        self.code = code
        """OpenAI's name for the problem, which agents look for."""


class Call(NamedTuple):
    """A request for the model's next turn."""

    model: str
    """The agent's name for the model, which the answer repeats."""
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    """In the form of OpenAI's chat completions."""
    max_new_tokens: int | None
    is_streamed: bool
    includes_usage: bool
    """True when the stream of chat completions ends with the numbers of tokens."""


class Answer(NamedTuple):
    """The model's turn."""

    name: str
    """Unique in the run; part of the ids in the answer."""
    created: int
    """Seconds since 1970."""
    message: Message
    finish: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: int
    num_sampled_tokens: int


class Dialect(NamedTuple):
    """The API of one provider."""

    paths: tuple[str, ...]
    """Behind the base URL; clients of one API differ."""
    read: Callable[[Body], Call]
    """Return the call; raise `Refused` for what is malformed. The fields of sampling are checked already."""
    harmless: frozenset[str]
    """Fields that `read` reads, or that change nothing in what is sampled."""
    write: Callable[[Call, Answer], dict[str, Any]]
    stream: Callable[[Call, Answer], Iterator[bytes]]
    """Yield the events of a stream, as server-sent events."""
    write_problem: Callable[[Refused], dict[str, Any]]


def text_of(content: object, field: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message: a text, or a list of parts with `type` and `text`; raise `Refused` for others."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(_text_of_part(part, f"{field}[{index}]", kinds) for index, part in enumerate(content))
        case _:
            raise Refused(f"{field} is neither a text nor a list of parts", field=field)


def pieces(text: str) -> Iterator[str]:
    """Yield a text in parts, as streams have it."""
    yield from (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call of a tool in the form of OpenAI's chat completions; `arguments` is JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(tool: Mapping[str, Any], field: str, *, parameters: str, kinds: Sequence[str | None]) -> dict[str, Any]:
    """Return a tool in the form of chat completions; raise `Refused` for one that the provider runs itself.

    Args:
        parameters: The name of the field with the schema.
        kinds: Types of tools that the agent runs.
    """
    if tool.get("type") not in kinds:
        raise Refused(f"{field} has the type {tool.get('type')!r}; only tools that the agent runs are here", field=field)
    function = {"name": text_field(tool, "name"), "parameters": tool.get(parameters) or {}}
    if tool.get("description"):
        function["description"] = text_field(tool, "description")
    return {"type": "function", "function": function}


def list_of_objects(value: object, field: str) -> list[Mapping[str, Any]]:
    """Return a list of JSON objects; raise `Refused` for anything else."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise Refused(f"{field} is not a list of objects", field=field)
    return value


def text_field(body: Body, name: str, default: str | None = None) -> str:
    """Return a text; raise `Refused` when it is none, or is missing and has no default."""
    value = body.get(name, default)
    if not isinstance(value, str):
        raise Refused(f"{name} is not a text" if name in body else f"{name} is missing", field=name)
    return value


def number_of_tokens(body: Body, *names: str) -> int | None:
    """Return the first of these fields that is given; raise `Refused` unless it is a positive integer."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise Refused(f"{name} = {value!r} is not a positive integer", field=name)
        return value
    return None


def _text_of_part(part: object, field: str, kinds: Sequence[str]) -> str:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in kinds:
            return text
        case {"type": str(kind)}:
            raise Refused(f"{field} has the type {kind!r}; the model reads text only", field=field)
        case _:
            raise Refused(f"{field} is no part of a message: an object with a type and a text", field=field)
