"""Claims about `docs.study.analysis`, by hand-computed numbers."""

import pytest

from docs.study.analysis import (
    Condition,
    area,
    compare_methods,
    conditions,
    has_collapsed,
    signs_of_collapse,
    steps_to,
)
from docs.study.trials import Outcome, Point, StudyRow


def make_row(
    method: str = "gspo",
    seed: int = 0,
    *,
    held_out: tuple[float, ...] = (0.2, 0.6, 0.95),
    final: float = 0.9,
    lag: int = 4,
    planned: int = 10,
    outcome: Outcome = "finished",
    ess: float = 0.5,
) -> StudyRow:
    points = tuple(Point(5 * index, value, ess_sequence=ess if index else None) for index, value in enumerate(held_out))
    settings = ("train.groups_per_step=1", f"train.num_steps={planned}")
    return StudyRow("reversal", method, lag, 0.0, seed, settings, outcome, points[-1].step, final, 1.0, points)


def test_methods_are_compared_with_the_default_in_pairs_of_one_seed() -> None:
    rewards = {"gspo": (0.8, 0.6), "grpo": (0.9, 0.8), "sapo": (0.7, 0.2)}
    rows = [make_row(method, seed, final=final) for method, of in rewards.items() for seed, final in enumerate(of)]
    rows.append(make_row("grpo", 2, final=0.0))
    gspo, grpo, sapo = compare_methods(rows, Condition("reversal", 0.0, 4))
    assert (gspo.method, gspo.num_seeds, gspo.reward.mean) == ("gspo", 2, pytest.approx(0.7))
    assert gspo.against_baseline is None
    # Differences 0.1 and 0.2, the third seed has no partner: t(1) = 0.15 / 0.05 = 3, p = 1 - 2 atan(3) / pi = 0.2048.
    assert grpo.against_baseline is not None
    compared = grpo.against_baseline.compared
    assert (compared.difference, compared.num_seeds) == (pytest.approx(0.15), (2, 2))
    assert compared.p_value == pytest.approx(0.20483, abs=1e-5)
    # Differences -0.1 and -0.4: t = 0.25 / 0.15, p = 0.3440. Holm: the smaller p doubles, the larger is at least that.
    assert sapo.against_baseline is not None
    assert sapo.against_baseline.compared.p_value == pytest.approx(0.34404, abs=1e-5)
    assert grpo.against_baseline.adjusted_p == pytest.approx(0.40967, abs=1e-5)
    assert sapo.against_baseline.adjusted_p == pytest.approx(0.40967, abs=1e-5)


def test_conditions_are_kept_apart() -> None:
    rows = [make_row(lag=0), make_row(lag=4), make_row("grpo", lag=4)]
    assert conditions(rows) == [Condition("reversal", 0.0, 0), Condition("reversal", 0.0, 4)]
    assert [result.method for result in compare_methods(rows, conditions(rows)[0])] == ["gspo"]


def test_area_is_the_mean_of_the_curve_and_a_stopped_run_keeps_its_end() -> None:
    # Trapezoids: (0.2 + 0.6) / 2 * 5 + (0.6 + 0.95) / 2 * 5 = 5.875 over 10 steps.
    assert area(make_row()) == pytest.approx(0.5875)
    # Then from 0.95 to 0.1 in the ten steps that were not taken.
    assert area(make_row(planned=20, final=0.1, outcome="hopeless")) == pytest.approx((5.875 + 5.25) / 20)


def test_steps_to_target_are_a_median_in_which_never_is_the_latest() -> None:
    assert steps_to(make_row()) == 10
    assert steps_to(make_row(held_out=(0.2, 0.9))) == 5
    assert steps_to(make_row(held_out=(0.2, 0.3))) is None
    never, soon = make_row(seed=0, held_out=(0.2, 0.3)), make_row(seed=1, held_out=(0.2, 0.9))
    condition = Condition("reversal", 0.0, 4)
    assert compare_methods([never, soon], condition)[0].steps_to_target is None
    assert compare_methods([never, soon, make_row(seed=2)], condition)[0].steps_to_target == 10
    assert compare_methods([make_row(outcome="diverged"), soon], condition)[0].num_stopped == 1


def test_signs_of_collapse_are_read_before_the_fall_and_compared_within_a_condition() -> None:
    def long_row(seed: int, *, falls: bool, ess: float, lag: int = 4) -> StudyRow:
        curve = (0.2, 0.3, 0.4, 0.5, 0.6, 0.9, *((0.3,) if falls else (0.9,)))
        return make_row(seed=seed, held_out=curve, final=curve[-1], planned=30, ess=ess, lag=lag)

    rows = [long_row(0, falls=True, ess=0.2), long_row(1, falls=False, ess=0.4), long_row(2, falls=False, ess=0.1)]
    assert [has_collapsed(row) for row in rows] == [True, False, False]
    ess = signs_of_collapse(rows)[0]
    assert (ess.num_collapsed, ess.num_others, ess.share) == (1, 2, 0.5)
    # A run of another lag is not compared with them; one that fell in the first third is no forecast.
    rows += [long_row(3, falls=False, ess=0.9, lag=16), make_row(seed=4, held_out=(0.2, 0.9, 0.1), final=0.1, planned=30)]
    again = signs_of_collapse(rows)[0]
    assert (again.num_collapsed, again.num_others, again.share) == (1, 3, 0.5)
    assert signs_of_collapse(rows[1:3])[0].share is None
    token_ess = next(sign for sign in signs_of_collapse(rows) if sign.name == "smallest token ESS")
    assert (token_ess.num_collapsed, token_ess.share) == (0, None)
