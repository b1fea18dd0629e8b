"""Whatever was appended is read back, in order and byte for byte, whatever happened to the process, the disk and the file."""

import logging
import mmap
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from offbeat.learner.leases import rollout_log
from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained, Tuned
from offbeat.learner.leases.rollout_log import (
    HEADER_BYTES,
    LogDamagedError,
    LogFormatError,
    LogFullError,
    LogInUseError,
    Position,
    Record,
    RolloutLog,
    read_log,
    read_record,
)
from offbeat.protocols.messages import CompletionMeta, Segment
from tests.fuzz.rollout_log_claims import check_segment
from tests.learner.leases.log_writer import accepted

CORPUS = Path(__file__).parents[2] / "fuzz/corpus/rollout_log"
PATIENCE_S = 20.0
HUGE = 1 << 40


class Entry(NamedTuple):
    """What is given to `append`."""

    event: LeaseEvent
    arrays: tuple[np.ndarray, ...] = ()

    @property
    def content(self) -> tuple[LeaseEvent, list[bytes]]:
        return self.event, [array.tobytes() for array in self.arrays]


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@st.composite
def accepted_entries(draw: st.DrawFn) -> Entry:
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    completions = tuple(
        CompletionMeta(length, draw(st.sampled_from(["stop", "length"])), draw(FLOATS), (Segment(draw(IDS), 0),))
        for length in lengths
    )
    event = Accepted(
        at=draw(FLOATS), lease_id=draw(IDS), actor=draw(NAMES), completions=completions, generate_s=0.5, policy_version=3
    )
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    token_ids = generator.integers(-(1 << 31), 1 << 31, sum(lengths), np.int32)
    return Entry(event, (token_ids, generator.normal(size=sum(lengths)).astype(np.float32)))


IDS = st.integers(0, (1 << 63) - 1)
FLOATS = st.floats(allow_nan=False)
NAMES = st.text(max_size=20)
OTHER_EVENTS = st.one_of(
    st.builds(Started, at=FLOATS, run_id=NAMES, learner_incarnation=IDS, policy_version=IDS),
    st.builds(Granted, at=FLOATS, lease_id=IDS, prompt_id=IDS, epoch=IDS, actor=NAMES, policy_version=IDS, oldest_version=IDS),
    st.builds(Dropped, at=FLOATS, lease_id=IDS, reason=NAMES, is_final=st.booleans()),
    st.builds(Expired, at=FLOATS, lease_id=IDS, reason=NAMES),
    st.builds(
        Trained,
        at=FLOATS,
        lease_ids=st.lists(IDS).map(tuple),
        policy_version=IDS,
        num_steps=IDS,
        selected_at=FLOATS,
        selected_after=IDS,
    ),
    st.builds(Tuned, at=FLOATS, settings=st.dictionaries(NAMES, NAMES), who=NAMES, reason=NAMES, policy_version=IDS),
)
ENTRIES = st.one_of(accepted_entries(), OTHER_EVENTS.map(Entry))


def open_log(folder: Path, **changes: Any) -> RolloutLog:
    options = {"fsync": "off", "segment_bytes": HUGE, "retain_bytes": HUGE, "min_free_bytes": 0} | changes
    return RolloutLog(folder, **options)


def append_all(log: RolloutLog, entries: list[Entry]) -> list[Position]:
    return [log.append(entry.event, *entry.arrays) for entry in entries]


def dropped(lease_id: int, reason: str = "returned") -> Entry:
    return Entry(Dropped(at=0.0, lease_id=lease_id, reason=reason, is_final=False))


def contents(records: Iterator[Record]) -> list[tuple[LeaseEvent, list[bytes]]]:
    return [(record.event, [bytes(array) for array in record.arrays]) for record in records]


def lease_ids(folder: Path, start: Position | None = None) -> list[int]:
    events = [record.event for record in read_log(folder, start)]
    return [event.lease_id for event in events if isinstance(event, Dropped | Accepted)]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


