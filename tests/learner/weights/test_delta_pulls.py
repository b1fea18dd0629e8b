"""Differences over real sockets: the real server and receiver, and every way in which differences fail."""

import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import torch

from offbeat.actor.weights.pull import MAX_DAMAGED, add_deltas
from offbeat.actor.weights.receiver import WeightReceiver
from offbeat.common.weights.deltas import encode_delta
from offbeat.common.weights.flat import checksum, make_layout
from offbeat.learner.weights.double_buffer import DoubleBuffer
from offbeat.learner.weights.server import Delta, DeltaChain, WeightServer
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.messages import Chunk, LearnerMessage, WeightPull, WeightsStaged, WeightUpdate
from offbeat.protocols.wire import Array
from tests.learner.weight_fleet import PATIENCE_S, fleet_of

pytestmark = pytest.mark.slow

LAYOUT = make_layout([("w", (1 << 15,))], torch.bfloat16)
NUM_BYTES = 1 << 16
CHUNK_BYTES = 1 << 14
NUM_CHUNKS = 4
PEER = b"actor/1"


class Learner:
    """The learner's end: each version is lent with the differences that lead to it."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.server = WeightServer(
            open_hub=lambda: Hub("tcp://127.0.0.1:0", max_message_bytes=1 << 12), chunk_bytes=CHUNK_BYTES
        )
        self.server.start(tend=lambda: None, on_failure=self.failures.append)
        self._snapshots = DoubleBuffer(LAYOUT)
        self._chain = DeltaChain(LAYOUT, CHUNK_BYTES)

    def lend(
        self, policy_version: int, flat: torch.Tensor, tamper: Callable[[Delta], Delta] = lambda delta: delta
    ) -> WeightPull:
        with self._snapshots.writing() as buffer:
            buffer.flat.copy_(flat)
            self._snapshots.publish(policy_version)
        snapshot = self._snapshots.take()
        self._chain.advance(snapshot)
        self._snapshots.give_back(snapshot)
        self.server.lend(policy_version, snapshot.buffer.flat, [tamper(delta) for delta in self._chain.deltas])
        self.server.admit(PEER)
        return WeightPull(
            policy_version=policy_version,
            host="127.0.0.1",
            port=self.server.port,
            num_bytes=NUM_BYTES,
            chunk_bytes=CHUNK_BYTES,
            checksum=snapshot.checksum,
            timeout_s=PATIENCE_S,
            bases=tuple(delta.base for delta in self._chain.deltas),
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes sent since the last `lend`."""
        return self.server.visitor(PEER).num_bytes

    def close(self) -> None:
        self.server.close()
        assert not self.failures


@pytest.fixture
def learner() -> Iterator[Learner]:
    learner = Learner()
    yield learner
    learner.close()


@pytest.fixture
def receiver() -> Iterator[WeightReceiver]:
    receiver = WeightReceiver(LAYOUT, lambda address: Link(address, identity=PEER, max_message_bytes=1 << 20))
    yield receiver
    receiver.close()


def start() -> torch.Tensor:
    return torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def step(flat: torch.Tensor, seed: int, num_changes: int = 100) -> torch.Tensor:
    flat = flat.clone()
    flat[torch.randperm(NUM_BYTES, generator=torch.Generator().manual_seed(seed))[:num_changes]] += 1
    return flat


