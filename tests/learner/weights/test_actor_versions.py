"""ActorVersions choose each actor's transport, and exclude actors that fail for a while."""

from collections.abc import Sequence, Set

import pytest

from offbeat.learner.weights.actor_versions import LONGEST_EXCLUSION_S, ActorVersions, Recipient

TIMEOUT_S = 10.0
NEWEST = 5


class Bench:
    """ActorVersions with a clock that only tests move, and a newest version of `NEWEST`."""

    def __init__(self, *, unreachable: Set[bytes] = frozenset()) -> None:
        self.now = 1000.0
        self.unreachable = unreachable
        """Actors that no collective reaches."""
        self.actor_versions = ActorVersions(TIMEOUT_S, clock=lambda: self.now)

    def plan(self, *recipients: Recipient) -> tuple[list[str], list[str]]:
        """Settle, exclude late actors, and return the names by collective and by pull."""
        self.actor_versions.settle(recipients, NEWEST, {one.peer for one in recipients} - self.unreachable)
        self.actor_versions.exclude_late(recipients, NEWEST)
        return self.behind(recipients)

    def behind(self, recipients: Sequence[Recipient]) -> tuple[list[str], list[str]]:
        by_collective, by_pull = (
            [one.name for one in self.actor_versions.behind(recipients, NEWEST, by_pull=by_pull)] for by_pull in (False, True)
        )
        return by_collective, by_pull

    def exclude(self, name: str = "a") -> float:
        """Exclude an actor; return the seconds of the exclusion."""
        self.actor_versions.exclude(name.encode(), name, "failed")
        ((who, why, seconds),) = self.actor_versions.take_news()
        assert (who, why) == (name, "failed")
        return seconds


def actor(name: str, policy_version: int | None) -> Recipient:
    return Recipient(name.encode(), name, policy_version)


def test_first_update_of_a_run_is_a_collective_for_all() -> None:
    assert Bench().plan(actor("a", None), actor("b", None)) == (["a", "b"], [])


def test_new_actor_pulls_when_others_have_weights() -> None:
    assert Bench().plan(actor("a", 4), actor("b", NEWEST), actor("new", None)) == (["a"], ["new"])


def test_actors_that_no_collective_reaches_pull() -> None:
    bench = Bench(unreachable={b"a", b"b"})
    assert bench.plan(actor("a", 4), actor("b", None), actor("c", NEWEST), actor("d", 4)) == (["d"], ["a", "b"])


def test_actor_that_was_sent_the_newest_version_is_given_time_to_commit_it() -> None:
    bench = Bench()
    bench.actor_versions.note_sent(b"a", NEWEST)
    bench.now += TIMEOUT_S
    assert bench.plan(actor("a", 4)) == ([], [])
    assert bench.actor_versions.take_news() == []
    bench.now += 0.1
    assert bench.plan(actor("a", 4)) == ([], [])
    ((_, why, _),) = bench.actor_versions.take_news()
    assert why == "did not commit version 5 within 10 s (weights.timeout_s)"
    assert bench.actor_versions.num_excluded == 1


def test_actor_that_was_sent_an_older_version_enters_the_next_collective_without_a_commit() -> None:
    bench = Bench()
    bench.actor_versions.note_sent(b"a", 4)
    assert bench.plan(actor("a", 3)) == (["a"], [])


def test_actor_that_pulls_always_commits_before_it_pulls_more() -> None:
    bench = Bench(unreachable={b"a"})
    bench.actor_versions.note_sent(b"a", 4)
    assert bench.plan(actor("a", 3)) == ([], [])
    assert bench.plan(actor("a", 4)) == ([], ["a"])


def test_asking_who_is_behind_changes_nothing() -> None:
    bench = Bench()
    late = actor("a", 4)
    bench.actor_versions.note_sent(b"a", NEWEST)
    bench.now += 2 * TIMEOUT_S
    for _ in range(3):
        assert bench.behind([late]) == ([], [])
    assert bench.actor_versions.num_excluded == 0
    assert bench.actor_versions.take_news() == []


def test_actor_is_left_out_twice_as_long_each_time_and_a_minute_at_most() -> None:
    bench = Bench()
    seconds = []
    for _ in range(7):
        seconds.append(bench.exclude())
        bench.now += seconds[-1]
    assert seconds == [2, 4, 8, 16, 32, 60, 60]


def test_failures_are_forgotten_after_the_longest_exclusion_without_one() -> None:
    bench = Bench()
    for _ in range(6):
        bench.now += bench.exclude()
    bench.now += LONGEST_EXCLUSION_S
    assert bench.exclude() == 60
    bench.now += 60 + LONGEST_EXCLUSION_S + 0.1
    assert bench.exclude() == 2


def test_excluded_actor_gets_nothing_until_its_time_is_over_and_then_pulls_until_it_commits() -> None:
    bench = Bench()
    bench.exclude()
    assert bench.actor_versions.problems() == ["a failed; no weights for another 2 s"]
    assert bench.plan(actor("a", 4)) == ([], [])
    bench.now += 2
    assert bench.actor_versions.problems() == []
    assert bench.plan(actor("a", 4)) == ([], ["a"])
    bench.actor_versions.note_sent(b"a", 4)
    # It has committed what it pulled, and takes part in the next collective.
    assert bench.plan(actor("a", 4)) == (["a"], [])


def test_actor_that_joins_again_or_leaves_is_forgotten() -> None:
    bench = Bench()
    bench.exclude("a")
    bench.exclude("b")
    bench.actor_versions.forget(b"a")
    assert bench.plan(actor("a", 4)) == (["a"], [])
    # "b" was away.
    assert bench.plan(actor("a", 4), actor("b", 4)) == (["a", "b"], [])


def test_first_broken_collective_is_forgiven_and_the_second_in_a_row_is_not() -> None:
    bench = Bench()
    member = actor("a", 4)
    bench.plan(member)
    assert bench.actor_versions.note_break(member, "bucket 1 of 1", NEWEST)
    assert bench.plan(member) == (["a"], [])
    assert not bench.actor_versions.note_break(member, "bucket 1 of 1", NEWEST)
    assert bench.actor_versions.take_news() == [("a", "could not take the weights: bucket 1 of 1", 2.0)]


def test_commit_between_two_broken_collectives_forgives_the_first() -> None:
    bench = Bench()
    bench.plan(actor("a", 4))
    assert bench.actor_versions.note_break(actor("a", 4), "broken", NEWEST)
    assert bench.plan(actor("a", NEWEST)) == ([], [])
    assert bench.actor_versions.note_break(actor("a", 4), "broken", NEWEST)


def test_wrong_bytes_are_the_actors_own_fault() -> None:
    bench = Bench()
    assert not bench.actor_versions.note_break(actor("a", 4), "wrong checksum: 1, not 2", NEWEST)
    assert bench.actor_versions.num_excluded == 1


@pytest.mark.parametrize("policy_version", [NEWEST, NEWEST + 1])
def test_break_reported_by_an_actor_that_has_the_version_is_no_failure(policy_version: int) -> None:
    bench = Bench()
    assert not bench.actor_versions.note_break(actor("a", policy_version), "wrong checksum", NEWEST)
    assert bench.actor_versions.num_excluded == 0
