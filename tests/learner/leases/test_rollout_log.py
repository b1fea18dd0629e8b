"""The rollout log returns what was appended, in order and byte for byte, to any process and over any history."""

import mmap
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from offbeat.learner.leases.events import LeaseEvent
from offbeat.learner.leases.log_reading import HEADER_BYTES, Position, read_log, read_record
from offbeat.learner.leases.rollout_log import LogInUseError, RolloutLog
from tests.learner.leases.log_entries import (
    ENTRIES,
    Entry,
    append_all,
    contents,
    cuts,
    dropped,
    lease_ids,
    new_folder,
    open_log,
    segments,
)
from tests.learner.leases.log_writer import accepted

pytestmark = pytest.mark.slow

PATIENCE_S = 20.0


# Round trips


@given(st.lists(ENTRIES, max_size=12), st.integers(1, 2000))
def test_records_come_back_as_they_were_appended(entries: list[Entry], segment_bytes: int) -> None:
    with new_folder() as folder:
        log = open_log(folder, segment_bytes=segment_bytes)
        ends = []
        for entry in entries:
            ends.append(log.end)
            assert log.append(entry.event, *entry.arrays) == ends[-1]
        written = [entry.content for entry in entries]
        assert contents(read_log(folder)) == written
        assert [record.position for record in read_log(folder)] == ends == sorted(ends)
        for index, position in enumerate([*ends, log.end]):
            assert contents(read_log(folder, position)) == written[index:]
        for position, content in zip(ends, written, strict=True):
            record = read_record(folder, position)
            assert record is not None and contents(iter([record])) == [content]
        assert read_record(folder, log.end) is None
        assert log.num_bytes == sum(path.stat().st_size for path in segments(folder))
        log.close()


