"""A torn tail of the rollout log is passed over, and so is damage before it: whole records behind it are read."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.learner.leases import log_reading
from offbeat.learner.leases.events import LeaseEvent
from offbeat.learner.leases.log_reading import (
    HEADER_BYTES,
    Gap,
    LogDamagedError,
    LogFormatError,
    Position,
    encode_record,
    read_history,
    read_log,
    read_record,
)
from offbeat.protocols.payload import CompletionMeta, Segment, Turn
from tests.fuzz.rollout_log_claims import check_segment
from tests.learner.leases.event_makers import make_accepted
from tests.learner.leases.log_entries import (
    ENTRIES,
    HUGE,
    Entry,
    append_all,
    contents,
    cuts,
    dropped,
    flip,
    lease_ids,
    new_folder,
    open_log,
    segments,
)

pytestmark = pytest.mark.slow

CORPUS = Path(__file__).parents[2] / "fuzz/corpus/rollout_log"


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
    assert caplog.messages == [
        f"{path}: the last whole record ends at offset {last.offset}; the 5 bytes after it are not a record and are skipped"
    ]
    assert path.stat().st_size == last.offset + 5, "nothing is thrown away"


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
    # After a power failure the file's length may be on disk without its content.
    segments(tmp_path)[1].write_bytes(bytes(5000))
    assert lease_ids(tmp_path) == [1]
    with cuts() as cut:
        log = open_log(tmp_path)
    assert cut == [5000]
    append_all(log, [dropped(3)])
    assert lease_ids(tmp_path) == [1, 3]


# Damage in the middle


def gaps(folder: Path, start: Position | None = None) -> list[str]:
    return [str(found) for found in read_history(folder, start) if isinstance(found, Gap)]


def test_damage_inside_a_segment_costs_one_record_and_is_told(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    positions = append_all(log, [dropped(lease_id) for lease_id in range(10)])
    log.close()
    flip(segments(tmp_path)[0], positions[4].offset + 20)
    with cuts() as cut:
        log = open_log(tmp_path)
    assert cut == []
    append_all(log, [dropped(10)])
    assert lease_ids(tmp_path) == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert gaps(tmp_path) == [f"00000001.log: bytes {positions[4].offset} to {positions[5].offset} are damaged"]
    assert gaps(tmp_path, positions[5]) == []
    assert gaps(tmp_path, positions[4]) == gaps(tmp_path)


def test_records_that_were_appended_again_are_passed_over(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    _, second, _ = append_all(log, [dropped(1), dropped(2), dropped(3)])
    log.close()
    (path,) = segments(tmp_path)
    repeated = path.read_bytes()[second.offset :]
    with path.open("ab") as file:
        file.write(repeated)
    with cuts() as cut:
        log = open_log(tmp_path)
    assert cut == [len(repeated)]
    append_all(log, [dropped(4)])
    assert lease_ids(tmp_path) == [1, 2, 3, 4]
    assert gaps(tmp_path) == []


def test_segments_of_two_runs_are_not_read_as_one_history(tmp_path: Path) -> None:
    for run_id in ("run", "other"):
        log = open_log(tmp_path, run_id=run_id)
        append_all(log, [dropped(1)])
        log.close()
    with pytest.raises(LogDamagedError, match=r"00000002\.log is of run other, and the log before it of run run"):
        lease_ids(tmp_path)


@pytest.mark.parametrize("num_context", [1, 2])
def test_damage_to_an_odd_number_of_numbers_hides_no_records(tmp_path: Path, num_context: int) -> None:
    """Whole records are looked for at multiples of eight bytes, and a token takes four."""
    completion = CompletionMeta(2, "stop", 0.0, (Segment(0, 0),), turns=(Turn(num_context, 2),))
    event = make_accepted(1, completions=(completion,))
    arrays = np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(num_context, np.int32)
    log = open_log(tmp_path)
    _, damaged, *_ = append_all(log, [dropped(0), Entry(event, arrays), dropped(2), dropped(3)])
    log.close()
    flip(segments(tmp_path)[0], damaged.offset + 20)
    assert lease_ids(tmp_path) == [0, 2, 3]


@given(st.lists(ENTRIES, min_size=3, max_size=6), st.data())
@settings(max_examples=50)
def test_one_flipped_bit_costs_one_record_wherever_it_is(entries: list[Entry], data: st.DataObject) -> None:
    with new_folder() as folder:
        log = open_log(folder)
        positions = append_all(log, entries)
        log.close()
        damaged = data.draw(st.integers(0, len(entries) - 1))
        ends = [*[position.offset for position in positions[1:]], log.end.offset]
        offset = data.draw(st.integers(positions[damaged].offset, ends[damaged] - 1))
        flip(segments(folder)[0], offset, data.draw(st.integers(0, 7)))
        left = [entry.content for index, entry in enumerate(entries) if index != damaged]
        assert contents(read_log(folder)) == left
        open_log(folder).close()
        assert contents(read_log(folder)) == left


def test_damage_at_the_end_of_a_segment_does_not_hide_the_next(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=500)
    positions = append_all(log, [dropped(lease_id) for lease_id in range(30)])
    log.close()
    last = next(index for index, position in enumerate(positions) if position.segment == 3) - 1
    size = segments(tmp_path)[1].stat().st_size
    flip(segments(tmp_path)[1], positions[last].offset + 20)
    assert lease_ids(tmp_path) == [lease_id for lease_id in range(30) if lease_id != last]
    assert gaps(tmp_path) == [f"00000002.log: bytes {positions[last].offset} to {size} are damaged"]


@pytest.mark.parametrize("missing", [1, 2])
def test_a_segment_missing_from_the_middle_is_a_gap(tmp_path: Path, missing: int) -> None:
    log = open_log(tmp_path, segment_bytes=1)
    positions = append_all(log, [dropped(lease_id) for lease_id in range(5)])
    end = segments(tmp_path)[missing - 1].stat().st_size
    segments(tmp_path)[missing].unlink()
    assert lease_ids(tmp_path) == [lease_id for lease_id in range(5) if lease_id != missing]
    lost = f"from offset {end} of 0000000{missing}.log to offset {end} of 0000000{missing + 1}.log the log is lost"
    assert gaps(tmp_path) == [lost]
    # A checkpoint's position in the missing segment.
    assert lease_ids(tmp_path, positions[missing]) == list(range(missing + 1, 5))


def test_a_segment_cut_short_at_a_record_is_a_gap(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=300)
    positions = append_all(log, [dropped(lease_id) for lease_id in range(10)])
    size, lost = segments(tmp_path)[0].stat().st_size, sum(position.segment == 1 for position in positions) - 1
    os.truncate(segments(tmp_path)[0], positions[1].offset)
    assert lease_ids(tmp_path) == [0, *range(1 + lost, 10)]
    assert gaps(tmp_path) == [f"00000001.log: bytes {positions[1].offset} to {size} are damaged"]


def test_a_start_that_was_pruned_is_an_error(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=1, retain_bytes=0)
    first, _, third = append_all(log, [dropped(lease_id) for lease_id in range(3)])
    assert lease_ids(tmp_path, Position(0, 0)) == [0, 1, 2]
    log.prune(third)
    assert lease_ids(tmp_path) == lease_ids(tmp_path, third) == [2]
    for start in (first, Position(0, 0)):
        with pytest.raises(LogDamagedError):
            lease_ids(tmp_path, start)


@pytest.mark.parametrize("offset", [7, 9, HEADER_BYTES - 1])
def test_a_damaged_header_hides_no_records(tmp_path: Path, offset: int) -> None:
    log = open_log(tmp_path)
    append_all(log, [dropped(1)])
    log.close()
    flip(segments(tmp_path)[0], offset)
    assert lease_ids(tmp_path) == [1]
    assert gaps(tmp_path) == [f"00000001.log: bytes 0 to {HEADER_BYTES} are damaged"]
    log = open_log(tmp_path)
    append_all(log, [dropped(2)])
    assert lease_ids(tmp_path) == [1, 2]


def test_numbers_that_an_actor_chose_are_not_taken_for_a_record(tmp_path: Path) -> None:
    """A record's arrays hold the bytes of another whole record; then the outer one is damaged."""
    forged = b"".join(bytes(part) for part in encode_record(0, dropped(666).event))
    arrays = [np.frombuffer(forged, np.int32), np.zeros(len(forged) // 4, np.float32)]
    completions = (CompletionMeta(len(arrays[0]), "stop", 0.0, (Segment(0, 0),)),)
    event = make_accepted(1, completions=completions)
    log = open_log(tmp_path)
    first, second = append_all(log, [Entry(event, tuple(arrays)), dropped(2)])
    log.close()
    flip(segments(tmp_path)[0], second.offset - 1)
    assert first.offset < second.offset
    assert lease_ids(tmp_path) == [2]


def test_a_log_in_another_format_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "00000001.log"
    path.write_bytes(b"offbeat\1" + bytes(1000))
    for attempt in (open_log, lease_ids):
        with pytest.raises(LogFormatError, match="format 1"):
            attempt(tmp_path)
    assert path.stat().st_size == 1008


def test_an_event_of_another_version_is_an_error_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(log_reading, "_encoder", NewerEncoder())
        position = log.append(dropped(1).event)
    log.close()
    with cuts() as cut:
        open_log(tmp_path)
    assert cut == []
    for read in (lambda: lease_ids(tmp_path), lambda: read_record(tmp_path, position)):
        with pytest.raises(LogDamagedError, match=f"offset {position.offset} is whole, but not understood"):
            read()


class NewerEncoder:
    """An encoder of a newer version, which has one more event."""

    def encode(self, event: LeaseEvent) -> bytes:
        return b"\x81\xa4type\xa9Cancelled"


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_what_fuzzing_tried_holds(path: Path) -> None:
    check_segment(path.read_bytes())


def test_the_fuzzing_corpus_reaches_the_decoder() -> None:
    assert sum(check_segment(path.read_bytes()) for path in CORPUS.iterdir()) > 10
