"""Collective updates name the actors that are not ready, and begin a new epoch after any failure."""

import threading
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from offbeat.common.weights.collectives import CollectiveError, CollectiveLateError, Seat
from offbeat.common.weights.flat import WeightBuffer
from offbeat.learner.weights import collective as collective_module
from offbeat.learner.weights.collective import RETRY_READY_S, Absent, BroadcastOutcome, CollectiveUpdates, NcclDetour
from offbeat.learner.weights.double_buffer import WeightSnapshot
from offbeat.learner.weights.transport import LearnerGpu
from offbeat.protocols.messages import WeightUpdate
from tests.learner.weights.weight_fakes import LAYOUT, TRANSPORT, actor

ON_GPU = TRANSPORT._replace(backend="nccl", gpu=LearnerGpu(3, "of the learner"))
A, B = actor("a"), actor("b")
SENT = BroadcastOutcome(is_sent=True, absent=[])


class Clock:
    """Stands in for the `time` module; a sleep moves it, and lets the actors act."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.act: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 0.1
        self.act()


class FakeStore:
    """The keys of a rendezvous store."""

    port = 4711

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def set(self, key: str, value: str) -> None:
        self.keys.add(key)

    def check(self, keys: list[str]) -> bool:
        return self.keys.issuperset(keys)

    def delete_key(self, key: str) -> None:
        self.keys.discard(key)


class FakeGroup:
    """A process group that broadcasts to nobody, and breaks when it is told to."""

    num_breaks = 0
    """Broadcasts to come that break."""
    error = CollectiveError("bucket 1 of 3: Connection reset by peer")

    def __init__(self, store: FakeStore, seat: Seat) -> None:
        assert (seat.rank, seat.bucket_bytes, seat.timeout_s) == (0, ON_GPU.bucket_bytes, ON_GPU.timeout_s)

    def prepare(self) -> None:
        pass

    def make(self, reason_to_stop: Callable[[], str]) -> None:
        pass

    def broadcast(self, flat: torch.Tensor, beat: Callable[[], None]) -> None:
        if FakeGroup.num_breaks:
            FakeGroup.num_breaks -= 1
            raise FakeGroup.error

    def close(self) -> None:
        pass


class Bench:
    """Collective updates to actors that get ready as soon as they are asked, unless they are in `asleep`."""

    def __init__(self, clock: Clock, store: FakeStore) -> None:
        self.clock, self.store = clock, store
        self.closing = threading.Event()
        self.updates = CollectiveUpdates(ON_GPU, self.closing)
        self.backend: Literal["gloo", "nccl"] = "gloo"
        self.asleep: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.posted: list[tuple[bytes, WeightUpdate]] = []

    @property
    def epochs(self) -> list[int]:
        """The epoch of each announcement so far."""
        return [update.epoch for _, update in self.posted]

    def post(self, peer: bytes, message: Any) -> None:
        assert isinstance(message, WeightUpdate)
        self.posted.append((peer, message))
        if peer not in self.asleep:
            self.store.set(f"weights/{message.epoch}/{message.policy_version}/ready/{message.rank}", "1")

    def send(self, policy_version: int, *recipients: Any) -> BroadcastOutcome:
        snapshot = WeightSnapshot(WeightBuffer(LAYOUT), policy_version, known_checksum=9)
        live = {A.peer, B.peer}
        return self.updates.send(recipients or (A, B), snapshot, self.backend, live=lambda: live - self.gone, post=self.post)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    clock, store = Clock(), FakeStore()
    monkeypatch.setattr(collective_module, "time", clock)
    monkeypatch.setattr(collective_module, "serve_store", lambda *_, **__: store)
    monkeypatch.setattr(collective_module, "GlooGroup", FakeGroup)
    monkeypatch.setattr(FakeGroup, "num_breaks", 0)

    def make_nccl_group(store: FakeStore, seat: Seat, gpu_index: int, avoided: tuple[str, ...]) -> FakeGroup:
        assert gpu_index == 3
        return FakeGroup(store, seat)

    monkeypatch.setattr(collective_module, "NcclGroup", make_nccl_group)
    return Bench(clock, store)


def test_every_recipient_is_told_its_rank_and_enters_the_same_epoch(bench: Bench) -> None:
    assert bench.send(3) == SENT
    (first, a), (second, b) = bench.posted
    assert (first, a.rank, second, b.rank) == (b"a", 1, b"b", 2)
    assert (a.world_size, a.policy_version, a.store_port, a.checksum) == (3, 3, 4711, 9)
    assert "weights/1/3/go" in bench.store.keys


def test_recipient_that_is_not_ready_at_the_deadline_is_named_and_nothing_is_sent(bench: Bench) -> None:
    assert bench.send(2) == SENT
    bench.asleep.add(B.peer)
    began = bench.clock.now
    late = "did not enter epoch 1 within 5 s (weights.timeout_s)"
    assert bench.send(3) == BroadcastOutcome(is_sent=False, absent=[Absent(B, late)])
    assert bench.clock.now - began == pytest.approx(ON_GPU.timeout_s, abs=0.25)
    assert "weights/1/3/go" not in bench.store.keys
    bench.asleep.clear()
    assert bench.send(3) == SENT
    assert bench.epochs[:4] == [1] * 4
    assert bench.epochs[4] > 1, "a was ready for a transfer that never came: its keys are not used again"


def test_recipient_that_leaves_is_not_blamed_and_ends_the_wait(bench: Bench) -> None:
    bench.asleep.add(B.peer)
    began = bench.clock.now
    bench.clock.act = lambda: bench.gone.add(B.peer)
    assert bench.send(3) == BroadcastOutcome(is_sent=False, absent=[Absent(B, None)])
    assert bench.clock.now - began < 0.5


def test_error_that_a_recipient_reports_about_this_epoch_ends_the_wait(bench: Bench) -> None:
    bench.asleep |= {A.peer, B.peer}

    def report() -> None:
        bench.updates.report("a", 0, "of an epoch before")
        bench.updates.report("b", 1, "no such store")

    bench.clock.act = report
    a, b = sorted(bench.send(3).absent, key=lambda absent: absent.recipient.name)
    assert b == Absent(B, "no such store")
    assert a.why is not None and a.why.startswith("did not enter")


def test_nobody_is_blamed_when_the_publisher_closes(bench: Bench) -> None:
    bench.asleep |= {A.peer, B.peer}
    bench.clock.act = bench.closing.set
    assert bench.send(3) == BroadcastOutcome(is_sent=False, absent=[Absent(A, None), Absent(B, None)])


def test_broadcast_that_breaks_blames_nobody_until_somebody_is_missing_from_the_retry(bench: Bench) -> None:
    FakeGroup.num_breaks = 1
    assert bench.send(3) == BroadcastOutcome(is_sent=False, absent=[], error="bucket 1 of 3: Connection reset by peer")
    bench.asleep.add(B.peer)
    began = bench.clock.now
    (absent,) = bench.send(3).absent
    assert absent.why is not None and absent.why.endswith("within 2 s of a broken broadcast")
    assert bench.clock.now - began == pytest.approx(RETRY_READY_S["gloo"], abs=0.25)
    # A broadcast that succeeds ends the haste.
    assert bench.send(3, A) == SENT
    (absent,) = bench.send(4).absent
    assert absent.why is not None and "(weights.timeout_s)" in absent.why


def test_epoch_lasts_until_members_change_or_a_version_is_sent_again_or_the_group_is_distrusted(bench: Bench) -> None:
    for version in (1, 2, 3):
        bench.send(version, A)
    bench.send(3, A)
    bench.updates.distrust_group()
    bench.send(4, A)
    bench.send(5, A)
    bench.send(6, B)
    assert bench.epochs == [1, 1, 1, 2, 3, 3, 4]


def test_report_on_an_epoch_that_is_over_counts_no_more(bench: Bench) -> None:
    bench.send(1, A)
    bench.updates.report("a", 1, "bucket 2 of 3")
    bench.send(1, A)
    assert bench.updates.take_error("a") is None
    bench.updates.report("a", 1, "bucket 2 of 3")
    assert bench.updates.take_error("a") is None
    bench.updates.report("a", 2, "bucket 3 of 3")
    assert [bench.updates.take_error("a") for _ in range(2)] == ["bucket 3 of 3", None]


def test_store_keeps_only_the_keys_of_the_last_transfer(bench: Bench) -> None:
    bench.send(1)
    num_keys = len(bench.store.keys)
    for version in range(2, 9):
        bench.send(version)
    assert len(bench.store.keys) == num_keys == 3


def avoided(bench: Bench) -> tuple[str, ...]:
    """Return what the members of the last transfer avoid."""
    return bench.posted[-1][1].avoided


@pytest.fixture
def nccl(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench whose NCCL groups hang."""
    monkeypatch.setattr(FakeGroup, "error", CollectiveLateError("NCCL did not answer within 5 s"))
    bench.backend = "nccl"
    return bench


