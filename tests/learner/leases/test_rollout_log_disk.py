"""The rollout log on a disk: full, pruned, and synced as the setting asks."""

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.learner.leases import rollout_log
from offbeat.learner.leases.log_reading import LogFullError
from tests.learner.leases.log_entries import Clock, append_all, cuts, dropped, lease_ids, new_folder, open_log, segments
from tests.learner.leases.log_writer import accepted

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


def test_limit_that_the_free_space_does_not_show_is_full_until_the_refused_record_would_fit(tmp_path: Path) -> None:
    clock = Clock()
    log = open_log(tmp_path, clock=clock)
    append_all(log, [dropped(1)])
    end = log.end
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (end.offset + 50_000, limits[1]))
        with pytest.raises(LogFullError, match="File too large"):
            log.append(*accepted(2))
        # A smaller record still fits, which says nothing about the large one.
        append_all(log, [dropped(3)])
        for _ in range(3):
            clock.now += 1.0
            assert log.is_full
        assert [path.name for path in tmp_path.iterdir() if path.name != "lock"] == ["00000001.log"]
        assert segments(tmp_path)[0].stat().st_size == log.end.offset
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    clock.now += 1.0
    assert not log.is_full
    log.append(*accepted(4))
    assert lease_ids(tmp_path) == [1, 3, 4]


@given(st.integers(1, 600))
def test_a_write_that_was_cut_short_is_continued(num_first: int) -> None:
    def write_a_part(descriptor: int, parts: list[bytes]) -> int:
        return os.write(descriptor, b"".join(parts)[:num_first])

    with new_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_log.os, "writev", write_a_part)
        log = open_log(folder)
        append_all(log, [dropped(1, "x" * 300), dropped(2)])
        assert lease_ids(folder) == [1, 2]


def test_broken_disk_is_an_error_that_names_the_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    log = open_log(tmp_path, fsync="ack")
    append_all(log, [dropped(1)])
    for name, act in (("fsync", log.commit), ("writev", lambda: append_all(log, [dropped(2)]))):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="Input/output error") as raised:
                act()
        assert raised.value.filename == str(segments(tmp_path)[0])


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


# The contents of the disk


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the synced files and folders, in order."""
    names: list[str] = []
    sync = rollout_log.sync

    def note(path: Path) -> None:
        names.append(path.name)
        sync(path)

    monkeypatch.setattr(rollout_log, "sync", note)
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
