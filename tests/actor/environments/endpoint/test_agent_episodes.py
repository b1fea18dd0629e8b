"""A worker's episodes that agents play over HTTP: their tokens, their end, and what becomes of an agent's failure."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from transformers import AutoTokenizer

from offbeat.actor.environments.chat import ChatFormat
from offbeat.actor.environments.messages import (
    FROM_WORKER,
    CancelEpisode,
    Ended,
    Failed,
    FromWorker,
    PlayEpisode,
    SampleTurn,
    TurnSampled,
    digest_of,
)
from offbeat.actor.environments.tool_calls import TurnParser
from offbeat.actor.environments.worker import Worker
from offbeat.common.processes.child import HEAD
from offbeat.common.settings.loading import load
from tests.actor.environments.endpoint.endpoint_harness import plain_client

PROMPT: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
ROW = '{"answer": "4"}'


class Actor:
    """Stands for the actor: it answers every `SampleTurn` with the next of its turns, and never when there is none."""

    def __init__(self, tokenizer: Any, turns: list[str]) -> None:
        self.tokenizer = tokenizer
        self.turns = turns
        self.worker: Worker | None = None
        self.samples: list[SampleTurn] = []
        self.ends: asyncio.Queue[Ended | Failed] = asyncio.Queue()

    def write(self, data: bytes) -> None:
        message: FromWorker = FROM_WORKER.decode(data[HEAD.size :])
        match message:
            case SampleTurn():
                self.samples.append(message)
                if len(self.samples) <= len(self.turns):
                    token_ids = self.tokenizer.encode(self.turns[len(self.samples) - 1])
                    sampled = TurnSampled(
                        episode=message.episode,
                        turn=len(self.samples) - 1,
                        token_ids=[*token_ids, self.tokenizer.eos_token_id],
                        finish_reason="stop",
                    )
                    assert self.worker is not None
                    asyncio.get_running_loop().call_soon(self.worker.handle, sampled)
            case Ended() | Failed():
                self.ends.put_nowait(message)
            case _:
                pass


@pytest.fixture(scope="module")
def tokenizer(tiny_bpe_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_bpe_model)


@asynccontextmanager
async def playing(
    tokenizer: Any, function: Callable[..., Awaitable[Any]], *turns: str, setting: str = "rollout.temperature=1"
) -> AsyncIterator[tuple[Actor, ChatFormat]]:
    """Begin one episode."""
    config = load(None, ["model.max_length=400", "train.micro_batch_tokens=2000", setting])
    actor, chat_format = Actor(tokenizer, list(turns)), ChatFormat(tokenizer, {}, has_chat_template=True)
    actor.worker = Worker(config, function, chat_format, TurnParser(tokenizer), cast(asyncio.StreamWriter, actor))
    prompt = chat_format.opening(PROMPT)
    play = PlayEpisode(
        episode="3/1/0", row=ROW, prompt="", num_prompt_tokens=len(prompt), prompt_digest=digest_of(prompt), max_new_tokens=50,
        seed=3, is_evaluation=False,
    )  # fmt: skip
    actor.worker.handle(play)
    yield actor, chat_format


async def ask(chat: Any, messages: list[Any], **options: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=chat.url, api_key=chat.key) as client:
        return (await client.chat.completions.create(model="m", messages=messages, **options)).choices[0].message


def test_agents_turns_continue_the_leases_prompt_and_sub_agents_begin_anew(tokenizer: Any) -> None:
    help_wanted: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2"}]
    more = {"role": "user", "content": "Sure?"}

    async def play(chat: Any, row: Any) -> float:
        first = await ask(chat, PROMPT)
        helped = await ask(chat, help_wanted)
        second = await ask(chat, [*PROMPT, first, more])
        assert helped.content == "it is 4"
        assert chat.url == chat.fork().url
        return float(second.content == row["answer"])

    async def check() -> None:
        async with playing(tokenizer, play, "4?", "it is 4", "4") as (actor, chat_format):
            end = await actor.ends.get()
            assert isinstance(end, Ended)
            assert (end.reward, end.is_out_of_room) == (1.0, False)
            first, helped, second = actor.samples
            # The prompt of the lease, nothing, the first turn.
            assert [(one.back, index) for index, one in enumerate(actor.samples)] == [(1, 0), (0, 1), (2, 2)]
            assert first.context == []
            assert helped.context == chat_format.opening(help_wanted)
            assert second.context == chat_format.context([more], last_token=tokenizer.eos_token_id)

    asyncio.run(check())


def test_agent_goes_on_from_its_own_turn_where_another_has_got_the_same_answer(tokenizer: Any) -> None:
    async def play(chat: Any, row: Any) -> None:
        for agent in ("first", "second"):
            answer = await ask(chat, PROMPT, extra_headers={"X-Session-ID": agent})
        await ask(chat, [*PROMPT, answer, {"role": "user", "content": "Sure?"}], extra_headers={"X-Session-ID": "first"})

    async def check() -> None:
        async with playing(tokenizer, play, "4", "4", "yes") as (actor, _):
            assert isinstance(await actor.ends.get(), Ended)
            assert [sample.back for sample in actor.samples] == [1, 2, 2]

    asyncio.run(check())


def test_calls_that_wait_and_later_ones_get_410_when_the_function_has_returned(tokenizer: Any) -> None:
    calls: list[asyncio.Task[Any]] = []

    async def play(chat: Any, row: Any) -> float:
        await ask(chat, PROMPT)
        calls.append(asyncio.ensure_future(ask(chat, [{"role": "user", "content": "?"}])))
        calls.append(asyncio.ensure_future(asyncio.sleep(0, chat.url)))
        while len(actors[0].samples) < 2:
            await asyncio.sleep(0.005)
        return 1.0

    actors: list[Actor] = []

    async def check() -> None:
        async with playing(tokenizer, play, "4") as (actor, _), plain_client() as http:
            actors.append(actor)
            assert isinstance(await actor.ends.get(), Ended)
            with pytest.raises(openai.APIStatusError) as caught:
                await calls[0]
            assert caught.value.status_code == 410
            url = await calls[1]
            assert (await http.post(f"{url}/chat/completions", json={"messages": PROMPT})).status_code == 410

    asyncio.run(check())


def test_cancelled_episode_refuses_the_calls_of_a_function_that_takes_long_to_end(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(chat: Any, row: Any) -> float:
        first = await ask(chat, PROMPT)
        try:
            has_answer.set()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            for messages in (PROMPT, [*PROMPT, first, {"role": "user", "content": "Sure?"}]):
                with pytest.raises(openai.APIStatusError) as caught:
                    await ask(chat, messages)
                statuses.append(caught.value.status_code)
            raise
        return 0.0

    statuses: list[int] = []
    has_answer = asyncio.Event()

    async def check() -> None:
        async with playing(tokenizer, play, "4", "5") as (actor, _):
            assert actor.worker is not None
            # The endpoint counts an answer before the function has it: cancelled there, the function asks nothing more.
            await has_answer.wait()
            actor.worker.handle(CancelEpisode(episode="3/1/0"))
            assert isinstance(await actor.ends.get(), Failed)
            # The learner is told at once, whatever the function still does.
            while len(statuses) < 2:
                await asyncio.sleep(0.005)
            assert len(actor.samples) == 1

    asyncio.run(check())
    assert statuses == [410, 410]
    assert "Exception in ASGI application" not in caplog.text


def test_cancelled_episode_gives_410_to_the_call_that_waits(tokenizer: Any) -> None:
    calls: list[asyncio.Task[Any]] = []

    async def play(chat: Any, row: Any) -> float:
        calls.append(asyncio.ensure_future(ask(chat, PROMPT)))
        await asyncio.sleep(60)
        return 1.0

    async def check() -> None:
        async with playing(tokenizer, play) as (actor, _):
            while not actor.samples:
                await asyncio.sleep(0.005)
            assert actor.worker is not None
            actor.worker.handle(CancelEpisode(episode="3/1/0"))
            assert isinstance(await actor.ends.get(), Failed)
            with pytest.raises(openai.APIStatusError) as caught:
                await calls[0]
            assert caught.value.status_code == 410

    asyncio.run(check())


def test_agent_that_fails_for_want_of_room_has_its_rewards_so_far(tokenizer: Any) -> None:
    async def play(chat: Any, row: Any) -> float:
        first = await ask(chat, PROMPT)
        chat.reward(0.25)
        try:
            await ask(chat, [*PROMPT, first, {"role": "user", "content": "long " * 400}])
        except openai.BadRequestError as error:
            raise LookupError("the framework's own error") from error
        return 1.0

    async def check() -> None:
        async with playing(tokenizer, play, "4") as (actor, _):
            end = await actor.ends.get()
            assert isinstance(end, Ended)
            assert (end.reward, end.is_out_of_room) == (0.25, True)

    asyncio.run(check())


def test_episode_whose_function_returns_after_a_turn_that_did_not_fit_is_out_of_room(tokenizer: Any) -> None:
    async def play(chat: Any, row: Any) -> float:
        first = await ask(chat, PROMPT)
        with pytest.raises(openai.BadRequestError):
            await ask(chat, [*PROMPT, first, {"role": "user", "content": "long " * 400}])
        if row["answer"] == first.content:
            return 1.0
        # It forgets its history, and goes on.
        await ask(chat, PROMPT)
        return 0.5

    async def check() -> None:
        for turns, expected in ((["4"], (1.0, True)), (["5", "4"], (0.5, False))):
            async with playing(tokenizer, play, *turns) as (actor, _):
                end = await actor.ends.get()
                assert isinstance(end, Ended)
                assert (end.reward, end.is_out_of_room) == expected

    asyncio.run(check())


def test_service_that_is_away_after_the_last_turn_that_fitted_gives_no_reward(tokenizer: Any) -> None:
    """The agent goes on without the turn, and its verifier is away: that is no reward of 0."""

    async def play(chat: Any, row: Any) -> float:
        first = await ask(chat, PROMPT)
        with pytest.raises(openai.BadRequestError):
            await ask(chat, [*PROMPT, first, {"role": "user", "content": "long " * 400}])
        raise ConnectionError("the verifier is away")

    async def check() -> None:
        async with playing(tokenizer, play, "4") as (actor, _):
            end = await actor.ends.get()
            assert isinstance(end, Failed)
            assert end.is_transient

    asyncio.run(check())


def test_agents_refused_field_fails_the_episode_with_its_cure_and_is_counted_when_overridden(tokenizer: Any) -> None:
    async def play(chat: Any, row: Any) -> float:
        await ask(chat, PROMPT, temperature=0.2)
        return 1.0

    async def check() -> None:
        async with playing(tokenizer, play, "4") as (actor, _):
            end = await actor.ends.get()
            assert isinstance(end, Failed)
            assert not end.is_transient
            assert "temperature = 0.2" in end.detail
        async with playing(tokenizer, play, "4", setting="environment.sampling=override") as (actor, _):
            end = await actor.ends.get()
            assert isinstance(end, Ended)
            assert end.parts == {"overridden_requests": 1.0, "repeated_requests": 0.0}
        async with playing(tokenizer, play, "4", setting="rollout.temperature=0.2") as (actor, _):
            assert isinstance(await actor.ends.get(), Ended)

    asyncio.run(check())