def test_retry_of_an_nccl_group_that_hung_avoids_transports_and_success_keeps_to_it_and_is_told_once(nccl: Bench) -> None:
    FakeGroup.num_breaks = 1
    nccl.send(3)
    assert avoided(nccl) == ()
    (advice,) = {nccl.send(3).advice}
    assert avoided(nccl) == ("P2P", "SHM")
    assert advice is not None and "NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1" in advice and "NCCL did not answer" in advice
    nccl.asleep.add(B.peer)
    assert nccl.send(4).absent and nccl.send(4, A).advice is None
    assert avoided(nccl) == ("P2P", "SHM"), "proved once, it stays"


def test_transports_are_not_suspected_when_a_member_explains_the_hang_or_nccl_names_another_reason(nccl: Bench) -> None:
    FakeGroup.num_breaks = 1
    nccl.send(3)
    nccl.asleep.add(B.peer)
    assert nccl.send(3).absent
    assert nccl.send(3, A).advice is None and avoided(nccl) == ()
    FakeGroup.error = CollectiveError("ncclInvalidUsage; Duplicate GPU detected")
    FakeGroup.num_breaks = 1
    nccl.send(4, A)
    assert nccl.send(4, A).is_sent and avoided(nccl) == ()
    FakeGroup.error = CollectiveError("Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)")
    FakeGroup.num_breaks = 1
    nccl.send(5, A)
    assert nccl.send(5, A).advice is not None


def test_operators_own_settings_of_nccl_stay() -> None:
    detour = NcclDetour({"NCCL_P2P_DISABLE": "0"})
    detour.note(CollectiveLateError("hangs"))
    assert detour.avoided == ("SHM",)


def test_other_backend_needs_another_group_and_retries_of_nccl_wait_for_its_process(nccl: Bench) -> None:
    nccl.send(1)
    nccl.backend = "gloo"
    nccl.send(2)
    assert [update.backend for _, update in nccl.posted] == ["nccl", "nccl", "gloo", "gloo"]
    assert nccl.epochs == [1, 1, 2, 2]
    nccl.backend = "nccl"
    FakeGroup.num_breaks = 1
    nccl.send(3)
    nccl.asleep.add(B.peer)
    began = nccl.clock.now
    nccl.send(3)
    assert nccl.clock.now - began == pytest.approx(min(RETRY_READY_S["nccl"], ON_GPU.timeout_s), abs=0.25)
