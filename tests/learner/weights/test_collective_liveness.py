"""A collective that fails for everybody, or never returns, ends in a pull or in a new process; it is never tried for ever."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from offbeat.actor.weights import receiver as weight_receiver
from offbeat.actor.weights.receiver import StuckError, WeightReceiver
from offbeat.common.records.rows import EventRow, Row
from offbeat.common.weights import nccl_group
from offbeat.common.weights.collectives import CollectiveError, GlooGroup
from offbeat.learner.weights import collective
from offbeat.learner.weights.actor_versions import Recipient
from offbeat.learner.weights.publisher import WeightPublisher
from offbeat.learner.weights.transport import LearnerGpu
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.messages import LearnerMessage, WeightPull, WeightsCommitted, WeightUpdate
from tests.common.weights import nccl_stand_in
from tests.common.weights.nccl_stand_in import Fate
from tests.forked import context
from tests.learner.weights.weight_fakes import LAYOUT, TRANSPORT

pytestmark = pytest.mark.slow

PATIENCE_S = 20.0
DUPLICATE = "bucket 1 of 1: ncclInvalidUsage; Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 65000"


class Actor:
    """A receiver in this process, under a peer's name."""

    def __init__(self, name: str, gpu: str | None) -> None:
        self.name = name
        self.gpu = gpu
        self.peer = f"{name}/{time.monotonic_ns()}".encode()
        self.policy_version: int | None = None
        self.receiver = WeightReceiver(LAYOUT, partial(Link, identity=self.peer, max_message_bytes=1 << 20))


class Bench:
    """A publisher with real receivers, whose loops a test runs."""

    def __init__(self, *names: str, timeout_s: float, gpus: dict[str, str] | None = None) -> None:
        """Actors without an entry in `gpus` have no GPU; without `gpus`, neither has the learner."""
        self.actors = [Actor(name, (gpus or {}).get(name)) for name in names]
        self.announced: list[tuple[str, type[LearnerMessage]]] = []
        self.rows: list[Row] = []
        self.failures: list[BaseException] = []
        self.publisher = WeightPublisher(
            layout=LAYOUT,
            transport=TRANSPORT._replace(
                backend="gloo" if gpus is None else "nccl",
                gpu=None if gpus is None else LearnerGpu(0, "GPU-0"),
                host="127.0.0.1",
                listen_on="127.0.0.1",
                timeout_s=timeout_s,
                bucket_bytes=64,
                chunk_bytes=64,
            ),
            open_hub=lambda: Hub("tcp://127.0.0.1:0", max_message_bytes=1 << 16),
            max_pull_lag=lambda: 2,
            record=self.rows.append,
        )
        self.publisher.start(self)

    def recipients(self) -> list[Recipient]:
        return [Recipient(actor.peer, actor.name, actor.policy_version, actor.gpu) for actor in self.actors]

    def post(self, peer: bytes, message: LearnerMessage) -> None:
        for actor in self.actors:
            if actor.peer == peer:
                assert isinstance(message, WeightPull | WeightUpdate)
                self.announced.append((actor.name, type(message)))
                actor.receiver.announce(message)

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def publish(self, policy_version: int) -> None:
        with self.publisher.writing() as buffer:
            buffer.flat.fill_(policy_version + 1)
            self.publisher.publish(policy_version)

    def run_until(self, claim: Callable[[], bool]) -> None:
        """Run the actors' loops; an actor whose receiver is stuck is started again."""
        deadline = time.monotonic() + PATIENCE_S
        while not claim():
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, (self.announced, self.rows, self.publisher.problems())
            for actor in list(self.actors):
                try:
                    self.run(actor)
                except StuckError:
                    self.actors[self.actors.index(actor)] = again = Actor(actor.name, actor.gpu)
                    self.publisher.joined(again.peer)
            time.sleep(0.002)

    def run(self, actor: Actor) -> None:
        outcome = actor.receiver.outcome()
        if outcome is None:
            return
        self.publisher.handle(actor.name, outcome)
        if outcome.error == "":
            assert actor.receiver.buffer.flat.unique().tolist() == [outcome.policy_version + 1]
            actor.policy_version = outcome.policy_version
            actor.receiver.release()
            self.publisher.handle(actor.name, WeightsCommitted(policy_version=outcome.policy_version, stall_s=0.0))

    def have(self, policy_version: int) -> bool:
        return all(actor.policy_version == policy_version for actor in self.actors)

    def events(self, event: str) -> list[str]:
        return [row.detail for row in self.rows if isinstance(row, EventRow) and row.event == event]


@pytest.fixture
def benches() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*names: str, **arguments: Any) -> Bench:
        made.append(bench := Bench(*names, **arguments))
        return bench

    yield make
    for bench in made:
        bench.publisher.close()
        for actor in bench.actors:
            actor.receiver.close()


