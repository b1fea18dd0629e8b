"""The first examples of docs/environments.md play when they are typed: the five lines, the tools, the judge."""

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import pytest

from offbeat.actor.environments.tool_calls import ToolCall
from offbeat.actor.judges.client import handed_to_processes
from offbeat.common.settings.config import Config, JudgeSection
from offbeat.deploy.local.quickstart.tiny_tasks import game_row
from tests.actor.environments.scripted_chat import ScriptedChat
from tests.actor.judges.fake_judge import Answer, serving

PAGE = (Path(__file__).parents[3] / "docs/environments.md").read_text()


def example(section: str) -> str:
    """Return the first Python of a section."""
    code = re.search(r"```python\n(.*?)```", PAGE.partition(f"{section}\n")[2], re.DOTALL)
    assert code is not None
    return code[1]


@pytest.fixture
def calculator() -> dict[str, Any]:
    """The names of the module with tools."""
    names: dict[str, Any] = {}
    exec(example("## Tools"), names)
    return names


def played(environment: Any, row: dict[str, Any], *turns: str | list[ToolCall]) -> tuple[float, list[str]]:
    """Return the reward of an episode, and what the model read."""
    chat = ScriptedChat(*turns)
    return asyncio.run(environment(chat, row)), chat.answers


def test_five_lines_play_the_look_up_game() -> None:
    names: dict[str, Any] = {}
    exec(example("# Environments"), names)
    row = game_row(random.Random(0))
    first = row["prompt"][0]
    second = row["table"][first]
    assert played(names["play"], row, f"?{first}", f"?{second}", f"!{row['answer']}") == (1.0, [second, row["answer"]])
    assert played(names["play"], row, "!x") == (0.0, [])
    assert played(names["play"], row, "?x", "?x", "?x", "?x") == (0.0, ["?"] * 4)


def test_tools_of_the_page_are_called(calculator: dict[str, Any]) -> None:
    call = ToolCall("call00000", "multiply", '{"a": 6, "b": 7}')
    assert played(calculator["play"], {"answer": "42"}, [call], " 42\n") == (1.0, ["42"])
    (schema,) = asyncio.run(calculator["play"].schemas())
    assert schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first number."}


def test_judge_of_the_page_rewards_the_answer(calculator: dict[str, Any]) -> None:
    with serving(lambda number, request: Answer("It is. Score: 9")) as fake:
        config = Config(judge=JudgeSection(url=fake.url, model="grader"))
        with handed_to_processes(config):
            exec(example("## A judge"), calculator)
            assert played(calculator["play"], {"prompt": "6*7="}, "42") == (0.9, [])
    (message,) = fake.requests[0]["messages"]
    assert message["content"].startswith("Is '42' a right and short answer to '6*7='?")
