"""Anthropic's Messages, with streams."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from offbeat.actor.environments.endpoint.calls import Call, Dialect, ModelAnswer, call_of, named_event, pieces
from offbeat.common.user_code.requests import (
    Body,
    CallRefused,
    Message,
    arguments_of,
    function_call,
    function_tools,
    list_of_objects,
    text_of,
)

HARMLESS = frozenset({
    "messages", "model", "system", "tools", "max_tokens", "stream", "cache_control", "container", "diagnostics",
    "inference_geo", "metadata", "service_tier", "speed", "thinking", "user_profile_id", "workspace_id",
})  # fmt: skip
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {408: "timeout_error", 410: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


def read(body: Body) -> Call:
    """Return the call of a request's body."""
    system = text_of(body.get("system"), "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, one in enumerate(list_of_objects(body.get("messages"), "messages")):
        messages += _messages(one, f"messages[{index}]")
    if not messages or messages[-1]["role"] == "assistant":
        raise CallRefused("messages does not end with a message to the model, which samples its turns whole", field="messages")
    tools = function_tools(body, parameters="input_schema", kinds=(None, "custom"))
    return call_of(body, messages, tools, "max_tokens")


def write(call: Call, answer: ModelAnswer) -> dict[str, Any]:
    """Return the body of an answer."""
    usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_sampled_tokens}
    return {
        "id": f"msg_{answer.name}", "type": "message", "role": "assistant", "model": call.model, "content": _blocks(answer),
        "stop_reason": _STOP_REASONS[answer.finish], "stop_sequence": None, "usage": usage,
    }  # fmt: skip


def stream(call: Call, answer: ModelAnswer) -> Iterator[bytes]:
    """Yield the message without its content, each block in pieces, the reason of the end, and the end."""
    message = write(call, answer)
    begun = {**message, "content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 0}}
    yield named_event("message_start", message=begun)
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            yield named_event("content_block_start", index=index, content_block={"type": "text", "text": ""})
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        else:
            yield named_event("content_block_start", index=index, content_block={**block, "input": {}})
            deltas = [{"type": "input_json_delta", "partial_json": msgspec.json.encode(block["input"]).decode()}]
        for delta in deltas:
            yield named_event("content_block_delta", index=index, delta=delta)
        yield named_event("content_block_stop", index=index)
    end = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield named_event("message_delta", delta=end, usage={"output_tokens": answer.num_sampled_tokens})
    yield named_event("message_stop")


def write_problem(refused: CallRefused) -> dict[str, Any]:
    """Return the body of an error."""
    return {"type": "error", "error": {"type": _ERRORS.get(refused.status, "invalid_request_error"), "message": str(refused)}}


# Clients of Anthropic's put the version into the path themselves.
ANTHROPIC_MESSAGES = Dialect(("messages", "v1/messages"), read, HARMLESS, write, stream, write_problem)


def _messages(one: Mapping[str, Any], field: str) -> Iterator[Message]:
    """Yield the messages that are in one of Anthropic's: results of tools are blocks of the user's there."""
    role, content = one.get("role"), one.get("content")
    if role not in ("user", "assistant"):
        raise CallRefused(f"{field}.role = {role!r} is neither user nor assistant", field=f"{field}.role")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list_of_objects(content, f"{field}.content")
    text: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{field}.content[{index}]"
        match role, block:
            case _, {"type": "text"}:
                text.append(text_of([block], place))
            case "assistant", {"type": "thinking" | "redacted_thinking"}:
                pass
            case "assistant", {"type": "tool_use", "id": str(call_id), "name": str(name), "input": arguments}:
                calls.append(function_call(call_id, name, msgspec.json.encode(arguments).decode()))
            case "user", {"type": "tool_result", "tool_use_id": str(call_id)}:
                if text:
                    yield {"role": "user", "content": "".join(text)}
                    text.clear()
                yield {"role": "tool", "content": text_of(block.get("content"), place), "tool_call_id": call_id}
            case _:
                raise CallRefused(f"{place} has the type {block.get('type')!r}, which the model cannot read here", field=place)
    if role == "assistant":
        yield {"role": "assistant", "content": "".join(text), **({"tool_calls": calls} if calls else {})}
    elif text:
        yield {"role": "user", "content": "".join(text)}


def _blocks(answer: ModelAnswer) -> list[dict[str, Any]]:
    text, calls = answer.message["content"], answer.message.get("tool_calls", ())
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
    for call in calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])})
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """Return a tool's arguments as an object; those that are none, which the model may write, in one."""
    value = arguments_of(arguments)
    return value if isinstance(value, dict) else {"arguments": arguments}
