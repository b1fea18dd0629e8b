"""An actor's numbers and probes, answered by a thread of their own from what the loop has shown last.

loop -> turn, heartbeat -> ActorPage -> /metrics, /healthz, /readyz

Docs and dashboard are made from the table of the numbers, too.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from offbeat.common.records.exported import Exported, Family, Values, families_of, health, numbers, one, readiness
from offbeat.common.records.web import Response, Route, WebServer
from offbeat.protocols.messages import ActorHeartbeat

logger = logging.getLogger(__name__)

SETTING = "metrics.actor_bind"


def _some(counts: Values, *names: str) -> Values:
    return {name: counts[name] for name in names if name in counts}


def _alone(counts: Values, name: str) -> Values:
    return one(counts[name]) if name in counts else {}


WELCOMED = Exported("offbeat_actor_welcomed", "1 while the learner knows the actor, else 0.")
SILENCE = Exported("offbeat_actor_silence_seconds", "Time since the actor's loop last ran.")
EXPORTED = (
    WELCOMED,
    SILENCE,
    Exported("offbeat_actor_policy_version", "Version of the engine's weights; -1 before the first."),
    Exported("offbeat_actor_generated_tokens_total", "Tokens that the engine has sampled."),
    Exported("offbeat_actor_groups_total", "Groups that were finished."),
    Exported("offbeat_actor_running_completions", "Completions in the engine."),
    Exported("offbeat_actor_held_leases", "Leases at work, or answered and not acknowledged."),
    Exported("offbeat_actor_loop_seconds_total", "Time of the loop by activity.", "activity"),
    Exported("offbeat_actor_reward_trouble_seconds", "Time since rewards became unavailable; 0 while they are available."),
    Exported("offbeat_actor_judge_requests_total", "Requests to the judge: sent, failed, or answered from the cache.", "kind"),
    Exported("offbeat_actor_judge_seconds_total", "Time of all requests to the judge."),
    Exported("offbeat_actor_open_episodes", "Episodes that are open, and those of them that wait for their function.", "state"),
    Exported("offbeat_actor_episodes_total", "Episodes by outcome.", "state"),
    Exported("offbeat_actor_turns_total", "Turns that episodes have sampled."),
    Exported("offbeat_actor_environment_seconds_total", "Time spent in the functions of episodes."),
)


def _values(heartbeat: ActorHeartbeat) -> dict[str, Values]:
    """Return the values of the numbers that a heartbeat has, by name."""
    stats, trouble = heartbeat.stats, heartbeat.reward_trouble
    return {
        "offbeat_actor_policy_version": one(heartbeat.policy_version),
        "offbeat_actor_generated_tokens_total": one(stats.num_generated_tokens),
        "offbeat_actor_groups_total": one(stats.num_groups_sent),
        "offbeat_actor_running_completions": one(stats.num_running_completions),
        "offbeat_actor_held_leases": one(len(heartbeat.lease_ids)),
        "offbeat_actor_loop_seconds_total": stats.seconds,
        "offbeat_actor_reward_trouble_seconds": one(trouble.waiting_s if trouble is not None else 0.0),
        "offbeat_actor_judge_requests_total": _some(stats.judge, "requests", "failed", "cached"),
        "offbeat_actor_judge_seconds_total": _alone(stats.judge, "seconds"),
        "offbeat_actor_open_episodes": _some(stats.environment, "open", "waiting"),
        "offbeat_actor_episodes_total": _some(stats.environment, "begun", "ended", "cancelled"),
        "offbeat_actor_turns_total": _alone(stats.environment, "turns"),
        "offbeat_actor_environment_seconds_total": _alone(stats.environment, "seconds"),
    }


def families(heartbeat: ActorHeartbeat | None, *, is_welcome: bool, silence_s: float) -> list[Family]:
    """Return all numbers that are known; `heartbeat` is the newest one, None before the first."""
    values = {WELCOMED.name: one(is_welcome), SILENCE.name: one(silence_s)}
    return families_of(EXPORTED, values | (_values(heartbeat) if heartbeat is not None else {}))


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
