"""The publisher sends, repeats and excludes at each phase's deadline, and tells a newcomer to pull."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import pytest

from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.rows import EventRow, PullRow, Row, WeightsRow
from offbeat.learner.weights import publisher as publisher_module
from offbeat.learner.weights.actor_versions import Recipient
from offbeat.learner.weights.collective import Absent, BroadcastOutcome
from offbeat.learner.weights.double_buffer import WeightSnapshot
from offbeat.learner.weights.publisher import WeightPublisher
from offbeat.learner.weights.transport import Transport
from offbeat.protocols.messages import LearnerMessage, WeightPull, WeightsCommitted, WeightsStaged
from tests.learner.weights.weight_fakes import LAYOUT, TRANSPORT, FakeServer, actor

PATIENCE_S = 10.0
SENT = BroadcastOutcome(is_sent=True, absent=[])
BROKEN = BroadcastOutcome(is_sent=False, absent=[])


class FakeCollective:
    """Hands each transfer to the test, and returns what the test says."""

    def __init__(self, transport: Transport, closing: threading.Event) -> None:
        self.asked: queue.Queue[tuple[list[str], Callable[[], set[bytes]]]] = queue.Queue()
        self.outcomes: queue.Queue[BroadcastOutcome] = queue.Queue()
        self.errors: dict[str, str] = {}
        self.num_distrusts = 0

    def send(
        self,
        recipients: Sequence[Recipient],
        snapshot: WeightSnapshot,
        backend: str,
        *,
        live: Callable[[], set[bytes]],
        post: object,
    ) -> BroadcastOutcome:
        self.asked.put(([recipient.name for recipient in recipients], live))
        return self.outcomes.get(timeout=PATIENCE_S)

    def report(self, actor: str, epoch: int, error: str) -> None:
        self.errors[actor] = error

    def take_error(self, actor: str) -> str | None:
        return self.errors.pop(actor, None)

    def distrust_group(self) -> None:
        self.num_distrusts += 1

    def close(self) -> None:
        pass


class Bench:
    """A publisher between a fake server, a fake collective and actors that are a list."""

    def __init__(self, backend: Literal["gloo", "pull"], max_pull_lag: Callable[[], int] = lambda: 0) -> None:
        self.live: list[Recipient] = []
        self.posted: list[tuple[str, int]] = []
        """Pulls announced, by name and version."""
        self.rows: list[Row] = []
        self.failures: list[BaseException] = []
        self.publisher = WeightPublisher(
            layout=LAYOUT,
            transport=TRANSPORT._replace(backend=backend),
            open_hub=lambda: pytest.fail("the server is a fake"),
            max_pull_lag=max_pull_lag,
            record=self.rows.append,
        )
        self.server: Any = self.publisher._server
        self.collective: Any = self.publisher._collective

    def recipients(self) -> list[Recipient]:
        return list(self.live)

    def post(self, peer: bytes, message: LearnerMessage) -> None:
        assert isinstance(message, WeightPull)
        self.posted.append((peer.decode(), message.policy_version))

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def publish(self, policy_version: int) -> None:
        with self.publisher.writing():
            self.publisher.publish(policy_version)

    def tend(self) -> None:
        """Do what the server's thread does between requests."""
        self.server.tend()

    def asked(self) -> list[str]:
        """Return the members of the next transfer, which then waits for `outcomes`."""
        return self.collective.asked.get(timeout=PATIENCE_S)[0]

    def transfer(self, outcome: BroadcastOutcome, *versions: Recipient) -> list[str]:
        """End the next transfer, after which the actors have these versions; return its members."""
        names = self.asked()
        self.live = list(versions) or self.live
        self.collective.outcomes.put(outcome)
        return names

    def excluded(self) -> list[str]:
        return [row.detail for row in self.rows if isinstance(row, EventRow) and row.event == "actor_excluded"]

    def wait_for(self, claim: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not claim():
            assert not self.failures and time.monotonic() < deadline, (self.failures, self.rows)
            time.sleep(0.002)


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    """Makes benches, and ends their threads."""
    monkeypatch.setattr(publisher_module, "WeightServer", lambda **_: FakeServer())
    monkeypatch.setattr(publisher_module, "CollectiveUpdates", FakeCollective)
    made: list[Bench] = []

    def make(*live: Recipient, backend: Literal["gloo", "pull"] = "gloo", **arguments: Any) -> Bench:
        made.append(bench := Bench(backend, **arguments))
        bench.live = list(live)
        bench.publisher.start(bench)
        return bench

    yield make
    for bench in made:
        bench.live = []
        if bench.collective is not None:
            bench.collective.outcomes.put(BROKEN)
        bench.publisher.close()
        assert not bench.failures


def test_actor_that_is_not_ready_is_excluded_and_the_update_goes_on_without_it(benches: Callable[..., Bench]) -> None:
    a, b, c = (actor(name) for name in "abc")
    bench = benches(a, b, c)
    bench.publish(0)
    # "c" left: that is no failure.
    outcome = BroadcastOutcome(is_sent=False, absent=[Absent(b, "was late"), Absent(c, None)])
    assert bench.transfer(outcome, a, b) == ["a", "b", "c"]
    assert bench.transfer(SENT, actor("a", 0), b) == ["a"]
    bench.wait_for(lambda: any(isinstance(row, WeightsRow) for row in bench.rows))
    (row,) = [row for row in bench.rows if isinstance(row, WeightsRow)]
    assert (row.policy_version, row.num_members, row.num_excluded) == (0, 1, 1)
    assert bench.excluded() == ["weights 0: b was late; left out for 2 s"]


def test_wait_for_an_update_ends_when_each_actor_has_it_or_is_left_out(benches: Callable[..., Bench]) -> None:
    bench = benches(*(actor(name) for name in "abc"))
    bench.publish(0)
    waiting = threading.Thread(target=bench.publisher.wait_until_taken, args=(StopRequest(),), daemon=True)
    waiting.start()
    # "c" has died.
    outcome = BroadcastOutcome(is_sent=True, absent=[Absent(actor("b"), "was late")])
    bench.transfer(outcome, actor("a"), actor("b"))
    waiting.join(3 * publisher_module.LOOK_S)
    assert waiting.is_alive(), "a has not committed"
    bench.live = [actor("a", 0), actor("b")]
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_wait_for_an_update_ends_when_the_run_is_to_stop(benches: Callable[..., Bench]) -> None:
    bench = benches(actor("a"))
    bench.publish(0)
    stop = StopRequest()
    waiting = threading.Thread(target=bench.publisher.wait_until_taken, args=(stop,), daemon=True)
    waiting.start()
    stop.ask("SIGTERM")
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_broadcast_that_broke_is_repeated_with_everybody(benches: Callable[..., Bench]) -> None:
    a, b = actor("a"), actor("b")
    bench = benches(a, b)
    bench.publish(0)
    assert bench.transfer(BROKEN) == ["a", "b"]
    assert bench.transfer(SENT, actor("a", 0), actor("b", 0)) == ["a", "b"]
    assert bench.excluded() == []


def test_member_that_reports_a_break_is_asked_again_in_a_new_group_and_excluded_at_the_second(
    benches: Callable[..., Bench],
) -> None:
    bench = benches(actor("a", 0), actor("b", 0))
    bench.publish(1)
    bench.asked()
    bench.live = [actor("a", 1), actor("b", 0)]
    bench.publisher.handle("b", WeightsStaged(policy_version=1, epoch=1, error="bucket 1 of 3"))
    bench.collective.outcomes.put(SENT)
    assert bench.asked() == ["b"]
    assert bench.collective.num_distrusts == 1
    bench.publisher.handle("b", WeightsStaged(policy_version=1, epoch=2, error="bucket 2 of 3"))
    bench.collective.outcomes.put(SENT)
    bench.wait_for(lambda: bool(bench.excluded()))
    assert bench.excluded() == ["weights 1: b could not take the weights: bucket 2 of 3; left out for 2 s"]
    assert bench.collective.num_distrusts == 1


def test_nobody_waits_in_a_transfer_for_an_actor_that_is_distrusted_meanwhile(benches: Callable[..., Bench]) -> None:
    bench = benches(actor("a"), actor("liar"))
    bench.publish(0)
    _, live = bench.collective.asked.get(timeout=PATIENCE_S)
    assert live() == {b"a", b"liar"}
    bench.publisher.distrust(b"liar", "liar", "scored otherwise")
    assert live() == {b"a"}
    bench.live = [actor("a", 0)]
    bench.collective.outcomes.put(SENT)


def test_newcomer_is_told_to_pull_once_and_again_when_it_comes_back_before_it_has_begun(
    benches: Callable[..., Bench],
) -> None:
    bench = benches(actor("a", 0))
    bench.publish(0)
    bench.live.append(actor("new"))
    bench.publisher.joined(b"new")
    bench.tend()
    bench.tend()
    assert bench.posted == [("new", 0)]
    bench.publisher.joined(b"new")
    bench.tend()
    assert bench.posted == [("new", 0)] * 2
    bench.server.visitors[b"new"].num_requests = 1
    bench.publisher.joined(b"new")
    bench.tend()
    assert bench.posted == [("new", 0)] * 2, "it has begun, and needs no announcement"
    assert bench.collective.asked.empty(), "nobody waits for it in a collective"


def test_puller_that_has_staged_is_sent_nothing_until_it_is_late_to_commit(
    benches: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = benches(actor("a"), backend="pull")
    bench.publish(0)
    bench.tend()
    bench.publisher.handle("a", WeightsStaged(policy_version=0, epoch=-1))
    bench.tend()
    assert (bench.posted, bench.server.visitors, bench.excluded()) == ([("a", 0)], {}, [])
    began = time.monotonic()
    monkeypatch.setattr(bench.publisher._actor_versions, "_clock", lambda: began + TRANSPORT.timeout_s + 1.0)
    bench.tend()
    assert bench.excluded() == ["weights 0: a did not commit version 0 within 5 s (weights.timeout_s); left out for 2 s"]


def test_puller_that_commits_pulls_the_next_version(benches: Callable[..., Bench]) -> None:
    bench = benches(actor("a"), backend="pull")
    for version in range(3):
        bench.publish(version)
        bench.tend()
        bench.publisher.handle("a", WeightsStaged(policy_version=version, epoch=-1))
        bench.live = [actor("a", version)]
        bench.publisher.handle("a", WeightsCommitted(policy_version=version, stall_s=0.0))
        bench.tend()
    assert bench.posted == [("a", 0), ("a", 1), ("a", 2)]


@pytest.mark.parametrize("is_reported", [True, False])
def test_pull_that_fails_or_stalls_excludes_its_actor_and_leaves_its_place_to_another(
    benches: Callable[..., Bench], is_reported: bool
) -> None:
    names = ("a", "b", "c")
    bench = benches(*(actor(name) for name in names), backend="pull")
    bench.publish(0)
    bench.tend()
    assert bench.posted == [("a", 0), ("b", 0)], "max_pulls is 2"
    if is_reported:
        bench.publisher.handle("a", WeightsStaged(policy_version=0, epoch=-1, error="no route"))
    else:
        bench.server.visitors[b"a"].asked_at -= TRANSPORT.timeout_s + 1.0
    bench.tend()
    late = "neither asked for a chunk of version 0 nor committed it within 5 s"
    why = "could not pull the weights: no route" if is_reported else late
    (excluded,) = bench.excluded()
    assert excluded.startswith(f"weights 0: a {why}")
    assert bench.posted[2:] == [("c", 0)]


def test_pull_that_differences_failed_for_is_a_row_and_a_line_for_the_operator(benches: Callable[..., Bench]) -> None:
    bench = benches(actor("a"), actor("b"), backend="pull")
    bench.publish(0)
    bench.tend()
    bench.server.visitors[b"a"].num_bytes = 300
    bench.publisher.handle("a", WeightsStaged(policy_version=0, epoch=-1, delta_error="wrong checksum"))
    bench.publisher.handle("b", WeightsStaged(policy_version=0, epoch=-1))
    assert bench.rows == [], "rows are not written in the hub's thread"
    bench.tend()
    rows = [(row.actor, row.sent_bytes, row.full_bytes, row.delta_error) for row in bench.rows if isinstance(row, PullRow)]
    assert rows == [("a", 300, 256, "wrong checksum"), ("b", 0, 256, None)]
    assert "differences of weights failed 1 times; the actors pulled all weights instead" in bench.publisher.problems()


def test_edition_is_not_kept_for_nobody_when_training_goes_on_while_it_is_borrowed(benches: Callable[..., Bench]) -> None:
    versions = [1]

    def max_pull_lag() -> int:
        # The publisher asks between borrowing version 0 and lending it: training publishes just then.
        if versions:
            bench.publish(versions.pop())
        return 0

    bench = benches(actor("a"), backend="pull", max_pull_lag=max_pull_lag)
    bench.publish(0)
    bench.tend()
    assert bench.posted == [], "version 0 is too old to begin with"
    bench.tend()
    assert bench.posted == [("a", 1)]


@pytest.mark.parametrize(("backend", "begins_to_pull"), [("pull", []), ("gloo", [("new", 0)])])
def test_lent_version_that_has_aged_is_good_enough_only_where_a_collective_brings_the_newest(
    benches: Callable[..., Bench], backend: Literal["gloo", "pull"], begins_to_pull: list[tuple[str, int]]
) -> None:
    bench = benches(actor("steady", 0), actor("a"), backend=backend)
    bench.publish(0)
    bench.tend()
    bench.live = [actor("steady", 2), actor("a"), actor("new")]
    for version in (1, 2):
        bench.publish(version)
    bench.tend()
    assert bench.posted == [("a", 0), *begins_to_pull]
