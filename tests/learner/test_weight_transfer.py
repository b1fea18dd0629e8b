"""Weights for real: a publisher here, receivers in processes of their own, some of which are killed or stopped."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from offbeat.actor.weight_receiver import Outcome, WeightReceiver
from offbeat.common import collectives
from offbeat.common.rows import row_fields
from offbeat.common.weights import checksum, make_layout
from offbeat.learner.weights import editions as weight_editions
from offbeat.learner.weights.publisher import WeightPublisher
from offbeat.learner.weights.standings import Recipient
from offbeat.learner.weights.transport import Transport
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.messages import LearnerMessage, TensorSpec, WeightPull, WeightsCommitted, WeightUpdate

SMALL = make_layout([("embed", (7, 3)), ("scale", ()), ("head", (5,))], torch.bfloat16)
LARGE = make_layout([("embed", (4096, 4096))], torch.float32)
BUCKET_BYTES = 1 << 18
CHUNK_BYTES = 1 << 18
MAX_PULLS = 2
MAX_MESSAGE_BYTES = 1 << 24
TIMEOUT_S = 1.5
PATIENCE_S = 30.0

Mishap = Literal["", "SIGKILL", "SIGSTOP", "wrong byte"]

context = multiprocessing.get_context("forkserver")
# One process imports torch; receivers are forked from it.
context.set_forkserver_preload(["offbeat.actor.weight_receiver", "offbeat.learner.training.ranks"])


def open_hub() -> Hub:
    return Hub("tcp://127.0.0.1:0", max_message_bytes=1 << 16)


def receive_weights(connection: Connection, layout: tuple[TensorSpec, ...], peer: bytes, mishap: Mishap, poll_s: float) -> None:
    """An actor's part: announcements in, `(outcome, checksum)` out. With a `mishap`, it befalls the first transfer half-way."""
    collectives.POLL_S = poll_s
    receiver = WeightReceiver(layout, lambda address: Link(address, identity=peer, max_message_bytes=MAX_MESSAGE_BYTES))
    connection.send("up")
    flat = receiver.buffer.flat
    while True:
        if mishap and flat[len(flat) // 2] != 0 and flat[-1] == 0:
            befallen, mishap = mishap, ""
            if befallen == "wrong byte":
                flat[0] ^= 1
            else:
                os.kill(os.getpid(), signal.Signals[befallen])
        while connection.poll(0.0005):
            receiver.announce(connection.recv())
        outcome = receiver.outcome()
        if outcome is not None:
            connection.send((outcome, checksum(flat)))
            if not outcome.error:
                receiver.release()


class Receiver:
    """A receiver's process, as the publisher's side sees it."""

    def __init__(self, name: str, layout: tuple[TensorSpec, ...], mishap: Mishap, poll_s: float) -> None:
        self.name = name
        self.peer = f"{name}/1".encode()
        self.policy_version: int | None = None
        self.is_mute = False
        self.num_breaks = 0
        """Transfers to come that it says have broken."""
        """It takes the weights and never says so."""
        self.checksums: dict[int, int] = {}
        self.epochs: dict[int, int] = {}
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=receive_weights, args=(theirs, layout, self.peer, mishap, poll_s), daemon=True)
        self.process.start()
        theirs.close()
        self.send: Callable[[LearnerMessage], None] = self.connection.send
        assert self.connection.poll(PATIENCE_S)
        assert self.connection.recv() == "up"

    def has(self, policy_version: int) -> bool:
        return self.policy_version is not None and self.policy_version >= policy_version

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        assert self.process.exitcode is not None
        self.connection.close()


