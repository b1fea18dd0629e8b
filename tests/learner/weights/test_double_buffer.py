"""Buffers are written while an older version is read."""

import errno
import threading
from typing import NoReturn

import pytest
import torch

from offbeat.common.weights.flat import checksum, make_layout
from offbeat.learner.weights import double_buffer as double_buffer
from offbeat.learner.weights.double_buffer import DoubleBuffer, WeightSnapshot

LAYOUT = make_layout([("w", (4096,))], torch.float32)
PATIENCE_S = 30.0


def write(snapshots: DoubleBuffer, policy_version: int) -> None:
    with snapshots.writing() as buffer:
        buffer.flat.fill_(policy_version)
        snapshots.publish(policy_version)


def assert_write_waits_for(snapshot: WeightSnapshot, snapshots: DoubleBuffer, policy_version: int) -> None:
    """Write a version in a thread, and give back the snapshot that it must wait for."""
    writer = threading.Thread(target=write, args=(snapshots, policy_version))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    snapshots.give_back(snapshot)
    writer.join(PATIENCE_S)
    assert not writer.is_alive()


def buffers_of(snapshots: DoubleBuffer, *taken: WeightSnapshot) -> set[int]:
    held = [snapshots._current.buffer, snapshots._spare, *(snapshot.buffer for snapshot in taken)]
    return {id(buffer) for buffer in held if buffer is not None}


def test_one_buffer_is_enough_while_nobody_reads() -> None:
    snapshots = DoubleBuffer(LAYOUT)
    for version in range(5):
        write(snapshots, version)
        snapshot = snapshots.take()
        assert snapshot.policy_version == version
        assert snapshot.checksum == checksum(snapshot.buffer.flat)
        snapshots.give_back(snapshot)
        assert len(buffers_of(snapshots, snapshot)) == 1


def test_every_buffer_that_a_gpu_fills_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[int, int]] = []
    monkeypatch.setattr(double_buffer, "pin", lambda storage, gpu: pinned.append((storage.data_ptr(), gpu)))
    monkeypatch.setattr(double_buffer, "PATIENCE_S", 0.01)
    DoubleBuffer(LAYOUT)
    assert not pinned
    for provide in (True, False):
        pinned.clear()
        snapshots = DoubleBuffer(LAYOUT, 5)
        if provide:
            snapshots.provide_spare()
        write(snapshots, 1)
        # Without a spare, writing makes the second buffer itself.
        first = snapshots.take()
        write(snapshots, 2)
        second = snapshots.take()
        assert pinned == [(snapshot.buffer.flat.data_ptr(), 5) for snapshot in (first, second)]


def test_lent_version_stays_as_it_is_while_training_publishes_on() -> None:
    snapshots = DoubleBuffer(LAYOUT)
    write(snapshots, 1)
    snapshots.provide_spare()
    lent = snapshots.take()
    for version in range(2, 7):
        write(snapshots, version)
        assert torch.equal(lent.buffer.flat, torch.full_like(lent.buffer.flat, 1))
        assert len(buffers_of(snapshots, lent)) == 2
    snapshots.give_back(lent)
    write(snapshots, 7)
    newest = snapshots.take()
    write(snapshots, 8)
    assert (newest.policy_version, int(newest.buffer.flat[0])) == (7, 7)
    assert len(buffers_of(snapshots, lent, newest)) == 2


def test_version_with_two_readers_is_kept_until_both_are_done() -> None:
    snapshots = DoubleBuffer(LAYOUT)
    write(snapshots, 1)
    snapshots.provide_spare()
    lent, also = snapshots.take(), snapshots.take()
    write(snapshots, 2)
    snapshots.give_back(also)
    write(snapshots, 3)
    assert int(lent.buffer.flat[-1]) == 1
    snapshots.give_back(lent)


def test_training_takes_a_second_buffer_when_a_transfer_hangs(monkeypatch) -> None:
    monkeypatch.setattr(double_buffer, "PATIENCE_S", 0.01)
    snapshots = DoubleBuffer(LAYOUT)
    write(snapshots, 1)
    hanging = snapshots.take()
    write(snapshots, 2)
    assert int(hanging.buffer.flat[0]) == 1
    assert snapshots.newest_version == 2


def test_there_is_never_a_third_buffer_training_waits_for_one_of_two(monkeypatch) -> None:
    monkeypatch.setattr(double_buffer, "PATIENCE_S", 0.01)
    snapshots = DoubleBuffer(LAYOUT)
    write(snapshots, 1)
    snapshots.provide_spare()
    lent = snapshots.take()
    write(snapshots, 2)
    in_collective = snapshots.take()
    assert_write_waits_for(in_collective, snapshots, 3)
    assert int(lent.buffer.flat[0]) == 1
    assert len(buffers_of(snapshots, lent, in_collective)) == 2


def test_training_waits_for_a_transfer_where_no_memory_is_left_for_a_second_buffer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = DoubleBuffer(LAYOUT)
    write(snapshots, 1)

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EFBIG, "File too large")

    with monkeypatch.context() as without_memory:
        without_memory.setattr(double_buffer, "WeightBuffer", refuse)
        snapshots.provide_spare()
        lent = snapshots.take()
        assert_write_waits_for(lent, snapshots, 2)
    assert snapshots.newest_version == 2
    assert "no memory for a second buffer of weights ([Errno 27] File too large)" in caplog.text
    snapshots.provide_spare()
    assert len(buffers_of(snapshots)) == 2


def test_nobody_takes_what_is_being_written() -> None:
    snapshots = DoubleBuffer(LAYOUT)
    write(snapshots, 1)
    taken: list[WeightSnapshot] = []
    with snapshots.writing() as buffer:
        reader = threading.Thread(target=lambda: taken.append(snapshots.take()))
        reader.start()
        buffer.flat[:100].fill_(2)
        reader.join(0.2)
        assert not taken
        buffer.flat.fill_(2)
        snapshots.publish(2)
    reader.join(PATIENCE_S)
    assert [(snapshot.policy_version, snapshot.checksum) for snapshot in taken] == [(2, checksum(buffer.flat))]
