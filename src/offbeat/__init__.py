"""Asynchronous, off-policy reinforcement learning for language models."""

from offbeat.actor.samples import RewardUnavailable, Sample

__all__ = ["RewardUnavailable", "Sample"]
