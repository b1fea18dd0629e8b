"""Functions play in processes of their own, which may crash, block or leave children behind without harm to anyone else."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from offbeat.actor.environments.messages import (
    Begin,
    CancelEpisode,
    Ended,
    Failed,
    OfEpisode,
    PlayEpisode,
    SampleTurn,
    TurnSampled,
    Withdraw,
)
from offbeat.actor.environments.worker_starts import WorkerStarts
from offbeat.actor.environments.workers import Workers
from offbeat.common.errors import ServiceError
from offbeat.common.processes import process_table as processes
from offbeat.common.settings.loading import load
from tests.conftest import ALPHABET

pytestmark = pytest.mark.slow

FUNCTIONS = """
import asyncio, os, subprocess, threading, time
import httpx2

all_here = threading.Barrier(100)
kept = []

async def play(chat, row):
    kind = row["kind"]
    if kind == "crash":
        os._exit(3)
    if kind == "block":
        time.sleep(600)
    if kind == "daemon":
        subprocess.Popen(["sleep", "617"])
        subprocess.Popen(["sh", "-c", "setsid sleep 618 &"])
        if not os.fork():
            os.setsid()
            open("daemon", "w").write(str(os.getpid()))
            time.sleep(619)
        await asyncio.sleep(600)
    if kind == "agent":
        await asyncio.to_thread(all_here.wait, 10)
        return 1.0
    if kind == "mistake":
        return row["answer"]
    if kind == "keep":
        kept.append(chat)
        return 0.0
    if kind == "late add":
        kept[0].add("tool", "4")
    if kind == "late reward":
        kept[0].reward(1.0)
    if kind == "late metric":
        kept[0].metric("found", 1.0)
    if kind == "judge":
        raise ConnectionError("no judge")
    if kind == "exit":
        raise SystemExit("bye")
    if kind == "text":
        return "good"
    if kind == "proxy":
        os.environ["http_proxy"] = "http://127.0.0.1:9"
        async with httpx2.AsyncClient() as client:
            del os.environ["http_proxy"]
            return float((await client.get(f"{chat.url}/models")).status_code == 200)
    if kind == "parts":
        return {"reached": float(chat.url.startswith("http"))} | {f"part_{number}": 0.0 for number in range(row["turns"])}
    if kind == "metrics":
        chat.metric("bytes", 6e5)
        chat.metric("characters", 6e5)
        return 1.0
    if kind == "half":
        raise ValueError("no file \\ud83d")
    if kind == "nameless":
        chat.metric("tool calls", 1)
        while True:
            await chat.sample()
    if kind == "greedy":
        chat.reward(0.25)
        while True:
            await chat.sample()
            chat.reward(0.5)
    if kind == "forks":
        first = await chat.sample()
        fork, again = chat.fork(), chat.restart("12")
        chat.add("tool", "3")
        again.reward(0.0625)
        fork.reward(0.125)
        both = await asyncio.gather(chat.sample(), fork.sample(), again.sample(2))
        fork.reward(0.25)
        chat.reward(0.5)
        chat.metric("room", chat.room)
        try:
            await asyncio.wait_for(again.sample(), 0.2)
        except TimeoutError:
            again.add("tool", "4")
        await again.sample()
        return float("".join(reply.text for reply in both))
    replies = []
    for _ in range(row["turns"]):
        replies.append(await chat.sample(max_new_tokens=3))
        chat.add("tool", replies[-1].text)
        chat.metric("turns", len(replies))
    return float(len(replies)) + chat.seed / 1000

