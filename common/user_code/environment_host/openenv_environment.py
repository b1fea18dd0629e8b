"""Environments that an OpenEnv 0.10 server offers: reset and step over its own client.

    task.environment = "openenv:echo"                             the name is yours to choose
    environment.arguments = {url = "http://127.0.0.1:8000", reset = {}, max_turns = 20, rules = "Guess the number."}

    observation, as JSON -> turn of the model -> an action -> step -> reward, observation -> ...

An answer is an action as JSON, perhaps in a fenced block; where the server's action has one required field, any text is its
value. An answer that is no action is answered with the schema, takes a turn, and earns `without_action` (0). Rows are seeds,
which `reset` gets. Most servers have room for one session: episodes wait for each other then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import openenv  # pyright: ignore[reportMissingImports]

FENCE = re.compile(r"^```\w*\n(.*)\n```$", re.DOTALL)
BASE_FIELDS = ("done", "metadata", "reward")
"""Fields of every observation, which the model does not read."""
FULL_S = 0.2
"""Time between two tries to begin a session at a server that has no room."""


class OpenEnvEnvironment:
    """The environment of one server."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Ask the server for the schema of actions."""
        self._url = str(arguments["url"]).rstrip("/")
        self._reset = dict(arguments.get("reset", {}))
        self._max_turns = int(arguments.get("max_turns", 50))
        self._without_action = float(arguments.get("without_action", 0.0))
        self._entrance = asyncio.Lock()
        self._was_full = False
        with urllib.request.urlopen(f"{self._url}/schema", timeout=30) as answer:
            schema = json.load(answer)["action"]
        self._fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
        self._required = [name for name in schema.get("required", []) if name in self._fields]
        self._rules = str(arguments.get("rules", self._how()))

    def _how(self) -> str:
        return f"Answer with an action as JSON, which has these fields: {json.dumps(self._fields)}"

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield seeds, for ever. The split `test` has other ones."""
        for seed in itertools.count(1_000_000 if split == "test" else 0):
            yield {"prompt": self._rules, "seed": seed}

    async def play(self, chat: Any, row: dict[str, Any]) -> dict[str, float]:
        """Play until the environment is done or the next turn does not fit; return the sum of the rewards."""
        total = 0.0
        async with contextlib.AsyncExitStack() as session:
            client, result = await self._begin(session, row["seed"])
            messages = [{"role": "user", "content": f"{self._rules}\n{_shown(result.observation)}"}]
            for turn in range(1, self._max_turns + 1):
                answer = await asyncio.to_thread(chat.next_text, messages)
                if answer is None:
                    break
                chat.metric("turns", turn)
                action = self._action(answer)
                try:
                    result = result if action is None else await client.step(action)
                except RuntimeError as error:
                    if "VALIDATION_ERROR" not in str(error):
                        raise
                    action = None
                if action is None:
                    chat.metric("without_action", chat.metrics.get("without_action", 0.0) + 1)
                    total += self._without_action
                    shown = self._how()
                else:
                    total += float(result.reward or 0.0)
                    if result.done:
                        break
                    shown = _shown(result.observation)
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": shown}]
        return {"reward": total}

    async def _begin(self, session: contextlib.AsyncExitStack, seed: int) -> tuple[Any, Any]:
        """Return a client and its first result. While the server is full, one episode of this process asks at a time."""
        begun = await self._try_to_begin(session, seed)
        if begun is None:
            async with self._entrance:
                while (begun := await self._try_to_begin(session, seed)) is None:
                    await asyncio.sleep(FULL_S)
        return begun

    async def _try_to_begin(self, session: contextlib.AsyncExitStack, seed: int) -> tuple[Any, Any] | None:
        client = await session.enter_async_context(openenv.GenericEnvClient(base_url=self._url))
        try:
            return client, await client.reset(**{"seed": seed, **self._reset})
        except RuntimeError as error:
            if "CAPACITY_REACHED" not in str(error):
                raise
            if not self._was_full:
                print(f"episodes wait for a session: raise max_concurrent_envs of {self._url} ({error})", file=sys.stderr)
            self._was_full = True
        await session.aclose()
        return None

    def _action(self, answer: str) -> dict[str, Any] | None:
        """Return the action in an answer; None for an answer without one."""
        fenced = FENCE.match(answer.strip())
        text = fenced[1].strip() if fenced else answer.strip()
        try:
            action: Any = json.loads(text)
        # Also numbers and lists too long for Python.
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict) and len(self._required) == 1:
            (name,) = self._required
            # `12` is a number as JSON, and may be meant as a word.
            value = text if self._fields[name].get("type") == "string" else action
            action = None if value is None else {name: value}
        if not isinstance(action, dict):
            return None
        return action if set(self._required) <= set(action) <= {*self._fields, "metadata"} else None


def load(name: str, arguments: dict[str, Any]) -> OpenEnvEnvironment:
    """Return the environment of the server at `url`."""
    if "url" not in arguments:
        raise ValueError('environment.arguments has no url: name the server, {url = "http://127.0.0.1:8000"}')
    return OpenEnvEnvironment(arguments)


def _shown(observation: dict[str, Any]) -> str:
    seen = {name: value for name, value in observation.items() if name not in BASE_FIELDS and value is not None}
    values = list(seen.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(seen)
