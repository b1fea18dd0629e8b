"""A pool of actors, such as this machine, a Slurm cluster or a Kubernetes Deployment, kept as large as the run wants it.

learner's status: actors wanted, members -> needed -> Pool.start, Pool.release
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple, Protocol

from offbeat.common.errors import ServiceError
from offbeat.common.processes.shutdown import StopRequest
from offbeat.protocols.messages import StatusReport

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""Seconds between two questions to the learner."""
LONGEST_WAIT_S = 300.0
"""Longest wait before new starts, where actors end before they join the run."""
LOOK_S = 0.1
"""Seconds between two looks at signals."""


class PoolError(ServiceError):
    """The pool's machinery did not do what it was asked to; the same request may succeed later."""


class Instance(NamedTuple):
    """One actor of a pool."""

    name: str
    """Its name in the pool; the actor's name in the run, where the pool can choose that."""
    state: Literal["starting", "working", "leaving"]
    """`starting`: asked for, and not running yet. `leaving`: asked to end, and still there."""


class Pool(Protocol):
    """A place where actors are started and ended. Its methods do not wait for an actor, and raise `PoolError`."""

    def running(self) -> list[Instance]:
        """Return the pool's actors, oldest first, with those that start or leave."""
        ...

    def start(self, count: int) -> None:
        """Ask for this many more actors, under names that no other actor of the run has."""
        ...

    def release(self, names: Sequence[str]) -> None:
        """Ask these actors to leave (SIGTERM) and set no deadline: they finish what their own settings let them finish."""
        ...


class StartBackoff:
    """Decides when a pool may start actors: it waits twice as long each time that some ended before they joined the run."""

    def __init__(self, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._there: set[str] = set()
        """The pool's actors at the last look."""
        self._joined: set[str] = set()
        """Actors of the pool that have been members of the run."""
        self._leaving: set[str] = set()
        """Actors that were asked to leave since the last look."""
        self._num_started = 0
        """Actors that were started since then."""
        self._num_failures = 0
        self._not_before = -math.inf

    def look(self, instances: Sequence[Instance], members: Collection[str]) -> None:
        """Compare the pool with the last time; `members` are the names of the run's actors."""
        there = {instance.name for instance in instances}
        gone = self._there - there - self._joined - self._leaving - set(members)
        # Actors that ended before anyone looked.
        num_unseen = max(0, self._num_started - len(there - self._there))
        self._joined = there & (self._joined | set(members))
        self._leaving = {instance.name for instance in instances if instance.state == "leaving"}
        self._there, self._num_started = there, 0
        if self._joined:
            self._num_failures = 0
        if gone or num_unseen:
            self._hold_back(len(gone) + num_unseen)

    def note(self, started: int, released: Collection[str]) -> None:
        """Take note of what the pool was asked to do."""
        self._num_started = started
        self._leaving.update(released)

    def may_start(self) -> bool:
        """Return whether the wait is over."""
        return self._clock() >= self._not_before

    def _hold_back(self, num_ended: int) -> None:
        self._num_failures += 1
        wait_s = min(self._interval_s * 2**self._num_failures, LONGEST_WAIT_S)
        self._not_before = self._clock() + wait_s
        text = "%d actors ended before they joined the run, and their logs say why: none is started for %g s"
        logger.warning(text, num_ended, wait_s)


class Needed(NamedTuple):
    """The change that makes a pool as large as the run wants."""

    start: int = 0
    release: tuple[str, ...] = ()


def needed(instances: Sequence[Instance], wanted: int, working: Collection[str] = ()) -> Needed:
    """Return the change that makes `instances`, oldest first, as many as are wanted.

    Actors that start count already, those that leave do not. Released first are actors that are not among `working`, the
    actors that generate rollouts; then the newest, because the next batch takes the oldest leases.
    """
    staying = [instance for instance in instances if instance.state != "leaving"]
    surplus = len(staying) - wanted
    if surplus <= 0:
        return Needed(start=-surplus)
    # A stable sort: the newest stay first within both kinds.
    newest_first = staying[::-1]
    by_worth = sorted(newest_first, key=lambda instance: instance.name in working)
    return Needed(release=tuple(instance.name for instance in by_worth[:surplus]))


def reconcile(
    pool: Pool,
    ask_learner: Callable[[], StatusReport],
    has_ended: Callable[[], bool],
    stop: StopRequest,
    interval_s: float = INTERVAL_S,
) -> None:
    """Start and release the pool's actors as the learner wants them, until the run's end or a signal.

    Consumes: the learner's status. Waits for: `interval_s` between two questions. Unblocked by: `stop`. While the learner does
    not answer, nothing is started and nothing released. A signal leaves the actors as they are; at the run's end the learner
    has told them to leave, and the pool releases those that had not joined.
    """
    problem, is_followed, starts = "", False, StartBackoff(interval_s)
    while not stop:
        try:
            # At the address of a run that is over, the learner of another run may answer.
            if not is_followed and has_ended():
                pool.release([instance.name for instance in pool.running() if instance.state != "leaving"])
                return
            is_followed = False
            follow(pool, ask_learner(), starts)
            problem, is_followed = "", True
        except ServiceError as error:
            if str(error) != problem:
                logger.warning("%s; the pool stays as it is, and the learner is asked every %g s", error, interval_s)
            problem = str(error)
        ask_again_at = time.monotonic() + interval_s
        while not stop and time.monotonic() < ask_again_at:
            time.sleep(min(LOOK_S, interval_s))


def follow(pool: Pool, report: StatusReport, starts: StartBackoff) -> None:
    """Start or release actors once, as the learner's report wants; raise `PoolError` when the pool does not do it."""
    working = {member.name for member in report.members if member.state == "working"}
    instances = pool.running()
    starts.look(instances, {member.name for member in report.members})
    start, release = needed(instances, report.actors_wanted, working)
    if not starts.may_start():
        start = 0
    if start:
        logger.info("%d actors wanted, %d there: starting %d", report.actors_wanted, len(instances), start)
        pool.start(start)
    if release:
        logger.info("%d actors wanted, %d there: releasing %s", report.actors_wanted, len(instances), ", ".join(release))
        pool.release(release)
    starts.note(start, release)
