"""Faults that are changes of a running job's settings, as an operator makes them."""

from collections.abc import Callable
from pathlib import Path

from offbeat.common.errors import ServiceError
from offbeat.common.records.run_folder import CONFIG_FILE
from offbeat.common.settings.config import actors_wanted
from offbeat.common.settings.hub_keys import OPERATOR
from offbeat.common.settings.loading import load
from offbeat.deploy.operating.link import ask, open_link_to
from offbeat.learner.dispatch.live_settings import CANARY_TOLERANCE
from offbeat.protocols.messages import LiveSettingsReport, LiveSettingsRequest

IMPOSSIBLE = "1e-12"
"""A tolerance, in nats, that the rounding of float32 exceeds."""
NUM_TRIES = 3
"""Attempts to reach a learner, each of which waits for an answer."""


def doubt_learner(run: Path, pause: Callable[[float], None], duration_s: float) -> str | None:
    """Let no engine match the learner for a while; return the fault in words, None where the learner does not answer.

    Every actor is quarantined meanwhile. A learner that differs for longer ends its run. This one is right again before it has
    been compared that often.
    """
    if not _set(run, CANARY_TOLERANCE, IMPOSSIBLE):
        return None
    pause(duration_s)
    if not _set(run, CANARY_TOLERANCE, "none"):
        return f"no engine could match the learner from then on: {NUM_TRIES} requests to end it were not answered"
    return f"no engine could match the learner for {duration_s:.1f} s"


def scale_up_and_down(run: Path, pause: Callable[[float], None], duration_s: float) -> str | None:
    """Let the launcher have one actor more for a while; return the fault in words, None where the learner does not answer.

    The actor may be asked to leave before it has joined, and keeps its place where the learner does not answer in the end.
    """
    before = actors_wanted(load(run / CONFIG_FILE, []))
    if not _set(run, "scale.actors", str(before + 1)):
        return None
    pause(duration_s)
    if not _set(run, "scale.actors", str(before)):
        return f"{before + 1} actors from then on: {NUM_TRIES} requests to end it were not answered"
    return f"{before + 1} actors instead of {before} for {duration_s:.1f} s"


def _set(run: Path, name: str, value: str) -> bool:
    """Ask the learner for a setting; return False when it gives no answer."""
    hub = load(run / CONFIG_FILE, []).hub
    for _ in range(NUM_TRIES):
        with open_link_to(hub, OPERATOR)() as link:
            try:
                request = LiveSettingsRequest(settings={name: value}, who="chaos")
                return not ask(link, hub.address, request, LiveSettingsReport).error
            except ServiceError:
                # Killed by a fault before this one, and not back yet.
                continue
    return False
