"""Rejections are counted by sender and reason, logged now and then, and take bounded memory."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.learner.dispatch.reports import MAX_ENTRIES, OTHERS, Rejections


def test_refusals_are_counted_by_sender_and_reason() -> None:
    rejections = Rejections()
    for sender, reason in [("a", "x"), ("a", "y"), ("b", "x"), ("a", "x")]:
        rejections.count(sender, reason)
    assert rejections.counts() == {"a: x": 2, "a: y": 1, "b: x": 1}


def test_the_first_tenth_and_hundredth_of_a_kind_are_worth_telling() -> None:
    rejections = Rejections()
    told = [number for number in range(1, 1002) if rejections.count("a", "x")]
    assert told == [1, 10, 100, 1000]
    assert rejections.count("b", "x"), "another sender is another kind"


def test_senders_that_call_themselves_anything_are_counted_under_one_name() -> None:
    rejections = Rejections()
    rejections.count("honest", "x")
    for number in range(5 * MAX_ENTRIES):
        rejections.count(f"name {number}", "x")
    rejections.count("honest", "x")
    counts = rejections.counts()
    assert len(counts) == MAX_ENTRIES + 1
    assert counts[OTHERS] == 4 * MAX_ENTRIES + 1
    assert counts["honest: x"] == 2


@given(st.lists(st.tuples(st.text(max_size=200), st.text(max_size=200))))
def test_nothing_is_left_out_and_no_name_is_long(refusals: list[tuple[str, str]]) -> None:
    rejections = Rejections()
    for sender, reason in refusals:
        rejections.count(sender, reason)
    assert sum(rejections.counts().values()) == len(refusals)
    assert all(len(name) <= 64 + 2 + 80 for name in rejections.counts())
