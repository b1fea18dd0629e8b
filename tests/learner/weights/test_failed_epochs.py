"""Collectives that fail with everybody ready are followed by a pause in which actors pull."""

import pytest

from offbeat.learner.weights.collective import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_IN_A_ROW, FailedEpochs


class Bench:
    def __init__(self) -> None:
        self.now = 1000.0
        self.failed = FailedEpochs(lambda: self.now)

    def fail(self, members: str, error: str = "Duplicate GPU detected") -> str | None:
        self.failed.note([name.encode() for name in members], error)
        return self.failed.pause()


def test_second_failure_of_the_same_members_begins_a_pause_that_names_the_error() -> None:
    bench = Bench()
    assert bench.fail("ab", "of the first") is None
    assert bench.fail("ab") == (
        "2 collective updates in a row failed although every member was ready: actors pull the weights, and try again in 60 s. "
        "The last error: Duplicate GPU detected"
    )


def test_failure_without_a_member_of_the_one_before_counts_anew_and_a_newcomer_changes_nothing() -> None:
    bench = Bench()
    bench.fail("ab")
    assert bench.fail("ac") is None
    assert bench.fail("acd") is not None


def test_pause_ends_with_its_time_and_is_twice_as_long_after_each_further_failure() -> None:
    bench = Bench()
    bench.fail("ab")
    lengths: list[float] = []
    for _ in range(9):
        assert bench.fail("ab") is not None
        began = bench.now
        while bench.failed.pause() is not None:
            bench.now += FIRST_PAUSE_S
        lengths.append(bench.now - began)
    assert lengths[:4] == [FIRST_PAUSE_S * factor for factor in (1, 2, 4, 8)]
    assert max(lengths) == lengths[-1] == LONGEST_PAUSE_S


@pytest.mark.parametrize(("live", "is_over"), [({b"a", b"b", b"c"}, False), ({b"a", b"c"}, True)])
def test_pause_ends_when_a_member_has_left(live: set[bytes], is_over: bool) -> None:
    bench = Bench()
    bench.fail("ab")
    bench.fail("ab")
    bench.failed.settle(live)
    assert (bench.failed.pause() is None) is is_over


def test_failures_of_ever_other_members_begin_a_pause_too_which_nobody_ends_by_leaving() -> None:
    bench = Bench()
    for number in range(1, MAX_IN_A_ROW):
        assert bench.fail(str(number)) is None
        bench.failed.explain()
    assert bench.fail("9") is not None
    bench.failed.settle(set())
    assert bench.failed.pause() is not None


def test_success_forgets_the_failures() -> None:
    bench = Bench()
    for _ in range(MAX_IN_A_ROW):
        bench.fail("ab")
        bench.failed.clear()
    assert bench.failed.pause() is None
