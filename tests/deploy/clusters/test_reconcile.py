"""Claims about the loop that keeps a pool as large as a run wants."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from offbeat.common.errors import ServiceError
from offbeat.common.processes.shutdown import StopRequest
from offbeat.deploy.clusters.pool import LONGEST_WAIT_S, Instance, Needed, PoolError, StartBackoff, follow, needed, reconcile
from offbeat.protocols.messages import MemberStatus, StatusReport
from tests.deploy.operating.operator_desk import REPORT

OLD, MIDDLE, NEW = (Instance(name, "working") for name in ("old", "middle", "new"))
STARTING, LEAVING = Instance("starting", "starting"), Instance("leaving", "leaving")
EVERYBODY = ("old", "middle", "new")


@dataclass
class ListedPool:
    """A pool that is a list: actors start and leave at once."""

    instances: list[Instance] = field(default_factory=list)
    failures: int = 0
    num_started: int = 0

    def running(self) -> list[Instance]:
        if self.failures:
            self.failures -= 1
            raise PoolError("slurmctld does not answer")
        return list(self.instances)

    def start(self, count: int) -> None:
        for _ in range(count):
            self.instances.append(Instance(f"p-{self.num_started}", "working"))
            self.num_started += 1

    def release(self, names: Sequence[str]) -> None:
        self.instances = [instance for instance in self.instances if instance.name not in names]


def report(wanted: int, *working: str) -> StatusReport:
    members = tuple(MemberStatus(name, "working", 6, 3, 4, 0.0, 0.2, "vllm 1") for name in working)
    return msgspec.structs.replace(REPORT, actors_wanted=wanted, members=members)


@pytest.mark.parametrize(
    ("instances", "wanted", "expected"),
    [
        ([], 2, Needed(start=2)),
        ([OLD, STARTING], 2, Needed()),
        ([OLD, LEAVING], 2, Needed(start=1)),
        ([OLD, MIDDLE, NEW], 1, Needed(release=("new", "middle"))),
        ([OLD, MIDDLE, LEAVING], 2, Needed()),
        ([OLD, STARTING, NEW], 1, Needed(release=("starting", "new"))),
        ([OLD, NEW], 0, Needed(release=("new", "old"))),
    ],
    ids=["none", "starting-counts", "leaving-does-not", "newest-first", "leaving-is-gone", "idle-before-working", "all"],
)
def test_pool_is_brought_to_the_wanted_number(instances: list[Instance], wanted: int, expected: Needed) -> None:
    assert needed(instances, wanted, EVERYBODY) == expected


def test_actor_that_the_run_does_not_trust_is_released_before_newer_ones() -> None:
    assert needed([OLD, MIDDLE, NEW], 2, working=("old", "new")) == Needed(release=("middle",))


def test_pool_follows_the_learner_up_and_down() -> None:
    pool, starts = ListedPool(), StartBackoff()
    follow(pool, report(3), starts)
    follow(pool, report(1, "p-0", "p-1", "p-2"), starts)
    assert [instance.name for instance in pool.instances] == ["p-0"]


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("lives_s", [0.0, 5.0], ids=["unseen", "seen-once"])
def test_actors_that_end_before_they_join_are_started_less_and_less_often(
    lives_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    pool, clock = ListedPool(), Clock()
    starts, started_at = StartBackoff(interval_s=5.0, clock=clock), list[float]()
    while clock.now < 2000.0:
        before = pool.num_started
        follow(pool, report(1), starts)
        if pool.num_started > before:
            started_at.append(clock.now)
        clock.now += 5.0
        # It ends for a reason that a new start does not cure.
        if clock.now - started_at[-1] > lives_s:
            pool.instances = []
    waits = [after - before for before, after in itertools.pairwise(started_at)]
    until_seen = 5.0 + lives_s
    assert waits[:4] == [until_seen + wait_s for wait_s in (10.0, 20.0, 40.0, 80.0)]
    assert waits[-1] == until_seen + LONGEST_WAIT_S
    assert "ended before they joined" in caplog.text


def test_actor_that_ends_after_it_joined_is_replaced_at_once() -> None:
    pool, starts = ListedPool(), StartBackoff(clock=Clock())
    for _ in range(3):
        follow(pool, report(1), starts)
        follow(pool, report(1, pool.instances[0].name), starts)
        # The learner may know of the death before the pool does.
        follow(pool, report(1), starts)
        pool.instances = []
    follow(pool, report(1), starts)
    assert pool.num_started == 4


def test_actors_that_were_asked_to_leave_before_they_joined_are_no_failures() -> None:
    pool, starts = ListedPool(), StartBackoff(clock=Clock())
    for wanted in (3, 0, 2):
        follow(pool, report(wanted), starts)
    assert pool.num_started == 5


def test_run_that_an_actor_has_joined_begins_with_short_waits_again() -> None:
    pool, clock = ListedPool(), Clock()
    starts = StartBackoff(interval_s=5.0, clock=clock)
    for _ in range(8):
        follow(pool, report(1), starts)
        pool.instances, clock.now = [], clock.now + 1000.0
    follow(pool, report(1), starts)
    follow(pool, report(2, pool.instances[0].name), starts)
    pool.instances = pool.instances[:1]
    follow(pool, report(2, pool.instances[0].name), starts)
    clock.now += 10.0
    follow(pool, report(2, pool.instances[0].name), starts)
    assert len(pool.instances) == 2


def test_loop_goes_on_after_errors_changes_nothing_meanwhile_and_empties_the_pool_at_the_end() -> None:
    pool, stop = ListedPool(failures=1), StopRequest()
    answers: list[StatusReport | ServiceError] = [report(2), ServiceError("no answer"), report(2), report(2), ServiceError("x")]
    sizes: list[int] = []

    def ask_learner() -> StatusReport:
        sizes.append(len(pool.instances))
        answer = answers.pop(0)
        if isinstance(answer, ServiceError):
            raise answer
        return answer

    reconcile(pool, ask_learner, lambda: not answers, stop, interval_s=0.0)
    # The first answer meets a pool that fails; the second question has none.
    assert sizes == [0, 0, 0, 2, 2]
    assert pool.instances == []


def test_signal_leaves_the_actors_as_they_are() -> None:
    pool, stop = ListedPool(), StopRequest()

    def ask_learner() -> StatusReport:
        stop.ask("SIGTERM")
        return report(2)

    reconcile(pool, ask_learner, lambda: False, stop, interval_s=60.0)
    assert len(pool.instances) == 2


def test_run_that_is_over_already_is_not_asked() -> None:
    pool = ListedPool([OLD, LEAVING])

    def ask_learner() -> StatusReport:
        raise AssertionError("asked")

    reconcile(pool, ask_learner, lambda: True, StopRequest(), interval_s=0.0)
    assert pool.instances == [LEAVING]
