"""Play environments in a Python of their own. The file needs nothing but Python 3.9, so you may copy it, or write its like.

    python host.py my_task:play '{"difficulty": 2}'

One message is one line of JSON. The program reads them from its standard input and answers on its standard output:

    -> {"type": "rows", "split": "train", "skip": 0, "size": 1000}      size null: all there are
    <- {"type": "row", "row": {"prompt": "a:", "answer": "7"}}          one for each row, then
    <- {"type": "rows_end"}
    -> {"type": "start", "episode": "17/3/0", "url": "http://127.0.0.1:PORT/e/SECRET/v1", "row": {...}, "prompt": "a:",
        "seed": 17, "is_evaluation": false}
    <- {"type": "end", "episode": "17/3/0", "reward": 1.0, "metrics": {"turns": 2}, "rewards": {"solver": 0.5}}
        reward: a number, or named parts; rewards: what agents earned beside it, by the X-Session-ID of their requests
    <- {"type": "failed", "episode": "17/3/0", "error": "ValueError: ...", "is_transient": false, "traceback": "...",
        "metrics": {"turns": 2}, "rewards": {"solver": 0.5}}
        metrics, rewards: those so far, which an episode keeps that failed because its next turn did not fit
    -> {"type": "stop", "episode": "17/3/0"}                            the episode is given up: it answers with failed

Its first message is `{"type": "ready"}`, or `{"type": "problem", "text": "..."}`. At the end of its input it exits. What the
environment prints goes to standard error.

A module has `play(chat, row)`, plain or async, and for `data.train_data = "task-environment:train"` also `rows(split)`. Both
get `environment.arguments` by name. The model is asked at `chat.url`, with any client of OpenAI's or Anthropic's API, or by
`chat.ask(messages)`.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Iterator  # noqa: UP035, Python 3.9 reads it

FRAMEWORKS = ("gymnasium", "harbor", "nemo_gym", "openenv", "verifiers")
"""Names before the colon that stand for a file beside this one, which plays the environments of that framework."""
NUM_THREADS = 512
"""Plain functions that play at once."""
END_S = 1.0
"""Time in which the event loop must notice the end of the input."""
MAX_METRICS = 24
"""Numbers of a framework that are shown beside the reward. A reward has at most 32 parts."""
LARGEST_METRIC = 1e6
"""Largest number that a part of a reward may be. Frameworks also record times and identifiers."""
TRANSIENT_STATUS = (408, 425, 429)
"""HTTP answers below 500 that ask to try again: request timeout, too early, too many requests."""
_TRANSIENT_ERRNO = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT)
_TRANSIENT_CLASSES = frozenset(
    [
        "APIConnectionError",
        "ClientConnectionError",
        "IncompleteRead",
        "RewardUnavailable",
        "aiohttp.ClientPayloadError",
        "httpcore.NetworkError",
        "httpcore.TimeoutException",
        "httpcore2.NetworkError",
        "httpcore2.TimeoutException",
        "httpx.TransportError",
        "httpx2.TransportError",
        "requests.ChunkedEncodingError",
        "requests.ConnectionError",
        "requests.Timeout",
        "urllib3.ProtocolError",
        "urllib3.TimeoutError",
        "websockets.ConnectionClosed",
    ]
)
"""Names of exceptions by which clients say that a connection failed, or that time ran out. A name that other packages use for
something else comes with its package."""


class HostedChat:
    """The episode as its function sees it."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.url: str = start["url"]
        """The base URL of the model's endpoint for this episode."""
        self.key: str = start["episode"]
        """Another one for every attempt at an episode."""
        self.seed: int = start["seed"]
        """Seed of the group: all its episodes have the same one."""
        self.prompt: str = start["prompt"]
        self.is_evaluation: bool = start["is_evaluation"]
        self.metrics: dict[str, float] = {}
        self.rewards: dict[str, float] = {}

    def reward(self, value: float, agent: str = "") -> None:
        """Add to the episode's reward. `agent` is the `X-Session-ID` of the agent that earned it; empty: the whole episode."""
        self.rewards[agent] = self.rewards.get(agent, 0.0) + float(value)

    def metric(self, name: str, value: float) -> None:
        """Give a number of the episode, which is shown as `reward_part/NAME`."""
        self.metrics[name] = float(value)

    def show(self, numbers: dict[str, float]) -> None:
        """Give numbers that a framework has named: the first `MAX_METRICS` of those within `LARGEST_METRIC`."""
        shown = [(self.part_name(name), float(value)) for name, value in numbers.items() if abs(value) <= LARGEST_METRIC]
        self.metrics.update(shown[:MAX_METRICS])

    @staticmethod
    def part_name(name: str) -> str:
        """Return a name that a part of a reward may have, with `_` in the place of other characters."""
        return re.sub(r"^(?![A-Za-z_])|[^A-Za-z0-9_.-]", "_", name)[:64]

    def ask(self, messages: list[dict[str, Any]], agent: str = "", **fields: Any) -> dict[str, Any]:
        """Return the model's next message. It waits: call it from a plain function, or with `asyncio.to_thread`.

        `agent` is the name for rewards of its own; `fields` are further ones of the request, such as `max_tokens` or `tools`.
        """
        body = {"model": "policy", "messages": messages, **fields}
        return self._post("chat/completions", body, agent)["choices"][0]["message"]

    def next_text(self, messages: list[dict[str, Any]]) -> str | None:
        """Return the text of the model's next turn, or None when no token of it fits. It waits, as `ask` does."""
        try:
            return self.ask(messages)["content"] or ""
        except urllib.error.HTTPError as error:
            if "context_length_exceeded" in error.msg:
                return None
            raise

    def respond(self, **fields: Any) -> dict[str, Any]:
        """Return the model's next turn as a response of OpenAI's Responses API. It waits, as `ask` does.

        `fields` are those of the request, such as `input` and `tools`.
        """
        return self._post("responses", {"model": "policy", **fields})

    def _post(self, path: str, body: dict[str, Any], agent: str = "") -> Any:
        # The counter says that this is no second try of an earlier request.
        headers = {"Content-Type": "application/json", "x-stainless-retry-count": "0", "X-Session-ID": agent}
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(body).encode(), headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            error.msg = error.read().decode(errors="replace") or error.msg
            raise