def plain(chat, row):
    return 0.0
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The functions are in the current folder."""
    folder = tmp_path_factory.mktemp("games")
    (folder / "games.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        yield


@pytest.fixture(scope="module")
def one_process(tiny_model: Path, forks: WorkerStarts) -> Iterator[Workers]:
    """For tests that leave it alive."""
    workers = Workers(begin(tiny_model), forks)
    yield workers
    workers.close()


@pytest.fixture
def workers(one_process: Workers) -> Workers:
    for episode in list(one_process._workers[0].episodes):
        one_process.send(episode, CancelEpisode(episode=episode))
        one_process.end(episode)
    # The mistake of this last episode comes behind what the others still say.
    play(one_process, "0/0/0", "mistake")
    while not any(isinstance(news, Failed) and news.episode == "0/0/0" for news in next_news(one_process)):
        pass
    one_process.end("0/0/0")
    return one_process


@pytest.fixture
def fragile(tiny_model: Path, forks: WorkerStarts) -> Iterator[Workers]:
    workers = Workers(begin(tiny_model), forks)
    yield workers
    workers.close()


def begin(model: Path, function: str = "games:play", max_length: int = 20) -> Begin:
    settings = [f"task.environment={function}", f"model.max_length={max_length}", "train.micro_batch_tokens=40"]
    return Begin(config=load(None, settings), model=str(model))


def play(workers: Workers, episode: str, kind: str, turns: int = 1) -> None:
    row = f'{{"kind": "{kind}", "turns": {turns}}}'
    message = PlayEpisode(
        episode=episode, row=row, prompt="1+1=", num_prompt_tokens=4, max_new_tokens=8, seed=7, is_evaluation=False
    )
    workers.play(episode, message)


def token(character: str) -> int:
    return ALPHABET.index(character) + 4


def next_news(workers: Workers, claim: Callable[[], bool] = lambda: False) -> list[OfEpisode | str]:
    """Return what arrives next; with `claim`, return when it holds."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (news := list(workers.poll())) or claim():
            return news
        time.sleep(0.01)
    raise AssertionError("nothing arrived")


def worker_pids() -> list[int]:
    own = processes.descendants(os.getpid())
    return [pid for pid in own if any("environments.worker" in word for word in processes.arguments(pid))]


def test_function_plays_its_turns_and_returns_its_reward(workers: Workers) -> None:
    play(workers, "1/0/0", "turns", turns=2)
    assert next_news(workers) == [SampleTurn(episode="1/0/0", context=[], max_new_tokens=3)]
    workers.send("1/0/0", TurnSampled(episode="1/0/0", turn=0, token_ids=[5, 6], finish_reason="stop"))
    (second,) = next_news(workers)
    # Tokens 4 and up are the characters of the alphabet.
    assert second == SampleTurn(episode="1/0/0", context=[5, 6], max_new_tokens=3)
    workers.send("1/0/0", TurnSampled(episode="1/0/0", turn=1, token_ids=[7], finish_reason="length"))
    assert next_news(workers) == [Ended(episode="1/0/0", reward=2.007, parts={"turns": 2.0}, is_out_of_room=False)]


def test_sequences_of_an_episode_are_sampled_at_once_and_a_turn_given_up_is_withdrawn(workers: Workers) -> None:
    play(workers, "1/0/0", "forks")
    assert next_news(workers) == [SampleTurn(episode="1/0/0", context=[], max_new_tokens=8)]
    workers.send("1/0/0", TurnSampled(episode="1/0/0", turn=0, token_ids=[5], finish_reason="stop"))
    asked: list[OfEpisode | str] = []
    while len(asked) < 3:
        asked += next_news(workers)
    one, two, three, four = map(token, "1234")
    assert asked == [
        SampleTurn(episode="1/0/0", back=1, context=[three], max_new_tokens=8),
        SampleTurn(episode="1/0/0", back=2, context=[], max_new_tokens=8),
        SampleTurn(episode="1/0/0", back=0, context=[one, two], max_new_tokens=2),
    ]
    for turn, text in ((3, "7"), (2, "8"), (1, "9")):
        workers.send("1/0/0", TurnSampled(episode="1/0/0", turn=turn, token_ids=[token(text)], finish_reason="stop"))
    assert next_news(workers) == [SampleTurn(episode="1/0/0", back=1, context=[], max_new_tokens=8)]
    given_up: list[OfEpisode | str] = []
    while len(given_up) < 2:
        given_up += next_news(workers)
    assert given_up == [
        Withdraw(episode="1/0/0", turn=4),
        SampleTurn(episode="1/0/0", back=2, context=[four], max_new_tokens=8),
    ]
    workers.send("1/0/0", TurnSampled(episode="1/0/0", turn=5, token_ids=[5], finish_reason="stop"))
    # The prompt has 4 tokens, and the first sequence 3 more, of 20; all sequences have 11 of 40 by then.
    assert next_news(workers) == [
        Ended(
            episode="1/0/0",
            reward=987.9375,
            parts={"room": 13.0},
            is_out_of_room=False,
            turn_rewards={0: 0.1875, 3: 0.75},
            branch_rewards={0: 0.125, 1: 0.5, 2: 0.25},
        )
    ]