def test_arrays_are_aligned_views_into_the_mapped_file(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for lease_id in range(8):
        event, *arrays = accepted(lease_id)
        # Names of different lengths, so that the arrays would begin anywhere.
        log.append(msgspec.structs.replace(event, actor="a" * lease_id), *arrays)
    for record in read_log(tmp_path):
        token_ids, logprobs = record.arrays
        assert isinstance(token_ids.obj, mmap.mmap)
        assert np.frombuffer(token_ids, np.int32).flags.aligned
        assert np.frombuffer(logprobs, np.float32).flags.aligned


def test_arrays_outlive_their_segment(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=1, retain_bytes=0)
    log.append(*accepted(5))
    (record,) = read_log(tmp_path)
    log.prune(log.end)
    assert not segments(tmp_path)
    assert set(np.frombuffer(record.arrays[0], np.int32)) == {5}


def test_arrays_of_another_size_than_the_event_says_are_not_written(tmp_path: Path) -> None:
    event, token_ids, logprobs = accepted(1)
    log = open_log(tmp_path)
    for arrays in ((token_ids,), (token_ids[1:], logprobs), (token_ids, logprobs.astype(np.float64)), ()):
        with pytest.raises(AssertionError):
            log.append(event, *arrays)
    with pytest.raises(AssertionError):
        log.append(dropped(1).event, token_ids)
    assert not list(read_log(tmp_path))


def test_a_log_that_is_being_written_can_be_read(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=300)
    for lease_id in range(20):
        reader = read_log(tmp_path)
        if lease_id:
            next(reader)
        # The segment that the reader reads next grows and ends meanwhile.
        append_all(log, [dropped(lease_id)])
        list(reader)
        assert lease_ids(tmp_path) == list(range(lease_id + 1))


# Several processes, one after another


def test_each_process_begins_a_segment_above_all_that_anyone_knows(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert append_all(log, [dropped(1)]) == [Position(1, HEADER_BYTES)]
    log.close()
    log = open_log(tmp_path)
    assert append_all(log, [dropped(2)]) == [Position(2, HEADER_BYTES)]
    log.close()
    lost = Position(7, 4000)
    log = open_log(tmp_path, after=lost)
    assert log.end == Position(8, HEADER_BYTES)
    append_all(log, [dropped(3)])
    assert lease_ids(tmp_path) == [1, 2, 3]
    assert lease_ids(tmp_path, lost) == [3]


def test_two_processes_cannot_write_one_log(tmp_path: Path) -> None:
    writer = start_writer(tmp_path, 0)
    try:
        assert writer.stdout and writer.stdout.readline()
        with pytest.raises(LogInUseError, match="another learner"):
            open_log(tmp_path)
    finally:
        writer.kill()
        writer.wait()
    open_log(tmp_path)


def test_a_killed_writers_acknowledged_records_are_all_there(tmp_path: Path) -> None:
    next_lease_id, num_cut_bytes = 0, 0
    generator = random.Random(0)
    for _ in range(6):
        writer = start_writer(tmp_path, next_lease_id)
        assert writer.stdout
        writer.stdout.readline()
        time.sleep(generator.uniform(0.02, 0.1))
        writer.send_signal(signal.SIGKILL)
        acknowledged, _ = writer.communicate(timeout=PATIENCE_S)
        # The pipe may end within a number.
        whole_lines = acknowledged[: acknowledged.rfind("\n") + 1].split()
        with cuts() as cut:
            open_log(tmp_path).close()
        num_cut_bytes += sum(cut)
        found = lease_ids(tmp_path)
        assert found == list(range(len(found)))
        assert len(found) - 1 >= int(whole_lines[-1])
        next_lease_id = len(found)
    for lease_id, record in enumerate(read_log(tmp_path)):
        event, token_ids, logprobs = accepted(lease_id)
        assert record.event == event
        assert list(map(bytes, record.arrays)) == [token_ids.tobytes(), logprobs.tobytes()]


def start_writer(folder: Path, first_lease_id: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.learner.leases.log_writer", str(folder), str(first_lease_id)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


# Any history


class LogHistory(RuleBasedStateMachine):
    """Appends, deaths, half-written records and pruning, against a list."""

    def __init__(self) -> None:
        super().__init__()
        self._context = new_folder()
        self.folder = self._context.__enter__()
        self.log = self._open()
        self.expected: list[tuple[Position, tuple[LeaseEvent, list[bytes]]]] = []

    def _open(self, after: Position | None = None) -> RolloutLog:
        return open_log(self.folder, segment_bytes=600, retain_bytes=2000, after=after)

    def teardown(self) -> None:
        self.log.close()
        self._context.__exit__(None, None, None)

    @rule(entry=ENTRIES)
    def append(self, entry: Entry) -> None:
        self.expected.append((self.log.append(entry.event, *entry.arrays), entry.content))

    @rule()
    def die(self) -> None:
        self.log.close()
        self.log = self._open()
        assert all(position < self.log.end for position, _ in self.expected)

    @rule(entry=ENTRIES, data=st.data())
    def die_while_writing(self, entry: Entry, data: st.DataObject) -> None:
        position = self.log.append(entry.event, *entry.arrays)
        path = self.folder / f"{position.segment:08d}.log"
        self.log.close()
        os.truncate(path, data.draw(st.integers(position.offset, path.stat().st_size - 1)))
        self.log = self._open(after=data.draw(st.sampled_from([None, position])))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        needed, _ = data.draw(st.sampled_from(self.expected[-5:]))
        self.log.prune(needed)
        oldest = min([int(path.stem) for path in segments(self.folder)], default=self.log.end.segment)
        self.expected = [(position, content) for position, content in self.expected if position.segment >= oldest]
        assert any(position == needed for position, _ in self.expected)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        records = list(read_log(self.folder))
        assert list(zip([record.position for record in records], contents(iter(records)), strict=True)) == self.expected
        if self.expected:
            index = data.draw(st.integers(0, len(self.expected) - 1))
            start, _ = self.expected[index]
            assert contents(read_log(self.folder, start)) == [content for _, content in self.expected[index:]]


LogHistory.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestLogHistory = LogHistory.TestCase
