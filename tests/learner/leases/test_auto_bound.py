"""The automatic bound moves as its rules say, and never leaves its range."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.records.rows import StepRow
from offbeat.common.settings.config import StalenessSection
from offbeat.learner.leases.auto_bound import (
    MAX_CLIP_DRIFT,
    MAX_KL_DRIFT,
    NOISE_MEMORY,
    WINDOW_STEPS,
    AutoBound,
    BoundDecision,
    Noise,
)

NOISE = Noise(kl=0.001, clip=0.1)


def step(
    *, kl: float = 0.001, clip: float = 0.1, lag: float = 4, waited: float = 0.5, held_back: float = 0.5, **more: Any
) -> dict[str, Any]:
    """Return the metrics of a step of 2 s that measures the noise floor, unless the arguments differ."""
    return {
        "lag/max": lag,
        "kl/behavior_policy_k3": kl,
        "clip/fraction": clip,
        "time/step_s": 2.0,
        "time/wait_rollouts_s": 2 * waited,
        "time/held_back_s": 2 * held_back,
        **more,
    }


def of_lag_0(kl: float, clip: float) -> dict[str, Any]:
    return {"by_lag/0/count": 8, "by_lag/0/kl_behavior_policy_k3": kl, "by_lag/0/clip_fraction": clip}


class Run:
    """An `AutoBound` and the bounds that its decisions set."""

    def __init__(self, bound: int = 4, hard: int | None = 16, *, least: int = 0, noise: Noise | None = NOISE) -> None:
        self.auto = AutoBound(least, noise)
        self.bounds = StalenessSection(max_staleness=bound, hard_max_staleness=hard, auto=True)
        self.num_steps = 0
        self.moves: list[tuple[int, int]] = []
        """Moves: the number of steps so far and the new bound."""

    def see(self, metrics: dict[str, Any], times: int = 1) -> list[BoundDecision]:
        """Observe `times` steps with these metrics; return the decisions."""
        decisions: list[BoundDecision] = []
        for _ in range(times):
            self.num_steps += 1
            decision = self.auto.observe(StepRow(policy_version=1, metrics=metrics), self.bounds)
            if decision is not None:
                decisions.append(decision)
                self.move(decision.max_staleness)
                self.moves.append((self.num_steps, decision.max_staleness))
        return decisions

    def move(self, bound: int) -> None:
        self.bounds = StalenessSection(
            max_staleness=bound, hard_max_staleness=self.bounds.hard_max_staleness, auto=self.bounds.auto
        )


def test_large_drift_halves_the_bound_with_the_reason() -> None:
    run = Run(bound=8)
    # Groups leased before the bound's last change come first: 8 steps.
    assert run.see(step(kl=0.5, lag=8), times=8 + WINDOW_STEPS - 1) == []
    (decision,) = run.see(step(kl=0.5, lag=8))
    assert decision.max_staleness == 4
    assert decision.reason == "KL per token drifts by 0.5, more than 0.02 (mean of 8 steps; largest lag 8)"


@pytest.mark.parametrize(
    ("measured", "is_narrowed"),
    [
        ({"kl": 0.001 + MAX_KL_DRIFT - 1e-9}, False),
        ({"kl": 0.001 + MAX_KL_DRIFT + 1e-9}, True),
        ({"clip": 0.1 + MAX_CLIP_DRIFT - 1e-9}, False),
        ({"clip": 0.1 + MAX_CLIP_DRIFT + 1e-9}, True),
    ],
)
def test_drift_is_what_is_above_the_noise(measured: dict[str, float], is_narrowed: bool) -> None:
    run = Run(bound=4)
    assert bool(run.see(step(**measured), times=4 + WINDOW_STEPS)) == is_narrowed


def test_bound_that_is_hardly_used_goes_below_the_lag_that_there_is() -> None:
    run = Run(bound=16)
    run.see(step(kl=0.5, lag=3), times=16 + WINDOW_STEPS)
    assert run.moves == [(16 + WINDOW_STEPS, 1)]


def test_bound_is_not_narrowed_for_what_no_bound_can_change() -> None:
    run = Run(bound=8, least=3)
    assert run.see(step(kl=0.5, lag=3), times=40) == []


def test_small_drift_widens_where_both_sides_wait_by_half_and_up_to_the_hard_bound() -> None:
    run = Run(bound=0, hard=5)
    run.see(step(), times=100)
    # After each move the bound waits as many steps as its new value, then for a window.
    assert run.moves == [(8, 1), (8 + 1 + 8, 2), (17 + 2 + 8, 3), (27 + 3 + 8, 4), (38 + 4 + 8, 5)]


@pytest.mark.parametrize(
    "measured",
    [{"waited": 0.05}, {"held_back": 0.05}, {"kl": 0.001 + MAX_KL_DRIFT / 4}, {"clip": 0.1 + MAX_CLIP_DRIFT / 4}],
    ids=lambda measured: next(iter(measured)),
)
def test_bound_stays_where_widening_is_of_no_use_or_drift_not_small(measured: dict[str, float]) -> None:
    assert Run().see(step(**measured), times=60) == []


def test_waits_that_the_bound_does_not_cause_are_no_reason_to_widen() -> None:
    run = Run()
    # Now the learner waits while no actor is held back, now actors are held back while the learner has enough.
    for _ in range(30):
        assert run.see(step(waited=0.5, held_back=0.0)) == run.see(step(waited=0.0, held_back=0.5)) == []


def test_after_a_move_what_was_leased_before_it_does_not_count() -> None:
    run = Run(bound=8, hard=8)
    run.see(step(kl=0.5, lag=8), times=16)
    assert run.moves == [(16, 4)]
    # The steps under the old bound's leases, then a window.
    run.see(step(kl=0.5, lag=8), times=8)
    run.see(step(lag=4, waited=0.0), times=100)
    assert run.moves == [(16, 4)]


def test_bound_that_somebody_sets_is_where_it_goes_on_from() -> None:
    run = Run(bound=4)
    run.see(step(), times=4 + WINDOW_STEPS - 1)
    run.move(10)
    assert run.see(step(), times=10 + WINDOW_STEPS - 1) == []
    assert [decision.max_staleness for decision in run.see(step())] == [15]


def test_widening_that_was_taken_back_is_tried_again_later_and_later() -> None:
    run = Run(bound=1, hard=2)
    widened: list[int] = []
    for _ in range(400):
        is_wide = run.bounds.max_staleness == 2
        moved = run.see(step(kl=0.5 if is_wide else 0.001, lag=run.bounds.max_staleness))
        widened += [run.num_steps] if moved and not is_wide else []
    waits = [after - before for before, after in itertools.pairwise(widened)]
    # Skip 2, window 8, narrow; then 16, 32, 64, ... steps.
    assert waits == [26, 42, 74, 138]


def test_off_it_learns_the_noise_and_decides_nothing() -> None:
    run = Run(noise=None)
    run.bounds = StalenessSection(max_staleness=4, hard_max_staleness=16)
    assert run.see(step(kl=0.5, **of_lag_0(0.002, 0.3)), times=40) == []
    assert run.auto.noise is not None
    assert (run.auto.noise.kl, run.auto.noise.clip) == pytest.approx((0.002, 0.3))


def test_without_a_group_of_lag_0_nothing_is_decided() -> None:
    run = Run(noise=None)
    assert run.see(step(kl=0.5), times=40) == []
    run.see(step(**of_lag_0(0.001, 0.1)))
    assert len(run.see(step(kl=0.5), times=4 + WINDOW_STEPS)) == 1


def test_noise_follows_the_newest_groups_of_lag_0() -> None:
    auto = AutoBound(0)
    bounds = StalenessSection()
    auto.observe(StepRow(policy_version=1, metrics=step(**of_lag_0(0.8, 0.0))), bounds)
    assert auto.noise == Noise(0.8, 0.0)
    auto.observe(StepRow(policy_version=2, metrics=step(**of_lag_0(0.0, 0.4))), bounds)
    assert auto.noise is not None
    assert (auto.noise.kl, auto.noise.clip) == pytest.approx((0.8 - 0.8 / NOISE_MEMORY, 0.4 / NOISE_MEMORY))


def test_calibrated_floor_goes_before_what_was_seen() -> None:
    run = Run(bound=4, noise=Noise(9.0, 9.0))
    calibrated = {"kl/drift": 0.5, "clip/drift": 0.0}
    assert [move.max_staleness for move in run.see(step(kl=0.0, **calibrated), times=4 + WINDOW_STEPS)] == [2]
    # An objective whose clips are no noise has no such split.
    run = Run(bound=4, noise=Noise(9.0, 9.0))
    assert [move.max_staleness for move in run.see(step(clip=0.5, **{"kl/drift": 0.0}), times=4 + WINDOW_STEPS)] == [2]


NUMBERS = st.one_of(st.floats(0, 1), st.sampled_from([0.0, math.inf, math.nan, -1.0]))


@given(
    st.integers(0, 3),
    st.integers(0, 12),
    st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(0, 40), st.floats(0, 1), st.sampled_from([None, 0, 5, 12])), max_size=60),
)
def test_bound_never_leaves_its_range(least: int, extra: int, story: list[tuple[float, float, int, float, int | None]]) -> None:
    run = Run(bound=least, hard=least + extra, least=least, noise=Noise(0.0, 0.0))
    for kl, clip, lag, waited, moved_to in story:
        if moved_to is not None and least <= moved_to <= least + extra:
            run.move(moved_to)
        before = run.bounds.max_staleness
        for decision in run.see(step(kl=kl, clip=clip, lag=lag, waited=waited, held_back=waited), times=4):
            assert least <= decision.max_staleness <= least + extra
            assert decision.max_staleness != before
            assert decision.reason
            before = decision.max_staleness
