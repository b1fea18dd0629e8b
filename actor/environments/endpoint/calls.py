"""Calls of agents as every API has them: a dialect reads its own JSON into a call, and writes the answer as its own JSON.

Fields that would change what is sampled are refused, or ignored where the run says so: the learner needs the log-probs of the
policy that sampled each token, and another temperature, a penalty or a grammar would make it another policy.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from offbeat.common.user_code.requests import Body, CallRefused, Message, text_field

PIECE = 256
"""Characters of a turn in one event of a stream."""
SETTING = "environment.sampling"
_SHOWN = 80
"""Longest value in an error, in characters."""


class Call(NamedTuple):
    """A request for the model's next turn."""

    model: str
    """The agent's name for the model, which the answer repeats."""
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    """The tools, in the form of OpenAI's chat completions."""
    max_new_tokens: int | None
    is_streamed: bool
    includes_usage: bool = True
    """True when the stream of chat completions ends with the numbers of tokens."""


class ModelAnswer(NamedTuple):
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
    """Return the call; raise `CallRefused` for what is malformed. The fields of sampling are checked already."""
    harmless: frozenset[str]
    """Fields that `read` reads, or that change nothing in what is sampled."""
    write: Callable[[Call, ModelAnswer], dict[str, Any]]
    stream: Callable[[Call, ModelAnswer], Iterator[bytes]]
    """Yield the events of a stream, as server-sent events."""
    write_problem: Callable[[CallRefused], dict[str, Any]]


def pieces(text: str) -> Iterator[str]:
    """Yield a text in parts, as streams have it."""
    yield from (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def named_event(kind: str, **fields: Any) -> bytes:
    """Return a server-sent event whose name is the type of its data, too."""
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"


def call_of(body: Body, messages: Iterable[Message], tools: Iterable[Mapping[str, Any]], *limits: str) -> Call:
    """Return the call of a request with these messages and tools; `limits` are the fields that bound the tokens of the turn."""
    model, is_streamed = text_field(body, "model", "policy"), body.get("stream") is True
    return Call(model, tuple(messages), tuple(tools), _number_of_tokens(body, *limits), is_streamed)


def _number_of_tokens(body: Body, *names: str) -> int | None:
    """Return the first of these fields that is given; raise `CallRefused` unless it is a positive integer."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise CallRefused(f"{name} = {value!r} is not a positive integer", field=name)
        return value
    return None


class FieldRule(NamedTuple):
    """Values under which a field changes nothing, and what to do about others."""

    neutral: tuple[object, ...]
    cure: str


_LEAVE_OUT = "Leave it out."
_CUT = "truncated sampling is not the policy that is trained"

_FORM = "Ask for the form in the prompt, and check it in the function that gives the reward."
_RULES = {
    "top_p": FieldRule((1,), f"{_LEAVE_OUT} Only 1 is allowed: {_CUT}."),
    "top_k": FieldRule((-1, 0), f"{_LEAVE_OUT} Only -1 is allowed: {_CUT}."),
    "min_p": FieldRule((0,), f"{_LEAVE_OUT} Only 0 is allowed: {_CUT}."),
    "n": FieldRule((1,), "Ask once for each turn; the run samples rollout.group_size episodes of each row."),
    "seed": FieldRule((), f"{_LEAVE_OUT} Turns of a group must differ."),
    "logit_bias": FieldRule(({},), _LEAVE_OUT),
    "frequency_penalty": FieldRule((0,), _LEAVE_OUT),
    "presence_penalty": FieldRule((0,), _LEAVE_OUT),
    "repetition_penalty": FieldRule((1,), _LEAVE_OUT),
    "response_format": FieldRule(({"type": "text"},), _FORM),
    "output_config": FieldRule((), _FORM),
    "text": FieldRule((), _FORM),
    "stop": FieldRule(([], ""), "Cut the text in the agent; sampling stops at the end of a turn."),
    "stop_sequences": FieldRule(([],), "Cut the text in the agent; sampling stops at the end of a turn."),
    "tool_choice": FieldRule(
        ("auto",), "Use auto: a forced call is not the model's own choice. Without a choice, give no tools."
    ),
    "logprobs": FieldRule((False,), "Agents do not see log-probs; the actor keeps them."),
    "top_logprobs": FieldRule((0,), "Agents do not see log-probs; the actor keeps them."),
    "functions": FieldRule(([],), "Give tools instead."),
    "function_call": FieldRule(("auto", "none"), "Give tools instead."),
    "modalities": FieldRule((["text"],), "The model writes text only."),
    "audio": FieldRule((), "The model writes text only."),
}


def check(body: Mapping[str, Any], dialect: Dialect, *, temperature: float, ignores: bool) -> list[str]:
    """Return the fields that are ignored; raise `CallRefused` at the first one that must not be there.

    Args:
        temperature: The run's; the only one that is allowed.
        ignores: Ignore such fields instead (`environment.sampling = "override"`).
    """
    ignored: list[str] = []
    for name, value in body.items():
        if name in dialect.harmless or value is None:
            continue
        if name == "temperature":
            rule = FieldRule((temperature,), f"Leave it out, or set it to {temperature:g} (rollout.temperature).")
        else:
            rule = _RULES.get(name, FieldRule((), "Leave it out: this field is not known here."))
        if _is_neutral(name, value, rule):
            continue
        if not ignores:
            shown = repr(value)
            shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
            cure = f'{rule.cure} Or set {SETTING} = "override" in the run, which ignores such fields.'
            raise CallRefused(f"{name} = {shown} is refused while the model is trained. {cure}", field=name)
        ignored.append(name)
    return ignored


def _is_neutral(name: str, value: object, rule: FieldRule) -> bool:
    match name, value:
        case "tool_choice", {"type": "auto"}:
            return True
        case ("text", {"format": {"type": "text"} | None}) | ("output_config", {"format": None}):
            return True
        case (("text" | "output_config"), dict()) if "format" not in value:
            return True
        case _:
            # True equals 1 in Python, and is no number here.
            return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in rule.neutral)
