"""Agents that use OpenAI's client, or plain HTTP, play an episode over a socket without knowing that they are trained."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from offbeat.actor.environments.endpoint.calls import Call, ModelAnswer
from offbeat.actor.environments.endpoint.chat_completions import CHAT_COMPLETIONS
from offbeat.actor.environments.endpoint.session import _warn_of_repeated  # pyright: ignore[reportPrivateUsage]
from tests.actor.environments.endpoint.endpoint_harness import Game, plain_client, playing, render, until

ASK = [{"role": "user", "content": "a:"}]


def client(game: Game, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=game.url, api_key="7/0/0", **{"max_retries": 0, **options})


async def ask(agent: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    return await agent.chat.completions.create(model="gpt-4o", messages=messages, **options)


def said(*pairs: str) -> list[dict[str, str]]:
    """Return messages from `role:content` texts."""
    return [dict(zip(("role", "content"), pair.split(":", 1), strict=True)) for pair in pairs]


def test_agent_plays_an_episode_as_one_sequence() -> None:
    async def play() -> None:
        async with playing() as game, client(game) as agent:
            game.write("?a", "!7")
            first = await ask(agent, said("system:look", "user:a"))
            assert first.choices[0].message.content == "?a"
            assert (first.choices[0].finish_reason, first.model) == ("stop", "gpt-4o")
            prompt = render(said("system:look", "user:a"))
            assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len(prompt), 2)
            # The message as the client has parsed it, with all its fields.
            history = [*said("system:look", "user:a"), first.choices[0].message, {"role": "user", "content": "c"}]
            second = await ask(agent, history)
            assert second.choices[0].message.content == "!7"
            assert second.usage.prompt_tokens == len(prompt + "?a" + render(said("user:c")))
            assert second.id != first.id
            assert game.sampled == [["?a", "!7"]]
            assert game.begun[-1].text == prompt + "?a" + render(said("user:c")) + "!7"

    asyncio.run(play())


def test_stream_has_role_text_finish_usage_and_end() -> None:
    async def play() -> None:
        text = "x" * 300
        async with playing() as game, client(game) as agent, plain_client() as http:
            game.write(text)
            chunks = [one async for one in await ask(agent, ASK, stream=True, stream_options={"include_usage": True})]
            assert chunks[0].choices[0].delta.role == "assistant"
            pieces = [one.choices[0].delta.content for one in chunks if one.choices]
            assert "".join(piece or "" for piece in pieces) == text
            assert max(len(piece or "") for piece in pieces) < len(text)
            assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "stop"
            assert [one.usage.completion_tokens for one in chunks if one.usage] == [len(text)]
            assert not chunks[-1].choices
            # The same call without usage, as a shell script sends it: answered once.
            body = {"model": "x", "messages": said("user:b"), "stream": True}
            game.write("y")
            answer = await http.post(f"{game.url}/chat/completions", json=body)
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.text.split("\n\n") if line]
            assert lines[-1] == "data: [DONE]"
            assert all("usage" not in json.loads(line[6:]) for line in lines[:-1])

    asyncio.run(play())


def test_stream_has_the_reasoning_that_the_whole_answer_has() -> None:
    call = Call("m", (), (), None, is_streamed=True, includes_usage=False)
    answer = ModelAnswer("1", 0, {"role": "assistant", "content": "7", "reasoning_content": "hm" * 200}, "stop", 1, 9)
    *events, _ = CHAT_COMPLETIONS.stream(call, answer)
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == answer.message[name]


def test_rewritten_history_and_other_tools_begin_new_sequences() -> None:
    async def play() -> None:
        tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
        async with playing() as game, client(game) as agent:
            game.write("A", "B", "C", "D", "E")
            await ask(agent, ASK)
            await ask(agent, [*ASK, *said("assistant:A", "user:c")])
            # Compacted, a sub-agent, and the same messages with a tool.
            await ask(agent, said("user:summary of A"))
            await ask(agent, [*ASK, *said("assistant:other", "user:c")])
            await ask(agent, ASK, tools=[tool])
            assert game.sampled == [["A", "B"], ["C"], ["D"], ["E"]]
            assert game.begun[3].text == render([*ASK, *said("assistant:other", "user:c")]) + "D"
            assert game.tools == [(), (), (), (tool,)]

    asyncio.run(play())


def test_tools_without_a_parser_are_refused() -> None:
    async def play() -> None:
        tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        async with playing(parses_tools=False) as game, client(game) as agent:
            with pytest.raises(openai.BadRequestError, match=r"Set environment\.tool_parser"):
                await ask(agent, ASK, tools=tools)

    asyncio.run(play())


def test_two_calls_at_once_from_one_turn_share_its_tokens() -> None:
    async def play() -> None:
        async with playing() as game, client(game) as agent:
            game.write(" A")
            await ask(agent, ASK)
            calls = [ask(agent, [*ASK, *said("assistant:A", f"user:{which}")]) for which in "xy"]
            waiting = asyncio.gather(*calls)
            await until(lambda: game.num_started == 3)
            game.write("B", "C")
            await waiting
            assert sorted(game.sampled) == [[" A", "B"], [" A", "C"]]

    asyncio.run(play())


def test_white_space_that_an_agent_trims_does_not_begin_a_sequence() -> None:
    async def play() -> None:
        async with playing() as game, client(game) as agent:
            game.write(" A \n", "B")
            await ask(agent, ASK)
            await ask(agent, [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "A"}]}, *said("user:c")])
            assert game.sampled == [[" A \n", "B"]]

    asyncio.run(play())


def test_call_that_timed_out_gets_the_turn_that_was_sampled_for_it() -> None:
    async def play() -> None:
        async with playing() as game, client(game, timeout=0.3, max_retries=1) as agent:
            call = asyncio.ensure_future(ask(agent, ASK))
            # The client hangs up; its next try waits for the same turn.
            await until(lambda: game.num_started == 1)
            await until(lambda: game.session.num_open == 0)
            game.write("A", "B")
            assert (await call).choices[0].message.content == "A"
            assert (game.sampled, game.num_started) == ([["A"]], 1)

    asyncio.run(play())


def test_turn_of_a_client_that_hung_up_is_kept_for_the_next_one_that_asks() -> None:
    async def play() -> None:
        async with playing() as game, client(game, timeout=0.3) as hasty, client(game) as agent:
            with pytest.raises(openai.APITimeoutError):
                await ask(hasty, ASK)
            assert game.num_started == 1
            await until(lambda: game.session.num_open == 0)
            game.write("A", "B")
            # Although its client says that it has not asked before: nobody has had this turn.
            await until(lambda: game.sampled == [["A"]])
            assert (await ask(agent, ASK)).choices[0].message.content == "A"
            # Now somebody has. A client that counts its tries asks for another turn.
            assert (await ask(agent, ASK)).choices[0].message.content == "B"
            assert game.sampled == [["A"], ["B"]]

    asyncio.run(play())


def test_call_without_a_count_of_tries_is_answered_once_until_the_agent_goes_on() -> None:
    async def play() -> None:
        async with playing() as game, plain_client() as http:
            game.write("A", "B", "C")

            async def post(messages: list[Any]) -> str:
                # Keys in another order each time.
                body = json.dumps(dict([("messages", messages), ("model", "x")][:: 1 if len(game.begun) % 2 else -1]))
                answer = await http.post(f"{game.url}/chat/completions", content=body)
                return answer.json()["choices"][0]["message"]["content"]

            assert [await post(ASK), await post(ASK)] == ["A", "A"]
            assert await post([*ASK, *said("assistant:A", "user:c")]) == "B"
            assert await post(ASK) == "C"
            assert game.sampled == [["A", "B"], ["C"]]

    asyncio.run(play())


def test_max_tokens_bounds_a_turn() -> None:
    async def play() -> None:
        async with playing() as game, client(game) as agent:
            game.write("long", "long")
            cut = await ask(agent, ASK, max_tokens=2)
            assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("lo", "length")
            await ask(agent, said("user:b"), max_completion_tokens=3)
            assert game.longest == 3
            with pytest.raises(openai.BadRequestError, match="max_tokens = 0 is not a positive integer"):
                await ask(agent, ASK, max_tokens=0)

    asyncio.run(play())


def test_prompt_without_room_is_refused_in_openais_words_and_a_shorter_one_is_answered() -> None:
    async def play() -> None:
        async with playing(max_length=40) as game, client(game) as agent:
            game.write("A", "B")
            await ask(agent, ASK)
            with pytest.raises(openai.BadRequestError, match="maximum context length is 40 tokens") as caught:
                await ask(agent, [*ASK, *said("assistant:A", "user:" + "x" * 40)])
            assert caught.value.code == "context_length_exceeded"
            assert game.session.is_out_of_room
            # What did not fit is in no prompt that follows.
            await ask(agent, [*ASK, *said("assistant:A", "user:y")])
            assert game.begun[-1].text == render(ASK) + "A" + render(said("user:y")) + "B"
            assert not game.session.is_out_of_room

    asyncio.run(play())


REFUSED = [
    ("temperature", 0.7, "set it to 1 "),
    ("top_p", 0.9, "Only 1 is allowed"),
    ("n", 2, "Ask once"),
    ("seed", 5, "Leave it out"),
    ("logit_bias", {"5": 1}, "Leave it out"),
    ("presence_penalty", 0.5, "Leave it out"),
    ("stop", ["\n"], "sampling stops at the end of a turn"),
    ("response_format", {"type": "json_object"}, "Ask for the form in the prompt"),
    ("tool_choice", "required", "Use auto"),
    ("logprobs", True, "the actor keeps them"),
]


def test_what_would_change_the_policy_is_refused_with_field_value_and_cure() -> None:
    async def play() -> None:
        async with playing() as game, client(game) as agent:
            for field, value, cure in REFUSED:
                with pytest.raises(openai.BadRequestError) as caught:
                    await ask(agent, ASK, **{field: value})
                assert caught.value.param == field
                assert isinstance(caught.value.body, dict)
                problem = caught.value.body["message"]
                assert all(part in problem for part in (f"{field} = {value!r}", cure, 'environment.sampling = "override"'))
            assert game.num_started == 0

    asyncio.run(play())


def test_fields_that_change_nothing_are_let_pass() -> None:
    async def play() -> None:
        neutral = {"temperature": 0.7, "top_p": 1.0, "n": 1, "presence_penalty": 0, "seed": None, "stop": None, "user": "me"}
        async with playing(temperature=0.7) as game, client(game) as agent:
            game.write("A")
            await ask(agent, ASK, **neutral, logprobs=False, response_format={"type": "text"}, tool_choice="auto")
            with pytest.raises(openai.BadRequestError, match="unheard_of"):
                await ask(agent, ASK, extra_body={"unheard_of": 1})

    asyncio.run(play())


def test_run_that_overrides_ignores_and_counts() -> None:
    async def play() -> None:
        async with playing(ignores=True) as game, client(game) as agent:
            game.write("A", "B")
            await ask(agent, ASK, temperature=0.0, stop=["\n"])
            await ask(agent, said("user:b"))
            assert game.session.num_overrides == 1

    asyncio.run(play())


def test_answer_that_is_sent_again_is_counted_and_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        async with playing() as game, plain_client() as agent:
            game.write("A", "B")
            body = {"model": "policy", "messages": ASK}
            url = f"{game.url}/chat/completions"
            answers = [(await agent.post(url, json=body)).json()["id"] for _ in range(3)]
            assert len(set(answers)) == 1 and game.session.num_repeated == 2
            other = await agent.post(url, json=body, headers={"x-stainless-retry-count": "0"})
            assert other.json()["id"] not in answers and game.session.num_repeated == 2

    _warn_of_repeated.cache_clear()
    asyncio.run(play())
    assert len([text for text in caplog.messages if "x-stainless-retry-count: 0" in text]) == 1


def test_identical_requests_are_sampled_again_where_the_run_says_so_but_not_repeated_ones() -> None:
    async def play() -> None:
        async with playing(samples_again=True) as game, plain_client() as agent:
            game.write("A", "B")
            body = {"model": "policy", "messages": ASK}
            url = f"{game.url}/chat/completions"
            first, second = [(await agent.post(url, json=body)).json()["choices"][0]["message"]["content"] for _ in range(2)]
            assert (first, second) == ("A", "B")
            repeated = await agent.post(url, json=body, headers={"x-stainless-retry-count": "1"})
            assert repeated.json()["choices"][0]["message"]["content"] == "B" and game.num_started == 2

    asyncio.run(play())


def test_unknown_path_is_an_error_object_that_names_the_paths() -> None:
    async def play() -> None:
        async with playing() as game, plain_client() as agent:
            answer = await agent.post(f"{game.url}/completions", json={"prompt": "A"})
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert "there is no POST /v1/completions here" in error["message"]
            assert "POST /v1/chat/completions" in error["message"] and error["code"] == "unknown_url"

    asyncio.run(play())


def test_episode_that_is_over_answers_410_to_calls_that_wait_and_to_later_ones() -> None:
    async def play() -> None:
        async with playing() as game, client(game, max_retries=5) as agent:
            waiting = asyncio.ensure_future(ask(agent, ASK))
            await until(lambda: game.num_started == 1)
            game.close()
            for call in (waiting, ask(agent, ASK), ask(agent, said("user:b")), agent.models.list()):
                with pytest.raises(openai.APIStatusError) as caught:
                    await call
                assert caught.value.status_code == 410
            assert game.num_started == 1

    asyncio.run(play())


def test_another_episodes_secret_is_of_no_use() -> None:
    async def play() -> None:
        async with playing() as game, plain_client() as http:
            guess = game.url.removesuffix("/v1") + "x/v1"
            assert (await http.post(f"{guess}/chat/completions", json={"messages": ASK})).status_code == 410
            assert (await http.get(f"{game.url}/models")).json()["data"][0]["id"] == "policy"

    asyncio.run(play())


MALFORMED = [
    (b"{", "no JSON"),
    (b"[1]", "no JSON object"),
    (b"[" * 100_000, "nested too deeply"),
    (b"{}", "messages is not a list of objects"),
    (b'{"messages": []}', "messages is empty"),
    (b'{"messages": [{"role": "king", "content": "x"}]}', "messages[0].role = 'king'"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages[0].content[0] has the type"),
    (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content is neither"),
    (b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}', "messages[0].tool_calls[0]"),
    (b'{"messages": [{"role": "user"}], "tools": [{"type": "custom", "custom": {"name": "look"}}]}', "tools[0] is no tool"),
    (b'{"messages": [{"role": "user"}], "tools": [{"type": "function", "name": "look"}]}', "tools[0] is no tool"),
]


def test_malformed_request_is_refused_with_its_field() -> None:
    async def play() -> None:
        async with playing() as game, plain_client() as http:
            for body, problem in MALFORMED:
                answer = await http.post(f"{game.url}/chat/completions", content=body)
                assert answer.status_code == 400
                assert problem in answer.json()["error"]["message"]

    asyncio.run(play())


def test_request_is_answered_however_deeply_it_is_nested() -> None:
    async def play() -> None:
        # No prompt fits: a request that can be read is refused, too.
        async with playing(max_length=1) as game, plain_client() as http:
            for depth in range(900, 1000, 5):
                metadata = "[" * depth + "]" * depth
                body = f'{{"messages": [{{"role": "user", "content": "x"}}], "metadata": {metadata}}}'
                assert (await http.post(f"{game.url}/chat/completions", content=body)).status_code == 400

    asyncio.run(play())


def test_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.actor.environments.endpoint.server.MAX_BODY_BYTES", 1000)
    monkeypatch.setattr("offbeat.actor.environments.endpoint.server.BODY_TIMEOUT_S", 0.1)
    monkeypatch.setattr("offbeat.actor.environments.endpoint.session.MAX_OPEN_CALLS", 1)

    async def play() -> None:
        async with playing() as game, plain_client() as http, client(game) as agent:
            url = f"{game.url}/chat/completions"
            assert (await http.post(url, content=b" " * 1001)).status_code == 413

            async def trickle() -> AsyncIterator[bytes]:
                yield b"{"
                await asyncio.sleep(1)

            assert (await http.post(url, content=trickle())).status_code == 408
            waiting = asyncio.ensure_future(ask(agent, ASK))
            await until(lambda: game.num_started == 1)
            with pytest.raises(openai.RateLimitError):
                await ask(agent, said("user:b"))
            game.write("A")
            assert (await waiting).choices[0].message.content == "A"

    asyncio.run(play())
