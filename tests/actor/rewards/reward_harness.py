"""Groups for a `RewardRunner`, and the wait for their outcomes."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offbeat.actor.rewards.failures import SamplingFailure
from offbeat.actor.rewards.functions import Reward
from offbeat.actor.rewards.runner import Rewarded, RewardRunner
from offbeat.actor.rewards.samples import Sample
from offbeat.common.settings.config import ActorSection, TaskSection


def make_runner_of(
    reward: str,
    weights: dict[str, float] | None = None,
    *,
    timeout_s: float = 20.0,
    retry_s: float = 0.0,
    num_workers: int = 1,
    concurrency: int = 64,
    calls_per_s: float | None = None,
    batch_size: int = 64,
) -> RewardRunner:
    """Return a runner that tries nothing again, unless a test asks for it."""
    task = TaskSection(reward=reward, reward_weights=weights or {}, reward_timeout_s=timeout_s, reward_retry_s=retry_s)
    actor = ActorSection(
        reward_workers=num_workers,
        reward_concurrency=concurrency,
        reward_calls_per_s=calls_per_s,
        reward_batch_size=batch_size,
    )
    return RewardRunner(task, actor)


def samples(completions: Sequence[str], row: Mapping[str, Any] | None = None, *, is_evaluation: bool = False) -> list[Sample]:
    """Return a group of these completions; each has as many tokens as letters."""
    return [
        Sample("p", text, dict(row or {}), np.arange(len(text), dtype=np.int32), "stop", is_evaluation) for text in completions
    ]


def rewarded(key: int, *totals: float) -> Rewarded:
    """Return the outcome of a group with these rewards."""
    return Rewarded(key, tuple(map(Reward, totals)))


def wait(runner: RewardRunner, limit_s: float = 20.0) -> dict[int, Rewarded | SamplingFailure]:
    """Wait for every submitted group; return the outcomes by key."""
    outcomes: dict[int, Rewarded | SamplingFailure] = {}
    deadline = time.monotonic() + limit_s
    while runner.num_pending and time.monotonic() < deadline:
        for outcome in runner.poll():
            assert outcome.lease_id not in outcomes
            outcomes[outcome.lease_id] = outcome
        time.sleep(0.005)
    assert not runner.num_pending
    return outcomes
