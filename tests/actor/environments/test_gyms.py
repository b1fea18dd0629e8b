"""Classes with reset and step play episodes; whatever happens, they are closed, once, after what they were doing."""

import asyncio
import threading
from typing import Any

import pytest

from offbeat.environments import gym
from tests.actor.environments.scripted_chat import ScriptedChat


class Counter:
    """Counts up to the row's target; moves are written down with their thread."""

    log: list[tuple[Any, ...]]
    entered: threading.Event
    leave: threading.Event

    def __init__(self) -> None:
        self.count = 0
        self.target = 0
        self.thread = threading.get_ident()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert options is not None
        self.target = options["target"]
        self.log.append(("reset", seed))
        return f"0 of {self.target}", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert threading.get_ident() == self.thread != threading.main_thread().ident
        if action == 0:
            self.entered.set()
            self.leave.wait(30)
        if action < 0:
            raise RuntimeError("negative")
        self.count += action
        self.log.append(("step", action))
        return f"{self.count}", 0.5, self.count == self.target, self.count > self.target, {}

    def close(self) -> None:
        self.log.append(("close",))


@pytest.fixture(autouse=True)
def log() -> list[tuple[Any, ...]]:
    Counter.log, Counter.entered, Counter.leave = [], threading.Event(), threading.Event()
    return Counter.log


def play(chat: ScriptedChat, row: dict[str, Any], **options: Any) -> None:
    asyncio.run(gym(Counter, action=int, **options)(chat, row))  # type: ignore[arg-type,func-returns-value]


def test_turns_are_steps_until_the_environment_ends_the_episode(log: list[tuple[Any, ...]]) -> None:
    chat = ScriptedChat("1", "2", "9")
    play(chat, {"target": 3})
    assert log == [("reset", 7), ("step", 1), ("step", 2), ("close",)]
    assert chat.answers == ["0 of 3", "1"]
    assert (chat.rewards, chat.metrics) == (1.0, {"turns": 2})


def test_rows_choose_the_world_and_prompts_may_be_the_first_observation(log: list[tuple[Any, ...]]) -> None:
    chat = ScriptedChat("5", prompt="0 of 3")
    play(chat, {"target": 3, "seed": 11})
    assert log[0] == ("reset", 11)
    assert (chat.answers, chat.rewards) == ([], 0.5)


def test_text_that_is_no_action_costs_a_turn(log: list[tuple[Any, ...]]) -> None:
    chat = ScriptedChat("one", "1", "never")
    play(chat, {"target": 3}, max_turns=2)
    assert chat.answers == ["0 of 3", "Error: invalid literal for int() with base 10: 'one'", "1"]
    assert log == [("reset", 7), ("step", 1), ("close",)]


def test_environment_that_raises_is_closed(log: list[tuple[Any, ...]]) -> None:
    with pytest.raises(RuntimeError, match="negative"):
        play(ScriptedChat("-1"), {"target": 3})
    assert log[-1] == ("close",)


def test_cancelled_episode_is_closed_after_the_step_at_work(log: list[tuple[Any, ...]]) -> None:
    async def cancelled() -> None:
        episode = asyncio.ensure_future(gym(Counter, action=int)(ScriptedChat("0"), {"target": 3}))  # type: ignore[arg-type]
        await asyncio.to_thread(Counter.entered.wait, 30)
        episode.cancel()
        await asyncio.sleep(0)
        assert log == [("reset", 7)]
        Counter.leave.set()
        with pytest.raises(asyncio.CancelledError):
            await episode

    asyncio.run(cancelled())
    assert log == [("reset", 7), ("step", 0), ("close",)]
