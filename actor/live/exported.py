"""The numbers that an actor exports to Prometheus at /metrics: one table, from which docs and dashboard are made."""

from collections.abc import Callable
from typing import NamedTuple

from offbeat.common.records.exported import Exported, Family, Values, family, one
from offbeat.protocols.messages import ActorHeartbeat


class OfHeartbeat(NamedTuple):
    """A number of the newest heartbeat."""

    exported: Exported
    values: Callable[[ActorHeartbeat], Values]


def _some(counts: Values, *names: str) -> Values:
    return {name: counts[name] for name in names if name in counts}


def _alone(counts: Values, name: str) -> Values:
    return one(counts[name]) if name in counts else {}


WELCOMED = Exported("offbeat_actor_welcomed", "1 while the learner knows the actor, else 0.")
SILENCE = Exported("offbeat_actor_silence_seconds", "Time since the actor's loop turned.")

FROM_HEARTBEAT: tuple[OfHeartbeat, ...] = (
    OfHeartbeat(
        Exported("offbeat_actor_policy_version", "Version of the engine's weights; -1 before the first."),
        lambda heartbeat: one(heartbeat.policy_version),
    ),
    OfHeartbeat(
        Exported("offbeat_actor_generated_tokens_total", "Tokens that the engine has sampled."),
        lambda heartbeat: one(heartbeat.stats.num_generated_tokens),
    ),
    OfHeartbeat(
        Exported("offbeat_actor_groups_total", "Groups that were finished."),
        lambda heartbeat: one(heartbeat.stats.num_groups_sent),
    ),
    OfHeartbeat(
        Exported("offbeat_actor_running_completions", "Completions in the engine."),
        lambda heartbeat: one(heartbeat.stats.num_running_completions),
    ),
    OfHeartbeat(
        Exported("offbeat_actor_held_leases", "Leases at work, or answered and not acknowledged."),
        lambda heartbeat: one(len(heartbeat.lease_ids)),
    ),
    OfHeartbeat(
        Exported("offbeat_actor_loop_seconds_total", "Time of the loop by what it went to.", "activity"),
        lambda heartbeat: heartbeat.stats.seconds,
    ),
    OfHeartbeat(
        Exported("offbeat_actor_reward_trouble_seconds", "Time since rewards cannot be had; 0 while they can."),
        lambda heartbeat: one(heartbeat.reward_trouble.waiting_s if heartbeat.reward_trouble is not None else 0.0),
    ),
    OfHeartbeat(
        Exported(
            "offbeat_actor_judge_requests_total", "Requests to the judge: sent, failed, or answered from the cache.", "kind"
        ),
        lambda heartbeat: _some(heartbeat.stats.judge, "requests", "failed", "cached"),
    ),
    OfHeartbeat(
        Exported("offbeat_actor_judge_seconds_total", "Time of all requests to the judge."),
        lambda heartbeat: _alone(heartbeat.stats.judge, "seconds"),
    ),
    OfHeartbeat(
        Exported(
            "offbeat_actor_open_episodes", "Episodes that are open, and those of them that wait for their function.", "state"
        ),
        lambda heartbeat: _some(heartbeat.stats.environment, "open", "waiting"),
    ),
    OfHeartbeat(
        Exported("offbeat_actor_episodes_total", "Episodes by what became of them.", "state"),
        lambda heartbeat: _some(heartbeat.stats.environment, "begun", "ended", "cancelled"),
    ),
    OfHeartbeat(
        Exported("offbeat_actor_turns_total", "Turns that episodes have sampled."),
        lambda heartbeat: _alone(heartbeat.stats.environment, "turns"),
    ),
    OfHeartbeat(
        Exported("offbeat_actor_environment_seconds_total", "Time in which functions of episodes had the word."),
        lambda heartbeat: _alone(heartbeat.stats.environment, "seconds"),
    ),
)

EXPORTED: tuple[Exported, ...] = (WELCOMED, SILENCE, *(number.exported for number in FROM_HEARTBEAT))


def families(heartbeat: ActorHeartbeat | None, *, is_welcome: bool, silence_s: float) -> list[Family]:
    """Return all numbers that are known; `heartbeat` is the newest one, None before the first."""
    found = [family(WELCOMED, one(is_welcome)), family(SILENCE, one(silence_s))]
    if heartbeat is not None:
        found += [family(number.exported, number.values(heartbeat)) for number in FROM_HEARTBEAT]
    return found