def end_of(receiver: WeightReceiver, update: WeightPull | WeightUpdate) -> WeightsStaged:
    receiver.announce(update)
    deadline = time.monotonic() + PATIENCE_S
    while (end := receiver.outcome()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    receiver.release()
    return end


def take(learner: Learner, receiver: WeightReceiver, version: int, flat: torch.Tensor) -> None:
    """Bring the receiver to these weights, by whatever way."""
    assert end_of(receiver, learner.lend(version, flat)) == WeightsStaged(policy_version=version, epoch=-1)
    assert torch.equal(receiver.buffer.flat, flat)


def fall_back(learner: Learner, receiver: WeightReceiver, pull: WeightPull, flat: torch.Tensor) -> str:
    """Pull weights whose differences do not work; return the reason that the receiver reports."""
    end = end_of(receiver, pull)
    assert end.error == ""
    assert torch.equal(receiver.buffer.flat, flat)
    assert learner.sent_bytes >= NUM_BYTES
    # The next version comes as differences again.
    take(learner, receiver, pull.policy_version + 1, step(flat, 99))
    assert learner.sent_bytes < NUM_BYTES / 10
    return end.delta_error


def test_next_version_costs_its_difference_and_a_newcomer_all_weights(learner: Learner, receiver: WeightReceiver) -> None:
    flat = start()
    take(learner, receiver, 0, flat)
    assert learner.sent_bytes == NUM_BYTES
    for version in range(1, 5):
        flat = step(flat, version)
        take(learner, receiver, version, flat)
        assert 0 < learner.sent_bytes < NUM_BYTES / 10


def test_actor_that_missed_versions_follows_the_chain(learner: Learner, receiver: WeightReceiver) -> None:
    versions = [start()]
    take(learner, receiver, 0, versions[0])
    for version in range(1, 5):
        versions.append(step(versions[-1], version))
        learner.lend(version, versions[-1])
    take(learner, receiver, 5, step(versions[-1], 5))
    assert learner.server.visitor(PEER).num_requests == 5 * NUM_CHUNKS
    assert learner.sent_bytes < NUM_BYTES / 5


def test_actor_that_has_the_version_fetches_nothing(learner: Learner, receiver: WeightReceiver) -> None:
    flat = start()
    take(learner, receiver, 3, flat)
    take(learner, receiver, 4, flat)
    assert learner.sent_bytes == 0


def test_version_of_another_learner_process_is_no_base_though_its_number_is_the_same(receiver: WeightReceiver) -> None:
    for seed in (1, 2):
        learner = Learner()
        # The second process resumes from version 0, and its version 1 has other bytes.
        learner.lend(0, start())
        flat = step(start(), seed)
        take(learner, receiver, 1, flat)
        assert learner.sent_bytes == NUM_BYTES
        take(learner, receiver, 2, step(flat, seed + 10))
        assert learner.sent_bytes < NUM_BYTES / 10
        learner.close()


def test_actor_that_resumes_from_a_version_in_the_chain_is_served_by_its_bytes(
    learner: Learner, receiver: WeightReceiver
) -> None:
    take(learner, receiver, 40, start())
    # A learner that went back to a checkpoint and made the same bytes under another number.
    take(learner, receiver, 7, step(start(), 1))
    assert learner.sent_bytes < NUM_BYTES / 10


def test_learner_without_differences_is_pulled_as_before(learner: Learner, receiver: WeightReceiver) -> None:
    take(learner, receiver, 0, start())
    pull = msgspec.structs.replace(learner.lend(1, step(start(), 1)), bases=())
    assert end_of(receiver, pull) == WeightsStaged(policy_version=1, epoch=-1)
    assert learner.sent_bytes == NUM_BYTES


def replaced(delta: Delta, piece: torch.Tensor) -> Delta:
    return delta._replace(pieces=(*delta.pieces[:-1], piece))


def test_difference_that_is_none_falls_back_to_all_weights(learner: Learner, receiver: WeightReceiver) -> None:
    take(learner, receiver, 0, start())
    flat = step(start(), 1)
    pull = learner.lend(1, flat, lambda delta: replaced(delta, torch.full((24,), 255, dtype=torch.uint8)))
    assert "do not fit" in fall_back(learner, receiver, pull, flat)


def test_difference_that_leads_elsewhere_falls_back_to_all_weights(learner: Learner, receiver: WeightReceiver) -> None:
    take(learner, receiver, 0, start())
    flat = step(start(), 1)
    zeros = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
    wrong = torch.from_numpy(encode_delta(zeros.numpy(), (zeros + 1).numpy(), 2))
    pull = learner.lend(1, flat, lambda delta: replaced(delta, wrong))
    assert fall_back(learner, receiver, pull, flat).startswith("wrong checksum")


def test_differences_larger_than_the_weights_are_not_taken(learner: Learner, receiver: WeightReceiver) -> None:
    take(learner, receiver, 0, start())
    flat = step(start(), 1)
    huge = torch.zeros(NUM_BYTES // NUM_CHUNKS + 8, dtype=torch.uint8)
    pull = learner.lend(1, flat, lambda delta: delta._replace(pieces=(huge,) * NUM_CHUNKS))
    assert "more than the 65536 bytes" in fall_back(learner, receiver, pull, flat)


def test_base_that_was_damaged_in_memory_is_replaced(learner: Learner, receiver: WeightReceiver) -> None:
    take(learner, receiver, 0, start())
    receiver.buffer.flat[5] ^= 1
    flat = step(start(), 1)
    assert fall_back(learner, receiver, learner.lend(1, flat), flat).startswith("wrong checksum")


def test_version_that_was_damaged_in_memory_is_fetched_though_the_actor_has_it(
    learner: Learner, receiver: WeightReceiver
) -> None:
    take(learner, receiver, 0, start())
    receiver.buffer.flat[5] ^= 1
    assert fall_back(learner, receiver, learner.lend(1, start()), start()).startswith("wrong checksum")


def test_difference_that_is_gone_falls_back_to_all_weights(learner: Learner, receiver: WeightReceiver) -> None:
    take(learner, receiver, 0, start())
    flat = step(start(), 1)
    pull = learner.lend(1, flat, lambda delta: delta._replace(base=delta.base + 1))
    assert "does not offer version 1 any longer" in fall_back(learner, receiver, pull, flat)


def damaging(send: Callable[..., bool], num_times: int, damage: Callable[[Array], Array]) -> Callable[..., bool]:
    """Return a `send` that damages the first answers with a difference."""
    left = [num_times]

    def send_damaged(peer: bytes, message: LearnerMessage, *arrays: Array) -> bool:
        if isinstance(message, Chunk) and message.base is not None and left[0]:
            left[0] -= 1
            return send(peer, message, damage(arrays[0].view(np.uint8).copy()))
        return send(peer, message, *arrays)

    return send_damaged


def flip(array: Array) -> Array:
    array[-9] ^= 1
    return array


def test_difference_that_was_damaged_on_the_way_is_asked_for_again(
    learner: Learner, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(learner, receiver, 0, start())
    monkeypatch.setattr(learner.server._hub, "send", damaging(learner.server._hub.send, 2, flip))
    take(learner, receiver, 1, step(start(), 1))
    assert learner.server.visitor(PEER).num_requests == NUM_CHUNKS + 2


def test_difference_that_is_always_damaged_falls_back_to_all_weights(
    learner: Learner, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(learner, receiver, 0, start())
    # 12 bytes: a checksum takes words of 8.
    monkeypatch.setattr(learner.server._hub, "send", damaging(learner.server._hub.send, 20, lambda array: array[:12]))
    end = end_of(receiver, learner.lend(1, step(start(), 1)))
    assert (end.error, torch.equal(receiver.buffer.flat, step(start(), 1))) == ("", True)
    assert f"came damaged {MAX_DAMAGED} times" in end.delta_error


def test_fetch_that_breaks_half_way_leaves_the_base_whole(
    learner: Learner, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(learner, receiver, 0, start())
    pull = learner.lend(1, step(start(), 1))
    send = learner.server._hub.send

    def lose_half(peer: bytes, message: LearnerMessage, *arrays: Array) -> bool:
        return isinstance(message, Chunk) and message.index < NUM_CHUNKS // 2 and send(peer, message, *arrays)

    monkeypatch.setattr(learner.server._hub, "send", lose_half)
    short = msgspec.structs.replace(pull, timeout_s=0.2)
    assert "2 of 4 are missing" in str(end_of(receiver, short).error)
    assert torch.equal(receiver.buffer.flat, start())
    monkeypatch.setattr(learner.server._hub, "send", send)
    take(learner, receiver, 2, step(start(), 2))
    assert learner.sent_bytes < NUM_BYTES / 5


@pytest.mark.parametrize("is_collective", [False, True])
def test_buffer_that_a_broken_transfer_wrote_to_is_no_base(
    learner: Learner, receiver: WeightReceiver, is_collective: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(learner, receiver, 0, start())
    send = learner.server._hub.send

    def lose_half(peer: bytes, message: LearnerMessage, *arrays: Array) -> bool:
        return isinstance(message, Chunk) and message.index < NUM_CHUNKS // 2 and send(peer, message, *arrays)

    broken: WeightPull | WeightUpdate = msgspec.structs.replace(learner.lend(1, step(start(), 7)), bases=(), timeout_s=0.2)
    if is_collective:
        broken = WeightUpdate(
            policy_version=1,
            epoch=0,
            rank=1,
            world_size=2,
            store_host="127.0.0.1",
            store_port=learner.server.port,
            backend="gloo",
            bucket_bytes=1 << 10,
            checksum=0,
            timeout_s=0.2,
        )
    else:
        monkeypatch.setattr(learner.server._hub, "send", lose_half)
    assert end_of(receiver, broken).error
    monkeypatch.setattr(learner.server._hub, "send", send)
    receiver.buffer.flat[0] ^= 1
    take(learner, receiver, 2, step(start(), 1))
    assert learner.sent_bytes == NUM_BYTES


def test_each_added_difference_is_noted_so_that_many_are_not_taken_for_a_hanging_transfer(learner: Learner) -> None:
    pull, flat = learner.lend(0, start()), start()
    nothing = encode_delta(flat.numpy()[:CHUNK_BYTES], flat.numpy()[:CHUNK_BYTES], 2).tobytes()
    beats: list[bool] = []
    add_deltas(pull, [(chunk, nothing) for chunk in range(NUM_CHUNKS)], flat, 2, lambda: beats.append(True))
    assert len(beats) == NUM_CHUNKS


def test_differences_reach_every_actor_of_a_run_and_the_rows_tell_their_size() -> None:
    with fleet_of(LAYOUT, "a", "b", timeout_s=PATIENCE_S, backend="pull", delta=True) as fleet:
        flat = start()
        for version in range(4):
            flat = step(flat, version)
            with fleet.publisher.writing() as buffer:
                buffer.flat.copy_(flat)
                fleet.sent_checksums[version] = checksum(flat)
                fleet.publisher.publish(version)
            fleet.wait(version, *fleet.receivers)
        late = fleet.join("late")
        fleet.wait(3, late)
        fleet.wait_for(lambda: len([row for row in fleet.rows if row["kind"] == "pull"]) == 9)
        pulls = {(row["actor"], row["policy_version"]): row for row in fleet.rows if row["kind"] == "pull"}
        assert {row["full_bytes"] for row in pulls.values()} == {NUM_BYTES}
        assert all("delta_error" not in row for row in pulls.values())
        for (name, version), row in pulls.items():
            if version == 0 or name == "late":
                assert row["sent_bytes"] == NUM_BYTES
            else:
                assert 0 < row["sent_bytes"] < NUM_BYTES / 10
        assert fleet.excluded() == []
