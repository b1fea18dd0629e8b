"""Claims about `common.records.writer`."""

import ctypes
import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from offbeat.common.records import writer as metrics_module
from offbeat.common.records.rows import ActorRow, EvalRow, EventRow, OtherRow, PullRow, Row, StepRow, decode_row
from offbeat.common.records.writer import MetricsWriter, read_rows, read_rows_of


def rows_of(folder: Path) -> list[Row | OtherRow]:
    return list(read_rows(folder / "metrics.jsonl"))


def event(name: str, detail: str = "") -> EventRow:
    return EventRow(event=name, detail=detail)


def actor(name: str, index: int, padding: str = "") -> ActorRow:
    return ActorRow(
        actor=name,
        policy_version=index,
        num_generated_tokens=7,
        num_groups_sent=1,
        num_running_completions=1,
        seconds={f"generate{padding}": 0.5},
    )


def step(version: int, **metrics: float | dict[str, int] | None) -> StepRow:
    return StepRow(policy_version=version, metrics={name.replace("__", "/"): value for name, value in metrics.items()})


def tensorboard_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return `{tag: [(step, value), ...]}` from TensorBoard's reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in tags}


def test_row_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path):
    with MetricsWriter(tmp_path, clock=lambda: 12.5) as metrics:
        returned = metrics.write(EventRow(event="actor_joined", detail="vllm", actor="a0"))
        line = b'{"kind":"event","time":12.5,"event":"actor_joined","detail":"vllm","actor":"a0"}\n'
        assert (tmp_path / "metrics.jsonl").read_bytes() == line
        assert rows_of(tmp_path) == [returned]


def test_file_that_has_grown_too_large_loses_its_older_details_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_module, "MAX_BYTES", 20_000)
    caplog.set_level("INFO")
    with MetricsWriter(tmp_path) as metrics:
        for version in range(300):
            metrics.write(step(version, reward__mean=0.5))
            for number in range(3):
                metrics.write(PullRow(actor=f"a{number}", policy_version=version, pull_s=0.1, sent_bytes=7, full_bytes=7))
    rows = rows_of(tmp_path)
    assert [row.policy_version for row in rows if isinstance(row, StepRow)] == list(range(300))
    details = [row.policy_version for row in rows if isinstance(row, PullRow)]
    assert details == sorted(details) and details[-1] == 299 and details[0] > 0 and len(details) < 900
    assert not list(tmp_path.glob("*.shorter"))
    assert any("were deleted, to bound its size" in text for text in caplog.messages)


def test_rows_after_the_file_was_deleted_are_in_a_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(step(1))
        (tmp_path / "metrics.jsonl").unlink()
        metrics.write(step(2))
        assert rows_of(tmp_path) == [msgspec.structs.replace(step(2), time=rows_of(tmp_path)[0].time)]
        shutil.rmtree(tmp_path)
        metrics.write(step(3))
    assert [record.getMessage().split("; ")[1] for record in caplog.records] == ["the rows from here on are in a new file"]


