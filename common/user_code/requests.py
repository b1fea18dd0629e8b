"""Requests for a model's turn: the reading of their fields, and of OpenAI's Responses as a whole.

Agents send requests to the endpoint of an episode, where every API has a dialect of its own. Rows of NeMo Gym hold requests of
Responses, which the learner renders as the endpoint reads them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Body = Mapping[str, Any]
"""The JSON object of a request."""
Message = Mapping[str, Any]
"""A message in the form of OpenAI's chat completions: `role`, `content` as text, and what else a chat template knows, such as
`tool_calls`, `tool_call_id` and `reasoning_content`."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXTS = ("input_text", "output_text", "text", "refusal")


class CallRefused(Exception):  # noqa: N818, an answer to an agent and no mistake of the program
    """A call that gets an error; the text says what to change."""

    def __init__(self, problem: str, *, field: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(problem)
        self.field = field
        self.status = status
        self.code = code
        """OpenAI's name for the problem, which agents look for."""


def read_responses(body: Body) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return the messages and the tools of a request of Responses, in the form of chat completions; raise `CallRefused`."""
    instructions, given = body.get("instructions"), body.get("input")
    messages: list[Message] = [{"role": "system", "content": text_of(instructions, "instructions")}] if instructions else []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of_objects(given, "input")
    for index, item in enumerate(items):
        _append(messages, item, f"input[{index}]")
    if not messages:
        raise CallRefused("input is empty", field="input")
    return messages, function_tools(body, parameters="parameters", kinds=("function",))


def _append(messages: list[Message], item: Mapping[str, Any], field: str) -> None:
    """Add an item; what the model has called in one turn are several items, and one message."""
    match item:
        case {"type": "reasoning"}:
            pass
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            call = function_call(call_id, name, arguments)
            if messages and messages[-1]["role"] == "assistant":
                last = messages.pop()
                messages.append({**last, "tool_calls": [*last.get("tool_calls", ()), call]})
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
            messages.append({"role": "tool", "content": text_of(output, f"{field}.output", _TEXTS), "tool_call_id": call_id})
        # Rows of tables hold every field of any item, most of them null.
        case {"role": str(role), "content": content} if role in ROLES and item.get("type") in (None, "message"):
            text = text_of(content, f"{field}.content", _TEXTS)
            # Templates do not know OpenAI's newer name.
            messages.append({"role": "system" if role == "developer" else role, "content": text})
        case _:
            raise CallRefused(f"{field} has the type {item.get('type')!r}, which the model cannot read here", field=field)


def text_of(content: object, field: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message: a text, or a list of parts with `type` and `text`; raise `CallRefused` for others."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(_text_of_part(part, f"{field}[{index}]", kinds) for index, part in enumerate(content))
        case _:
            raise CallRefused(f"{field} is neither a text nor a list of parts", field=field)


def _text_of_part(part: object, field: str, kinds: Sequence[str]) -> str:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in kinds:
            return text
        case {"type": str(kind)}:
            raise CallRefused(f"{field} has the type {kind!r}; the model reads text only", field=field)
        case _:
            raise CallRefused(f"{field} is no part of a message: an object with a type and a text", field=field)


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call of a tool in the form of OpenAI's chat completions; `arguments` is JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tools(body: Body, *, parameters: str, kinds: Sequence[str | None]) -> list[dict[str, Any]]:
    """Return the tools in the form of chat completions; raise `CallRefused` for one that the provider runs itself.

    Args:
        parameters: The name of the field with the schema.
        kinds: Types of tools that the agent runs.
    """
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(list_of_objects(body.get("tools") or [], "tools")):
        if tool.get("type") not in kinds:
            field = f"tools[{index}]"
            raise CallRefused(
                f"{field} has the type {tool.get('type')!r}; only tools that the agent runs are here", field=field
            )
        function = {"name": text_field(tool, "name"), "parameters": tool.get(parameters) or {}}
        if tool.get("description"):
            function["description"] = text_field(tool, "description")
        tools.append({"type": "function", "function": function})
    return tools


def list_of_objects(value: object, field: str) -> list[Mapping[str, Any]]:
    """Return a list of JSON objects; raise `CallRefused` for anything else."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise CallRefused(f"{field} is not a list of objects", field=field)
    return value


def text_field(body: Body, name: str, default: str | None = None) -> str:
    """Return a text; raise `CallRefused` when it is none, or is missing and has no default."""
    value = body.get(name, default)
    if not isinstance(value, str):
        raise CallRefused(f"{name} is not a text" if name in body else f"{name} is missing", field=name)
    return value


def for_template(message: Message) -> Message:
    """Return a message with the arguments of its tool calls as objects: chat templates write them as JSON themselves."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments_of(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def arguments_of(arguments: str) -> object:
    """Return the arguments of a tool call, which are JSON as a rule; the text itself where they are none."""
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        # The model may write arguments that are no JSON.
        return arguments
