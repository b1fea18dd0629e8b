"""A judge that is down destroys nothing: completions wait for their rewards, and only mistakes in the function fail at once."""

import asyncio
import http.server
import sys
import threading
import time
import types
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offbeat.actor.rewards import retries
from offbeat.actor.rewards.failures import SamplingFailure
from offbeat.actor.rewards.runner import RewardRunner
from offbeat.actor.rewards.samples import RewardUnavailable
from tests.actor.rewards.reward_harness import make_runner_of, rewarded, samples, wait

MakeRunner = Callable[..., RewardRunner]


@pytest.fixture
def run_reward(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRunner]:
    """Return a function that makes a runner of an async reward function; failed calls are tried again after milliseconds."""
    monkeypatch.setattr(retries, "FIRST_DELAY_S", 0.002)
    monkeypatch.setattr(retries, "LONGEST_DELAY_S", 0.02)
    runners: list[RewardRunner] = []

    def make(
        function: Callable[..., Any], *, weights: dict[str, float] | None = None, retry_s: float = 20.0, **limits: Any
    ) -> RewardRunner:
        module = types.ModuleType("judged_rewards")
        module.__file__ = __file__
        vars(module)["reward"] = function
        monkeypatch.setitem(sys.modules, "judged_rewards", module)
        runners.append(make_runner_of("judged_rewards:reward", weights, retry_s=retry_s, **limits))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