def test_row_keeps_the_time_it_brings(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(EventRow(time=3.0, event="resumed", detail=""))
    assert [row.time for row in rows_of(tmp_path)] == [3.0]


def test_non_finite_numbers_become_null(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(step(1, loss__policy=float("nan")))
    assert msgspec.json.decode((tmp_path / "metrics.jsonl").read_bytes())["loss/policy"] is None


def test_rows_of_many_threads_do_not_mix(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:

        def write_many(number: int) -> None:
            for index in range(200):
                metrics.write(actor(f"a{number}", index, padding="x" * 500))

        threads = [threading.Thread(target=write_many, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    broken: list[int] = []
    rows = list(read_rows(tmp_path / "metrics.jsonl", broken))
    assert not broken
    for number in range(4):
        own = [row.policy_version for row in rows if isinstance(row, ActorRow) and row.actor == f"a{number}"]
        assert own == list(range(200))


def test_resumed_run_appends_after_a_torn_line(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(event("first"))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind":"event","eve')
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(event("second"))
    broken: list[int] = []
    events = [row.event for row in read_rows(tmp_path / "metrics.jsonl", broken) if isinstance(row, EventRow)]
    assert events == ["first", "second"]
    assert broken == [2]


@pytest.mark.parametrize("torn", [b'{"kind":"st', b'{"a":"\xc3', b"[1, 2]", b"null", b"\x00\x00", b"nonsense"])
def test_torn_last_line_is_not_a_row(tmp_path: Path, torn: bytes):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind":"event","time":1.0,"event":"resumed","detail":""}\n' + torn)
    broken: list[int] = []
    assert list(read_rows(path, broken)) == [EventRow(time=1.0, event="resumed", detail="")]
    assert broken == [2]


def test_scalars_of_steps_and_evaluations_reach_tensorboard(tmp_path: Path):
    with MetricsWriter(tmp_path, tensorboard=True) as metrics:
        for version in (1, 2):
            metrics.write(step(version, reward__mean=version / 4, lag__counts={"0": 3}, loss__policy=None))
        evaluation = EvalRow(policy_version=1, reward=0.75, length=None, num_completions=8, num_failed=0)
        metrics.write(
            msgspec.structs.replace(evaluation, pass_at={"1": 0.75, "2": 0.875}, sets={"math": 0.5}, numbers={"cut": 0.25})
        )
        metrics.write(actor("a0", 1))
    assert tensorboard_points(tmp_path) == {
        "reward/mean": [(1, 0.25), (2, 0.5)],
        "eval/reward": [(1, 0.75)],
        "eval/num_completions": [(1, 8.0)],
        "eval/num_failed": [(1, 0.0)],
        "eval/pass_at_1": [(1, 0.75)],
        "eval/pass_at_2": [(1, 0.875)],
        "eval/reward/math": [(1, 0.5)],
        "eval/own/cut": [(1, 0.25)],
    }


def test_tensorboard_of_a_resumed_run_holds_both_parts(tmp_path: Path):
    for version in (1, 2):
        with MetricsWriter(tmp_path, tensorboard=True, clock=lambda at=float(version): at) as metrics:
            metrics.write(step(version, reward__mean=0.5))
    assert tensorboard_points(tmp_path)["reward/mean"] == [(1, 0.5), (2, 0.5)]


def test_write_after_close_is_an_error(tmp_path: Path):
    metrics = MetricsWriter(tmp_path)
    metrics.close()
    metrics.close()
    with pytest.raises(ValueError, match="is closed"):
        metrics.write(event("late"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a file system of 64 KiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tmp_path / "disk"
    folder.mkdir()
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=64k") != 0:
        pytest.skip(f"mounting a small disk is not permitted: {os.strerror(ctypes.get_errno())}")
    yield folder
    assert libc.umount2(bytes(folder), 0) == 0


def fill(disk: Path) -> Path:
    """Use up every free byte."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(512))
    return ballast


def test_full_disk_costs_rows_but_does_not_stop_the_run(small_disk: Path, caplog: pytest.LogCaptureFixture):
    with MetricsWriter(small_disk, tensorboard=True) as metrics, caplog.at_level(logging.WARNING):

        def write_step(version: int) -> None:
            metrics.write(step(version, reward__mean=0.5, **{f"time/{index}/{'x' * 100}": index for index in range(30)}))

        write_step(1)
        ballast = fill(small_disk)
        # The rest of the file's last page takes the first row or a part of it.
        for version in range(2, 12):
            write_step(version)
        assert sum("metrics rows are being lost" in record.message for record in caplog.records) == 1
        ballast.unlink()
        write_step(12)
        write_step(13)
    broken: list[int] = []
    rows = list(read_rows(small_disk / "metrics.jsonl", broken))
    assert not broken, "a row that did not fit whole is taken back"
    kept = [row.policy_version for row in rows if isinstance(row, StepRow)]
    num_lost = 13 - len(kept)
    assert num_lost >= 9
    assert kept == [*range(1, 12 - num_lost), 12, 13]
    events = [row for row in rows if isinstance(row, EventRow)]
    assert [(row.event, row.detail) for row in events] == [
        ("metrics_rows_lost", f"{num_lost} metrics rows were lost while the disk was full or failed")
    ]
    assert sum("metrics are written again" in record.message for record in caplog.records) == 1
    points = tensorboard_points(small_disk)["reward/mean"]
    assert points[0] == (1, 0.5)
    assert points[-1] == (13, 0.5), "TensorBoard goes on as well"


def test_device_without_space_costs_rows_but_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    # Needs no rights, unlike the small disk: every write to /dev/full fails with ENOSPC.
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    monkeypatch.setattr(metrics_module, "CLOSE_S", 0.2)
    with MetricsWriter(tmp_path) as metrics, caplog.at_level(logging.WARNING):
        for _ in range(3):
            metrics.write(event("unwritable"))
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "metrics rows are being lost, training continues",
        "the disk did not take the newest metrics row; trying for 0.2 s",
        "the newest metrics row is lost",
    ], "one warning for all three, and two at the end"


def test_newest_row_is_written_while_the_file_is_closed_when_the_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write = os.write
    num_refusals = 5

    def refuse_first(fd: int, data: bytes) -> int:
        nonlocal num_refusals
        if num_refusals:
            num_refusals -= 1
            raise OSError(errno.ENOSPC, "full disk")
        return write(fd, data)

    with MetricsWriter(tmp_path) as metrics:
        monkeypatch.setattr(os, "write", refuse_first)
        metrics.write(event("lost"))
        metrics.write(event("also_lost"))
        metrics.write(event("the_last"))
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if isinstance(row, EventRow)]
    assert [row.event for row in rows] == ["metrics_rows_lost", "the_last"]
    assert rows[0].detail == "2 metrics rows were lost while the disk was full or failed", "the last one was not"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
def test_event_row_tells_the_number_of_rows_that_were_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    def fail(fd: int, data: bytes) -> int:
        raise OSError(number, "full or broken disk")

    with MetricsWriter(tmp_path) as metrics:
        for num_rows in (3, 2):
            with monkeypatch.context() as full_disk:
                full_disk.setattr(os, "write", fail)
                for _ in range(num_rows):
                    metrics.write(event("unwritable"))
            metrics.write(event("space_again"))
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if isinstance(row, EventRow)]
    assert [(row.event, row.detail) for row in rows if row.event == "metrics_rows_lost"] == [
        ("metrics_rows_lost", "3 metrics rows were lost while the disk was full or failed"),
        ("metrics_rows_lost", "2 metrics rows were lost while the disk was full or failed"),
    ]
    assert [row.event for row in rows] == ["metrics_rows_lost", "space_again"] * 2


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = os.write
    with MetricsWriter(tmp_path) as metrics:
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: (len(data) + 1) // 2]))
        for _ in range(3):
            metrics.write(event("written in parts"))
    broken: list[int] = []
    assert len(list(read_rows(tmp_path / "metrics.jsonl", broken))) == 3
    assert not broken


def test_rows_are_plain_json_lines(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(event("line\nbreak"))
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["event"] for line in lines] == ["line\nbreak"]


def test_rows_of_some_kinds_are_read_without_decoding_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MetricsWriter(tmp_path, clock=lambda: 1.0) as metrics:
        for row in (step(1), actor("a", 1), event("joined"), step(2)):
            metrics.write(row)
    decoded: list[bytes] = []
    monkeypatch.setattr(metrics_module.rows, "decode_row", lambda line: decoded.append(line) or decode_row(line))
    found = list(read_rows_of(tmp_path / "metrics.jsonl", StepRow, EventRow))
    assert [type(row) for row in found] == [StepRow, EventRow, StepRow]
    assert len(decoded) == 3
    assert list(read_rows_of(tmp_path / "absent", StepRow)) == []


@pytest.mark.parametrize("sort_keys", [False, True])
def test_rows_of_some_kinds_are_found_where_another_program_wrote_the_file_anew(tmp_path: Path, *, sort_keys: bool) -> None:
    with MetricsWriter(tmp_path, clock=lambda: 1.0) as metrics:
        for row in (step(1), event("joined"), step(2)):
            metrics.write(row)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_text("".join(f"{json.dumps(json.loads(line), sort_keys=sort_keys)}\n" for line in lines))
    assert [row.policy_version for row in read_rows_of(path, StepRow)] == [1, 2]
