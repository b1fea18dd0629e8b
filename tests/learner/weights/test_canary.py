"""The judgement on engines: an actor's log-probs and routing of the canary against the learner's own."""

from typing import Any

import numpy as np
import pytest
import torch

from offbeat.common.routing import Routing
from offbeat.common.rows import canary_tolerance, row_fields
from offbeat.learner.weights.canary import CANARY_VERSIONS, Canary, canary_token_ids

LOGPROBS = np.array([-1.0, -2.0, -3.0], np.float32)
TOKEN_IDS = np.array([5, 6, 7, 8], np.int32)


class Bench:
    """A canary of four tokens, and the rows that it records."""

    def __init__(self, tolerance: float = 1e-3, *, routing_interval: int = 0, publish_interval: int = 1) -> None:
        self.rows: list[dict[str, Any]] = []
        self.tolerance = tolerance
        self.canary = Canary(
            TOKEN_IDS,
            tolerance=lambda: self.tolerance,
            routing_interval=routing_interval,
            publish_interval=publish_interval,
            record=lambda row: self.rows.append(row_fields(row)),
        )


@pytest.mark.parametrize(
    ("setting", "dtype", "tolerated", "too_much"),
    [(None, "float32", 0.0009, 0.0011), (None, "bfloat16", 0.49, 0.51), (0.01, "float32", 0.009, 0.011)],
)
def test_engine_may_differ_by_the_tolerance_and_by_no_more(
    setting: float | None, dtype: str, tolerated: float, too_much: float
) -> None:
    tolerance = canary_tolerance(setting, dtype)
    bench = Bench(tolerance)
    # Near zero, so that float32 does not round the difference.
    bench.canary.add(4, np.zeros(3, np.float32), None)
    right = bench.canary.judge("a", 4, np.array([0.0, -tolerated, 0.0], np.float32))
    wrong = bench.canary.judge("a", 4, np.array([0.0, 0.0, too_much], np.float32))
    assert right is not None
    assert wrong is not None
    assert right.flaw is None
    assert right.max_abs_diff == pytest.approx(tolerated)
    assert wrong.flaw == f"its log-probs of the canary differ by {too_much:.2g} at version 4 (tolerance {tolerance:g})"
    assert [row["max_abs_diff"] for row in bench.rows] == [pytest.approx(tolerated), pytest.approx(too_much)]
    assert {(row["kind"], row["actor"], row["policy_version"]) for row in bench.rows} == {("canary", "a", 4)}


def test_wrong_engines_that_agree_with_each_other_are_named_until_one_is_right_or_the_version_is_old() -> None:
    bench = Bench()
    bench.canary.add(7, np.zeros(3, np.float32), None)

    def judge(actor: str, version: int, value: float) -> tuple[str, ...]:
        verdict = bench.canary.judge(actor, version, np.full(3, value, np.float32))
        assert verdict is not None
        return verdict.agrees_with

    assert judge("a", 7, 0.5) == ()
    assert judge("b", 7, 0.5005) == ("a",)
    assert judge("c", 7, 0.6) == (), "wrong in another way"
    assert judge("a", 7, 0.5) == ("b",)
    assert judge("b", 7, 0.0) == (), "right"
    assert judge("a", 7, 0.5) == ()
    bench.canary.add(8, np.zeros(3, np.float32), None)
    assert judge("b", 8, 0.5) == (), "what a said is of an older version"
    assert judge("a", 7, 0.5) == (), "an answer about an older version is compared with none"


def test_tolerance_may_change_between_two_comparisons() -> None:
    bench = Bench(1e-3)
    bench.canary.add(0, np.zeros(3, np.float32), None)
    answer = np.full(3, 0.005, np.float32)
    before = bench.canary.judge("a", 0, answer)
    bench.tolerance = 0.01
    after = bench.canary.judge("a", 0, answer)
    assert before is not None and before.flaw is not None
    assert after is not None and after.flaw is None


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_engine_whose_log_probs_are_no_numbers_is_wrong(value: float) -> None:
    bench = Bench(0.5)
    bench.canary.add(0, LOGPROBS, None)
    verdict = bench.canary.judge("a", 0, np.array([-1.0, value, -3.0], np.float32))
    assert verdict is not None
    assert verdict.flaw is not None


