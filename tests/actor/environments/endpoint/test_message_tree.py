"""Requests of any conversation go on from the turn that holds their history, whatever agents rewrite."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.actor.environments.endpoint.anthropic_messages import ANTHROPIC_MESSAGES
from offbeat.actor.environments.endpoint.calls import Call, ModelAnswer
from offbeat.actor.environments.endpoint.session import MessageTree, key_of
from offbeat.common.user_code.requests import Message, for_template, function_call


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def wrote(text: str, *calls: tuple[str, str, str]) -> Message:
    named = [{"id": id_, "type": "function", "function": {"name": name, "arguments": json}} for id_, name, json in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": named} if named else {})}


@dataclass(eq=False)
class Turn:
    """A turn of the model as the reference keeps it: its whole history, and the text up to its end as it was sampled."""

    tools: tuple[str, ...]
    messages: list[Message]
    text: str


def rendered(messages: list[Message]) -> str:
    return "".join(f"<{one['role']}>{one['content']}" for one in messages)


def alike(one: Message, other: Message) -> bool:
    """Compare as a reader would: an agent may trim the model's text."""
    texts = [message["content"].strip() if message["role"] == "assistant" else message["content"] for message in (one, other)]
    return one["role"] == other["role"] and texts[0] == texts[1]


def naive(turns: list[Turn], messages: list[Message], tools: tuple[str, ...]) -> Turn | None:
    """Return the newest turn with the longest history that these messages begin with."""
    fitting = [
        turn
        for turn in reversed(turns)
        if turn.tools == tools and len(turn.messages) <= len(messages) and all(map(alike, turn.messages, messages))
    ]
    return max(fitting, key=lambda turn: len(turn.messages), default=None)


SHORT = st.sampled_from(["", "x", "y", " y"])
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["go on", "rewrite", "compact", "repeat", "sub-agent", "trim"]),
        st.integers(0, 9),
        SHORT,
        st.sampled_from([(), ("look",)]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(ACTIONS)
def test_request_goes_on_from_the_turn_that_a_search_of_all_histories_finds(
    actions: list[tuple[str, int, str, tuple[str, ...]]],
) -> None:
    tree: MessageTree[Turn] = MessageTree()
    turns: list[Turn] = []
    histories: list[list[Message]] = [[user("start")]]
    for number, (kind, which, word, tools) in enumerate(actions):
        messages = next_request(histories[which % len(histories)], kind, which, word)
        expected = naive(turns, messages, tools)
        found, num_known = tree.find(messages, tools)
        assert found is expected
        assert num_known == (len(expected.messages) if expected else 0)
        prompt = (found.text if found else "") + rendered(messages[num_known:])
        # The prompt is the history of this request, with the model's turns as they were sampled.
        assert "".join(prompt.split()) == "".join(rendered(messages).split())
        text = f" {'ab'[number % 2]}{'!' * (number % 3)} "
        turns.append(Turn(tools, [*messages, wrote(text)], f"{prompt}<assistant>{text}"))
        tree.put(messages, tools, wrote(text), turns[-1])
        histories.append(turns[-1].messages)


def next_request(history: list[Message], kind: str, which: int, word: str) -> list[Message]:
    match kind:
        case "rewrite":
            changed = which % len(history)
            return [*history[:changed], {**history[changed], "content": word}, *history[changed + 1 :], user("z")]
        case "compact":
            return [user(f"summary {word}"), *history[-(which % 3) or len(history) :], user("z")]
        case "repeat":
            return list(history)
        case "sub-agent":
            return [{"role": "system", "content": word}, user("z")]
        case "trim":
            return [*({**one, "content": one["content"].strip()} for one in history), user(word)]
        case _:
            return [*history, user(word)]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (wrote("", ("1", "f", '{"a": 1, "b": [2]}')), wrote("", ("2", "f", '{"b":[2],"a":1}')), True),
        (wrote("", ("1", "f", '{"a": 1}')), wrote("", ("1", "f", '{"a": 2}')), False),
        (wrote("", ("1", "f", "{}")), wrote("", ("1", "g", "{}")), False),
        (wrote("", ("1", "f", "{half")), wrote("", ("1", "f", "{half")), True),
        (wrote("a"), {**wrote("a\n"), "reasoning_content": "hm", "tool_calls": None}, True),
        (wrote(""), {"role": "assistant", "content": None}, True),
        (user("a"), user("a "), False),
        (user("a"), wrote("a"), False),
    ],
)
def test_messages_that_are_the_same_to_the_model(one: Message, other: Any, is_same: bool) -> None:
    assert (key_of(one) == key_of(other)) is is_same


@pytest.mark.parametrize("arguments", ["[" * 100_000, "[" * 5000 + "]" * 5000], ids=["open", "closed"])
def test_arguments_nested_beyond_what_json_is_read_to_are_text(arguments: str) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [function_call("a", "add", arguments)]}
    assert key_of(message) != key_of({**message, "tool_calls": [function_call("a", "add", "[]")]})
    assert for_template(message)["tool_calls"][0]["function"]["arguments"] == arguments
    turn = ModelAnswer("1", 0, message, "tool_calls", 1, 1)
    (block,) = ANTHROPIC_MESSAGES.write(Call("m", (), (), None, False, False), turn)["content"]
    assert block["input"] == {"arguments": arguments}
