"""A process that runs the user's environment function, for many episodes at once on one event loop.

    actor <- pipe (`actor.environments.messages`) -> this process: user code, tokenizer, chat template

It never sees log-probs or policy versions, so no environment can spoil them; and it may block, leak, crash or be killed
without harm to the engine.
"""

import asyncio
import contextlib
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, assert_never

import msgspec

from offbeat.actor.environments import messages
from offbeat.actor.environments.chat import Chat, ChatEpisode, ChatFormat, NoRoom
from offbeat.actor.environments.endpoint.server import Endpoint
from offbeat.actor.environments.endpoint.session import AgentSession
from offbeat.actor.environments.external import ExternalEnvironment
from offbeat.actor.environments.tool_calls import TurnParser
from offbeat.actor.rewards.failures import failure_of, file_of
from offbeat.actor.rewards.functions import parts_of, reward_of
from offbeat.common.errors import SettingError
from offbeat.common.models.folders import load_tokenizer
from offbeat.common.processes.child import framed, guard_session, join_parent, read_message
from offbeat.common.processes.environment import prepare_environment
from offbeat.common.records.logs import PrintedText
from offbeat.common.settings.config import Config, environment_of
from offbeat.common.user_code.environment_function import PlayFunction, load_environment, offer_tools
from offbeat.protocols.fields import MAX_PARTS

NUM_THREADS = 512
"""Calls of `asyncio.to_thread` that run at once: an agent that is not async takes one for its whole episode. Under asyncio's
own bound, six on two cores, episodes would wait for each other until their time is up."""

USER_ERRORS = (Exception, SystemExit, KeyboardInterrupt)
"""Exceptions that the user's code may raise, which may also call `sys.exit` or raise an interrupt."""


class Worker:
    """The episodes of one process."""

    def __init__(
        self, config: Config, function: PlayFunction, chat_format: ChatFormat, parser: TurnParser, writer: asyncio.StreamWriter
    ) -> None:
        self._config = config
        self._function = function
        self._format = chat_format
        self._parser = parser
        self._writer = writer
        self._endpoint = Endpoint(config.rollout.temperature, config.environment)
        self._sessions: dict[str, AgentSession] = {}
        """The sessions of the episodes whose functions have asked for `chat.url`."""
        self._episodes: dict[str, ChatEpisode] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def handle(self, message: messages.PlayEpisode | messages.TurnSampled | messages.CancelEpisode) -> None:
        """Begin an episode, hand it a turn, or end it."""
        match message:
            case messages.PlayEpisode(episode=episode):
                self._episodes[episode] = ChatEpisode(message, self._config, self._send, self._open_url)
                self._tasks[episode] = asyncio.get_running_loop().create_task(self._play(message))
            case messages.TurnSampled(episode=episode):
                if episode in self._episodes:
                    self._episodes[episode].take(message)
            case messages.CancelEpisode(episode=episode):
                if episode in self._tasks:
                    self._episodes[episode].end()
                    if episode in self._sessions:
                        # The function may take a while to end, and its agents call meanwhile.
                        self._sessions[episode].end()
                    # A task that is cancelled before its first step never runs, and would answer nothing.
                    asyncio.get_running_loop().call_soon(self._tasks[episode].cancel)
            case _:
                assert_never(message)

    async def _play(self, play: messages.PlayEpisode) -> None:
        episode = self._episodes[play.episode]
        try:
            outcome = await self._outcome(play, episode)
            episode.end()
            self._send(outcome)
        finally:
            del self._episodes[play.episode], self._tasks[play.episode]
            if play.episode in self._sessions:
                self._endpoint.close(self._sessions.pop(play.episode))

    async def _outcome(self, play: messages.PlayEpisode, episode: ChatEpisode) -> messages.Ended | messages.Failed:
        returned, is_out_of_room = None, False
        try:
            returned = await self._function(self._chat(episode), msgspec.json.decode(play.row))
            is_out_of_room = self._has_refused_turn(play)
        except NoRoom:
            is_out_of_room = True
        except asyncio.CancelledError:
            return messages.Failed(episode=play.episode, is_transient=True, detail="cancelled")
        except USER_ERRORS as error:
            failed = self._failed(play, error)
            # Agents wrap the refusal in errors of their own. Services that are away have nothing to do with it.
            is_out_of_room = self._has_refused_turn(play) and not failed.is_transient
            if not is_out_of_room:
                return failed
        try:
            return self._ended(episode, returned, is_out_of_room=is_out_of_room)
        except USER_ERRORS as error:
            return self._failed(play, error)

    def _has_refused_turn(self, play: messages.PlayEpisode) -> bool:
        """Return whether the last call of the episode's agents was refused because no token fitted."""
        session = self._sessions.get(play.episode)
        return session is not None and session.is_out_of_room

    def _failed(self, play: messages.PlayEpisode, error: BaseException) -> messages.Failed:
        failure = failure_of(error, file_of(self._function))
        return messages.Failed(
            episode=play.episode, is_transient=failure.is_transient, detail=failure.detail, traceback=failure.traceback
        )

    def _ended(self, episode: ChatEpisode, returned: object, *, is_out_of_room: bool) -> messages.Ended:
        session = self._sessions.get(episode.play.episode)
        counts: dict[str, float] = {}
        if session is not None:
            counts["repeated_requests"] = float(session.num_repeated)
        if session is not None and self._config.environment.sampling == "override":
            counts["overridden_requests"] = float(session.num_overrides)
        reward = reward_of(0.0 if returned is None else returned, {})
        parts = parts_of({**reward.parts, **episode.metrics})
        # Only where the user's own parts leave room: an episode with more than `MAX_PARTS` fails.
        parts |= dict(list(counts.items())[: MAX_PARTS - len(parts)])
        return messages.Ended(
            episode=episode.play.episode,
            reward=reward_of(reward.total + episode.rewards, {}).total,
            parts=parts,
            is_out_of_room=is_out_of_room,
            turn_rewards={number: reward_of(value, {}).total for number, value in episode.turn_rewards.items()},
            branch_rewards={number: reward_of(value, {}).total for number, value in episode.branch_rewards.items()},
        )

    def _chat(self, episode: ChatEpisode) -> Chat:
        """Return a sequence at the episode's prompt."""
        return Chat(episode, self._format, self._parser)

    def _open_url(self, episode: ChatEpisode) -> str:
        session = AgentSession(self._chat(episode), self._config.model.max_length)
        self._sessions[episode.play.episode] = session
        return self._endpoint.open(session)

    def _send(self, message: messages.FromWorker) -> None:
        self._writer.write(framed(message))


