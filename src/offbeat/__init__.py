"""Asynchronous, off-policy reinforcement learning for language models."""

from offbeat.actor.samples import RewardUnavailable, Sample
from offbeat.common.user_errors import StopRun

__all__ = ["RewardUnavailable", "Sample", "StopRun"]
