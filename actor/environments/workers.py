"""The processes that run environments, as the actor holds them: started, given episodes, replaced when they die."""

import logging
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from offbeat.actor.environments.messages import FROM_WORKER, Begin, OfEpisode, Ready, ToWorker
from offbeat.actor.environments.worker_starts import WorkerStarts, can_fork
from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.processes.child import ChildError, Pipe
from offbeat.common.settings.config import Config, environment_of
from offbeat.common.user_code.external_environment import interpreter

logger = logging.getLogger(__name__)

START_S = 120.0
"""Longest time in which a worker imports the tokenizer and the user's module."""
LOOK_S = 0.01
MAX_STARTS = 5
"""Workers that may die one after the other without an episode that has ended."""


def start_workers(config: Config, model: Path) -> "Workers":
    """Return the workers of a run, ready to play; `model` is the folder of its model. Raise `ServiceError`."""
    if (environment := environment_of(config)).is_external:
        # Before the workers, which have less time for their start than packages may take.
        try:
            interpreter(environment)
        except SettingError as error:
            raise ServiceError(str(error)) from error
    has_parser = bool(config.environment.tool_parser or config.environment.reasoning_parser)
    starts = WorkerStarts(forks=can_fork(), has_parser=has_parser)
    return Workers(Begin(config=config, model=str(model)), starts)


class WorkerProcess:
    """One process and its episodes."""

    def __init__(self, begin: Begin, starts: WorkerStarts) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = starts.start(theirs)
        self.pipe = Pipe(ours, FROM_WORKER)
        self.pipe.send(begin)
        self.episodes: set[str] = set()
        """Episodes that have begun here and have not ended."""
        self.is_ready = False
        self.started_at = time.monotonic()

    def kill(self) -> None:
        """Kill the process; its guard kills what it has started."""
        self.pipe.close()
        self._process.kill()
        self._process.wait()


class Workers:
    """`environment.workers` processes. A dead one is replaced, and its episodes are given back to the caller."""

    def __init__(self, begin: Begin, starts: WorkerStarts) -> None:
        """Start them and wait until they are ready. Raise `ServiceError` with the reason for which one cannot play.

        `starts` is closed with the workers.
        """
        self._begin = begin
        self._starts = starts
        self.num_restarts = 0
        """Processes that were replaced."""
        self._num_deaths = 0
        """Deaths since the last episode that ended."""
        self._workers = [WorkerProcess(begin, starts) for _ in range(begin.config.environment.workers)]
        self._await_ready()

    def play(self, episode: str, message: ToWorker) -> None:
        """Begin an episode in the worker with the fewest."""
        worker = min(self._workers, key=lambda one: len(one.episodes))
        worker.episodes.add(episode)
        self._try_to_send(worker, message)

    def send(self, episode: str, message: ToWorker) -> None:
        """Send a message about an episode; nothing happens when its worker has died."""
        for worker in self._workers:
            if episode in worker.episodes:
                self._try_to_send(worker, message)

    def end(self, episode: str) -> None:
        """Forget an episode that has ended."""
        self._num_deaths = 0
        for worker in self._workers:
            worker.episodes.discard(episode)

    def not_begun(self) -> Iterator[str]:
        """Yield the episodes whose worker is still starting."""
        for worker in self._workers:
            if not worker.is_ready:
                yield from worker.episodes

    def kill_worker_of(self, episode: str, reason: str) -> Iterable[str]:
        """Replace the worker that plays this episode; return all episodes that it played."""
        for index, worker in enumerate(self._workers):
            if episode in worker.episodes:
                return self._replace(index, reason)
        return ()

    def poll(self) -> Iterator[OfEpisode | str]:
        """Yield the messages that have arrived, and the name of each episode that died with its worker. Never waits."""
        for index, worker in enumerate(self._workers):
            try:
                messages = worker.pipe.exchange()
                if not worker.is_ready and time.monotonic() > worker.started_at + START_S:
                    raise ChildError(f"it was not ready after {START_S:g} s")
            except ChildError as error:
                yield from self._replace(index, str(error))
                continue
            for message in messages:
                if isinstance(message, Ready):
                    self._note_ready(worker, message)
                else:
                    yield message

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.kill()
        self._starts.close()

    def _try_to_send(self, worker: WorkerProcess, message: ToWorker) -> None:
        try:
            worker.pipe.send(message)
        except ChildError:
            # The next `poll` finds it.
            logger.debug("an environment worker does not read")

    def _replace(self, index: int, reason: str) -> list[str]:
        worker = self._workers[index]
        worker.kill()
        self._num_deaths += 1
        self.num_restarts += 1
        logger.warning("an environment worker is replaced (%s); its %d episodes begin again", reason, len(worker.episodes))
        if self._num_deaths > MAX_STARTS:
            raise ServiceError(
                f"{self._num_deaths} environment workers have died one after the other ({reason}): repair task.environment; "
                "its output is above"
            )
        self._workers[index] = WorkerProcess(self._begin, self._starts)
        return sorted(worker.episodes)

    def _note_ready(self, worker: WorkerProcess, ready: Ready) -> None:
        if ready.problem:
            raise ServiceError(ready.problem)
        worker.is_ready = True

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_S
        try:
            while not all(worker.is_ready for worker in self._workers):
                for worker in self._workers:
                    for message in worker.pipe.exchange():
                        assert isinstance(message, Ready)
                        self._note_ready(worker, message)
                if time.monotonic() > deadline:
                    raise ServiceError(f"the environment of task.environment was not ready after {START_S:g} s")
                time.sleep(LOOK_S)
        except (ChildError, ServiceError) as error:
            self.close()
            if isinstance(error, ChildError):
                raise ServiceError(f"an environment worker cannot start: {error}; its output is above") from error
            raise
