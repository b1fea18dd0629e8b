"""Buffers are written while an older version is read."""

import threading

import pytest
import torch

from offbeat.common.weights.flat import checksum, make_layout
from offbeat.learner.weights import editions as weight_editions
from offbeat.learner.weights.editions import Edition, Editions

LAYOUT = make_layout([("w", (4096,))], torch.float32)
PATIENCE_S = 30.0


def write(editions: Editions, policy_version: int) -> None:
    with editions.writing() as buffer:
        buffer.flat.fill_(policy_version)
        editions.publish(policy_version)


def buffers_of(editions: Editions, *taken: Edition) -> set[int]:
    held = [editions._current.buffer, editions._spare, *(edition.buffer for edition in taken)]
    return {id(buffer) for buffer in held if buffer is not None}


def test_one_buffer_is_enough_while_nobody_reads() -> None:
    editions = Editions(LAYOUT)
    for version in range(5):
        write(editions, version)
        edition = editions.take()
        assert edition.policy_version == version
        assert edition.checksum == checksum(edition.buffer.flat)
        editions.give_back(edition)
        assert len(buffers_of(editions, edition)) == 1


def test_every_buffer_that_a_gpu_fills_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[int, int]] = []
    monkeypatch.setattr(weight_editions, "pin", lambda storage, gpu: pinned.append((storage.data_ptr(), gpu)))
    monkeypatch.setattr(weight_editions, "PATIENCE_S", 0.01)
    Editions(LAYOUT)
    assert not pinned
    for provide in (True, False):
        pinned.clear()
        editions = Editions(LAYOUT, 5)
        if provide:
            editions.provide_spare()
        write(editions, 1)
        # Without a spare, writing makes the second buffer itself.
        first = editions.take()
        write(editions, 2)
        second = editions.take()
        assert pinned == [(edition.buffer.flat.data_ptr(), 5) for edition in (first, second)]


def test_lent_edition_stays_as_it_is_while_training_publishes_on() -> None:
    editions = Editions(LAYOUT)
    write(editions, 1)
    editions.provide_spare()
    lent = editions.take()
    for version in range(2, 7):
        write(editions, version)
        assert torch.equal(lent.buffer.flat, torch.full_like(lent.buffer.flat, 1))
        assert len(buffers_of(editions, lent)) == 2
    editions.give_back(lent)
    write(editions, 7)
    newest = editions.take()
    write(editions, 8)
    assert (newest.policy_version, int(newest.buffer.flat[0])) == (7, 7)
    assert len(buffers_of(editions, lent, newest)) == 2


def test_edition_with_two_readers_is_kept_until_both_are_done() -> None:
    editions = Editions(LAYOUT)
    write(editions, 1)
    editions.provide_spare()
    lent, also = editions.take(), editions.take()
    write(editions, 2)
    editions.give_back(also)
    write(editions, 3)
    assert int(lent.buffer.flat[-1]) == 1
    editions.give_back(lent)


def test_training_takes_a_second_buffer_when_a_transfer_hangs(monkeypatch) -> None:
    monkeypatch.setattr(weight_editions, "PATIENCE_S", 0.01)
    editions = Editions(LAYOUT)
    write(editions, 1)
    hanging = editions.take()
    write(editions, 2)
    assert int(hanging.buffer.flat[0]) == 1
    assert editions.newest_version == 2


def test_there_is_never_a_third_buffer_training_waits_for_one_of_two(monkeypatch) -> None:
    monkeypatch.setattr(weight_editions, "PATIENCE_S", 0.01)
    editions = Editions(LAYOUT)
    write(editions, 1)
    editions.provide_spare()
    lent = editions.take()
    write(editions, 2)
    in_collective = editions.take()
    writer = threading.Thread(target=write, args=(editions, 3))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    editions.give_back(in_collective)
    writer.join(PATIENCE_S)
    assert not writer.is_alive()
    assert int(lent.buffer.flat[0]) == 1
    assert len(buffers_of(editions, lent, in_collective)) == 2


def test_nobody_takes_what_is_being_written() -> None:
    editions = Editions(LAYOUT)
    write(editions, 1)
    taken: list[Edition] = []
    with editions.writing() as buffer:
        reader = threading.Thread(target=lambda: taken.append(editions.take()))
        reader.start()
        buffer.flat[:100].fill_(2)
        reader.join(0.2)
        assert not taken
        buffer.flat.fill_(2)
        editions.publish(2)
    reader.join(PATIENCE_S)
    assert [(edition.policy_version, edition.checksum) for edition in taken] == [(2, checksum(buffer.flat))]
