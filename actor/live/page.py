"""An actor's numbers and probes, answered by a thread of their own from what the loop has shown last.

loop -> turn, heartbeat -> ActorPage -> /metrics, /healthz, /readyz
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from offbeat.actor.live.exported import families
from offbeat.common.records.probes import health, numbers, readiness
from offbeat.common.records.web import Response, Route, WebServer
from offbeat.protocols.messages import ActorHeartbeat

logger = logging.getLogger(__name__)

SETTING = "metrics.actor_bind"


class _Turn(NamedTuple):
    """The loop as it was at its last turn."""

    at: float
    is_welcome: bool
    has_weights: bool


class ActorPage:
    """Keeps what the loop has shown. One thread shows, any other answers: each value is replaced as a whole."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turn = _Turn(clock(), is_welcome=False, has_weights=False)
        self._busy_until = -math.inf
        self._heartbeat: ActorHeartbeat | None = None

    def turn(self, *, is_welcome: bool, has_weights: bool) -> None:
        """Take note that the loop turned."""
        self._turn = _Turn(self._clock(), is_welcome, has_weights)
        self._busy_until = -math.inf

    def be_busy(self, most_s: float) -> None:
        """Excuse the loop for work that may take this long, until it turns again."""
        self._busy_until = self._clock() + most_s

    def show(self, heartbeat: ActorHeartbeat) -> None:
        """Take the numbers of a heartbeat."""
        self._heartbeat = heartbeat

    def routes(self) -> dict[str, Route]:
        """Return the paths that are answered."""
        return {
            "/metrics": lambda: numbers(
                families(self._heartbeat, is_welcome=self._turn.is_welcome, silence_s=self._clock() - self._turn.at)
            ),
            "/healthz": self._health,
            "/readyz": self._readiness,
        }

    def _health(self) -> Response:
        """Answer 200 while the loop turns. A learner that cannot be reached must not end its actors."""
        now = self._clock()
        return health("the loop", 0.0 if now < self._busy_until else now - self._turn.at)

    def _readiness(self) -> Response:
        """Answer 200 while the learner knows the actor, once it has weights."""
        turn = self._turn
        if not turn.is_welcome:
            return readiness("the learner has not welcomed this actor", is_ready=False)
        return readiness("working" if turn.has_weights else "there are no weights yet", is_ready=turn.has_weights)


@contextmanager
def serving(page: ActorPage, bind: str) -> Iterator[None]:
    """Serve the page at `bind`, `HOST:PORT`, or nowhere where that is empty; `SettingError` where that cannot be done."""
    if not bind:
        yield
        return
    with WebServer(SETTING, bind, page.routes()) as server:
        logger.info("numbers and probes: %smetrics", server.url)
        yield
