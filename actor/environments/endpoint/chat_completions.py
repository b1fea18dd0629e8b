"""OpenAI's chat completions, with streams."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from offbeat.actor.environments.endpoint.calls import Call, Dialect, ModelAnswer, call_of, pieces
from offbeat.common.user_code.requests import (
    ROLES,
    Body,
    CallRefused,
    Message,
    function_call,
    list_of_objects,
    text_field,
    text_of,
)

HARMLESS = frozenset({
    "messages", "model", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options", "parallel_tool_calls",
    "metadata", "moderation", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "reasoning_effort", "safety_identifier", "service_tier", "store", "user", "verbosity",
})  # fmt: skip


def read(body: Body) -> Call:
    """Return the call of a request's body."""
    objects = list_of_objects(body.get("messages"), "messages")
    if not objects:
        raise CallRefused("messages is empty", field="messages")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise CallRefused("stream_options is not an object", field="stream_options")
    messages = (_message(one, f"messages[{index}]") for index, one in enumerate(objects))
    tools = (_tool(one, f"tools[{i}]") for i, one in enumerate(list_of_objects(body.get("tools") or [], "tools")))
    call = call_of(body, messages, tools, "max_completion_tokens", "max_tokens")
    return call._replace(includes_usage=options.get("include_usage") is True)


def write(call: Call, answer: ModelAnswer) -> dict[str, Any]:
    """Return the body of an answer."""
    choice = {"index": 0, "message": {"refusal": None, **answer.message}, "finish_reason": answer.finish, "logprobs": None}
    return {**_head(call, answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def stream(call: Call, answer: ModelAnswer) -> Iterator[bytes]:
    """Yield role, pieces of reasoning and text, tool calls, the reason of the end, the usage if asked for, and a last mark."""
    yield _chunk(call, answer, {"role": "assistant", "content": ""})
    for name in ("reasoning_content", "content"):
        for piece in pieces(answer.message.get(name, "")):
            yield _chunk(call, answer, {name: piece})
    for index, one in enumerate(answer.message.get("tool_calls", ())):
        yield _chunk(call, answer, {"tool_calls": [{"index": index, **one}]})
    yield _chunk(call, answer, {}, finish=answer.finish)
    if call.includes_usage:
        yield _event({**_head(call, answer, "chat.completion.chunk"), "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def write_problem(refused: CallRefused) -> dict[str, Any]:
    """Return the body of an error."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.field, "code": refused.code}}


CHAT_COMPLETIONS = Dialect(("chat/completions",), read, HARMLESS, write, stream, write_problem)


def _message(one: Mapping[str, Any], field: str) -> Message:
    role = one.get("role")
    if role not in ROLES:
        raise CallRefused(f"{field}.role = {role!r} is none of {', '.join(ROLES)}", field=f"{field}.role")
    # Templates do not know OpenAI's newer name.
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    message["content"] = text_of(one.get("content"), f"{field}.content", ("text", "refusal"))
    if one.get("tool_calls"):
        message["tool_calls"] = [
            _tool_call(call, f"{field}.tool_calls[{index}]")
            for index, call in enumerate(list_of_objects(one["tool_calls"], f"{field}.tool_calls"))
        ]
    for name in ("tool_call_id", "name"):
        if one.get(name) is not None:
            message[name] = text_field(one, name)
    return message


def _tool(tool: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    match tool:
        case {"function": {"name": str()}} if tool.get("type", "function") == "function":
            return tool
        case _:
            raise CallRefused(f"{field} is no tool: it needs the type 'function' and the text function.name", field=field)


def _tool_call(call: Mapping[str, Any], field: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            return function_call(str(call.get("id", "")), name, arguments)
        case _:
            raise CallRefused(f"{field} is no call: it needs the texts function.name and function.arguments", field=field)


def _chunk(call: Call, answer: ModelAnswer, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    return _event({**_head(call, answer, "chat.completion.chunk"), "choices": [choice]})


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _head(call: Call, answer: ModelAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.name}", "object": kind, "created": answer.created, "model": call.model}


def _usage(answer: ModelAnswer) -> dict[str, int]:
    total = answer.num_prompt_tokens + answer.num_sampled_tokens
    return {"prompt_tokens": answer.num_prompt_tokens, "completion_tokens": answer.num_sampled_tokens, "total_tokens": total}
