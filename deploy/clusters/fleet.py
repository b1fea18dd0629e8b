"""The fleet: the actors that a cluster starts and ends, all with one key."""

import math

from offbeat.common.settings.config import Config

FLEET = "actor"
"""Beginning of the actors' names, and stem of the key file that they share."""
MARGIN_S = 15
"""Seconds that an actor has before its cluster kills it beyond those that it may take to leave."""


def leave_s(config: Config) -> int:
    """Return the seconds that an actor may take to leave: it finishes its work, and waits for the learner's answer."""
    working_s = config.actor.leave_within_s if config.actor.leave == "finish" else 0.0
    return math.ceil(working_s + config.hub.dead_after_s)


def notice_s(config: Config) -> int:
    """Return the seconds between the signal that asks an actor to leave and the one that kills it."""
    return leave_s(config) + MARGIN_S
