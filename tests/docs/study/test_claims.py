"""Claims about the sentences of the study: none says more than its intervals."""

import pytest

from docs.study.analysis import Condition, Contrast, Side, claim_verdict, compare_claim, compare_methods
from docs.study.trials import StudyRow
from tests.docs.study.test_study_page import make_row

SIDES = Contrast(Side("reversal", "gspo", 4), Side("reversal", "grpo", 4))


def rows_of(*differences: float, method: str = "gspo") -> list[StudyRow]:
    return [
        row
        for seed, difference in enumerate(differences)
        for row in (make_row(method, seed, 0.5 + difference), make_row("grpo", seed, 0.5))
    ]


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        ((0.10, 0.11, 0.12), "confirmed"),
        ((-0.10, -0.11, -0.12), "contradicted: the opposite holds"),
        # Mean 0.1, and the interval holds 0.
        ((0.0, 0.1, 0.2), "these runs cannot tell: none of 1 differences is distinguishable from 0"),
        # One seed, and equal differences, have no interval.
        ((0.3,), "these runs cannot tell: none of 1 differences is distinguishable from 0"),
        ((0.3, 0.3, 0.3), "these runs cannot tell: none of 1 differences is distinguishable from 0"),
        ((), "no runs"),
    ],
)
def test_confirmed_is_only_said_where_the_interval_excludes_0(differences: tuple[float, ...], said: str) -> None:
    assert claim_verdict(compare_claim([SIDES], rows_of(*differences))) == said


def test_one_difference_of_two_is_no_confirmation() -> None:
    claim = (SIDES, Contrast(Side("reversal", "sapo", 4), SIDES.second))
    rows = [*rows_of(0.10, 0.11, 0.12), *(make_row("sapo", seed, 0.4 + 0.1 * seed) for seed in range(3))]
    assert claim_verdict(compare_claim(claim, rows)) == "not as a rule: 1 of 2 for it, 1 not distinguishable from 0"


def test_difference_of_differences_is_taken_by_seed() -> None:
    difference = SIDES._replace(less=(Side("reversal", "sapo", 4), Side("reversal", "cispo", 4)))
    rows = [
        *rows_of(0.30, 0.31, 0.32),
        *(make_row("sapo", seed, 0.6) for seed in range(3)),
        *(make_row("cispo", seed, 0.5 + 0.01 * (seed == 1)) for seed in range(2)),
    ]
    (finding,) = compare_claim([difference], rows)
    # Seed 2 is not on every side: 0.30 - 0.10 and 0.31 - 0.09.
    assert finding.compared.num_seeds == (2, 2)
    assert finding.compared.difference == pytest.approx(0.21)


def test_rows_of_one_seed_and_equal_differences_are_not_in_holms_family() -> None:
    rows = [make_row("gspo", seed, 0.5) for seed in range(3)]
    rows += [make_row("grpo", seed, 0.6 + 0.01 * seed) for seed in range(3)]
    alone = {result.method: result for result in compare_methods(rows, Condition("reversal", 0.0, 4))}
    rows += [make_row("sapo", 0, 0.6), *(make_row("cispo", seed, 0.7) for seed in range(3))]
    found = {result.method: result for result in compare_methods(rows, Condition("reversal", 0.0, 4))}
    against = {method: result.against_baseline for method, result in found.items()}
    assert against["sapo"] is not None and against["sapo"].adjusted_p is None
    assert against["cispo"] is not None and against["cispo"].compared.low is None
    assert alone["grpo"].against_baseline == against["grpo"] is not None
