import math

import numpy as np
import pytest

from offbeat.common.records.step_metrics import step_metric
from offbeat.learner.diagnostics.batch_metrics import group_metrics
from offbeat.learner.leases.groups import Group, Rollout
from offbeat.protocols.payload import Segment, Turn


def make_group(rewards: list[float], length: int, oldest_version: int) -> Group:
    rollouts = tuple(
        Rollout(
            np.zeros(length, dtype=np.int32),
            np.zeros(length, dtype=np.float32),
            reward,
            "stop",
            (Segment(oldest_version, 0), Segment(9, 1)),
        )
        for reward in rewards
    )
    return Group(0, 0, np.zeros(3, dtype=np.int32), rollouts, "actor", 0.0)


def test_group_metrics_are_over_completions_and_lags_over_groups():
    metrics = group_metrics([make_group([0.0, 2.0], 4, 7), make_group([1.0, 1.0], 6, 9)], policy_version=9)
    assert metrics == {
        "reward/mean": 1.0,
        "reward/std": pytest.approx(math.sqrt(0.5)),
        "reward/zero_variance_groups": 1,
        "lag/mean": 1.0,
        "lag/max": 2,
        "lag/counts": {"0": 1, "2": 1},
        "length/mean": 5.0,
        "length/min": 4,
        "length/p50": 5.0,
        "length/p95": 6.0,
        "length/max": 6,
        "length/cut": 0.0,
        "group/seconds_mean": 0.0,
        "group/seconds_max": 0.0,
        "tokens/trained": 20,
        "tokens/prompt": 12,
        "by_lag/2/reward_mean": 1.0,
        "by_lag/2/length_mean": 4.0,
        "by_lag/0/reward_mean": 1.0,
        "by_lag/0/length_mean": 6.0,
    }


@pytest.mark.parametrize("reward", [0.1, -0.1, 0.7])
def test_equal_rewards_have_no_deviation_also_where_their_mean_is_rounded(reward):
    assert group_metrics([make_group([reward], 1, 9) for _ in range(12)], policy_version=9)["reward/std"] == 0


def test_rewards_and_lengths_by_lag_are_means_over_all_completions_in_the_bucket():
    groups = [make_group([0.0, 1.0], 4, 6), make_group([4.0], 10, 5), make_group([7.0], 1, 9)]
    metrics = group_metrics(groups, policy_version=9)
    by_lag = {name: value for name, value in metrics.items() if name.startswith("by_lag/")}
    assert by_lag == {
        "by_lag/3-4/reward_mean": pytest.approx(5 / 3),
        "by_lag/3-4/length_mean": 6.0,
        "by_lag/0/reward_mean": 7.0,
        "by_lag/0/length_mean": 1.0,
    }


def test_the_share_cut_is_over_completions_and_percentiles_are_over_their_lengths():
    groups = [make_group([0.0], length, 9) for length in (1, 2, 3, 10)]
    groups[3] = groups[3]._replace(rollouts=(groups[3].rollouts[0]._replace(finish_reason="length"),))
    metrics = group_metrics(groups, policy_version=9)
    assert metrics["length/cut"] == 0.25
    # Linear between neighbors: 3 + 0.85 * (10 - 3).
    assert (metrics["length/min"], metrics["length/p50"], metrics["length/p95"]) == (1, 2.5, pytest.approx(8.95))


def test_reward_of_each_task_is_the_mean_over_its_completions() -> None:
    groups = [make_group(rewards, 4, 7) for rewards in ([0.0, 1.0], [1.0, 1.0], [3.0, 5.0], [9.0])]
    names = ("sums", "sums", "letters", "")
    metrics = group_metrics([group._replace(task=name) for group, name in zip(groups, names, strict=True)], policy_version=9)
    tasks = {name: value for name, value in metrics.items() if name.startswith("reward_by_task/")}
    assert tasks == {"reward_by_task/letters": 4.0, "reward_by_task/sums": 0.75}
    assert all(step_metric(name) is not None for name in tasks)


def test_parts_of_rewards_are_means_over_the_completions_that_have_them():
    group = make_group([0.0, 2.0, 1.0], 4, 7)
    parts = ({"format": 1.0, "right": 0.0}, {"format": 0.0}, {})
    rollouts = tuple(
        rollout._replace(reward_parts=of_rollout) for rollout, of_rollout in zip(group.rollouts, parts, strict=True)
    )
    metrics = group_metrics([group._replace(rollouts=rollouts)], policy_version=9)
    assert metrics["reward_part/format"] == 0.5
    assert metrics["reward_part/right"] == 0.0


def test_episodes_have_turns_context_and_time_of_their_environment() -> None:
    one_turn, two_turns = make_group([0.0, 2.0], 4, 7).rollouts
    episodes = (
        one_turn._replace(environment_s=1.0),
        two_turns._replace(turns=(Turn(0, 1), Turn(5, 3)), context_ids=np.zeros(5, dtype=np.int32), environment_s=3.0),
    )
    group = make_group([0.0], 4, 7)._replace(rollouts=episodes, generate_s=9.0)
    metrics = group_metrics([group, make_group([0.0, 1.0], 4, 7)._replace(generate_s=1.0)], policy_version=9)
    names = ("turns/mean", "turns/max", "length/context", "environment/seconds_mean", "environment/seconds_max")
    assert [metrics[name] for name in names] == [1.25, 2, 1.25, 1.0, 3.0]
    assert (metrics["group/seconds_mean"], metrics["group/seconds_max"]) == (5.0, 9.0)
