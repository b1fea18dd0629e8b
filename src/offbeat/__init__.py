"""Asynchronous, off-policy reinforcement learning for language models."""

from typing import TYPE_CHECKING

from offbeat.actor.judges.asking import judge, judge_sync
from offbeat.actor.rewards.samples import JudgeError, RewardUnavailable, Sample, Verdict
from offbeat.common.errors import RunError, StopRun

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.deploy.local.notebook import Run

__all__ = [
    "JudgeError",
    "RewardUnavailable",
    "RunError",
    "Sample",
    "StopRun",
    "Verdict",
    "judge",
    "judge_sync",
    "train",
]


def train(config: "str | Path | None" = None, **settings: object) -> "Run":
    """Start learner and actors on this machine in the background, as `offbeat train` does; return when the learner is at work.

    Args:
        config: A TOML file. None: the quick start.
        settings: Settings that replace those of the file: `learning_rate=1e-5`, `**{"task.reward": "my_rewards:solved"}`.

    Raises `RunError` with the text that the command prints when the run cannot start.
    """
    # Imported now: every service imports this package, and most of them never call this.
    from offbeat.deploy.local.notebook import start

    return start(config, settings)
