import math

import numpy as np
import pytest
import torch

from learner.groups import Group, Rollout
from learner.losses import gspo_loss
from learner.step_metrics import LossTally, group_metrics, loss_metrics
from protocols.messages import Segment


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
        "length/max": 6,
        "tokens/trained": 20,
        "tokens/prompt": 12,
    }


def tally_of(ratios: list[float], advantages: list[float]) -> torch.Tensor:
    """The packed tally of rows of one token each; a ratio of 0 stands for a row without tokens."""
    policy = torch.tensor([[math.log(ratio) if ratio else 5.0] for ratio in ratios])
    mask = torch.tensor([[ratio > 0] for ratio in ratios])
    result = gspo_loss(policy, torch.zeros_like(policy), mask, torch.tensor(advantages), clip_low=0.1, clip_high=0.1)
    tally = LossTally(torch.device("cpu"))
    tally.add(result.loss_sum, result.statistics)
    return tally.packed()


def test_ratios_and_clip_fractions_are_of_all_ranks():
    packed = torch.stack([tally_of([math.e, 1.0], [1.0, 1.0]), tally_of([1 / math.e, 1 / math.e], [1.0, -1.0])])
    metrics = loss_metrics(packed, num_completions=4)
    assert metrics["ratio/log_mean"] == pytest.approx(-0.25)
    assert metrics["ratio/log_std"] == pytest.approx(math.sqrt(3 / 4 - 1 / 16))
    assert (metrics["ratio/log_min"], metrics["ratio/log_max"]) == pytest.approx((-1.0, 1.0))
    assert metrics["ratio/token_log_abs_max"] == pytest.approx(1.0)
    assert metrics["ratio/first"] == pytest.approx((math.e - 1 + 2 * (1 - 1 / math.e)) / 4)
    # Clipped: (A > 0, above) and (A < 0, below). Losses -1.1, -1, -1/e and +0.9.
    assert metrics["clip/fraction"] == 0.5
    assert (metrics["clip/positive_above"], metrics["clip/positive_below"]) == (0.25, 0.25)
    assert (metrics["clip/negative_above"], metrics["clip/negative_below"]) == (0.0, 0.25)
    assert metrics["loss/policy"] == pytest.approx((-1.1 - 1 - 1 / math.e + 0.9) / 4)


def test_rows_without_tokens_are_in_the_denominator_and_not_in_the_ratios():
    metrics = loss_metrics(tally_of([math.e, 0.0], [1.0, 0.0])[None], num_completions=2)
    assert metrics["ratio/log_mean"] == pytest.approx(1.0)
    assert metrics["ratio/log_min"] == pytest.approx(1.0)
    assert metrics["clip/fraction"] == 0.5


def test_a_rank_without_rows_changes_nothing():
    lone = tally_of([math.e], [1.0])
    empty = tally_of([0.0], [0.0])
    assert loss_metrics(torch.stack([lone, empty]), num_completions=1) == loss_metrics(lone[None], num_completions=1)


def test_a_step_of_empty_completions_has_finite_metrics():
    assert all(map(math.isfinite, loss_metrics(tally_of([0.0], [0.0])[None], num_completions=1).values()))