class Messages:
    """The standard streams, as messages. Standard output becomes standard error for everyone else."""

    def __init__(self) -> None:
        self._input: IO[bytes] = os.fdopen(os.dup(0), "rb")
        self._output: IO[bytes] = os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        os.close(nothing)
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        """Write a message. Exit where nobody reads it any more."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            try:
                self._output.write(line)
                self._output.flush()
            except BrokenPipeError:
                os._exit(0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that arrive, until the input ends."""
        return map(json.loads, self._input)


class EnvironmentHost:
    """The episodes of one process."""

    def __init__(self, environment: Any, arguments: dict[str, Any], messages: Messages) -> None:
        """`environment` has `play`, and perhaps `rows`."""
        self._play = environment.play
        self._rows = getattr(environment, "rows", None)
        self._arguments = arguments
        self._messages = messages
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="episode")
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.is_sending_rows = False

    def handle(self, message: dict[str, Any]) -> None:
        """Begin or give up an episode, or send rows."""
        if message["type"] == "start":
            task = asyncio.get_running_loop().create_task(self._play_episode(message))
            self._tasks[message["episode"]] = task
        elif message["type"] == "stop":
            task = self._tasks.get(message["episode"])
            if task is not None:
                task.cancel()
        elif message["type"] == "rows":
            self.is_sending_rows = True
            self._send_rows(message)
            self.is_sending_rows = False

    async def _play_episode(self, start: dict[str, Any]) -> None:
        episode, chat = start["episode"], HostedChat(start)
        try:
            reward = await self._call(chat, start["row"])
            self._messages.send(type="end", episode=episode, reward=reward, metrics=chat.metrics, rewards=chat.rewards)
        except asyncio.CancelledError:
            self._messages.send(type="failed", episode=episode, error="given up", is_transient=True, traceback="")
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001, the user's code
            self._messages.send(
                type="failed",
                episode=episode,
                error=" ".join(f"{type(error).__name__}: {error}".split())[:300],
                is_transient=is_transient(error),
                traceback=traceback.format_exc(),
                metrics=chat.metrics,
                rewards=chat.rewards,
            )
        finally:
            del self._tasks[episode]

    async def _call(self, chat: HostedChat, row: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._play):
            return await self._play(chat, row, **self._arguments)
        call = lambda: self._play(chat, row, **self._arguments)  # noqa: E731
        returned = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        return await returned if inspect.isawaitable(returned) else returned

    def _send_rows(self, message: dict[str, Any]) -> None:
        try:
            if self._rows is None:
                raise ValueError("the module has no function rows(split)")
            rows = self._rows(message["split"], **self._arguments)
            last = None if message["size"] is None else message["skip"] + message["size"]
            for row in itertools.islice(rows, message["skip"], last):
                self._messages.send(type="row", row=row)
        except (Exception, SystemExit) as error:  # noqa: BLE001, the user's code
            self._messages.send(type="problem", text=described(error))
        else:
            self._messages.send(type="rows_end")


