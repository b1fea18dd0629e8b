"""Agents with tools play through chat completions, Responses and Anthropic's Messages alike: one sequence, tokens kept."""

import asyncio
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseUsage

from tests.actor.environments.endpoint.endpoint_harness import Game, playing

pytestmark = pytest.mark.slow  # imports the clients' libraries

SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}}
CALL = 'looking <call>look{"key":  "a"}</call><call>look{"key": "b"}</call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
WHOLE = "<system>be brief<user>a?" + CALL + "<tool>1<tool>2<user>so?3"
"""The one sequence of each agent below."""


def check_game(game: Game) -> None:
    assert game.begun[-1].text == WHOLE
    assert game.sampled == [[CALL, "3"]]
    assert [dict(tool) for tool in game.tools[0]] == [TOOL]


def test_chat_completions_with_tools() -> None:
    async def play() -> None:
        async with playing() as game, openai.AsyncOpenAI(base_url=game.url, api_key="x") as agent:
            game.write(CALL, "3")
            tools: Any = [TOOL]
            history: list[Any] = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "a?"}]
            first = (await agent.chat.completions.create(model="m", messages=history, tools=tools)).choices[0]
            assert first.finish_reason == "tool_calls"
            results = zip(first.message.tool_calls or (), "12", strict=True)
            history += [
                first.message,
                *({"role": "tool", "content": text, "tool_call_id": call.id} for call, text in results),
                {"role": "user", "content": "so?"},
            ]
            async with agent.chat.completions.stream(model="m", messages=history, tools=tools) as events:
                final = await events.get_final_completion()
            assert final.choices[0].message.content == "3"
            check_game(game)

    asyncio.run(play())


def test_history_with_tool_calls_of_another_model_is_written_with_objects() -> None:
    async def play() -> None:
        async with playing() as game, openai.AsyncOpenAI(base_url=game.url, api_key="x") as agent:
            game.write("3")
            call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"key":"a"}'}}
            history: list[Any] = [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "user", "content": "?"},
            ]
            await agent.chat.completions.create(model="m", messages=history)
            assert game.begun[0].text == '<assistant>[{"name": "look", "arguments": {"key": "a"}}]<user>?3'

    asyncio.run(play())