class Fleet:
    """The publisher, its receivers, and a thread that carries messages between them as the hub would."""

    def __init__(self, layout: tuple[TensorSpec, ...], timeout_s: float, backend: Literal["gloo", "pull"]) -> None:
        self.layout = layout
        self.receivers: list[Receiver] = []
        self.rows: list[dict[str, Any]] = []
        self.failures: list[BaseException] = []
        self.announced: list[tuple[str, int]] = []
        """Receivers by name and the versions announced to them."""
        self.pulled: list[tuple[str, int]] = []
        """Those of them that were to pull."""
        self.most_pulls = 0
        """At once."""
        self.sent_checksums: dict[int, int] = {}
        self.publisher = WeightPublisher(
            layout=layout,
            transport=Transport(
                host="127.0.0.1",
                listen_on="127.0.0.1",
                backend=backend,
                port=0,
                timeout_s=timeout_s,
                bucket_bytes=BUCKET_BYTES,
                chunk_bytes=CHUNK_BYTES,
                max_pulls=MAX_PULLS,
            ),
            open_hub=open_hub,
            max_pull_lag=lambda: 2,
            record=lambda row: self.rows.append(row_fields(row)),
        )
        self.publisher.start(self)
        self._is_over = False
        self._courier = threading.Thread(target=self.carry, daemon=True)
        self._courier.start()

    def recipients(self) -> list[Recipient]:
        return [Recipient(receiver.peer, receiver.name, receiver.policy_version) for receiver in self.receivers]

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def join(self, name: str, mishap: Mishap = "", poll_s: float = 0.001) -> Receiver:
        receiver = Receiver(name, self.layout, mishap, poll_s)
        self.receivers.append(receiver)
        self.publisher.joined(receiver.peer)
        return receiver

    def post(self, peer: bytes, message: LearnerMessage) -> None:
        for receiver in self.receivers:
            if receiver.peer == peer and receiver.process.is_alive():
                assert isinstance(message, WeightUpdate | WeightPull)
                self.announced.append((receiver.name, message.policy_version))
                if isinstance(message, WeightPull):
                    self.pulled.append((receiver.name, message.policy_version))
                    self.most_pulls = max(self.most_pulls, len(self.publisher._pulls))
                receiver.send(message)

    def carry(self) -> None:
        while not self._is_over:
            for receiver in list(self.receivers):
                self.deliver(receiver)
            time.sleep(0.0005)

    def deliver(self, receiver: Receiver) -> None:
        try:
            if not receiver.connection.poll():
                return
            outcome, received = receiver.connection.recv()
        except (EOFError, OSError):
            return
        assert isinstance(outcome, Outcome)
        if receiver.is_mute:
            return
        version = outcome.policy_version
        if receiver.num_breaks:
            receiver.num_breaks -= 1
            outcome = outcome._replace(error="bucket 1 of 1: Connection reset by peer")
        if not outcome.error:
            receiver.checksums[version] = received
            receiver.epochs[version] = outcome.as_message().epoch
            receiver.policy_version = version
        self.publisher.handle(receiver.name, outcome.as_message())
        if not outcome.error:
            self.publisher.handle(receiver.name, WeightsCommitted(policy_version=version, stall_s=0.0))

    def publish(self, policy_version: int) -> None:
        with self.publisher.writing() as buffer:
            buffer.flat.view(torch.int64).random_(generator=torch.Generator().manual_seed(policy_version))
            # A receiver must be able to tell how much has arrived from the zeros before it.
            buffer.flat[len(buffer.flat) // 2] = buffer.flat[-1] = 1
            self.sent_checksums[policy_version] = checksum(buffer.flat)
            self.publisher.publish(policy_version)

    def wait(self, policy_version: int, *receivers: Receiver) -> None:
        self.wait_for(lambda: all(receiver.has(policy_version) for receiver in receivers))
        for receiver in receivers:
            for version, received in receiver.checksums.items():
                assert received == self.sent_checksums[version]

    def wait_for(self, claim: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not claim():
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {self.rows}"
            time.sleep(0.002)

    def excluded(self) -> list[str]:
        return [row["actor"] for row in self.rows if row.get("event") == "actor_excluded"]

    def commit_failures(self) -> list[str]:
        return [row["detail"] for row in self.rows if "did not commit" in row.get("detail", "")]

    def updates(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == "weights"]

    def close(self) -> None:
        self.publisher.close()
        self._is_over = True
        self._courier.join(5)
        for receiver in self.receivers:
            receiver.end()
        for thread in (self.publisher._thread, self.publisher._server._thread):
            assert thread is None or not thread.is_alive()
        assert not self.failures, self.failures


@contextmanager
def fleet_of(
    layout: tuple[TensorSpec, ...], *names: str, timeout_s: float = TIMEOUT_S, backend: Literal["gloo", "pull"] = "gloo"
) -> Iterator[Fleet]:
    fleet = Fleet(layout, timeout_s, backend)
    try:
        for name in names:
            fleet.join(name)
        yield fleet
    finally:
        fleet.close()


def test_every_receiver_gets_the_exact_bytes_of_every_version_in_one_epoch() -> None:
    with fleet_of(SMALL) as fleet:
        # "c" gets its bytes from "a". It looks for the learner's go so seldom that the learner is done long before.
        for name in "abcd":
            fleet.join(name, poll_s=0.1 if name == "c" else 0.001)
        fleet.publish(0)
        fleet.wait(0, *fleet.receivers)
        for version in range(1, 9):
            fleet.publish(version)
            fleet.wait(version, *fleet.receivers)
        assert fleet.excluded() == []
        assert {row["num_members"] for row in fleet.updates()[1:]} <= {4}
        for receiver in fleet.receivers:
            assert len({receiver.epochs[version] for version in range(1, 9)}) == 1


def test_version_larger_than_a_bucket_arrives() -> None:
    with fleet_of(make_layout([("w", (300, 301)), ("b", (3,))], torch.float32), "a", "b") as fleet:
        for version in (0, 1):
            fleet.publish(version)
            fleet.wait(version, *fleet.receivers)
        assert fleet.excluded() == []


def num_keys(fleet: Fleet) -> int:
    assert fleet.publisher._collective is not None
    return fleet.publisher._collective._store.num_keys()


def test_keys_of_past_transfers_do_not_pile_up_in_the_store() -> None:
    with fleet_of(SMALL, "a", "b") as fleet:
        fleet.publish(0)
        fleet.wait(0, *fleet.receivers)
        fleet.publish(1)
        fleet.wait(1, *fleet.receivers)
        before = num_keys(fleet)
        for version in range(2, 12):
            fleet.publish(version)
            fleet.wait(version, *fleet.receivers)
        assert num_keys(fleet) <= before


def test_late_joiner_gets_the_current_version() -> None:
    with fleet_of(SMALL, "a") as fleet:
        fleet.publish(3)
        fleet.wait(3, *fleet.receivers)
        late = fleet.join("late")
        fleet.wait(3, late)
        fleet.publish(4)
        fleet.wait(4, *fleet.receivers)
        assert fleet.receivers[0].epochs[4] == late.epochs[4]
        assert fleet.excluded() == []


def test_actor_that_joins_again_gets_the_version_that_it_had() -> None:
    with fleet_of(SMALL, "a", "b") as fleet:
        fleet.publish(3)
        fleet.wait(3, *fleet.receivers)
        again = fleet.receivers[0]
        again.policy_version = None
        again.checksums.clear()
        fleet.publisher.joined(again.peer)
        fleet.wait(3, again)
        assert fleet.excluded() == []


def test_whole_fleet_that_joins_again_gets_the_version_that_it_had() -> None:
    with fleet_of(SMALL, "a", "b") as fleet:
        fleet.publish(3)
        fleet.wait(3, *fleet.receivers)
        for receiver in fleet.receivers:
            receiver.policy_version = None
            receiver.checksums.clear()
            fleet.publisher.joined(receiver.peer)
        fleet.wait(3, *fleet.receivers)
        assert fleet.excluded() == []


def test_receiver_killed_in_the_middle_of_a_broadcast_is_named_and_the_others_get_the_version() -> None:
    with fleet_of(LARGE, "survivor-1", "survivor-2") as fleet:
        survivors = list(fleet.receivers)
        victim = fleet.join("victim", "SIGKILL")
        fleet.publish(0)
        fleet.wait(0, *survivors)
        victim.process.join(10)
        assert victim.process.exitcode == -signal.SIGKILL
        assert set(fleet.excluded()) == {"victim"}
        fleet.publish(1)
        fleet.wait(1, *survivors)


def test_receiver_stopped_in_the_middle_of_a_broadcast_is_named_and_catches_up_when_it_goes_on() -> None:
    with fleet_of(LARGE, "survivor-1", "survivor-2") as fleet:
        survivors = list(fleet.receivers)
        victim = fleet.join("victim", "SIGSTOP")
        fleet.publish(0)
        fleet.wait(0, *survivors)
        assert set(fleet.excluded()) == {"victim"}
        assert victim.policy_version is None
        victim.signal(signal.SIGCONT)
        fleet.publish(1)
        fleet.wait(1, victim, *survivors)


def test_receiver_that_does_not_get_ready_is_left_out_by_name_and_catches_up_when_it_goes_on() -> None:
    with fleet_of(SMALL, "survivor-1", "survivor-2", "sleeper") as fleet:
        *survivors, sleeper = fleet.receivers
        fleet.publish(0)
        fleet.wait(0, *fleet.receivers)
        sleeper.signal(signal.SIGSTOP)
        started = time.monotonic()
        fleet.publish(1)
        fleet.wait(1, *survivors)
        assert TIMEOUT_S <= time.monotonic() - started < 2 * TIMEOUT_S
        assert fleet.excluded() == ["sleeper"]
        assert "did not enter epoch" in next(row["detail"] for row in fleet.rows if row["kind"] == "event")
        assert fleet.updates()[-1]["num_excluded"] == 1
        # While it is left out, nobody waits for it.
        started = time.monotonic()
        fleet.publish(2)
        fleet.wait(2, *survivors)
        assert time.monotonic() - started < TIMEOUT_S
        sleeper.signal(signal.SIGCONT)
        fleet.wait(2, sleeper)
        fleet.publish(3)
        fleet.wait(3, *fleet.receivers)
        assert len({receiver.epochs[3] for receiver in fleet.receivers}) == 1


def test_receiver_that_leaves_while_it_is_awaited_is_no_failure_and_keeps_nobody_waiting() -> None:
    with fleet_of(SMALL, "survivor", "leaver") as fleet:
        survivor, leaver = fleet.receivers
        fleet.publish(0)
        fleet.wait(0, survivor, leaver)
        leaver.signal(signal.SIGSTOP)
        started = time.monotonic()
        fleet.publish(1)
        fleet.wait_for(lambda: ("leaver", 1) in fleet.announced)
        fleet.receivers.remove(leaver)
        fleet.wait(1, survivor)
        assert time.monotonic() - started < TIMEOUT_S
        leaver.end()
        assert fleet.excluded() == []


def test_publisher_that_is_closed_while_it_waits_reports_no_failure() -> None:
    with fleet_of(SMALL, "sleeper") as fleet:
        (sleeper,) = fleet.receivers
        sleeper.signal(signal.SIGSTOP)
        fleet.publish(0)
        fleet.wait_for(lambda: ("sleeper", 0) in fleet.announced)
        fleet.publisher.close()
        assert fleet.excluded() == []


def test_actor_that_does_not_commit_is_left_out_longer_each_time() -> None:
    with fleet_of(SMALL, "a", timeout_s=0.3) as fleet:
        (mute,) = fleet.receivers
        fleet.publish(0)
        fleet.wait(0, mute)
        mute.is_mute = True
        fleet.publish(1)
        fleet.wait_for(lambda: len(fleet.commit_failures()) >= 2)
        first, second, *_ = fleet.commit_failures()
        assert first.startswith("weights 1: a did not commit version 1 within 0.3 s")
        assert first.endswith("left out for 2 s")
        assert second.endswith("left out for 4 s")


def test_joiner_pulls_while_collectives_go_on_for_the_others_and_enters_the_next() -> None:
    with fleet_of(LARGE, "a", "b") as fleet:
        others = list(fleet.receivers)
        fleet.publish(0)
        fleet.wait(0, *others)
        late = fleet.join("late")
        version = 0
        while late.policy_version is None:
            version += 1
            fleet.publish(version)
            fleet.wait(version, *others)
        assert ("late", late.policy_version) in fleet.pulled
        assert late.epochs[late.policy_version] == -1
        fleet.publish(version + 1)
        fleet.wait(version + 1, *fleet.receivers)
        assert late.epochs[version + 1] == others[0].epochs[version + 1] >= 0
        assert {name for name, _ in fleet.pulled} == {"late"}
        assert fleet.excluded() == []


def test_actor_that_comes_back_as_its_pull_is_announced_pulls_all_the_same() -> None:
    with fleet_of(SMALL, "a") as fleet:
        fleet.publish(0)
        fleet.wait(0, *fleet.receivers)
        late = Receiver("late", SMALL, "", 0.001)
        # The first announcement is lost with its connection.
        is_lost = threading.Event()

        def come_back(message: LearnerMessage) -> None:
            if not is_lost.is_set():
                is_lost.set()
                fleet.publisher.joined(late.peer)
                return
            late.connection.send(message)

        late.send = come_back
        fleet.receivers.append(late)
        fleet.wait(0, late)
        assert fleet.pulled == [("late", 0), ("late", 0)]
        assert fleet.excluded() == []


def test_no_more_than_max_pulls_actors_pull_at_once() -> None:
    with fleet_of(LARGE, "a") as fleet:
        fleet.publish(0)
        fleet.wait(0, *fleet.receivers)
        joiners = [Receiver(f"late-{index}", LARGE, "", 0.001) for index in range(4)]
        fleet.receivers.extend(joiners)
        fleet.wait(0, *joiners)
        assert fleet.most_pulls == MAX_PULLS
        assert len(fleet.pulled) == 4
        assert fleet.excluded() == []


@pytest.mark.parametrize("mishap", ["SIGKILL", "SIGSTOP"])
def test_puller_that_stalls_or_dies_half_way_is_named_and_its_place_goes_to_another(mishap: Mishap) -> None:
    with fleet_of(LARGE, "a") as fleet:
        fleet.publish(0)
        fleet.wait(0, *fleet.receivers)
        # They take all the places there are.
        victims = [fleet.join(f"victim-{index}", mishap) for index in range(MAX_PULLS)]
        fleet.wait_for(lambda: len(fleet.pulled) == MAX_PULLS)
        late = fleet.join("late")
        fleet.wait(0, late)
        fleet.wait_for(lambda: set(fleet.excluded()) == {victim.name for victim in victims})
        assert any("asked for no chunk of version 0" in row.get("detail", "") for row in fleet.rows)
        if mishap == "SIGSTOP":
            for victim in victims:
                victim.signal(signal.SIGCONT)
            fleet.wait(0, *victims)


def test_receiver_that_has_a_wrong_byte_says_so_and_pulls_while_the_others_have_the_version() -> None:
    with fleet_of(LARGE, "a", "b") as fleet:
        others = list(fleet.receivers)
        victim = fleet.join("victim", "wrong byte")
        fleet.publish(0)
        fleet.wait(0, *others)
        fleet.wait(0, victim)
        assert fleet.excluded() == ["victim"]
        assert "wrong checksum" in next(row["detail"] for row in fleet.rows if row["kind"] == "event")
        assert fleet.pulled == [("victim", 0)]


def test_member_whose_broadcast_broke_is_asked_again_before_it_is_blamed() -> None:
    with fleet_of(SMALL, "a", "b") as fleet:
        a, b = fleet.receivers
        fleet.publish(0)
        fleet.wait(0, a, b)
        a.num_breaks = 1
        fleet.publish(1)
        fleet.wait(1, a, b)
        assert fleet.excluded() == []
        assert fleet.pulled == []
        assert a.epochs[1] > b.epochs[1], "a group that broke is not used again"
        a.num_breaks = 2
        fleet.publish(2)
        fleet.wait(2, a, b)
        assert fleet.excluded() == ["a"]
        assert fleet.pulled == [("a", 2)]


def test_actor_that_is_distrusted_is_left_out_and_pulls() -> None:
    with fleet_of(SMALL, "honest", "liar") as fleet:
        honest, liar = fleet.receivers
        fleet.publish(0)
        fleet.wait(0, honest, liar)
        liar.policy_version = None
        liar.checksums.clear()
        fleet.publisher.distrust(liar.peer, "liar", "scored the canary otherwise")
        assert fleet.publisher.problems()[0].startswith("liar scored the canary otherwise; no weights for another")
        fleet.publish(1)
        fleet.wait(1, honest)
        assert fleet.pulled == []
        fleet.wait(1, liar)
        assert fleet.excluded() == ["liar"]
        assert fleet.pulled == [("liar", 1)]
        fleet.publish(2)
        fleet.wait(2, honest, liar)
        assert honest.epochs[2] == liar.epochs[2] >= 0


def test_with_the_backend_pull_nobody_meets_in_a_store() -> None:
    with fleet_of(SMALL, "a", "b", "c", backend="pull") as fleet:
        for version in range(5):
            fleet.publish(version)
            fleet.wait(version, *fleet.receivers)
        assert fleet.publisher._collective is None
        assert len(fleet.pulled) == 15
        assert fleet.excluded() == []


def test_training_goes_on_while_an_actor_pulls_and_what_it_pulls_does_not_change() -> None:
    with fleet_of(LARGE, "a", timeout_s=PATIENCE_S) as fleet:
        (steady,) = fleet.receivers
        fleet.publish(0)
        fleet.wait(0, steady)
        late = fleet.join("late", "SIGSTOP")
        fleet.wait_for(lambda: stopped(late))
        for version in range(1, 5):
            fleet.publish(version)
            fleet.wait(version, steady)
            assert late.peer in fleet.publisher._pulls
        assert any(line.startswith("late pulls weights 0: asked for") for line in fleet.publisher.problems())
        late.signal(signal.SIGCONT)
        # The bytes of version 0, in spite of everything written since.
        fleet.wait_for(lambda: 0 in late.checksums)
        fleet.wait(4, late)
        assert late.epochs[4] >= 0
        assert fleet.excluded() == []


def test_training_goes_on_while_a_broadcast_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_editions, "PATIENCE_S", 0.1)
    with fleet_of(LARGE) as fleet:
        stopped_one = fleet.join("victim", "SIGSTOP")
        fleet.publish(0)
        fleet.wait_for(lambda: stopped(stopped_one))
        fleet.publish(1)
        assert fleet.publisher._in_collective
        assert fleet.excluded() == []


def stopped(receiver: Receiver) -> bool:
    return Path(f"/proc/{receiver.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def update_from(port: int, timeout_s: float) -> WeightUpdate:
    return WeightUpdate(
        policy_version=1,
        epoch=1,
        rank=1,
        world_size=2,
        store_host="127.0.0.1",
        store_port=port,
        backend="gloo",
        bucket_bytes=BUCKET_BYTES,
        checksum=0,
        timeout_s=timeout_s,
    )


def no_link(address: str) -> Link:
    raise AssertionError(f"nobody pulls from {address} here")


def test_receiver_that_waits_for_the_learners_go_ends_when_it_is_closed() -> None:
    store = collectives.serve_store("127.0.0.1", 0, PATIENCE_S, listen_on="127.0.0.1")
    receiver = WeightReceiver(SMALL, no_link)
    receiver.announce(update_from(store.port, PATIENCE_S))
    rendezvous = collectives.Rendezvous(store, epoch=1, policy_version=1)
    deadline = time.monotonic() + PATIENCE_S
    while not rendezvous.is_ready(1):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    receiver.close()
    assert not receiver._thread.is_alive()


def test_receiver_without_a_learner_reports_an_error_and_lives() -> None:
    receiver = WeightReceiver(SMALL, no_link)
    try:
        receiver.announce(update_from(9, 0.5))
        deadline = time.monotonic() + PATIENCE_S
        while (outcome := receiver.outcome()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert outcome.error
    finally:
        receiver.close()
    assert not receiver._thread.is_alive()


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert [child for child in multiprocessing.active_children() if child.is_alive()] == []