def flip(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


@contextmanager
def new_folder() -> Iterator[Path]:
    """For properties, which need one for every example; in memory, where there is such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder) / "log"


@contextmanager
def cuts() -> Iterator[list[int]]:
    """Collect the numbers of bytes that opened logs report to have cut off."""
    cut: list[int] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert isinstance(record.args, tuple)
            number = record.args[2]
            assert isinstance(number, int)
            cut.append(number)

    collector = Collector()
    rollout_log.logger.addHandler(collector)
    try:
        yield cut
    finally:
        rollout_log.logger.removeHandler(collector)


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
        # What the reader comes to next grows, and ends, under its hands.
        append_all(log, [dropped(lease_id)])
        list(reader)
        assert lease_ids(tmp_path) == list(range(lease_id + 1))


# Torn tails


@given(st.lists(ENTRIES, min_size=1, max_size=4), st.booleans())
@settings(max_examples=10)
def test_truncation_anywhere_in_the_last_record_leaves_those_before_it(entries: list[Entry], is_one_segment: bool) -> None:
    with new_folder() as folder:
        log = open_log(folder, segment_bytes=HUGE if is_one_segment else 1)
        last = append_all(log, entries)[-1]
        log.close()
        path = segments(folder)[-1]
        whole = path.read_bytes()
        for num_left in range(last.offset, len(whole)):
            path.write_bytes(whole[:num_left])
            assert contents(read_log(folder)) == [entry.content for entry in entries[:-1]]
            with cuts() as cut:
                open_log(folder).close()
            assert sum(cut) == num_left - last.offset
            assert contents(read_log(folder)) == [entry.content for entry in entries[:-1]]


@given(ENTRIES, st.data())
def test_a_flipped_bit_anywhere_in_the_last_record_is_detected(entry: Entry, data: st.DataObject) -> None:
    with new_folder() as folder:
        log = open_log(folder)
        _, last = append_all(log, [dropped(1), entry])
        num_bytes = log.end.offset - last.offset
        log.close()
        flip(segments(folder)[0], last.offset + data.draw(st.integers(0, num_bytes - 1)), data.draw(st.integers(0, 7)))
        assert contents(read_log(folder)) == [dropped(1).content]
        assert read_record(folder, last) is None
        with cuts() as cut:
            open_log(folder)
        assert cut == [num_bytes]


@given(st.binary(min_size=1, max_size=200) | st.integers(1, 9000).map(bytes))
def test_appended_garbage_is_cut(garbage: bytes) -> None:
    with new_folder() as folder:
        log = open_log(folder)
        append_all(log, [dropped(1)])
        log.close()
        with segments(folder)[0].open("ab") as file:
            file.write(garbage)
        with cuts() as cut:
            log = open_log(folder)
        assert cut == [len(garbage)]
        append_all(log, [dropped(2)])
        assert lease_ids(folder) == [1, 2]


def test_what_is_cut_is_said_with_file_offset_and_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = open_log(tmp_path)
    _, last = append_all(log, [dropped(1), dropped(2)])
    log.close()
    (path,) = segments(tmp_path)
    os.truncate(path, last.offset + 5)
    with caplog.at_level(logging.WARNING):
        open_log(tmp_path)
    assert caplog.messages == [f"{path}: the last whole record ends at offset {last.offset}; cut off the 5 bytes after it"]
    caplog.clear()
    open_log(tmp_path)
    assert not caplog.messages


def test_a_torn_tail_that_nobody_cut_ends_its_segment_quietly(tmp_path: Path) -> None:
    for lease_id in range(3):
        log = open_log(tmp_path)
        append_all(log, [dropped(lease_id)])
        log.close()
    for path in segments(tmp_path):
        with path.open("ab") as file:
            file.write(b"torn")
    assert lease_ids(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("num_header_bytes", [0, 1, HEADER_BYTES - 1, HEADER_BYTES])
def test_a_segment_without_a_record_does_not_stay(tmp_path: Path, num_header_bytes: int) -> None:
    log = open_log(tmp_path)
    append_all(log, [dropped(1)])
    log.close()
    (path,) = segments(tmp_path)
    for number in (2, 3):
        path.with_name(f"{number:08d}.log").write_bytes(path.read_bytes()[:num_header_bytes])
    assert lease_ids(tmp_path) == [1]
    log = open_log(tmp_path)
    assert segments(tmp_path) == [path]
    append_all(log, [dropped(2)])
    assert lease_ids(tmp_path) == [1, 2]


def test_opening_alone_makes_no_file(tmp_path: Path) -> None:
    for _ in range(3):
        open_log(tmp_path).close()
    assert not segments(tmp_path)


def test_pages_that_never_reached_the_disk_are_a_torn_tail(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=1)
    append_all(log, [dropped(1), dropped(2)])
    log.close()
    # After a power failure: the file's length is on disk, what was written of it is not.
    segments(tmp_path)[1].write_bytes(bytes(5000))
    assert lease_ids(tmp_path) == [1]
    with cuts() as cut:
        log = open_log(tmp_path)
    assert cut == [5000]
    append_all(log, [dropped(3)])
    assert lease_ids(tmp_path) == [1, 3]


# Damage in the middle


def test_damage_inside_the_last_segment_cuts_what_follows_it(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    positions = append_all(log, [dropped(lease_id) for lease_id in range(10)])
    log.close()
    flip(segments(tmp_path)[0], positions[4].offset + 20)
    assert lease_ids(tmp_path) == [0, 1, 2, 3]
    log = open_log(tmp_path)
    append_all(log, [dropped(10)])
    assert lease_ids(tmp_path) == [0, 1, 2, 3, 10]


def test_damage_before_the_last_segment_is_an_error_that_says_where_and_what_to_do(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=500)
    positions = append_all(log, [dropped(lease_id) for lease_id in range(30)])
    log.close()
    flip(segments(tmp_path)[1], positions[8].offset + 20)
    assert positions[8].segment == 2
    with pytest.raises(LogDamagedError) as raised:
        lease_ids(tmp_path)
    assert f"{segments(tmp_path)[1]}: from offset {positions[8].offset} on" in str(raised.value)
    # One cure: a checkpoint that needs nothing before the next segment.
    later = next(index for index, position in enumerate(positions) if position.segment == 3)
    assert lease_ids(tmp_path, positions[later]) == list(range(later, 30))
    # The other: do without what follows.
    assert f"delete {segments(tmp_path)[2].name} and the segments after it" in str(raised.value)
    for path in segments(tmp_path)[2:]:
        path.unlink()
    assert lease_ids(tmp_path) == list(range(8))
    log = open_log(tmp_path, after=positions[-1])
    append_all(log, [dropped(99)])
    assert lease_ids(tmp_path) == [*range(8), 99]


@pytest.mark.parametrize("missing", [1, 2])
def test_a_segment_missing_from_the_middle_is_an_error(tmp_path: Path, missing: int) -> None:
    log = open_log(tmp_path, segment_bytes=1)
    append_all(log, [dropped(lease_id) for lease_id in range(5)])
    segments(tmp_path)[missing].unlink()
    with pytest.raises(LogDamagedError, match=f"0000000{missing}.log"):
        lease_ids(tmp_path)


def test_a_segment_cut_short_at_a_record_is_an_error(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=300)
    positions = append_all(log, [dropped(lease_id) for lease_id in range(10)])
    os.truncate(segments(tmp_path)[0], positions[1].offset)
    with pytest.raises(LogDamagedError, match=f"from offset {positions[1].offset} on"):
        lease_ids(tmp_path)


def test_a_start_that_was_pruned_is_an_error(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=1, retain_bytes=0)
    first, _, third = append_all(log, [dropped(lease_id) for lease_id in range(3)])
    assert lease_ids(tmp_path, Position(0, 0)) == [0, 1, 2]
    log.prune(third)
    assert lease_ids(tmp_path) == lease_ids(tmp_path, third) == [2]
    for start in (first, Position(0, 0)):
        with pytest.raises(LogDamagedError):
            lease_ids(tmp_path, start)


def test_a_damaged_header_hides_no_records(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_all(log, [dropped(1)])
    log.close()
    flip(segments(tmp_path)[0], 9)
    with pytest.raises(LogDamagedError, match="header at offset 0"):
        lease_ids(tmp_path)
    with pytest.raises(LogDamagedError, match="header at offset 0"):
        open_log(tmp_path)
    assert segments(tmp_path)


def test_a_log_in_another_format_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "00000001.log"
    path.write_bytes(b"offbeat\2" + bytes(1000))
    for attempt in (open_log, lease_ids):
        with pytest.raises(LogFormatError, match="format 2"):
            attempt(tmp_path)
    assert path.stat().st_size == 1008


def test_an_event_of_another_version_is_an_error_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(rollout_log, "_encoder", NewerEncoder())
        position = log.append(dropped(1).event)
    log.close()
    with cuts() as cut:
        open_log(tmp_path)
    assert cut == []
    for read in (lambda: lease_ids(tmp_path), lambda: read_record(tmp_path, position)):
        with pytest.raises(LogDamagedError, match=f"offset {position.offset} is whole, but not understood"):
            read()


class NewerEncoder:
    """Of a version that knows one event more."""

    def encode(self, event: LeaseEvent) -> bytes:
        return b"\x81\xa4type\xa9Cancelled"


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_what_fuzzing_tried_holds(path: Path) -> None:
    check_segment(path.read_bytes())


def test_the_fuzzing_corpus_reaches_the_decoder() -> None:
    assert sum(check_segment(path.read_bytes()) for path in CORPUS.iterdir()) > 10


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


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, where this may be made."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_disk_leaves_the_log_as_it_was_until_there_is_room(small_disk: Path) -> None:
    folder, clock = small_disk / "log", Clock()
    log = open_log(folder, segment_bytes=300_000, retain_bytes=0, min_free_bytes=1000, clock=clock)
    num_written = 0
    with pytest.raises(LogFullError):
        while True:
            log.append(*accepted(num_written))
            num_written += 1
    assert num_written >= 4
    end, num_bytes = log.end, log.num_bytes
    for _ in range(3):
        with pytest.raises(LogFullError):
            log.append(*accepted(num_written))
    assert log.is_full
    assert (log.end, log.num_bytes) == (end, num_bytes)
    assert sum(path.stat().st_size for path in segments(folder)) == num_bytes
    assert lease_ids(folder) == list(range(num_written))
    log.prune(log.end)
    assert log.is_full
    clock.now += 1.0
    assert not log.is_full
    assert log.append(*accepted(num_written)) == end
    assert lease_ids(folder)[-1] == num_written


def test_a_log_on_a_full_disk_can_be_opened(small_disk: Path) -> None:
    folder = small_disk / "log"
    log = open_log(folder, segment_bytes=1)
    append_all(log, [dropped(1)])
    log.close()
    with segments(folder)[-1].open("ab") as file:
        file.write(b"torn")
    with (small_disk / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    with cuts() as cut:
        log = open_log(folder, min_free_bytes=1)
    assert cut == [4]
    assert log.is_full
    with pytest.raises(LogFullError):
        append_all(log, [dropped(2)])
    assert len(segments(folder)) == 1
    (small_disk / "ballast").unlink()
    append_all(log, [dropped(3)])
    assert lease_ids(folder) == [1, 3]


def test_a_record_that_fits_only_in_part_is_taken_back(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_all(log, [dropped(1)])
    end = log.end
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel writes up to the limit and says so at the next write, as it does on a disk that becomes full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (end.offset + 50_000, limits[1]))
    try:
        with pytest.raises(LogFullError, match="File too large"):
            log.append(*accepted(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert log.is_full
    assert segments(tmp_path)[0].stat().st_size == end.offset
    assert log.append(*accepted(3)) == end
    assert lease_ids(tmp_path) == [1, 3]


@given(st.integers(1, 600))
def test_a_write_that_was_cut_short_is_continued(num_first: int) -> None:
    def write_a_part(descriptor: int, parts: list[bytes]) -> int:
        return os.write(descriptor, b"".join(parts)[:num_first])

    with new_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_log.os, "writev", write_a_part)
        log = open_log(folder)
        append_all(log, [dropped(1, "x" * 300), dropped(2)])
        assert lease_ids(folder) == [1, 2]


def test_little_free_space_is_full_and_looked_up_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, usage = Clock(), shutil.disk_usage(tmp_path)
    log = open_log(tmp_path, min_free_bytes=1000, clock=clock)
    seen = []
    for free in (1000, 999, 999, 1000, 1000):
        monkeypatch.setattr(rollout_log.shutil, "disk_usage", lambda folder, free=free: usage._replace(free=free))
        seen.append(log.is_full)
        clock.now += 0.6
    assert seen == [False, False, True, True, False]


# Retention


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=30),
    st.integers(1, 1000),
    st.integers(0, 4000),
    st.data(),
)
def test_pruning_loses_nothing_needed_and_keeps_no_more_than_it_must(
    sizes: list[int], segment_bytes: int, retain_bytes: int, data: st.DataObject
) -> None:
    with new_folder() as folder:
        log = open_log(folder, segment_bytes=segment_bytes, retain_bytes=retain_bytes)
        positions = append_all(log, [dropped(index, "x" * size) for index, size in enumerate(sizes)])
        index = data.draw(st.integers(0, len(sizes)))
        needed = [*positions, log.end][index]
        is_over = log.is_over(needed)
        before = segments(folder)
        log.prune(needed)
        assert lease_ids(folder, needed) == list(range(index, len(sizes)))
        left = segments(folder)
        assert log.num_bytes == sum(path.stat().st_size for path in left)
        # The oldest are gone, and no more of them than necessary.
        assert left == before[len(before) - len(left) :]
        if log.num_bytes > retain_bytes:
            assert not left or int(left[0].stem) >= needed.segment
            assert is_over == (needed.segment < log.end.segment)
        else:
            assert not is_over
        log.prune(log.end)
        assert not log.is_over(log.end)


# What is on disk


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is had on disk, in order."""
    names: list[str] = []
    sync = rollout_log._sync

    def note(path: Path) -> None:
        names.append(path.name)
        sync(path)

    monkeypatch.setattr(rollout_log, "_sync", note)
    return names


def test_fsync_ack_syncs_at_each_commit_that_has_something_to_sync(tmp_path: Path, synced: list[str]) -> None:
    log = open_log(tmp_path / "log", fsync="ack")
    log.commit()
    assert synced == []
    append_all(log, [dropped(1), dropped(2)])
    log.commit()
    # With the name of the new file, and of its folder.
    assert synced == ["00000001.log", "log", tmp_path.name]
    log.commit()
    append_all(log, [dropped(3)])
    log.commit()
    assert synced[3:] == ["00000001.log"]


def test_fsync_second_syncs_at_most_once_a_second(tmp_path: Path, synced: list[str]) -> None:
    clock = Clock()
    log = open_log(tmp_path / "log", fsync="second", clock=clock)
    num_syncs = []
    for _ in range(6):
        append_all(log, [dropped(1)])
        log.commit()
        num_syncs.append(synced.count("00000001.log"))
        clock.now += 0.4
    assert num_syncs == [1, 1, 1, 2, 2, 2]
    log.close()
    assert synced.count("00000001.log") == 3


def test_fsync_off_syncs_only_when_told_and_then_every_segment(tmp_path: Path, synced: list[str]) -> None:
    log = open_log(tmp_path / "log", fsync="off", segment_bytes=1, retain_bytes=0)
    _, second, _ = append_all(log, [dropped(1), dropped(2), dropped(3)])
    log.prune(second)
    log.commit()
    assert synced == []
    log.sync()
    assert synced == ["00000002.log", "00000003.log", "log", tmp_path.name]
    append_all(log, [dropped(4)])
    log.close()
    assert len(synced) == 4


@pytest.mark.parametrize("fsync", ["second", "ack"])
def test_a_segment_is_on_disk_before_the_next_exists(tmp_path: Path, synced: list[str], fsync: str) -> None:
    log = open_log(tmp_path / "log", fsync=fsync, segment_bytes=1)
    for number in range(1, 4):
        append_all(log, [dropped(number)])
        assert f"{number:08d}.log" in synced
        assert len(segments(tmp_path / "log")) == number


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
