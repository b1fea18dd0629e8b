"""The loop that keeps as many actors in a pool as the run wants: `offbeat reconcile`.

learner's status: actors wanted, members -> needed -> Pool.start, Pool.release
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from offbeat.common.shutdown import ServiceError, StopRequest
from offbeat.deploy.pools.pool import Instance, Pool, PoolError
from offbeat.protocols.messages import StatusReport

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""Seconds between two questions to the learner."""
LOOK_S = 0.1
"""Seconds between two looks at signals."""


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
    problem, is_followed = "", False
    while not stop:
        try:
            # At the address of a run that is over, the learner of another run may answer.
            if not is_followed and has_ended():
                pool.release([instance.name for instance in pool.running() if instance.state != "leaving"])
                return
            is_followed = False
            follow(pool, ask_learner())
            problem, is_followed = "", True
        except ServiceError as error:
            if str(error) != problem:
                logger.warning("%s; the pool stays as it is, and the learner is asked every %g s", error, interval_s)
            problem = str(error)
        _sleep(interval_s, stop)


def follow(pool: Pool, report: StatusReport) -> None:
    """Start or release actors once, as the learner's report wants; raise `PoolError` when the pool does not do it."""
    if report.actors_wanted is None:
        raise PoolError("the learner does not tell how many actors it wants: install the same release of offbeat there")
    working = {member.name for member in report.members if member.state == "working"}
    instances = pool.running()
    start, release = needed(instances, report.actors_wanted, working)
    if start:
        logger.info("%d actors wanted, %d there: starting %d", report.actors_wanted, len(instances), start)
        pool.start(start)
    if release:
        logger.info("%d actors wanted, %d there: releasing %s", report.actors_wanted, len(instances), ", ".join(release))
        pool.release(release)


def _sleep(seconds: float, stop: StopRequest) -> None:
    deadline = time.monotonic() + seconds
    while not stop and time.monotonic() < deadline:
        time.sleep(min(LOOK_S, seconds))