def test_many_episodes_wait_at_once_in_one_process(workers: Workers) -> None:
    names = {f"1/{index}/0" for index in range(200)}
    for name in names:
        play(workers, name, "turns")
    asked: list[OfEpisode | str] = []
    while len(asked) < len(names):
        asked += next_news(workers)
    assert {one.episode for one in asked if isinstance(one, SampleTurn)} == names


def test_many_agents_that_are_not_async_play_at_once(workers: Workers) -> None:
    for index in range(100):
        play(workers, f"1/{index}/0", "agent")
    ended: list[OfEpisode | str] = []
    while len(ended) < 100:
        ended += next_news(workers)
    assert all(isinstance(one, Ended) for one in ended)


@pytest.mark.parametrize(
    ("kind", "is_transient", "detail"),
    [
        ("mistake", False, "KeyError: 'answer'"),
        ("judge", True, "ConnectionError: no judge"),
        ("exit", False, "SystemExit: bye"),
        ("text", False, "TypeError: the reward is 'good', not a number"),
        ("half", False, "ValueError: no file \\ud83d"),
    ],
)
def test_function_that_raises_fails_its_episode_alone(workers: Workers, kind: str, is_transient: bool, detail: str) -> None:
    play(workers, "1/0/0", kind)
    (failed,) = next_news(workers)
    assert isinstance(failed, Failed)
    assert (failed.is_transient, failed.detail.startswith(detail)) == (is_transient, True)
    play(workers, "2/0/0", "turns")
    assert isinstance(next_news(workers)[0], SampleTurn)


@pytest.mark.parametrize("call", ["add", "reward", "metric"])
def test_what_an_episode_that_has_ended_would_lose_is_refused(workers: Workers, call: str) -> None:
    play(workers, "1/0/0", "keep")
    assert isinstance(next_news(workers)[0], Ended)
    play(workers, "2/0/0", f"late {call}")
    (failed,) = next_news(workers)
    assert isinstance(failed, Failed)
    assert failed.detail.startswith(f"RuntimeError: {call}() after the end of the episode")


def test_episode_without_room_ends_with_the_rewards_it_has(workers: Workers) -> None:
    play(workers, "1/0/0", "greedy")
    for turn in range(2):
        assert isinstance(next_news(workers)[0], SampleTurn)
        workers.send("1/0/0", TurnSampled(episode="1/0/0", turn=turn, token_ids=[5] * 8, finish_reason="length"))
    assert next_news(workers) == [
        Ended(
            episode="1/0/0",
            reward=1.25,
            parts={},
            is_out_of_room=True,
            turn_rewards={0: 0.5, 1: 0.5},
            branch_rewards={0: 0.5, 1: 0.5},
        )
    ]


def test_episode_without_room_whose_metric_has_a_wrong_name_fails_at_once(workers: Workers) -> None:
    play(workers, "1/0/0", "nameless")
    for turn in range(2):
        assert isinstance(next_news(workers)[0], SampleTurn)
        workers.send("1/0/0", TurnSampled(episode="1/0/0", turn=turn, token_ids=[5] * 8, finish_reason="length"))
    (failed,) = next_news(workers)
    assert isinstance(failed, Failed)
    assert "'tool calls'" in failed.detail


def test_agent_behind_a_proxy_reaches_its_endpoint(workers: Workers) -> None:
    play(workers, "1/0/0", "proxy")
    assert next_news(workers) == [Ended(episode="1/0/0", reward=1.0, parts={"repeated_requests": 0.0}, is_out_of_room=False)]


