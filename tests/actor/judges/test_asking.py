"""The judge is asked within its limits; what it fails to answer is never a score, and costs no more than was allowed."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

import offbeat
from offbeat import JudgeError, RewardUnavailable, Verdict, judge, judge_sync
from offbeat.actor.judges import client
from offbeat.actor.judges.client import counts_of_judge, handed_to_processes, verdict_of
from offbeat.actor.rewards import retries
from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config, JudgeSection
from tests.actor.judges.fake_judge import Answer, FakeJudge, serving


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY_S", 0.002)
    monkeypatch.setattr(retries, "LONGEST_DELAY_S", 0.01)


def config_of(fake: FakeJudge, **settings: Any) -> Config:
    return Config(judge=JudgeSection(url=fake.url, model="grader", **settings))


def ask(fake: FakeJudge, question: Callable[[], Awaitable[Any]] | None = None, **settings: Any) -> Any:
    """Run one coroutine, by default a judgement with a score, and return what it returns and the counts."""

    async def run() -> Any:
        return await (judge("good?", pattern=r"Score: (\S+)") if question is None else question())

    with handed_to_processes(config_of(fake, **settings)):
        return asyncio.run(run()), counts_of_judge()


def test_verdict_has_text_score_and_tokens() -> None:
    with serving(lambda number, request: Answer("Score: 3, no: Score: 7.5")) as fake:
        verdict, counts = ask(fake, options={"max_tokens": 5})
    assert verdict == Verdict("Score: 3, no: Score: 7.5", 7.5, 10)
    assert fake.requests == [
        {"model": "grader", "temperature": 0, "max_tokens": 5, "messages": [{"role": "user", "content": "good?"}]}
    ]
    assert "Authorization" not in fake.headers[0]
    assert {name: count for name, count in counts.items() if name != "seconds"} == {
        "requests": 1, "failed": 0, "cached": 0, "tokens": 10
    }  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "text", "score"),
    [
        (r"\d", "1 or 2", 2.0), ("Score: (.*)", "Score: nan", None), ("Score: (.*)", "Score: x", None),
        ("(a)|b", "b", None), (None, "x", None), (r"Score: (\d+)", "none", None),
    ],
)  # fmt: skip
def test_score_is_the_last_match_and_never_made_up(pattern: str | None, text: str, score: float | None) -> None:
    verdict = verdict_of(text, pattern)
    assert (None if verdict is None else verdict.score) == score
    assert (verdict is None) == (score is None and pattern is not None)


FAILURES = {
    "500": Answer("Score: 1", 500),
    "429": Answer("Score: 1", 429),
    "garbage": Answer(body=b"\xff<html>"),
    "no choice": Answer(body=b'{"choices": []}'),
    "no text": Answer(None),
    "no score": Answer("I cannot say"),
    "huge": Answer("Score: 1 " + "x" * (1 << 21)),
}


@pytest.mark.parametrize("name", FAILURES)
def test_judge_that_fails_twice_is_asked_a_third_time(name: str) -> None:
    with serving(lambda number, request: FAILURES[name] if number < 2 else Answer()) as fake:
        verdict, counts = ask(fake, max_retries=2, timeout_s=20)
    assert (verdict.score, len(fake.requests)) == (7.0, 3)
    assert (counts["requests"], counts["failed"]) == (3, 2)


def test_judge_whose_answer_drips_twice_is_asked_a_third_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # The client's clock goes on by 5 s with each byte of a dripping answer. So the limit is over for certain after some bytes,
    # and the last answer, during which the clock is an ordinary one, has the whole limit on a busy machine too.
    ahead_s = 0.0

    def after_byte() -> None:
        nonlocal ahead_s
        ahead_s += 5.0
        time.sleep(0.02)

    async def question() -> Verdict:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + ahead_s)
        return await judge("good?", pattern=r"Score: (\S+)")

    drips = Answer("Score: 1", after_byte=after_byte)
    with serving(lambda number, request: drips if number < 2 else Answer()) as fake:
        verdict, counts = ask(fake, question, max_retries=2, timeout_s=100)
    assert (verdict.score, len(fake.requests)) == (7.0, 3)
    assert (counts["requests"], counts["failed"]) == (3, 2)


@pytest.mark.parametrize("name", ["500", "no score", "huge"])
def test_judge_that_keeps_failing_is_unavailable_and_gives_no_score(name: str) -> None:
    with serving(lambda number, request: FAILURES[name]) as fake, pytest.raises(RewardUnavailable, match=fake.url) as raised:
        ask(fake, max_retries=1)
    assert len(fake.requests) == 2
    assert len(str(raised.value)) < 600


def test_judge_that_is_not_there_is_unavailable() -> None:
    with serving(lambda number, request: Answer()) as fake:
        pass
    with pytest.raises(RewardUnavailable, match="ConnectError"):
        ask(fake, max_retries=1)


def test_refused_request_is_a_mistake_that_is_not_repeated_and_hides_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-123456")
    refusal = Answer(status=401, body=b"no such key: sk-123456 \x1b[2J")
    with serving(lambda number, request: refusal) as fake, pytest.raises(JudgeError, match="HTTP 401") as raised:
        ask(fake, key_env="JUDGE_KEY")
    assert fake.headers[0]["Authorization"] == "Bearer sk-123456"
    assert len(fake.requests) == 1
    assert "123456" not in str(raised.value)
    assert "\x1b" not in str(raised.value)


def test_retry_after_is_heeded_by_all_calls_of_the_actor() -> None:
    def answer(number: int, request: dict[str, Any]) -> Answer:
        return Answer(status=429, headers={"Retry-After": "0.4"}) if number == 0 else Answer()

    async def first_then_others() -> None:
        first = asyncio.create_task(judge("a"))
        while not fake.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await asyncio.gather(first, judge("b"), judge("c"))

    with serving(answer) as fake:
        ask(fake, first_then_others)
    assert len(fake.requests) == 4
    assert min(fake.times[1:]) >= fake.times[0] + 0.4


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0), ("0.5", 0.5), ("Wed, 21 Oct 2015 07:30:00 GMT", 120.0), ("Wed, 21 Oct 2015 07:00:00 GMT", 0.0),
        ("", None), ("soon", None), ("-1", None), ("Wed, 21 Oct 2015 25:00:00 GMT", None),
        ("Wed, 21 Oct 2015 07:30:00 +99999999999999", None),
    ],
)  # fmt: skip
def test_retry_after_is_a_number_or_a_date_by_the_servers_clock(value: str, seconds: float | None) -> None:
    headers = httpx2.Headers({"Date": "Wed, 21 Oct 2015 07:28:00 GMT", "Retry-After": value})
    assert client._retry_after_s(headers) == seconds


@pytest.mark.parametrize("pause", ["3600", formatdate(time.time() + 86400, usegmt=True)], ids=["seconds", "date"])
def test_long_pause_is_given_back_to_the_caller_and_no_request_breaks_it(pause: str) -> None:
    async def twice() -> None:
        for _ in range(2):
            with pytest.raises(RewardUnavailable, match="asked to wait"):
                await judge("a")

    with serving(lambda number, request: Answer(status=503, headers={"Retry-After": pause})) as fake:
        ask(fake, twice)
    assert len(fake.requests) == 1


def test_requests_keep_their_distance_and_their_number() -> None:
    async def many() -> None:
        await asyncio.gather(*[judge(str(number)) for number in range(6)])

    with serving(lambda number, request: Answer(delay_s=0.15)) as fake:
        ask(fake, many, max_concurrent=2)
    assert fake.most_at_once == 2
    with serving(lambda number, request: Answer()) as fake:
        ask(fake, many, requests_per_minute=60 / 0.1)
    times = sorted(fake.times)
    assert times[-1] - times[0] >= 0.3, "six requests, 0.1 s apart, minus what a busy machine delays the first by"


def test_same_request_is_sent_once_with_a_cache(tmp_path: Path) -> None:
    async def thrice() -> list[Verdict]:
        return [await judge("a", pattern=r"\d"), await judge("a", pattern=r"\d"), await judge("b", pattern=r"\d")]

    with serving(lambda number, request: Answer()) as fake:
        (first, second, _), counts = ask(fake, thrice, cache=str(tmp_path))
        assert (first.is_cached, second) == (False, first._replace(num_tokens=0, is_cached=True))
        assert (len(fake.requests), counts["cached"], counts["tokens"]) == (2, 1, 20)
        # Another process, another model, or another wish for a score.
        assert ask(fake, lambda: judge("a"), cache=str(tmp_path))[0].is_cached
        assert not ask(fake, lambda: judge("a", options={"max_tokens": 1}), cache=str(tmp_path))[0].is_cached
        with pytest.raises(RewardUnavailable):
            ask(fake, lambda: judge("a", pattern="Points: (.)"), cache=str(tmp_path), max_retries=0)
    assert len(fake.requests) == 4


def test_answers_at_another_temperature_are_not_kept(tmp_path: Path) -> None:
    async def twice() -> None:
        await judge("a", options={"temperature": 1})
        await judge("a", options={"temperature": 1})

    with serving(lambda number, request: Answer()) as fake:
        ask(fake, twice, cache=str(tmp_path))
    assert len(fake.requests) == 2


def test_cache_that_cannot_be_used_costs_only_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "judge.sqlite3").write_bytes(b"not a database" * 100)
    with serving(lambda number, request: Answer()) as fake:
        for _ in range(2):
            assert ask(fake, cache=str(tmp_path))[0].score == 7
    assert len(fake.requests) == 2
    assert "judge.cache" in caplog.text


def test_plain_functions_ask_from_several_threads() -> None:
    verdicts: list[Verdict] = []
    with serving(lambda number, request: Answer()) as fake, handed_to_processes(config_of(fake)):
        threads = [threading.Thread(target=lambda: verdicts.append(judge_sync("a"))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert counts_of_judge()["requests"] == 3
    assert [verdict.text for verdict in verdicts] == ["Score: 7"] * 3


def test_plain_call_in_async_code_is_a_mistake() -> None:
    async def wrong() -> None:
        judge_sync("a")

    with pytest.raises(RuntimeError, match="await judge"):
        asyncio.run(wrong())


def test_without_a_judge_the_setting_is_named() -> None:
    assert counts_of_judge() == {}
    with pytest.raises(SettingError, match=r"judge\.url"):
        asyncio.run(offbeat.judge("a"))


def test_tokens_are_estimated_where_the_server_does_not_count() -> None:
    with serving(lambda number, request: Answer(tokens=None)) as fake:
        verdict, counts = ask(fake)
    assert counts["tokens"] == verdict.num_tokens > 20


def test_processes_learn_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-123456")
    with serving(lambda number, request: Answer()) as fake:
        config = config_of(fake, key_env="JUDGE_KEY", max_concurrent=9)
    with handed_to_processes(msgspec.structs.replace(config, actor=msgspec.structs.replace(config.actor, reward_workers=2))):
        here = client.handed()
    assert here is not None
    assert here.max_concurrent == 4, "half of it, rounded down, for each of two processes"
    assert "123456" not in msgspec.json.encode(here).decode()
