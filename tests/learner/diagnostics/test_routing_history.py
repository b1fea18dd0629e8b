from typing import Any

import numpy as np
import pytest
import torch

from offbeat.common.models.routing import Routing
from offbeat.common.records.rows import row_fields
from offbeat.learner.diagnostics.routing_metrics import RoutingComparison


def routing(*experts: int) -> Routing:
    """Return a routing of one layer with ten experts and `top_k` 1, given each token's expert. Margins 1, 2, ..."""
    margins = torch.arange(1.0, 1 + len(experts))[:, None]
    return Routing(torch.tensor(experts)[:, None, None], margins, num_experts=10)


def history(*added: tuple[int, Routing], max_versions: int = 33) -> RoutingComparison:
    history = RoutingComparison(1, 1, lambda row: None, max_versions)
    for policy_version, of_version in added:
        history.add(policy_version, of_version)
    return history


def overlaps(metrics: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("routing/"): value for name, value in metrics.items() if name.endswith("_overlap")}


def test_nothing_is_told_of_nothing() -> None:
    assert history().metrics() == {}
    assert history().engine_metrics(0, np.zeros((4, 1, 1), np.int32)) == {}


def test_the_first_version_has_load_and_margins_alone() -> None:
    # Expert 1 has 2 of 4 tokens, 10 experts: 0.5 * 10. Entropy of 1/2, 1/4, 1/4 is 1.5 log 2.
    metrics = history((0, routing(1, 1, 2, 3))).metrics()
    assert metrics == pytest.approx(
        {
            "routing/load_max_over_mean": 5.0,
            "routing/load_entropy": 1.5 * np.log(2) / np.log(10),
            "routing/margin_p5": 1.0,
            "routing/margin_p25": 1.0,
            "routing/margin_p50": 2.0,
        }
    )


def test_an_update_is_the_newest_version_against_the_one_before_it() -> None:
    metrics = history((0, routing(9, 9, 9, 9)), (4, routing(1, 2, 3, 4)), (6, routing(1, 2, 3, 5))).metrics()
    update = {name.removeprefix("routing/update_"): value for name, value in metrics.items() if "update" in name}
    expected = {"overlap": 0.75, "changed_slots": 0.25, "router_mismatch": 0.25, "token_any": 0.25, "routers_per_token": 0.25}
    assert update == {"steps": 2, **expected}


def test_lags_are_put_into_buckets_and_averaged() -> None:
    # The newest is version 20, all tokens to expert 1. Lags 1, 2, 3, 4, 5, 8, 9, 20 share this many of four tokens with it:
    shares = {19: 4, 18: 3, 17: 4, 16: 2, 15: 1, 12: 3, 11: 2, 0: 0}
    older = [(version, routing(*[1] * share, *[2] * (4 - share))) for version, share in sorted(shares.items())]
    metrics = history(*older, (20, routing(1, 1, 1, 1))).metrics()
    assert overlaps(metrics) == {
        "update_overlap": 1.0,
        "lag_1_overlap": 1.0,
        "lag_2_overlap": 0.75,
        "lag_3_4_overlap": (4 + 2) / 8,
        "lag_5_8_overlap": (1 + 3) / 8,
        "lag_9_up_overlap": (2 + 0) / 8,
    }
    assert metrics["routing/lag_9_up_router_mismatch"] == 6 / 8


def test_a_lag_that_is_not_kept_has_no_entry() -> None:
    same = routing(1, 2, 3, 4)
    assert overlaps(history((0, same), (2, same)).metrics()).keys() == {"update_overlap", "lag_2_overlap"}


def test_only_the_newest_versions_are_kept() -> None:
    kept = history(*((version, routing(version, version)) for version in range(6)), max_versions=3)
    experts = [np.full((2, 1, 1), version, np.int32) for version in range(6)]
    told = [bool(kept.engine_metrics(version, of_version)) for version, of_version in enumerate(experts)]
    assert told == [False, False, False, True, True, True]
    assert overlaps(kept.metrics()).keys() == {"update_overlap", "lag_1_overlap", "lag_2_overlap"}


def test_an_engine_is_compared_under_its_own_version() -> None:
    kept = history((0, routing(1, 2, 3, 4)), (1, routing(5, 6, 7, 8)))
    experts = np.array([1, 2, 3, 8], np.int32)
    experts.flags.writeable = False
    old, new = (kept.engine_metrics(version, experts[:, None, None]) for version in (0, 1))
    assert overlaps(old) == {"engine_overlap": 0.75}
    assert overlaps(new) == {"engine_overlap": 0.25}
    assert old["routing/engine_routers_per_token"] == 0.25


@pytest.mark.parametrize("shape", [(3, 1, 1), (4, 2, 1), (4, 1, 2), (1, 1, 4)])
def test_an_engine_that_sent_another_shape_is_not_compared(shape: tuple[int, int, int]) -> None:
    assert history((0, routing(1, 2, 3, 4))).engine_metrics(0, np.ones(shape, np.int32)) == {}


def test_ids_that_no_expert_has_are_a_difference_and_no_error() -> None:
    experts = np.array([-(2**31), -1, 10, 2**31 - 1], np.int32)[:, None, None]
    assert history((0, routing(1, 2, 3, 4))).engine_metrics(0, experts)["routing/engine_overlap"] == 0.0


def comparing(interval: int, *, publish_interval: int = 1) -> tuple[list[dict[str, Any]], RoutingComparison]:
    """Return a comparison and the rows that it records."""
    rows: list[dict[str, Any]] = []
    return rows, RoutingComparison(interval, publish_interval, lambda row: rows.append(row_fields(row)))


def routing_of(*experts: int) -> Routing:
    """Return the routing of one layer that sends each token to one of four experts."""
    chosen = torch.tensor(experts).reshape(-1, 1, 1)
    return Routing(chosen, torch.ones(len(experts), 1), num_experts=4)


def test_routing_is_compared_under_the_first_version_published_in_each_interval() -> None:
    rows, comparison = comparing(10, publish_interval=3)
    for version in (9, 12, 15, 18, 21):
        comparison.add(version, routing_of(0, 1, 2))
        comparison.compare("a", version, np.array([[[0]], [[1]], [[3]]], np.int32))
    assert [(row["policy_version"], row.get("actor")) for row in rows] == [(12, None), (12, "a"), (21, None), (21, "a")]
    assert {row["kind"] for row in rows} == {"routing"}


def test_routing_of_an_engine_with_another_shape_is_left_out() -> None:
    rows, comparison = comparing(1)
    comparison.add(1, routing_of(0, 1, 2))
    comparison.compare("a", 1, np.zeros((2, 1, 1), np.int32))
    assert [row.get("actor") for row in rows] == [None]


@pytest.mark.parametrize("routing", [None, routing_of(0, 1, 2)])
def test_without_routers_or_interval_no_routing_is_recorded(routing: Routing | None) -> None:
    rows, comparison = comparing(0 if routing else 1)
    comparison.add(1, routing)
    comparison.compare("a", 1, np.zeros((3, 1, 1), np.int32))
    assert rows == []