async def serve(end: socket.socket) -> None:
    """Play the episodes that the actor asks for, until it closes the pipe."""
    reader, writer = await asyncio.open_unix_connection(sock=end)
    begin = messages.TO_WORKER.decode(await read_message(reader))
    assert isinstance(begin, messages.Begin)
    config = begin.config
    settings, environment = config.environment, environment_of(config)
    try:
        if environment.is_external:
            function = await ExternalEnvironment.start(environment, config.judge.key_env)
        else:
            function = load_environment(environment.function)
        arguments = await offer_tools(function, config)
        tokenizer = load_tokenizer(Path(begin.model))
        chat_format = ChatFormat(tokenizer, arguments, has_chat_template=config.data.chat_template)
        parser = TurnParser(
            tokenizer, arguments.get("tools", ()), tool_parser=settings.tool_parser, reasoning_parser=settings.reasoning_parser
        )
    except SettingError as error:
        writer.write(framed(messages.Ready(problem=str(error))))
        await writer.drain()
        return
    writer.write(framed(messages.Ready()))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="agent"))
    worker = Worker(config, function, chat_format, parser, writer)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            message = messages.TO_WORKER.decode(await read_message(reader))
            assert not isinstance(message, messages.Begin)
            worker.handle(message)


def run_worker(end: socket.socket) -> NoReturn:
    """Serve the actor at the other end until it closes the pipe. Call it in a child that has no thread."""
    guard_session()
    prepare_environment()
    # The endpoint is on this machine, whatever proxy agents need for the rest of the world.
    there = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{there},127.0.0.1" if there else "127.0.0.1"
    sys.stdout, sys.stderr = PrintedText(sys.stdout), PrintedText(sys.stderr)
    asyncio.run(serve(end))
    # Tasks of the user's that ignore their cancellation must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    run_worker(socket.socket(fileno=join_parent()))
