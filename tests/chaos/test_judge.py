"""The judge of a chaos round can be down, and no group is lost for it."""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from tests.actor.rewards.reward_harness import make_runner_of, rewarded, samples, wait
from tests.chaos.faults import Attempt, Scene, commit
from tests.chaos.judge import REWARD, SLOW_S, URL_VARIABLE, Judge, judged
from tests.chaos.schedule import Fault, Target
from tests.chaos.test_chaos import detail_of

DOWN = Fault("judge down", "learner", at_step=1, delay_s=0.0, duration_s=0.2, seed=1)


class Interrupted:
    """A round whose pauses are filled by the test."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile

    def find(self, target: Target) -> int:
        raise AssertionError(f"{target} is no victim of this fault")

    def pause(self, seconds: float) -> None:
        self._meanwhile()

    def try_learner(self, *settings: str) -> Attempt:
        raise AssertionError("this fault tries no learner")


def make_scene(judge: Judge | None, meanwhile: Callable[[], None]) -> Scene:
    """Return a scene without services; `meanwhile` is what happens while a fault lasts."""
    return Scene(Interrupted(meanwhile), cast(Any, None), cast(Any, None), None, judge, Path(), Path(), 0)


def test_judge_is_down_for_a_while_and_costs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.actor.rewards.retries.FIRST_DELAY_S", 0.05)
    judge = Judge("127.0.0.1")
    monkeypatch.setenv(URL_VARIABLE, judge.url)
    runner = make_runner_of(REWARD, retry_s=20.0)

    def meanwhile() -> None:
        for key in range(4):
            runner.submit(key, samples(["7", "8"], {"answer": 7}))
        deadline = time.monotonic() + 10
        while (trouble := runner.retries.trouble(time.monotonic())) is None or len(trouble.lease_ids) < 4:
            assert time.monotonic() < deadline
            assert runner.poll() == []

    try:
        down = commit(DOWN, make_scene(judge, meanwhile))
        assert detail_of(down).startswith("the judge of the rewards was down for 0.2 s, and refused ")
        assert judge.num_refusals >= 4
        assert wait(runner) == {key: rewarded(key, 1.0, 0.0) for key in range(4)}
    finally:
        runner.close()
        judge.close()


def test_slow_judge_answers_late(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("tests.chaos.judge.time.sleep", slept.append)
    with closing(Judge("127.0.0.1")) as judge:
        monkeypatch.setenv(URL_VARIABLE, judge.url)
        group = samples(["7", "8"], {"answer": 7})
        assert (judged(group), slept) == ([1.0, 0.0], [])
        judge.is_slow = lambda: True
        assert (judged(group), slept) == ([1.0, 0.0], [SLOW_S])


def test_run_with_a_reward_of_its_own_has_no_judge_to_take_down() -> None:
    assert commit(DOWN, make_scene(None, lambda: None)).detail is None
