"""The judgement on engines: an actor's log-probs of the canary against the learner's own."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from offbeat.common.records.rows import row_fields
from offbeat.learner.dispatch import canary as canary_module
from offbeat.learner.dispatch.canary import CANARY_VERSIONS, Canary, CanaryVerdict, canary_token_ids

LOGPROBS = np.array([-1.0, -2.0, -3.0], np.float32)
"""A canary of four tokens: one token in two contexts, then one in a single context, which does not count."""
TOKEN_IDS = np.array([5, 6, 6, 5], np.int32)


class Bench:
    """A canary of four tokens, and the rows that it records."""

    def __init__(
        self,
        tolerance: float | None = None,
        *,
        dtype: str = "float32",
        token_ids: NDArray[np.int32] = TOKEN_IDS,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.tolerance = tolerance
        self.canary = Canary(
            token_ids,
            dtype=dtype,
            file_logprobs=np.zeros(len(token_ids) - 1, np.float32),
            tolerance=lambda: self.tolerance,
            record=lambda row: self.rows.append(row_fields(row)),
        )

    def rows_of(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]

    def judge(self, *difference: float, actor: str = "a", version: int = 0) -> CanaryVerdict:
        """Judge an actor that differs so from a learner whose log-probs are all zero, which float32 does not round."""
        if version not in self.canary._logprobs:
            self.canary.add(version, np.zeros(len(difference), np.float32))
        verdict = self.canary.judge(actor, version, np.array(difference, np.float32))
        assert verdict is not None
        return verdict


def floor_of(bench: Bench, *difference: float, actor: str = "a") -> None:
    bench.canary.measure_floor(actor, np.array(difference, np.float32))


# The limits


@pytest.mark.parametrize(
    ("dtype", "floor", "mean_limit"),
    [
        # LEAST, FACTOR * floor, and MOST, of the mean of a single token.
        ("bfloat16", 0.001, 0.01),
        ("bfloat16", 0.01, 0.04),
        ("bfloat16", 0.1, 0.2),
        ("float32", 0.0, 5e-5),
        ("float32", 5e-4, 2e-3),
        ("float32", 2e-3, 3e-3),
    ],
)
def test_limit_is_a_multiple_of_the_floor_within_bounds(dtype: str, floor: float, mean_limit: float) -> None:
    bench = Bench(dtype=dtype)
    floor_of(bench, floor, -floor, floor)
    within, beyond = 0.99 * mean_limit, 1.01 * mean_limit
    assert bench.judge(within, -within, within).flaw is None
    assert bench.judge(beyond, beyond, -beyond).flaw is not None
    assert [row["excess"] for row in bench.rows_of("canary")] == [pytest.approx(0.99), pytest.approx(1.01)]


def test_each_statistic_has_its_limit() -> None:
    """Here 0.04 on average, 0.05 at the 95% quantile, 0.6 at most, for 40 tokens."""

    def excess(*odd: float) -> float:
        bench = Bench(dtype="bfloat16", token_ids=np.zeros(82, np.int32))
        floor_of(bench, *([0.01] * 81))
        tokens = [*odd, *([0.0] * (40 - len(odd)))]
        bench.judge(*tokens, *reversed(tokens), 0.0)
        return bench.rows_of("canary")[-1]["excess"]

    assert excess(*[0.045] * 40) == pytest.approx(0.045 / 0.04)
    assert excess(0.3, 0.3) == pytest.approx(0.3 / 0.6), "2 of 40 tokens may be beyond the quantile"
    assert excess(0.3, 0.3, 0.3) == pytest.approx(0.3 / 0.05)
    assert excess(1.2) == pytest.approx(1.2 / 0.6)


def test_row_holds_the_statistics_of_the_whole_canary() -> None:
    bench = Bench()
    bench.judge(1e-5, -3e-5, 2e-5)
    (row,) = bench.rows_of("canary")
    assert (row["actor"], row["policy_version"]) == ("a", 0)
    assert row["max_abs_diff"] == pytest.approx(3e-5)
    assert row["high_abs_diff"] == pytest.approx(3e-5)
    assert row["mean_abs_diff"] == pytest.approx(2e-5)


# Two in a row


@pytest.mark.parametrize(
    ("difference", "is_wrong"),
    [((1.0, 0.0, 0.0), False), ((0.0, 1.0, 0.0), False), ((0.0, 0.0, 1.0), False), ((1.0, -1.0, 0.0), True)],
)
def test_miss_in_one_context_is_wrong_only_when_the_other_context_confirms_it(
    difference: tuple[float, ...], is_wrong: bool
) -> None:
    assert (Bench().judge(*difference).flaw is not None) == is_wrong


def test_token_that_misses_in_one_context_under_two_versions_in_a_row_is_wrong() -> None:
    bench = Bench(dtype="bfloat16")
    floor_of(bench, 0.0, 0.0, 0.0)
    # At most 0.6, whatever the context.
    first = bench.judge(0.0, 0.0, 0.7, version=0)
    assert (first.flaw, first.is_certain) == (None, False)
    again = bench.judge(0.0, 0.0, 0.8, version=0)
    assert (again.flaw, again.is_certain) == (None, False), "the same weights have the same noise"
    assert bench.judge(0.0, 0.0, -0.9, version=1).flaw is not None
    assert bench.judge(0.0, 0.0, 0.7, version=1).flaw is not None, "pulling the same weights again did not help"
    assert bench.judge(0.0, 0.0, 0.1, version=1) == CanaryVerdict(None), "it did"
    assert bench.judge(0.0, 0.0, 0.7, version=2).flaw is None
    assert bench.judge(0.7, 0.0, 0.0, version=3).flaw is None, "another token"
    assert bench.judge(0.0, 0.0, 0.0, version=4) == CanaryVerdict(None)
    assert bench.judge(0.7, 0.0, 0.0, version=5).flaw is None, "not in a row"
    bench.canary.joined("a")
    floor_of(bench, 0.0, 0.0, 0.0)
    assert bench.judge(0.7, 0.0, 0.0, version=6).flaw is None, "another process"


def test_each_token_is_paired_with_itself_in_reverse_order() -> None:
    """Tokens a b c d, then d c b a: log-probs of b c d d c b a."""
    token_ids = canary_token_ids([np.array([1, 2, 3, 4])], 8)
    by_token = {2: (0.1, 0.2), 3: (0.4, 0.3), 4: (0.5, 0.6)}
    scored = [by_token[token][0] for token in (2, 3, 4)] + [by_token[token][1] for token in (4, 3, 2)] + [9.0]
    bench = Bench(dtype="bfloat16", token_ids=token_ids)
    floor_of(bench, *[0.0] * 7)
    flaw = bench.judge(*scored).flaw
    # 0.1, 0.3 and 0.5.
    assert flaw is not None
    assert "by 0.3 on average, 0.5 at the 95% quantile and 0.5 at most" in flaw


def test_only_log_prob_of_a_very_short_canary_decides_alone() -> None:
    bench = Bench(token_ids=np.array([7, 7], np.int32))
    assert bench.judge(1e-5).flaw is None
    assert bench.judge(1.0).flaw is not None


def test_flaw_gives_the_confirmed_differences_and_their_limits() -> None:
    bench = Bench()
    floor_of(bench, 0.0, 0.0, 0.0)
    assert bench.judge(0.03, 1.0, -0.5, version=4).flaw == (
        "its log-probs of the canary differ at version 4 by 0.03 on average, 0.03 at the 95% quantile and 0.03 at most "
        "(limits 5e-05, 0.0002 and 0.001)"
    )


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("tolerance", [None, 0.5])
def test_one_log_prob_that_is_no_number_is_wrong_at_once(value: float, tolerance: float | None) -> None:
    bench = Bench(tolerance)
    bench.canary.add(3, LOGPROBS)
    verdict = bench.canary.judge("a", 3, np.array([-1.0, value, -3.0], np.float32))
    assert verdict is not None
    assert verdict.flaw == "log-probs of the canary are not finite at version 3: 1 of its 3, 0 of the learner's"
    (row,) = bench.rows
    assert np.isnan(row["max_abs_diff"])
    # The same infinity on both sides is no agreement.
    bench.canary.add(4, np.array([-1.0, value, -3.0], np.float32))
    verdict = bench.canary.judge("a", 4, np.array([-1.0, value, -3.0], np.float32))
    assert verdict is not None
    assert verdict.flaw is not None


@pytest.mark.parametrize("num_tokens", [0, 2, 4])
def test_engine_that_scores_another_number_of_tokens_is_wrong_at_once(num_tokens: int) -> None:
    bench = Bench()
    bench.canary.add(0, LOGPROBS)
    verdict = bench.canary.judge("a", 0, np.full(num_tokens, -1.0, np.float32))
    assert verdict is not None
    assert verdict.flaw == f"it scored {num_tokens} tokens of the canary, not 3, at version 0"
    assert bench.rows == []


# The floor


def test_floor_is_told_when_it_is_measured() -> None:
    bench = Bench()
    floor_of(bench, 1e-6, -2e-6, 4e-6)
    (event,) = bench.rows
    assert (event["event"], event["actor"]) == ("engine_noise", "a")
    assert event["detail"] == (
        "under the model's files its log-probs of the canary differ by 1e-06 on average, 4e-06 at the 95% quantile and 4e-06 "
        "at most; the limits are 4 times that, within bounds"
    )


@pytest.mark.parametrize("odd", [(9.0, 9.0, 9.0), (np.nan, 0.0, 0.0), (0.0, 0.0)])
def test_actor_with_other_files_has_the_floor_of_its_first_update(odd: tuple[float, ...]) -> None:
    bench = Bench(dtype="bfloat16")
    floor_of(bench, *odd)
    assert bench.judge(0.02, 0.02, 0.02, version=0).flaw is None
    assert bench.judge(0.07, 0.07, 0.07, version=1).flaw is None
    assert bench.judge(0.09, 0.09, 0.09, version=2).flaw is not None, "4 times 0.02"


def test_engine_that_is_broken_when_it_joins_gets_no_floor_from_that() -> None:
    bench = Bench(dtype="bfloat16")
    assert bench.judge(0.3, 0.3, 0.3).flaw is not None
    assert bench.judge(0.02, 0.02, 0.02).flaw is None
    assert bench.judge(0.09, 0.09, 0.09).flaw is not None


def test_floor_is_measured_once_and_anew_for_the_next_process_of_that_name() -> None:
    bench = Bench(dtype="bfloat16")
    floor_of(bench, 0.02, 0.02, 0.02)
    for _ in range(3):
        assert bench.judge(0.07, 0.07, 0.07).flaw is None
    assert bench.judge(0.09, 0.09, 0.09).flaw is not None, "drift does not raise it"
    assert bench.judge(0.15, 0.15, 0.15, actor="b").flaw is None, "b has a floor of its own"
    bench.canary.joined("a")
    assert bench.judge(0.15, 0.15, 0.15).flaw is None
    assert bench.judge(0.19, 0.19, 0.19).flaw is None
    assert len(bench.rows_of("event")) == 3


def test_largest_difference_of_the_floor_grows_with_what_is_certainly_right_up_to_the_bound() -> None:
    def limit_after(*odd: float) -> float:
        bench = Bench(dtype="bfloat16")
        floor_of(bench, 0.01, 0.01, 0.01)
        for version, value in enumerate(odd):
            bench.judge(0.0, value, 0.0, version=version)
            bench.judge(0.0, 0.0, 0.0, version=100 + version)
        flaw = bench.judge(9.0, 9.0, 9.0, version=200).flaw
        assert flaw is not None
        return float(flaw.rpartition(" and ")[2].rstrip(")"))

    assert limit_after() == 0.6
    assert limit_after(0.5) == 2.0
    assert limit_after(0.7) == 0.6, "it may be wrong"
    assert limit_after(0.5, 1.9) == 4.0


def test_floors_of_many_actors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary_module, "MAX_ACTORS", 3)
    bench = Bench()
    for index in range(5):
        floor_of(bench, 0.0, 0.0, 0.0, actor=f"actor-{index}")
    assert list(bench.canary._known) == ["actor-2", "actor-3", "actor-4"]


# The setting


def test_setting_replaces_the_limits_and_may_change_between_two_comparisons() -> None:
    bench = Bench(1e-3)
    assert bench.judge(0.0, 0.0009, 0.0).flaw is None
    assert bench.judge(0.0, 0.0, 0.0011, version=4).flaw == (
        "its log-probs of the canary differ at version 4 by 0.0011 (tolerance 0.001)"
    )
    bench.tolerance = 1.5
    assert bench.judge(1.0, 1.0, 1.0).flaw is None
    bench.tolerance = None
    assert bench.judge(1.0, 1.0, 1.0).flaw is not None
    assert bench.judge(0.0, 0.0, 0.0011).flaw is None


@pytest.mark.parametrize("tolerance", [None, 1e-3])
def test_wrong_engines_that_agree_with_each_other_are_named_until_one_is_right_or_the_version_is_old(
    tolerance: float | None,
) -> None:
    bench = Bench(tolerance)
    for actor in "abc":
        floor_of(bench, 0.0, 0.0, 0.0, actor=actor)
    bench.canary.add(7, np.zeros(3, np.float32))

    def judge(actor: str, version: int, value: float) -> tuple[str, ...]:
        return bench.judge(*[value] * 3, actor=actor, version=version).agrees_with

    assert judge("a", 7, 0.5) == ()
    assert judge("b", 7, 0.50003) == ("a",)
    assert judge("c", 7, 0.6) == (), "wrong in another way"
    assert judge("a", 7, 0.5) == ("b",)
    assert judge("b", 7, 0.0) == (), "right"
    assert judge("a", 7, 0.5) == ()
    bench.canary.add(8, np.zeros(3, np.float32))
    assert judge("b", 8, 0.5) == (), "what a said is of an older version"
    assert judge("a", 7, 0.5) == (), "an answer about an older version is compared with none"


# Versions


def test_engine_is_compared_with_the_version_that_it_reports() -> None:
    bench = Bench()
    bench.canary.add(0, LOGPROBS)
    bench.canary.add(1, LOGPROBS - 1)
    verdicts = [bench.canary.judge("a", version, LOGPROBS - 1) for version in (0, 1)]
    assert [verdict is not None and verdict.flaw is None for verdict in verdicts] == [False, True]


def test_version_that_is_not_kept_is_not_judged() -> None:
    bench = Bench()
    # Every third version is published.
    for version in range(0, 3 * (CANARY_VERSIONS + 2), 3):
        bench.canary.add(version, LOGPROBS)
    assert bench.canary.judge("a", 3, LOGPROBS) is None
    assert bench.canary.judge("a", 7, LOGPROBS) is None
    assert bench.rows == []
    oldest = bench.canary.judge("a", 6, LOGPROBS)
    assert oldest is not None
    assert oldest.flaw is None
    assert len(bench.canary._logprobs) == CANARY_VERSIONS


def test_canary_is_the_beginning_of_the_prompts_and_the_same_in_reverse() -> None:
    prompts = [np.array([1, 2], np.int32), np.array([3], np.int32), np.array([4, 5, 6], np.int32)]
    token_ids = canary_token_ids(prompts, 8)
    assert token_ids.tolist() == [1, 2, 3, 4, 4, 3, 2, 1]
    assert token_ids.dtype == np.int32
    assert canary_token_ids(prompts, 9).tolist() == token_ids.tolist()
    assert canary_token_ids(prompts, 128).tolist() == [1, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2, 1]
    assert canary_token_ids([np.array([7])], 128).tolist() == [7, 7], "the first token has no log-prob"
