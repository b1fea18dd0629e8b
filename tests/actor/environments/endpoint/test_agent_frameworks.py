"""Requests of LangGraph and smolagents, recorded from langchain-openai 1.7 and smolagents 1.26, are turns of an episode."""

import asyncio
from typing import Any

import httpx2

from tests.actor.environments.endpoint.endpoint_harness import Game, plain_client, playing

Body = dict[str, Any]


def function(name: str, description: str, **types: str) -> Body:
    parameters = {"properties": {key: {"type": kind} for key, kind in types.items()}, "required": [*types], "type": "object"}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def part(text: str) -> list[Body]:
    return [{"type": "text", "text": text}]


ADD = function("add", "Add two numbers.", a="integer", b="integer")
QUESTION = {"content": "17+25=", "role": "user"}
ARGUMENTS = '{"a": 17, "b": 25}'
SYSTEM_AND_TASK = [{"role": "system", "content": part("")}, {"role": "user", "content": part("New task:\na")}]
CODE_STOP = ["Observation:", "Calling tools:", "</code>"]


async def post(game: Game, body: Body) -> httpx2.Response:
    # Both have OpenAI's client, which says of each request whether it is the first of its kind.
    async with plain_client() as http:
        return await http.post(f"{game.url}/chat/completions", json=body, headers={"x-stainless-retry-count": "0"})


async def message(game: Game, body: Body) -> Body:
    answer = await post(game, body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def test_langgraph_game_with_a_tool_is_one_sequence() -> None:
    async def play() -> None:
        async with playing() as game:
            game.write(f"<call>add{ARGUMENTS}</call>", "42")
            fixed = {"model": "policy", "stream": False, "tools": [ADD]}
            (call,) = (await message(game, {**fixed, "messages": [QUESTION]}))["tool_calls"]
            assert call["function"] == {"name": "add", "arguments": ARGUMENTS}
            # Without content and name, with the keys in another order.
            called = {"type": "function", "id": call["id"], "function": call["function"]}
            history = [
                QUESTION,
                {"content": None, "role": "assistant", "tool_calls": [called]},
                {"content": "42", "role": "tool", "tool_call_id": call["id"]},
            ]
            assert (await message(game, {**fixed, "messages": history}))["content"] == "42"
            assert game.sampled == [[f"<call>add{ARGUMENTS}</call>", "42"]]

    asyncio.run(play())


def test_smolagents_is_refused_with_the_setting_that_lets_it_play() -> None:
    async def play() -> None:
        async with playing() as game:
            answer = await post(game, {"model": "policy", "messages": SYSTEM_AND_TASK, "stop": CODE_STOP})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "stop"
            assert 'environment.sampling = "override"' in answer.json()["error"]["message"]

    asyncio.run(play())


def test_smolagents_writes_each_call_into_its_history_so_each_turn_begins_a_sequence() -> None:
    async def play() -> None:
        async with playing(ignores=True) as game:
            game.write('<code>look("a")</code>', '<code>final_answer("7")</code>')
            first = await message(game, {"model": "policy", "messages": SYSTEM_AND_TASK, "stop": CODE_STOP})
            call = {
                "id": "call_1",
                "type": "function",
                "function": {"name": "python_interpreter", "arguments": 'look("a")'},
            }
            history = [
                *SYSTEM_AND_TASK,
                {"role": "assistant", "content": part(f"{first['content']}\nCalling tools:\n[{call}]")},
                {"role": "user", "content": part("Observation:\nExecution logs:\nLast output from code snippet:\nc")},
            ]
            await message(game, {"model": "policy", "messages": history, "stop": CODE_STOP})
            assert game.sampled == [['<code>look("a")</code>'], ['<code>final_answer("7")</code>']]
            assert "Calling tools:" in game.begun[-1].text
            assert game.session.num_overrides == 2

    asyncio.run(play())


def test_smolagents_tool_calling_agent_is_free_to_call_none() -> None:
    async def play() -> None:
        async with playing(ignores=True) as game:
            look = function("look", "Look up.", key="string")
            game.write("no call", '<call>look{"key": "a"}</call>')
            stop = {"stop": CODE_STOP[:2], "tool_choice": "required", "tools": [look]}
            body = {"model": "policy", "messages": SYSTEM_AND_TASK, **stop}
            assert (await message(game, body))["content"] == "no call"
            (call,) = (await message(game, body))["tool_calls"]
            assert call["function"]["name"] == "look"

    asyncio.run(play())
