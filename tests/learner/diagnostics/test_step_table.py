"""The metrics of a step: tokens by the turn that they belong to, and the gradient beside the one before."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.common.records.step_metrics import step_metric
from offbeat.learner.diagnostics.row_statistics import TURN_BUCKETS, Column, row_statistics
from offbeat.learner.diagnostics.step_table import GradientDirection, turn_metrics
from offbeat.learner.leases.groups import Group, Rollout
from offbeat.learner.objectives.objective import Evaluation, PolicyLogprobs
from offbeat.protocols.payload import Segment, Turn


def rollout(num_tokens: int, **fields: Any) -> Rollout:
    ids = np.arange(num_tokens, dtype=np.int32)
    return Rollout(ids, np.zeros(num_tokens, dtype=np.float32), 1.0, "stop", (Segment(5, 0),))._replace(**fields)


def group_of(*rollouts: Rollout) -> Group:
    return Group(0, 0, np.array([1], dtype=np.int32), rollouts, "actor", 0.0)


def table_of(log_ratios: list[list[float]], turns: list[list[int]]) -> torch.Tensor:
    policy = torch.tensor(log_ratios, dtype=torch.float64)
    zeros = torch.zeros_like(policy)
    return row_statistics(
        PolicyLogprobs(policy, zeros, None),
        Evaluation(zeros, zeros.bool(), None, None),
        completion_mask=torch.tensor(turns) >= 0,
        advantages=zeros,
        row_weights=torch.ones(len(policy)),
        policy_lags=torch.zeros(len(policy), dtype=torch.int64),
        turns=torch.tensor(turns).clamp(min=0),
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
    table = table_of([[0.5] * 12], [list(range(12))])
    metrics = turn_metrics([group_of(many)], 9, table)
    assert [metrics[f"by_turn/{name}/tokens"] for name in TURN_BUCKETS] == [1, 1, 2, 4, 4]
    k3 = math.exp(0.5) - 1.5
    assert [metrics[f"by_turn/{name}/kl_behavior_policy_k3"] for name in TURN_BUCKETS] == pytest.approx([k3] * 5)


def test_cosine_is_with_the_call_before_and_absent_in_the_first():
    direction = GradientDirection()
    # (3, 4, 0), (4, 3, 0): 24 / 25. Then (0, 0, 2): 0, and the opposite: -1.
    assert direction.compare([("a", torch.tensor([3.0, 4.0])), ("b", torch.tensor([[0.0]]))]) is None
    assert direction.compare([("a", torch.tensor([4.0, 3.0])), ("b", torch.tensor([[0.0]]))]) == pytest.approx(0.96)
    assert direction.compare([("a", torch.tensor([0.0, 0.0])), ("b", torch.tensor([[2.0]]))]) == 0.0
    assert direction.compare([("a", torch.tensor([0.0, 0.0])), ("b", torch.tensor([[-1.0]]))]) == pytest.approx(-1.0)


def test_a_gradient_that_is_missing_is_zero():
    direction = GradientDirection()
    assert direction.compare([("a", torch.tensor([3.0])), ("b", None)]) is None
    # (3, 0) and (3, 4): 9 / 15; then (0, 4) with (3, 4): 16 / 20.
    assert direction.compare([("a", torch.tensor([3.0])), ("b", torch.tensor([4.0]))]) == pytest.approx(0.6)
    assert direction.compare([("b", torch.tensor([4.0]))]) == pytest.approx(0.8)


def test_there_is_no_cosine_with_a_gradient_of_zero_or_none_at_all():
    direction = GradientDirection()
    assert direction.compare([]) is None
    assert direction.compare([("a", torch.zeros(2))]) is None
    assert direction.compare([("a", torch.ones(2))]) is None
    assert direction.compare([("a", torch.zeros(2))]) is None


def test_the_scale_of_a_gradient_does_not_matter_even_where_its_square_overflows_float32():
    direction = GradientDirection()
    direction.compare([("a", torch.tensor([3e30, 4e30]))])
    assert direction.compare([("a", torch.tensor([4e-30, 3e-30]))]) == pytest.approx(0.96)


def test_a_gradient_that_is_not_finite_gives_nan():
    direction = GradientDirection()
    direction.compare([("a", torch.ones(2))])
    assert math.isnan(direction.compare([("a", torch.tensor([math.nan, 1.0]))]) or 0.0)


def pair_of_gradients(cosine: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return two gradients of 35,000 coordinates in tensors of several sizes, of one magnitude, in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    first = {f"{size}": torch.randn(size, 100, generator=generator) for size in (40, 200, 10, 100)}
    second = {
        name: cosine * values + math.sqrt(1 - cosine**2) * torch.randn(values.shape, generator=generator)
        for name, values in first.items()
    }
    return ({name: x.bfloat16() for name, x in first.items()}, {name: x.bfloat16() for name, x in second.items()})


@pytest.mark.parametrize("cosine", [-0.6, 0.0, 0.9])
def test_a_sample_of_the_coordinates_is_about_as_good(cosine):
    first, second = pair_of_gradients(cosine)
    sampled = GradientDirection(max_coordinates=5000)
    sampled.compare(first.items())
    # Five standard errors of 2,500 coordinates, to which halving may have come.
    assert sampled.compare(second.items()) == pytest.approx(cosine, abs=0.1)


def test_no_more_coordinates_are_kept_than_allowed_and_every_tensor_has_its_share():
    first, second = pair_of_gradients(0.5)
    direction = GradientDirection(max_coordinates=1000)
    direction.compare(first.items())
    direction.compare(second.items())
    kept = {name: len(indices) for name, indices in direction._indices.items()}
    assert 500 < sum(kept.values()) <= 1000
    shares = [count / first[name].numel() for name, count in kept.items()]
    assert max(shares) < 1.1 * min(shares)


def test_a_tensor_that_comes_late_takes_room_from_the_others():
    """A new expert gets coordinates, and the samples of the other tensors shrink."""
    first, second = pair_of_gradients(0.9)
    direction = GradientDirection(max_coordinates=5000)
    direction.compare([("200", first["200"])])
    expected = 0.9 * math.sqrt(20_000 / 35_000)
    assert direction.compare(second.items()) == pytest.approx(expected, abs=0.1)
    assert sum(map(len, direction._indices.values())) <= 5000


def test_the_sample_is_the_same_in_every_process_and_leaves_the_random_state_alone():
    first, second = pair_of_gradients(0.5)
    state = torch.get_rng_state()
    cosines = []
    for _ in range(2):
        direction = GradientDirection(max_coordinates=100)
        direction.compare(first.items())
        cosines.append(direction.compare(second.items()))
    assert cosines[0] == cosines[1]
    assert torch.equal(torch.get_rng_state(), state)
