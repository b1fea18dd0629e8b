"""The model calls functions with arguments that fit, several at once; whatever it or they do wrong, it reads, and goes on."""

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from offbeat import RewardUnavailable
from offbeat.actor.environments.ready_made import ToolUse
from offbeat.actor.environments.tool_calls import ToolCall
from offbeat.environments import tools
from tests.actor.environments.scripted_chat import ScriptedChat

ROW = {"answer": "42", "table": {"x": 40}}


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def find(key: str, row: dict[str, Any], kind: Literal["exact", "any"] = "exact") -> str:
    """Find a value.

    Args:
        key: What to look for.
        kind: How.
    """
    return f"{row['table'][key]} ({kind})"


def is_right(answer: str, row: dict[str, Any]) -> float:
    return float(answer == row["answer"])


def play(chat: ScriptedChat, *functions: Callable[..., object], **options: Any) -> object:
    environment = tools(functions, reward=is_right, **options)
    return asyncio.run(environment(chat, ROW))  # type: ignore[arg-type]


def call(name: str, arguments: str, number: int = 0) -> ToolCall:
    return ToolCall(f"call{number:05d}", name, arguments)


def test_model_calls_tools_until_it_answers() -> None:
    chat = ScriptedChat([call("add", '{"a": 40}'), call("find", '{"key": "x"}', 1)], [call("add", '{"a": 1, "b": 3}')], "42")
    assert play(chat, add, find, max_result_tokens=9) == 1.0
    assert chat.added == [
        {"role": "tool", "content": "42", "tool_call_id": "call00000", "name": "add", "max_tokens": 9},
        {"role": "tool", "content": "40 (exact)", "tool_call_id": "call00001", "name": "find", "max_tokens": 9},
        {"role": "tool", "content": "4", "tool_call_id": "call00000", "name": "add", "max_tokens": 9},
    ]
    assert chat.metrics == {"turns": 3}


def test_last_turn_is_judged_whatever_it_is() -> None:
    chat = ScriptedChat([call("add", '{"a": 40}')], [call("add", '{"a": 40}')], "42")
    assert play(chat, add, max_turns=2) == 0.0
    assert chat.metrics == {"turns": 2}


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("sub", "{}", "Error: there is no tool 'sub'. Tools: add, find"),
        ("add", '{"a": "1"}', "Error: Expected `int`, got `str` - at `$.a`"),
        ("add", "{}", "Error: Object missing required field `a`"),
        ("add", '{"a": 1, "c": 2}', "Error: Object contains unknown field `c`"),
        ("find", '{"key": "x", "row": {}}', "Error: Object contains unknown field `row`"),
        ("find", '{"key": "x", "kind": "some"}', "Error: Invalid enum value 'some' - at `$.kind`"),
        ("add", "[1]", "Error: Expected `object`, got `array`"),
        ("add", '{"a": 1', "Error: Input data was truncated"),
        ("find", '{"key": "y"}', "Error: KeyError: 'y'"),
    ],
)
def test_mistake_is_an_answer_that_the_model_reads(name: str, arguments: str, error: str) -> None:
    chat = ScriptedChat([call(name, arguments)], "42")
    assert play(chat, add, find) == 1.0
    assert chat.answers == [error]


def test_calls_of_a_turn_run_at_once_and_none_blocks_the_loop() -> None:
    """Each waits for the others, so one after the other none would return."""
    everyone = threading.Barrier(4, timeout=30)

    def wait() -> str:
        """Wait."""
        return f"{everyone.wait() < 4}"

    chat = ScriptedChat([call("wait", "{}", index) for index in range(4)], "42")
    play(chat, wait)
    assert chat.answers == ["True"] * 4


@pytest.mark.parametrize("error", [RewardUnavailable("busy"), ConnectionError("refused")])
def test_service_that_is_down_ends_the_attempt_instead_of_the_answer(error: Exception) -> None:
    def search() -> str:
        """Search."""
        raise error

    with pytest.raises(type(error)):
        play(ScriptedChat([call("search", "{}")], "42"), search)


def test_schema_is_made_of_signature_and_docstring_without_the_row() -> None:
    first, second = asyncio.run(tools([add, find], reward=is_right).schemas())
    assert first["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "integer", "description": "The second."},
        },
        "required": ["a"],
    }
    assert second["function"]["name"] == "find"
    assert list(second["function"]["parameters"]["properties"]) == ["key", "kind"]
    assert find.__annotations__["row"] == dict[str, Any]


def test_function_that_cannot_be_a_tool_is_refused_where_it_is_offered() -> None:
    def untyped(key) -> str:  # type: ignore[no-untyped-def]
        return key

    def starred(*keys: str) -> str:
        return "".join(keys)

    for function in (untyped, starred):
        with pytest.raises(TypeError, match=r"of the tool (untyped|starred) needs"):
            tools([function], reward=is_right)
    with pytest.raises(ValueError, match="same name: add, add"):
        tools([add, add], reward=is_right)


def test_reward_may_be_async() -> None:
    async def judged(answer: str, row: dict[str, Any]) -> dict[str, float]:
        return {"length": len(answer), "right": is_right(answer, row)}

    environment: ToolUse = tools([add], reward=judged)
    assert asyncio.run(environment(ScriptedChat("42"), ROW)) == {"length": 2, "right": 1.0}  # type: ignore[arg-type]


def test_example_of_the_docs_plays() -> None:
    page = (Path(__file__).parents[3] / "docs/environments.md").read_text()
    example = re.search(r"## Tools\n.*?```python\n(.*?)```", page, re.DOTALL)
    assert example
    names: dict[str, Any] = {"__name__": "my_task"}
    exec(example[1], names)
    chat = ScriptedChat([call("multiply", '{"a": 6, "b": 7}')], "42")
    assert asyncio.run(names["play"](chat, ROW)) == 1.0
    assert chat.answers == ["42"]