def is_transient(error: BaseException) -> bool:
    """Return True when the cause may be gone later: no connection, a time limit, HTTP 408, 425, 429 or 5xx.

    `RewardUnavailable` always is. Every other exception is taken for a mistake in the user's function, which repeats itself.
    """
    if isinstance(error, (ConnectionError, TimeoutError, asyncio.TimeoutError)):
        return True
    if isinstance(error, socket.gaierror):
        # A misspelt host name stays wrong; a name server that does not answer may answer later.
        return error.errno == socket.EAI_AGAIN
    # urllib wraps the cause.
    reason = getattr(error, "reason", None)
    if isinstance(reason, BaseException) and is_transient(reason):
        return True
    status = _http_status(error)
    if status is not None:
        return status in TRANSIENT_STATUS or status >= 500
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    bases = [(base.__name__, base.__module__.partition(".")[0]) for base in type(error).__mro__]
    return any(name in _TRANSIENT_CLASSES or f"{package}.{name}" in _TRANSIENT_CLASSES for name, package in bases)


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status in an exception of urllib, aiohttp, openai, requests or httpx; None where there is none."""
    candidates = [getattr(error, name, None) for name in ("code", "status", "status_code")]
    candidates.append(getattr(getattr(error, "response", None), "status_code", None))
    return next((value for value in candidates if type(value) is int and 100 <= value <= 599), None)


def described(error: BaseException) -> str:
    """Return an error on one line, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return " ".join(f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})".split())[:600]


def load(name: str, arguments: dict[str, Any]) -> Any:
    """Return the environment `module:function`, or one of a framework, `verifiers:NAME`."""
    prefix, _, rest = name.partition(":")
    if prefix in FRAMEWORKS:
        file = Path(__file__).with_name(f"{prefix}_environment.py")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        adapter = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = adapter
        spec.loader.exec_module(adapter)
        return adapter.load(rest, arguments)
    module = importlib.import_module(prefix)
    if not callable(getattr(module, rest, None)):
        raise ValueError(f"{module.__file__} has no function {rest!r}")
    return SimpleNamespace(play=getattr(module, rest), rows=getattr(module, "rows", None))


async def serve(host: EnvironmentHost, messages: Messages) -> None:
    """Handle messages until the input ends, and then exit, whatever the environment still does."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        for message in messages:
            loop.call_soon_threadsafe(host.handle, message)
        # Rows that are still being sent come first; an environment that blocks the loop does not keep the process.
        loop.call_soon_threadsafe(os._exit, 0)
        time.sleep(END_S)
        while host.is_sending_rows:
            time.sleep(END_S)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    await loop.create_future()


def main(name: str, arguments: dict[str, Any]) -> None:
    """Load an environment, and serve it until the input ends."""
    messages = Messages()
    # Modules of the user's lie in the current folder, not beside this file.
    sys.path[0] = str(Path.cwd())
    try:
        environment = load(name, arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001, the user's code
        messages.send(type="problem", text=described(error))
        return
    own = {} if name.partition(":")[0] in FRAMEWORKS else arguments
    messages.send(type="ready")
    asyncio.run(serve(EnvironmentHost(environment, own, messages), messages))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
