"""Groups of one turn tell how long they were generated and rewarded."""

from typing import Any, cast

import numpy as np

from offbeat.actor.leases_at_work import as_group
from offbeat.actor.rewards.runner import RewardRunner
from offbeat.actor.sampling import RewardedGroup, SingleTurns
from offbeat.protocols.messages import Lease, Sampling
from tests.actor.actor_harness import FakeEngine, FakeRewards, FakeTokenizer


def test_seconds_of_generation_and_rewards_follow_each_other() -> None:
    now = 100.0
    engine, rewards = FakeEngine(), FakeRewards()
    play = SingleTurns(engine, cast(Any, FakeTokenizer()), cast(RewardRunner, rewards), clock=lambda: now)
    lease = Lease(
        lease_id=1,
        prompt_id=1,
        group_size=2,
        sampling=Sampling(8),
        min_policy_version=0,
        timeout_s=60.0,
        prompt="1+1=",
        row="{}",
    )
    play.begin(lease, [1])
    for seconds in (1.0, 2.0):
        now += seconds
        for completion in engine.step():
            play.add(completion)
    now += 0.5
    (played,) = play.poll()
    assert isinstance(played, RewardedGroup)
    message, arrays = as_group(played)
    assert (message.generate_s, message.reward_s) == (3.0, 0.5)
    assert np.array_equal(arrays[0], [1, 0, 1, 1])
