"""OpenAI's Responses, with streams. Nothing is stored: each request has the whole history."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from offbeat.actor.environments.endpoint.calls import Call, Dialect, ModelAnswer, call_of, named_event, pieces
from offbeat.actor.environments.endpoint.chat_completions import write_problem
from offbeat.common.user_code.requests import Body, CallRefused, read_responses

_STORED = ("previous_response_id", "conversation", "prompt")
HARMLESS = frozenset({
    *_STORED, "background", "include", "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model",
    "moderation", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning",
    "safety_identifier", "service_tier", "store", "stream", "stream_options", "tools", "truncation", "user",
})  # fmt: skip


def read(body: Body) -> Call:
    """Return the call of a request's body."""
    for name in _STORED:
        if body.get(name) is not None:
            raise CallRefused(f"{name} is refused: nothing is stored. Send the whole history as input.", field=name)
    if body.get("background"):
        raise CallRefused("background is refused: wait for the answer, or stream it", field="background")
    messages, tools = read_responses(body)
    return call_of(body, messages, tools, "max_output_tokens")


def write(call: Call, answer: ModelAnswer) -> dict[str, Any]:
    """Return the body of an answer."""
    is_cut = answer.finish == "length"
    return {
        "id": f"resp_{answer.name}", "object": "response", "created_at": answer.created, "error": None, "model": call.model,
        "status": "incomplete" if is_cut else "completed", "output": _output(answer), "parallel_tool_calls": True,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None, "instructions": None, "metadata": {},
        "tool_choice": "auto", "temperature": None, "top_p": None,
        "tools": [{"type": "function", **tool["function"]} for tool in call.tools],
        "usage": {
            "input_tokens": answer.num_prompt_tokens, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.num_sampled_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
        },
    }  # fmt: skip


def stream(call: Call, answer: ModelAnswer) -> Iterator[bytes]:
    """Yield the response without its output, each item in pieces, and the whole response."""
    numbers = count()

    def event(kind: str, **fields: Any) -> bytes:
        return named_event(kind, sequence_number=next(numbers), **fields)

    response = write(call, answer)
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(response["output"]):
        place: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
        added = {**item, "status": "in_progress"}
        if item["type"] == "function_call":
            yield event("response.output_item.added", output_index=index, item={**added, "arguments": ""})
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            place["content_index"] = 0
            yield event("response.output_item.added", output_index=index, item={**added, "content": []})
            yield event("response.content_part.added", **place, part={**part, "text": ""})
            for piece in pieces(part["text"]):
                yield event("response.output_text.delta", **place, delta=piece, logprobs=[])
            yield event("response.output_text.done", **place, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{response['status']}", response=response)


RESPONSES = Dialect(("responses",), read, HARMLESS, write, stream, write_problem)


def _output(answer: ModelAnswer) -> list[dict[str, Any]]:
    text, calls = answer.message["content"], answer.message.get("tool_calls", ())
    status = "incomplete" if answer.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{answer.name}", "role": "assistant", "status": status, "content": [part]})
    for call in calls:
        items.append(
            {"type": "function_call", "id": f"fc_{answer.name}_{call['id']}", "call_id": call["id"], "status": status,
             "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        )  # fmt: skip
    return items