@pytest.mark.parametrize("num_parts", [31, 32])
def test_reward_of_an_agents_episode_has_as_many_parts_as_another(num_parts: int, workers: Workers) -> None:
    play(workers, "1/0/0", "parts", turns=num_parts - 1)
    (ended,) = next_news(workers)
    assert isinstance(ended, Ended)
    assert (ended.reward, len(ended.parts), "repeated_requests" in ended.parts) == (1.0, 32, num_parts == 31)


def test_metrics_are_no_part_of_the_sum_that_a_reward_is(workers: Workers) -> None:
    play(workers, "1/0/0", "metrics")
    parts = {"bytes": 6e5, "characters": 6e5}
    assert next_news(workers) == [Ended(episode="1/0/0", reward=1.0, parts=parts, is_out_of_room=False)]


def test_cancelled_episode_ends(workers: Workers) -> None:
    play(workers, "1/0/0", "turns")
    next_news(workers)
    workers.send("1/0/0", CancelEpisode(episode="1/0/0"))
    assert next_news(workers) == [Failed(episode="1/0/0", is_transient=True, detail="cancelled")]


def test_episode_that_is_cancelled_with_its_begin_answers(workers: Workers) -> None:
    play(workers, "1/0/0", "turns")
    workers.send("1/0/0", CancelEpisode(episode="1/0/0"))
    news = next_news(workers)
    while not isinstance(news[-1], Failed):
        news += next_news(workers)
    assert news[-1].episode == "1/0/0"


def test_crash_gives_back_every_episode_of_the_process_and_the_next_one_plays(fragile: Workers) -> None:
    play(fragile, "1/0/0", "turns")
    next_news(fragile)
    pid = fragile._workers[0]._process.pid
    play(fragile, "2/0/0", "crash")
    lost: list[OfEpisode | str] = []
    while len(lost) < 2:
        lost += next_news(fragile)
    assert lost == ["1/0/0", "2/0/0"]
    play(fragile, "1/0/1", "turns")
    assert list(fragile.not_begun()) == ["1/0/1"], "its worker is still starting"
    assert next_news(fragile)[-1] == SampleTurn(episode="1/0/1", context=[], max_new_tokens=3)
    assert list(fragile.not_begun()) == []
    assert not psutil.pid_exists(pid)


def test_blocked_process_and_what_it_started_are_killed(fragile: Workers) -> None:
    play(fragile, "1/0/0", "daemon")
    pid = fragile._workers[0]._process.pid
    next_news(fragile, lambda: len(sleepers()) == 2 and Path("daemon").exists() and bool(Path("daemon").read_text()))
    play(fragile, "2/0/0", "block")
    assert list(fragile.kill_worker_of("2/0/0", "it blocks")) == ["1/0/0", "2/0/0"]
    assert not psutil.pid_exists(pid)
    next_news(fragile, lambda: not sleepers() and processes.has_ended(int(Path("daemon").read_text())))


def sleepers() -> list[int]:
    """Return the programs that the function `daemon` has started; one of them has left its session, as its fork has."""
    return [pid for pid in processes._all() if processes.arguments(pid)[-1:] in (["617"], ["618"])]


def test_processes_that_all_die_end_the_actor_with_the_reason(fragile: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.actor.environments.workers.MAX_STARTS", 1)
    with pytest.raises(ServiceError, match=r"environment workers have died one after the other.*task\.environment"):
        for attempt in range(20):
            play(fragile, f"1/0/{attempt}", "crash")
            next_news(fragile)


@pytest.mark.parametrize(
    ("function", "why"),
    [("games:plain", "not async"), ("games:none", "has no 'none'"), ("nowhere:play", "no module 'nowhere'")],
)
def test_function_that_cannot_play_is_refused_before_anything_is_played(
    tiny_model: Path, forks: WorkerStarts, function: str, why: str
) -> None:
    before = worker_pids()
    with pytest.raises(ServiceError, match=why):
        Workers(begin(tiny_model, function), forks)
    assert worker_pids() == before
