"""Floods of bad messages mute their sender for a while, and cost a bounded amount of memory."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from offbeat.protocols import connection_limits as flood_guard
from offbeat.protocols.connection_limits import MAX_MALFORMED, MAX_REJECTED, MUTE_S, FloodGuard


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def guard(clock: Clock) -> FloodGuard:
    return FloodGuard(clock)


KINDS: list[tuple[Callable[[FloodGuard, bytes], None], Callable[[FloodGuard, bytes], None], int]] = [
    (partial(FloodGuard.note_form, is_good=False), partial(FloodGuard.note_form, is_good=True), MAX_MALFORMED),
    (partial(FloodGuard.note_verdict, is_good=False), partial(FloodGuard.note_verdict, is_good=True), MAX_REJECTED),
]


@pytest.fixture(params=KINDS, ids=["malformed", "rejected"])
def kind(request: pytest.FixtureRequest) -> Iterator[tuple[Callable, Callable, int]]:
    yield request.param


def test_sender_is_muted_at_the_limit_and_not_before(guard: FloodGuard, kind: tuple[Callable, Callable, int]) -> None:
    note_bad, _, limit = kind
    for _ in range(limit - 1):
        note_bad(guard, b"a")
    assert not guard.is_muted(b"a")
    note_bad(guard, b"a")
    assert guard.is_muted(b"a")
    assert not guard.is_muted(b"b")


def test_one_good_message_forgives_the_bad_ones_before_it(guard: FloodGuard, kind: tuple[Callable, Callable, int]) -> None:
    note_bad, note_good, limit = kind
    for _ in range(3):
        for _ in range(limit - 1):
            note_bad(guard, b"a")
        note_good(guard, b"a")
    assert not guard.is_muted(b"a")


def test_malformed_and_rejected_messages_are_counted_apart(guard: FloodGuard) -> None:
    for _ in range(MAX_MALFORMED - 1):
        guard.note_form(b"a", is_good=False)
        guard.note_verdict(b"a", is_good=False)
        guard.note_verdict(b"a", is_good=True)
    assert not guard.is_muted(b"a")
    guard.note_form(b"a", is_good=False)
    assert guard.is_muted(b"a")


def test_muted_sender_is_heard_again_after_mute_s_and_has_a_new_start(guard: FloodGuard, clock: Clock) -> None:
    for _ in range(MAX_MALFORMED):
        guard.note_form(b"a", is_good=False)
    clock.now += MUTE_S - 0.01
    assert guard.is_muted(b"a")
    clock.now += 0.01
    assert not guard.is_muted(b"a")
    for _ in range(MAX_MALFORMED - 1):
        guard.note_form(b"a", is_good=False)
    assert not guard.is_muted(b"a")


def test_mutes_are_forgotten_oldest_first(guard: FloodGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_guard, "MAX_MALFORMED", 1)
    monkeypatch.setattr(flood_guard, "MAX_REMEMBERED", 10)
    for number in range(30):
        guard.note_form(b"%d" % number, is_good=False)
    assert [guard.is_muted(b"%d" % number) for number in range(30)] == [False] * 20 + [True] * 10


def test_sender_muted_again_counts_as_the_newest(guard: FloodGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_guard, "MAX_MALFORMED", 1)
    monkeypatch.setattr(flood_guard, "MAX_REMEMBERED", 2)
    for sender in (b"a", b"b", b"a", b"c"):
        guard.note_form(sender, is_good=False)
    assert [guard.is_muted(sender) for sender in (b"a", b"b", b"c")] == [True, False, True]


def test_bad_messages_below_the_limit_are_forgotten_oldest_first(guard: FloodGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_guard, "MAX_MALFORMED", 2)
    monkeypatch.setattr(flood_guard, "MAX_REMEMBERED", 10)
    for number in range(30):
        guard.note_form(b"%d" % number, is_good=False)
    # A second bad message mutes only those whose first one is remembered. From the newest on, so that none is forgotten anew.
    for number in reversed(range(20, 30)):
        guard.note_form(b"%d" % number, is_good=False)
    guard.note_form(b"0", is_good=False)
    assert [number for number in range(30) if guard.is_muted(b"%d" % number)] == list(range(20, 30))


def test_dropped_messages_are_counted_by_name_up_to_a_bound(guard: FloodGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_guard, "MAX_DROP_KINDS", 2)
    for name in ("a", "b", "c", "a", "d"):
        guard.count_dropped(name, "muted")
    assert dict(guard.num_dropped) == {"a: muted": 2, "b: muted": 1, "others: muted": 2}
