"""A learner whose cluster ends it and starts it again: it pauses when it is asked to end, and goes on where it was."""

from offbeat.common.settings.config import Config

NOTICE_S = 300
"""Seconds that a cluster gives the learner between SIGTERM and its end."""
_MARGIN_S = 15
"""Seconds of them in which the process ends."""


def moving_settings(config: Config) -> list[str]:
    """Return the settings by which one command begins a run and goes on with it; the user's `run.grace_s` stays."""
    grace = [] if config.run.grace_s is not None else [f"run.grace_s={NOTICE_S - _MARGIN_S}"]
    return ["run.resume=auto", *grace]