@pytest.mark.parametrize("num_tokens", [0, 2, 4])
def test_engine_that_scores_another_number_of_tokens_is_wrong(num_tokens: int) -> None:
    bench = Bench()
    bench.canary.add(0, LOGPROBS, None)
    verdict = bench.canary.judge("a", 0, np.full(num_tokens, -1.0, np.float32))
    assert verdict is not None
    assert verdict.flaw == f"it scored {num_tokens} tokens of the canary, not 3, at version 0"
    assert verdict.max_abs_diff is None
    assert bench.rows == []


def test_engine_is_compared_with_the_version_that_it_reports() -> None:
    bench = Bench()
    bench.canary.add(0, LOGPROBS, None)
    bench.canary.add(1, LOGPROBS - 1, None)
    verdicts = [bench.canary.judge("a", version, LOGPROBS - 1) for version in (0, 1)]
    assert [verdict is not None and verdict.flaw is None for verdict in verdicts] == [False, True]


def test_version_that_is_not_kept_is_not_judged() -> None:
    bench = Bench()
    # Every third version is published.
    for version in range(0, 3 * (CANARY_VERSIONS + 2), 3):
        bench.canary.add(version, LOGPROBS, None)
    assert bench.canary.judge("a", 3, LOGPROBS) is None
    assert bench.canary.judge("a", 7, LOGPROBS) is None
    assert bench.rows == []
    oldest = bench.canary.judge("a", 6, LOGPROBS)
    assert oldest is not None
    assert oldest.flaw is None
    assert len(bench.canary._logprobs) == CANARY_VERSIONS


def routing_of(*experts: int) -> Routing:
    """Return the routing of one layer that sends each token to one of four experts."""
    chosen = torch.tensor(experts).reshape(-1, 1, 1)
    return Routing(chosen, torch.ones(len(experts), 1), num_experts=4)


def test_routing_is_compared_under_the_first_version_published_in_each_interval() -> None:
    bench = Bench(routing_interval=10, publish_interval=3)
    for version in (9, 12, 15, 18, 21):
        bench.canary.add(version, LOGPROBS, routing_of(0, 1, 2))
        bench.canary.compare_routing("a", version, np.array([[[0]], [[1]], [[3]]], np.int32))
    assert [(row["policy_version"], row.get("actor")) for row in bench.rows] == [(12, None), (12, "a"), (21, None), (21, "a")]
    assert {row["kind"] for row in bench.rows} == {"routing"}


def test_routing_of_an_engine_with_another_shape_is_left_out() -> None:
    bench = Bench(routing_interval=1)
    bench.canary.add(1, LOGPROBS, routing_of(0, 1, 2))
    bench.canary.compare_routing("a", 1, np.zeros((2, 1, 1), np.int32))
    assert [row.get("actor") for row in bench.rows] == [None]


@pytest.mark.parametrize("routing", [None, routing_of(0, 1, 2)])
def test_without_routers_or_interval_no_routing_is_recorded(routing: Routing | None) -> None:
    bench = Bench(routing_interval=0 if routing else 1)
    bench.canary.add(1, LOGPROBS, routing)
    bench.canary.compare_routing("a", 1, np.zeros((3, 1, 1), np.int32))
    assert bench.rows == []


def test_canary_is_the_beginning_of_the_prompts() -> None:
    prompts = [np.array([1, 2], np.int32), np.array([3], np.int32), np.array([4, 5, 6], np.int32)]
    token_ids = canary_token_ids(prompts, 4)
    assert token_ids.tolist() == [1, 2, 3, 4]
    assert token_ids.dtype == np.int32
    assert canary_token_ids(prompts, 64).tolist() == [1, 2, 3, 4, 5, 6]
    assert canary_token_ids([np.array([7])], 64).tolist() == [7, 7], "the first token has no log-prob"
