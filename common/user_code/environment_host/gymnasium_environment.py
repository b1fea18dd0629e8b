"""Environments of gymnasium whose observations and actions can be written as text: FrozenLake, Taxi, Blackjack, CliffWalking.

    task.environment = "gymnasium:FrozenLake-v1"
    environment.arguments = {make = {is_slippery = false}, max_turns = 20, rules = "Reach G. Answer with 0, 1, 2 or 3."}

    observation, as text -> turn of the model -> its last number, an action -> step -> reward, observation -> ...

A text that holds no action is answered with the actions that there are, takes a turn, and earns `without_action` (0). `ansi`
shows the environment's own picture where it has one. Rows are seeds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import gymnasium  # pyright: ignore[reportMissingImports]

NUMBER = re.compile(r"-?\d+")
MAX_DIGITS = 18
"""Longest number that may be an action, in characters."""


class GymnasiumEnvironment:
    """One environment: seeds as rows, and its episodes."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        """Raise `ValueError` for actions that are no whole numbers."""
        self._name = name
        self._options = dict(arguments.get("make", {}))
        self._max_turns = int(arguments.get("max_turns", 50))
        self._without_action = float(arguments.get("without_action", 0.0))
        environment = self._make()
        space = environment.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{name} has actions {space}, and a model writes whole numbers: give it a wrapper of your own")
        self._actions = range(int(space.start), int(space.start + space.n))
        self._how = f"Answer with an action, {self._actions.start} to {self._actions.stop - 1}."
        self._rules = str(arguments.get("rules") or f"{name}. {self._how}")
        environment.close()

    def _make(self) -> Any:
        environment = gymnasium.make(self._name, **self._options)
        if "render_mode" in self._options or "ansi" not in environment.metadata.get("render_modes", ()):
            return environment
        environment.close()
        return gymnasium.make(self._name, render_mode="ansi", **self._options)

    def _shown(self, environment: Any, observation: Any) -> str:
        picture = environment.render() if environment.unwrapped.render_mode == "ansi" else None
        return re.sub(r"\x1b\[[0-9;]*m(.)\x1b\[0m", r"*\1*", picture).strip() if isinstance(picture, str) else str(observation)

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield seeds with their first observations, for ever. The split `test` has other seeds."""
        environment = self._make()
        for seed in itertools.count(1_000_000 if split == "test" else 0):
            observation, _ = environment.reset(seed=seed)
            yield {"prompt": self._first(environment, observation), "seed": seed}

    def _first(self, environment: Any, observation: Any) -> str:
        return f"{self._rules}\n{self._shown(environment, observation)}"

    def play(self, chat: Any, row: dict[str, Any]) -> dict[str, float]:
        """Play the row's seed until it ends or the next turn does not fit; return the sum of the rewards."""
        environment = self._make()
        try:
            observation, _ = environment.reset(seed=row["seed"])
            messages = [{"role": "user", "content": self._first(environment, observation)}]
            total = 0.0
            for turn in range(1, self._max_turns + 1):
                answer = chat.next_text(messages)
                if answer is None:
                    break
                chat.metric("turns", turn)
                action = self._action(answer)
                if action is None:
                    shown = self._how
                    chat.metric("without_action", chat.metrics.get("without_action", 0.0) + 1)
                    total += self._without_action
                else:
                    observation, reward, terminated, truncated, _ = environment.step(action)
                    total += float(reward)
                    if terminated or truncated:
                        break
                    shown = self._shown(environment, observation)
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": shown}]
            return {"reward": total}
        finally:
            environment.close()

    def _action(self, answer: str) -> int | None:
        """Return the last number of an answer; None where it is no action."""
        numbers = NUMBER.findall(answer)
        # A model that repeats a digit writes numbers that Python does not read.
        if not numbers or len(numbers[-1]) > MAX_DIGITS or int(numbers[-1]) not in self._actions:
            return None
        return int(numbers[-1])


def load(name: str, arguments: dict[str, Any]) -> GymnasiumEnvironment:
    """Return the environment that gymnasium has registered under this name."""
    return GymnasiumEnvironment(name, arguments)
