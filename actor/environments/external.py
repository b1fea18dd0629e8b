"""An environment with a Python of its own, as its worker has it: a process that plays the worker's episodes at `chat.url`.

    actor <- pipe -> worker: tokenizer, endpoint <- lines of JSON, HTTP -> host: user's code, another Python

The worker's fate and the host's are one. A host that ends takes its worker along, whose episodes the actor plays again; one
that does not answer is killed with the worker, at the same deadlines.
"""

import asyncio
import codecs
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from offbeat.actor.environments.chat import Chat
from offbeat.actor.rewards.samples import RewardUnavailable
from offbeat.common.settings.config import Environment
from offbeat.common.user_code.external_environment import host_command, host_variables, require_ready

MAX_LINE_BYTES = 64 << 20
_READ_BYTES = 1 << 16


class EpisodeFailed(Exception):  # noqa: N818, it carries another process's exception
    """The host's function has raised; the text is the exception, and the notes are its traceback."""


class ExternalEnvironment:
    """The host of a worker's episodes. It is called as an environment function is."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ends: dict[str, asyncio.Future[Mapping[str, Any]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, environment: Environment, judge_key: str) -> "ExternalEnvironment":
        """Return an environment that is ready to play. Raise `SettingError`.

        `judge_key` is the name of the variable with the judge's key, which the environment does not get.
        """
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *host_command(environment),
            env=host_variables(judge_key),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=MAX_LINE_BYTES,
        )
        started = cls(process)
        started._tasks.append(asyncio.create_task(started._show_output()))
        assert process.stdout is not None
        first = await process.stdout.readline()
        message = json.loads(first) if first else {"type": "", "text": "its process has ended; its output is above"}
        require_ready(environment, message["type"], message.get("text", ""))
        started._tasks.append(asyncio.create_task(started._take_messages()))
        return started

    async def __call__(self, chat: Chat, row: dict[str, Any]) -> object:
        """Let the host play an episode; return its reward. Raise `RewardUnavailable` or `EpisodeFailed` where it has failed."""
        end: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._ends[chat.key] = end
        self._send(
            type="start", episode=chat.key, url=chat.url, row=row, prompt=chat.prompt, seed=chat.seed,
            is_evaluation=chat.is_evaluation,
        )  # fmt: skip
        try:
            message = await asyncio.shield(end)
        except asyncio.CancelledError:
            self._send(type="stop", episode=chat.key)
            # One that does not answer is blocked: the actor kills the worker, and with it the host.
            await end
            raise
        finally:
            del self._ends[chat.key]
        for name, value in message.get("metrics", {}).items():
            chat.metric(name, value)
        for agent, value in message.get("rewards", {}).items():
            chat.reward(value, agent=agent)
        if message["type"] == "end":
            return message["reward"]
        error = (RewardUnavailable if message["is_transient"] else EpisodeFailed)(message["error"])
        error.add_note(message["traceback"])
        raise error

    def _send(self, **message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _take_messages(self) -> None:
        """Hand each end of an episode to its call, and end with the host.

        Consumes: the host's lines. Waits for: the host. Unblocked by: its end.
        """
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                message = json.loads(line)
                end = self._ends.get(message["episode"])
                if end is not None and not end.done():
                    end.set_result(message)
        # Whatever it has written instead of a message.
        except (ValueError, KeyError, TypeError) as error:
            _end_worker(f"the environment's process has sent something else than messages ({error})")
        _end_worker(f"the environment's process has ended with exit status {await self._process.wait()}")

    async def _show_output(self) -> None:
        assert self._process.stderr is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while content := await self._process.stderr.read(_READ_BYTES):
            sys.stderr.write(decoder.decode(content))


def _end_worker(reason: str) -> NoReturn:
    """End this process, so that the actor replaces it and plays its episodes again."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)
