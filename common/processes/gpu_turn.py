"""One GPU in turns: the learner trains while the actors' engines sleep, and each has the memory that the other gives back.

    actors    sample ... | sleep             | wake, take the weights, sample ...
    learner   wait       | train on a batch  | publish, wait

A turn is a lock on a file. The kernel frees the locks of a process that dies, so nobody waits for the dead:

    FILE           shared by the actors that are awake; the learner's alone while it trains
    FILE.wanted    the learner's from the moment it wants the GPU; actors look at it between two steps
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import torch

from offbeat.common.errors import ServiceError
from offbeat.common.processes.own_process import TURN_VARIABLE
from offbeat.common.processes.shutdown import StopRequest

logger = logging.getLogger(__name__)

LOOK_S = 0.01
"""Seconds between two tries to take a lock."""
LONG_S = 10.0
"""Seconds of waiting after which a process says what it waits for."""
LONGEST_S = 600.0
"""Longest wait of the learner: the longest step of an engine, after which its actor counts as stuck."""


class _Lock:
    """A lock on a file, which several processes share or one has alone. Programs that a holder starts do not inherit it."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, *, alone: bool) -> bool:
        """Take the lock if it is free; return whether it was."""
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def free(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class _Turns:
    """The two locks, as a process has them."""

    def __init__(self, file: Path) -> None:
        self._turn = _Lock(file)
        self._wanted = _Lock(file.with_name(f"{file.name}.wanted"))

    @classmethod
    def of_process(cls) -> Self | None:
        """Return the turns that the launcher has given this process; None where each process has its part of a GPU."""
        return cls(Path(os.environ[TURN_VARIABLE])) if TURN_VARIABLE in os.environ else None


class LearnerTurn(_Turns):
    """The learner's turns on the GPU."""

    @contextlib.contextmanager
    def taken(self, stop: StopRequest) -> Iterator[bool]:
        """Have the GPU inside the `with` block, while all engines sleep; yield False, without it, if `stop` comes first.

        Waits for: the end of each engine's step, at most `LONGEST_S`. Raises `ServiceError` after that.
        """
        with contextlib.ExitStack() as held:
            for lock in (self._wanted, self._turn):
                held.callback(lock.free)
                is_over = _wait_for(
                    lambda lock=lock: bool(stop) or lock.take(alone=True), "the actors to give up the GPU", LONGEST_S
                )
                if not is_over:
                    raise ServiceError(
                        f"an actor has kept the GPU for {LONGEST_S:g} s. Kill it if it is stuck: its log is in the run's folder"
                    )
                if stop:
                    yield False
                    return
            if torch.cuda.is_available():
                # Called before the locks are freed: the engines take what torch has cached.
                held.callback(torch.cuda.empty_cache)
            yield True


class ActorTurn(_Turns):
    """The turns of an actor, which it shares with the other actors. Its engine is awake in the first one."""

    _is_awake = True

    def begin(self) -> None:
        """Begin a turn. Waits for: the end of the learner's, however long it takes."""
        _wait_for(self.try_to_begin, "the learner to give up the GPU")

    def try_to_begin(self) -> bool:
        """Begin a turn unless the learner has or wants one; return whether it has begun."""
        return not self.is_wanted() and self._turn.take(alone=False)

    def is_wanted(self) -> bool:
        """Return whether the learner wants the GPU."""
        if not self._wanted.take(alone=False):
            return True
        self._wanted.free()
        return False

    def end(self) -> None:
        """End the turn; the engine sleeps."""
        self._turn.free()

    def look(self, sleep: Callable[[], None], wake: Callable[[], None]) -> bool:
        """Put the engine to sleep when the learner wants the GPU, and wake it when the learner has ended its turn.

        Return whether the engine is awake. Takes seconds where that changes.
        """
        if self._is_awake and self.is_wanted():
            sleep()
            self.end()
            self._is_awake = False
        elif not self._is_awake and self.try_to_begin():
            wake()
            self._is_awake = True
        return self._is_awake


def _wait_for(is_done: Callable[[], bool], what: str, limit_s: float = float("inf")) -> bool:
    """Wait until this is true; return False after the limit."""
    started = time.monotonic()
    next_word = LONG_S
    while not is_done():
        waited_s = time.monotonic() - started
        if waited_s > limit_s:
            return False
        if waited_s > next_word:
            logger.warning("waiting for %s, %.0f s so far", what, waited_s)
            next_word *= 2
        time.sleep(LOOK_S)
    return True