def test_stream_of_chat_completions_has_whole_tool_calls() -> None:
    async def play() -> None:
        async with playing() as game, openai.AsyncOpenAI(base_url=game.url, api_key="x") as agent:
            game.write(CALL)
            tools: Any = [TOOL]
            async with agent.chat.completions.stream(
                model="m", messages=[{"role": "user", "content": "a?"}], tools=tools
            ) as events:
                final = (await events.get_final_completion()).choices[0]
            calls = final.message.tool_calls or ()
            assert [(call.function.name, call.function.arguments) for call in calls] == [
                ("look", '{"key":  "a"}'), ("look", '{"key": "b"}')
            ]  # fmt: skip
            assert (final.finish_reason, final.message.content) == ("tool_calls", "looking ")

    asyncio.run(play())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses(is_streamed: bool) -> None:
    async def play() -> None:
        async with playing() as game, openai.AsyncOpenAI(base_url=game.url, api_key="x") as agent:
            tools: Any = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": None}]
            history: list[Any] = [{"role": "user", "content": "a?"}]

            async def respond(**options: Any) -> Any:
                fields: Any = {"model": "m", "instructions": "be brief", "input": history, "tools": tools, **options}
                if not is_streamed:
                    return await agent.responses.create(**fields)
                async with agent.responses.stream(**fields) as events:
                    return await events.get_final_response()

            game.write(CALL, "3")
            first = await respond(store=False, include=["reasoning.encrypted_content"], text={"verbosity": "low"})
            assert first.output_text == "looking "
            history += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
            calls = [item for item in first.output if item.type == "function_call"]
            results = zip(calls, "12", strict=True)
            history += [{"type": "function_call_output", "call_id": call.call_id, "output": text} for call, text in results]
            history.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "so?"}]})
            second = await respond()
            assert (second.output_text, second.status) == ("3", "completed")
            assert second.usage.input_tokens == len(WHOLE) - 1
            # The client checks nothing, and frameworks read every number.
            ResponseUsage.model_validate(second.usage.model_dump(), strict=True)
            check_game(game)
            game.write("long")
            cut: Any = await agent.responses.create(model="m", input="b", max_output_tokens=2)
            assert (cut.output_text, cut.status, cut.incomplete_details.reason) == ("lo", "incomplete", "max_output_tokens")

    asyncio.run(play())


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
def test_anthropic_messages(is_streamed: bool) -> None:
    # Not above: every process that collects tests would import 3,000 modules for a second.
    import anthropic

    async def play() -> None:
        async with playing() as game, anthropic.AsyncAnthropic(base_url=game.url, api_key="x") as agent:
            tools: Any = [{"name": "look", "input_schema": SCHEMA}]
            history: list[Any] = [{"role": "user", "content": "a?"}]

            async def say(**options: Any) -> Any:
                system: Any = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
                fields: Any = {"model": "m", "system": system, "messages": history, "tools": tools, "max_tokens": 99, **options}
                if not is_streamed:
                    return await agent.messages.create(**fields)
                async with agent.messages.stream(**fields) as events:
                    return await events.get_final_message()

            game.write(CALL, "3")
            first = await say(tool_choice={"type": "auto", "disable_parallel_tool_use": False})
            assert (first.stop_reason, [block.type for block in first.content]) == (
                "tool_use",
                ["text", "tool_use", "tool_use"],
            )
            assert first.content[2].input == {"key": "b"}
            history.append({"role": "assistant", "content": first.content})
            results = zip(first.content[1:], ("1", [{"type": "text", "text": "2"}]), strict=True)
            answers = [{"type": "tool_result", "tool_use_id": call.id, "content": content} for call, content in results]
            history.append({"role": "user", "content": [*answers, {"type": "text", "text": "so?"}]})
            second = await say()
            assert (second.content[0].text, second.stop_reason) == ("3", "end_turn")
            assert (second.usage.input_tokens, second.usage.output_tokens) == (len(WHOLE) - 1, 1)
            check_game(game)
            game.write("long")
            assert (await say(max_tokens=2)).stop_reason == "max_tokens"

    asyncio.run(play())


def test_other_dialects_refuse_in_their_own_form() -> None:
    import anthropic

    async def play() -> None:
        async with (
            playing() as game,
            openai.AsyncOpenAI(base_url=game.url, api_key="x", max_retries=0) as agent,
            anthropic.AsyncAnthropic(base_url=game.url, api_key="x", max_retries=0) as other,
        ):
            responses: Any = agent.responses.create
            messages: Any = other.messages.create
            for options, field in (
                ({"input": "x", "temperature": 0.5}, "temperature"),
                ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}, "text"),
                ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
                ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]"),
                ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0]"),
            ):
                with pytest.raises(openai.BadRequestError) as caught:
                    await responses(model="m", **options)
                assert caught.value.param == field
            ask = [{"role": "user", "content": "x"}]
            for options, problem in (
                ({"extra_body": {"temperature": 0.5}}, "temperature = 0.5"),
                ({"stop_sequences": ["x"]}, "stop_sequences"),
                ({"tool_choice": {"type": "any"}}, "tool_choice"),
                ({"messages": [*ask, {"role": "assistant", "content": "{"}]}, "samples its turns whole"),
                ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
            ):
                with pytest.raises(anthropic.BadRequestError, match=problem) as refused:
                    await messages(**{"model": "m", "max_tokens": 9, "messages": ask, **options})
                assert isinstance(refused.value.body, dict)
                assert refused.value.body["error"]["type"] == "invalid_request_error"
            assert game.num_started == 0

    asyncio.run(play())