@pytest.mark.parametrize(("learner_s", "actor_s"), [(0.0, 0.05), (0.05, 0.0), (0.02, 0.02)])
def test_failure_that_all_members_see_ends_in_a_pull_after_two_epochs_and_is_told(
    benches: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, learner_s: float, actor_s: float
) -> None:
    def refuse(group: GlooGroup, flat: torch.Tensor, beat: Callable[[], None]) -> None:
        time.sleep(actor_s if group._seat.rank else learner_s)
        raise CollectiveError(DUPLICATE)

    monkeypatch.setattr(GlooGroup, "broadcast", refuse)
    bench = benches("a", "b", timeout_s=5.0)
    for version in range(3):
        bench.publish(version)
        bench.run_until(lambda version=version: bench.have(version))
    assert bench.announced.count(("a", WeightUpdate)) == 2, "later versions do not try again at once"
    (told,) = bench.events("collectives_paused")
    (problem,) = bench.publisher.problems()
    for text in (told, problem):
        assert DUPLICATE in text
    assert bench.events("actor_excluded") == [], "nobody is to blame"


def test_broadcast_that_never_returns_is_left_behind_and_every_stuck_actor_is_replaced(
    benches: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def hang(group: GlooGroup, flat: torch.Tensor, beat: Callable[[], None]) -> None:
        released.wait(PATIENCE_S)
        raise CollectiveError("long over")

    monkeypatch.setattr(GlooGroup, "broadcast", hang)
    monkeypatch.setattr(collective, "STUCK_S", 0.05)
    # Long enough for the learner to ask again before the survivor gives up.
    monkeypatch.setattr(weight_receiver, "STUCK_S", 1.0)
    bench = benches("dies", "b", timeout_s=0.15)
    survivor = bench.actors[1]
    bench.publish(0)
    bench.run_until(lambda: len(bench.announced) >= 2)
    del bench.actors[0]
    bench.publish(1)
    bench.run_until(lambda: bench.have(1))
    assert bench.actors != [survivor]
    bench.publish(2)
    bench.run_until(lambda: bench.have(2))
    assert any("b did not enter epoch" in why for why in bench.events("actor_excluded"))
    assert "stuck" in bench.events("collectives_paused")[0]
    released.set()


def test_receiver_that_nobody_has_looked_at_yet_is_not_stuck(
    benches: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(GlooGroup, "broadcast", lambda *_: released.wait(PATIENCE_S))
    monkeypatch.setattr(weight_receiver, "STUCK_S", 1.0)
    bench = benches("a", timeout_s=2.0)
    bench.publish(0)
    receiver = bench.actors[0].receiver
    deadline = time.monotonic() + PATIENCE_S
    while not receiver._is_receiving:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert receiver.outcome() is None
    released.set()


@pytest.fixture
def befall(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, Fate]], None]:
    """Lets a fate befall the ranks of the NCCL groups to come."""
    monkeypatch.setattr(nccl_group, "context", context)
    monkeypatch.setattr(nccl_group, "GRACE_S", 0.3)
    return lambda fates: monkeypatch.setattr(nccl_group, "serve", partial(nccl_stand_in.serve, fates=fates))


GPUS = {"a": "GPU-1", "b": "GPU-2", "shares": "GPU-0"}


def test_mixed_fleet_takes_part_by_nccl_where_it_can_and_pulls_where_not(
    benches: Callable[..., Bench], befall: Callable[[dict[int, Fate]], None]
) -> None:
    befall({})
    bench = benches("a", "b", "shares", "cpu", timeout_s=10.0, gpus=GPUS)
    for version in range(2):
        bench.publish(version)
        bench.run_until(lambda version=version: bench.have(version))
    kinds = {(name, kind) for name, kind in bench.announced}
    assert kinds == {("a", WeightUpdate), ("b", WeightUpdate), ("shares", WeightPull), ("cpu", WeightPull)}
    assert bench.publisher.problems() == []


@pytest.mark.parametrize("fate", ["refuse", "hang in init", "no device"])
def test_nccl_that_fails_for_all_ends_in_pulls_and_nobody_is_stuck(
    benches: Callable[..., Bench], befall: Callable[[dict[int, Fate]], None], fate: Fate
) -> None:
    befall(dict.fromkeys(range(3), fate))
    bench = benches("a", "b", timeout_s=0.7, gpus=GPUS)
    threads = [actor.receiver._thread for actor in bench.actors]
    bench.publish(0)
    bench.run_until(lambda: bench.have(0))
    assert all(thread.is_alive() for thread in threads), "a construction that fails is reported, and ends no receiver"
    assert threads == [actor.receiver._thread for actor in bench.actors]
    if fate == "refuse":
        assert "Duplicate GPU detected" in bench.events("collectives_paused")[0]


def test_nccl_process_that_dies_amid_a_transfer_costs_a_retry(
    benches: Callable[..., Bench], befall: Callable[[dict[int, Fate]], None]
) -> None:
    befall({2: "die"})
    bench = benches("a", "b", timeout_s=1.0, gpus=GPUS)
    bench.publish(0)
    bench.run_until(lambda: len(bench.announced) >= 3)
    befall({})
    bench.run_until(lambda: bench.have(0))
    assert bench.events("collectives_paused") == bench.events("actor_excluded") == []
