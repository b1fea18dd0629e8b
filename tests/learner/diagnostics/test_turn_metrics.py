"""Lag and drift of tokens by the turn that they belong to."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.common.records.step_metrics import step_metric
from offbeat.learner.diagnostics.row_statistics import K3_OF_TURNS, Column, row_statistics
from offbeat.learner.diagnostics.turn_metrics import TURN_BUCKETS, turn_buckets, turn_metrics
from offbeat.learner.leases.groups import Group, Rollout
from offbeat.learner.objectives.objective import Evaluation, PolicyLogprobs
from offbeat.protocols.payload import Segment, Turn


def rollout(num_tokens: int, **fields: Any) -> Rollout:
    ids = np.arange(num_tokens, dtype=np.int32)
    return Rollout(ids, np.zeros(num_tokens, dtype=np.float32), 1.0, "stop", (Segment(5, 0),))._replace(**fields)


def group_of(*rollouts: Rollout) -> Group:
    return Group(0, 0, np.array([1], dtype=np.int32), rollouts, "actor", 0.0)


def table_of(log_ratios: list[list[float]], buckets: list[list[int]]) -> torch.Tensor:
    policy = torch.tensor(log_ratios, dtype=torch.float64)
    zeros = torch.zeros_like(policy)
    return row_statistics(
        PolicyLogprobs(policy, zeros, None),
        Evaluation(zeros, zeros.bool(), None, None),
        completion_mask=torch.tensor(buckets) >= 0,
        advantages=zeros,
        row_weights=torch.ones(len(policy)),
        policy_lags=torch.zeros(len(policy), dtype=torch.int64),
        turn_buckets=torch.tensor(buckets).clamp(min=0),
    )


def test_each_token_counts_in_its_turn_with_its_own_lag() -> None:
    """At version 9: turns of 2, 1 and 1 tokens, the second token sampled at version 5 and those after it at 8."""
    many = rollout(4, turns=(Turn(0, 2), Turn(1, 1), Turn(1, 1)), segments=(Segment(5, 0), Segment(8, 2)))
    one = rollout(1, segments=(Segment(11, 0),))
    table = table_of([[0.5, 0.0, 1.0, 0.25], [-0.5, math.inf, math.nan, 7.0]], [[0, 0, 1, 2], [0, -1, -1, -1]])
    metrics = turn_metrics([group_of(many, one)], 9, table)

    def k3(log_ratio: float) -> float:
        return math.exp(log_ratio) - 1 - log_ratio

    assert metrics == {
        "by_turn/1/tokens": 3,
        # Of 4 steps twice, and of a version that the learner has lost.
        "by_turn/1/lag_mean": pytest.approx(8 / 3),
        "by_turn/1/kl_behavior_policy_k3": pytest.approx((k3(0.5) + k3(-0.5)) / 3),
        "by_turn/2/tokens": 1,
        "by_turn/2/lag_mean": 1.0,
        "by_turn/2/kl_behavior_policy_k3": pytest.approx(k3(1.0)),
        "by_turn/3-4/tokens": 1,
        "by_turn/3-4/lag_mean": 1.0,
        "by_turn/3-4/kl_behavior_policy_k3": pytest.approx(k3(0.25)),
    }
    assert all(step_metric(name) is not None for name in metrics)


def test_step_whose_completions_have_one_turn_each_has_no_metrics_of_turns() -> None:
    table = table_of([[0.5, 0.0]], [[0, 0]])
    assert turn_metrics([group_of(rollout(2), rollout(2, turns=(Turn(3, 2),)))], 9, table) == {}
    assert table[0, Column.K3_OF_TURN_1] == table[0, Column.BEHAVIOR_POLICY_K3]


def test_turns_beyond_the_last_bucket_share_it() -> None:
    many = rollout(12, turns=tuple(Turn(1, 1) for _ in range(12)))
    assert turn_buckets(many).tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]
    assert turn_buckets(rollout(3)).tolist() == [0, 0, 0]
    assert len(K3_OF_TURNS) == len(TURN_BUCKETS)