class Judge(http.server.BaseHTTPRequestHandler):
    """Rewards a completion with its length; answers 503 to the first `num_refusals` requests."""

    num_refusals = 0
    num_requests = 0

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).num_requests += 1
        is_down = type(self).num_requests <= type(self).num_refusals
        answer = b"busy" if is_down else str(len(text)).encode()
        self.send_response(503 if is_down else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


@pytest.fixture
def judge() -> Iterator[str]:
    """Serve a judge, and return its URL."""
    Judge.num_refusals = Judge.num_requests = 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_no_group_is_lost_while_a_judge_answers_503(run_reward: MakeRunner, judge: str) -> None:
    def ask(text: str) -> float:
        with urllib.request.urlopen(urllib.request.Request(judge, data=text.encode()), timeout=10) as answer:
            return float(answer.read())

    async def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
        return await asyncio.to_thread(ask, completion)

    Judge.num_refusals = 60
    runner = run_reward(reward, concurrency=4)
    for key in range(6):
        runner.submit(key, samples(["a" * key, "bb", "ccc"]))
    assert wait(runner) == {key: rewarded(key, key, 2, 3) for key in range(6)}
    assert Judge.num_requests == 60 + 18, "every completion got its one answer"


def test_only_the_completion_without_a_reward_is_asked_for_again(run_reward: MakeRunner) -> None:
    calls: Counter[str] = Counter()

    async def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
        calls[completion] += 1
        if completion == "slow" and calls[completion] < 4:
            raise RewardUnavailable("not yet")
        return 1.0

    runner = run_reward(reward)
    runner.submit(1, samples(["a", "slow", "b"]))
    assert wait(runner) == {1: rewarded(1, 1, 1, 1)}
    assert calls == {"a": 1, "slow": 4, "b": 1}


def test_call_that_exceeds_its_time_is_tried_again_without_the_others(run_reward: MakeRunner) -> None:
    calls: Counter[str] = Counter()

    async def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
        calls[completion] += 1
        if completion == "hangs" and calls[completion] == 1:
            await asyncio.sleep(60)
        return 1.0

    runner = run_reward(reward, timeout_s=0.1)
    runner.submit(1, samples(["a", "hangs"]))
    assert wait(runner) == {1: rewarded(1, 1, 1)}
    assert calls == {"a": 1, "hangs": 2}


@pytest.mark.parametrize("form", ["samples", "one"])
def test_call_whose_shared_task_another_calls_time_limit_cancelled_is_tried_again(run_reward: MakeRunner, form: str) -> None:
    shared: list[asyncio.Task[None]] = []
    num_calls = 0

    async def ask() -> float:
        nonlocal num_calls
        num_calls += 1
        if not shared:
            shared.append(asyncio.create_task(asyncio.sleep(60)))
        if not shared[0].done() or num_calls <= 2:
            await shared[0]
        return 1.0

    async def of_samples(samples: Any) -> list[float]:
        return [await ask() for _ in samples]

    async def of_one(prompt: str, completion: str, row: dict[str, Any]) -> float:
        return await ask()

    runner = run_reward(of_samples if form == "samples" else of_one, concurrency=2, batch_size=1, timeout_s=0.3)
    runner.submit(1, samples(["a"]))
    while not num_calls:
        time.sleep(0.001)
    time.sleep(0.1)
    # Its own time is not over when that of the first one ends the task.
    runner.submit(2, samples(["b"]))
    assert wait(runner) == {1: rewarded(1, 1), 2: rewarded(2, 1)}


def test_mistake_fails_the_group_at_once_although_another_completion_waits(run_reward: MakeRunner) -> None:
    async def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
        if completion == "down":
            raise ConnectionRefusedError("nobody there")
        await asyncio.sleep(0.01)
        return {"good": 1.0}[completion]

    runner = run_reward(reward)
    runner.submit(1, samples(["down", "good", "bad"]))
    outcome = wait(runner)[1]
    assert isinstance(outcome, SamplingFailure)
    assert outcome.reason == "reward_error"
    assert outcome.detail.startswith("KeyError: 'bad' (")


def test_first_mistake_is_shown_with_its_whole_traceback_and_later_ones_are_not(
    run_reward: MakeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    async def reward(sample: Any) -> float:
        return 1 / len(sample.row)

    runner = run_reward(reward)
    for key in range(3):
        runner.submit(key, samples(["a"]))
    assert {type(outcome) for outcome in wait(runner).values()} == {SamplingFailure}
    (shown,) = [record.getMessage() for record in caplog.records if "Traceback" in record.getMessage()]
    assert "return 1 / len(sample.row)" in shown
    assert "reward_functions.py" not in shown, "only the user's part"


def test_reward_that_stays_away_is_given_up_in_time(run_reward: MakeRunner) -> None:
    async def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
        raise RewardUnavailable("the judge is down")

    runner = run_reward(reward, retry_s=0.1)
    runner.submit(1, samples(["a"]))
    outcome = wait(runner)[1]
    assert isinstance(outcome, SamplingFailure)
    assert outcome.reason == "reward_unavailable"
    assert outcome.detail.startswith("RewardUnavailable: the judge is down (")


def test_trouble_names_the_groups_that_wait_and_ends_with_them(run_reward: MakeRunner) -> None:
    is_down = True

    async def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
        if is_down and completion == "a":
            raise TimeoutError("no answer")
        return 1.0

    started = time.monotonic()
    runner = run_reward(reward)
    runner.submit(1, samples(["a"]))
    runner.submit(2, samples(["b"]))
    runner.submit(3, samples(["a"]))
    deadline = time.monotonic() + 10
    done = []
    while (trouble := runner.retries.trouble(started)) is None or set(trouble.lease_ids) != {1, 3}:
        assert time.monotonic() < deadline
        done += runner.poll()
    assert trouble.problem.startswith("TimeoutError: no answer (")
    assert trouble.waiting_s == 0, "by a clock that was read before the failure"
    later = runner.retries.trouble(started + 1e3)
    assert later is not None
    assert later.waiting_s > 900
    # Attempts at both go on, and one success is not half of what is done.
    while not runner.retries.is_failing:
        assert time.monotonic() < deadline
        done += runner.poll()
    runner.cancel(3)
    is_down = False
    assert done + list(wait(runner).values()) == [rewarded(2, 1), rewarded(1, 1)]
    assert runner.retries.trouble(time.monotonic()) is None
    assert not runner.retries.is_failing


def test_cancelled_group_is_not_tried_again(run_reward: MakeRunner) -> None:
    calls: Counter[str] = Counter()

    async def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
        calls[completion] += 1
        raise ConnectionResetError

    runner = run_reward(reward)
    runner.submit(1, samples(["a"]))
    while not calls["a"]:
        time.sleep(0.001)
    runner.cancel(1)
    assert runner.num_pending == 0
    runner.submit(2, samples(["b"]))
    while calls["b"] < 3:
        time.sleep(0.001)
    before = calls["a"]
    while calls["b"] < 8:
        time.sleep(0.001)
    assert calls["a"] == before
    runner.cancel(2)
    assert runner.poll() == []


def test_calls_at_the_same_time_stay_within_their_bound(run_reward: MakeRunner) -> None:
    num_running, most = 0, 0

    async def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        await asyncio.sleep(0.002)
        num_running -= 1
        return 1.0

    runner = run_reward(reward, concurrency=3)
    for key in range(4):
        runner.submit(key, samples(["a"] * 5))
    assert len(wait(runner)) == 4
    assert most == 3


def test_samples_of_several_groups_share_a_call_while_the_others_are_busy(run_reward: MakeRunner) -> None:
    batches: list[list[str]] = []
    is_first_in = asyncio.Event()
    may_go_on = threading.Event()

    async def reward(samples: Any) -> list[float]:
        batches.append([sample.completion for sample in samples])
        is_first_in.set()
        while not may_go_on.is_set():
            await asyncio.sleep(0.001)
        return [float(len(sample.completion)) for sample in samples]

    runner = run_reward(reward, concurrency=1, batch_size=3)
    runner.submit(1, samples(["a"]))
    while not is_first_in.is_set():
        time.sleep(0.001)
    runner.submit(2, samples(["bb", "cc"]))
    runner.submit(3, samples(["ddd", "eee"]))
    time.sleep(0.02)
    may_go_on.set()
    assert wait(runner) == {1: rewarded(1, 1), 2: rewarded(2, 2, 2), 3: rewarded(3, 3, 3)}
    assert batches == [["a"], ["bb", "cc", "ddd"], ["eee"]]


def test_mistake_in_a_shared_call_fails_only_its_group(run_reward: MakeRunner) -> None:
    may_go_on = threading.Event()

    async def reward(samples: Any) -> list[float]:
        while not may_go_on.is_set():
            await asyncio.sleep(0.001)
        return [float(sample.completion) for sample in samples]

    runner = run_reward(reward, concurrency=1)
    for key, texts in enumerate([["0"], ["1", "2"], ["x", "3"], ["4"]]):
        runner.submit(key, samples(texts))
    time.sleep(0.02)
    may_go_on.set()
    outcomes = wait(runner)
    assert [outcomes[key] for key in (0, 1, 3)] == [rewarded(0, 0), rewarded(1, 1, 2), rewarded(3, 4)]
    assert isinstance(outcomes[2], SamplingFailure)


def test_function_of_a_group_sees_it_whole_and_again_when_it_was_not_to_be_had(run_reward: MakeRunner) -> None:
    seen: list[list[str]] = []

    async def reward(group: Any) -> list[dict[str, float]]:
        seen.append([sample.completion for sample in group])
        if len(seen) == 1:
            raise RewardUnavailable
        longest = max(len(sample.token_ids) for sample in group)
        return [{"longest": float(len(sample.token_ids) == longest), "even": 1.0} for sample in group]

    runner = run_reward(reward, weights={"even": 0.25})
    runner.submit(1, samples(["a", "bbb"]))
    outcome = wait(runner)[1]
    assert not isinstance(outcome, SamplingFailure)
    assert [reward.total for reward in outcome.rewards] == [0.25, 1.25]
    assert [reward.parts for reward in outcome.rewards] == [{"longest": 0.0, "even": 1.0}, {"longest": 1.0, "even": 1.0}]
    assert seen == [["a", "bbb"]] * 2
