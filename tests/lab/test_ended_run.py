"""`offbeat status` of a run that is over tells its end from the run's folder."""

from pathlib import Path

import msgspec
import pytest

from offbeat.common.errors import ServiceError
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.rows import EventRow, FinalRow, LedgerSums, StepRow
from offbeat.common.records.writer import MetricsWriter
from offbeat.deploy.operating import link as questions
from offbeat.deploy.operating.status import Asked, print_status, watch_status
from offbeat.lab.run_summary import EndedRun, read_end
from offbeat.protocols.channels import Link
from tests.deploy.services import free_port


def end_run(folder: Path, outcome: str = "failed") -> None:
    """Write the rows of a run of 12 steps that has ended."""
    with MetricsWriter(folder) as metrics:
        metrics.write(EventRow(event="run_started", detail="x"))
        metrics.write(EventRow(event="setting_changed", detail="train.learning_rate = 0.3, was 1e-6; by me", setting="x"))
        metrics.write(EventRow(event="health", detail="No signal. Look at it.", rule="no_signal"))
        metrics.write(StepRow(policy_version=12, metrics={"reward/mean": 0.25}))
        ledger = LedgerSums(leased=0, trained=0, dropped={}, expired=0, in_flight=0)
        metrics.write(FinalRow(policy_version=12, wall_s=61.0, ledger=ledger, outcome=outcome, detail="no actor for 20 s"))


def open_no_link() -> Link:
    raise AssertionError("a run that is over is not asked")


def open_link() -> Link:
    return Link(f"tcp://127.0.0.1:{free_port()}", identity=b"ops", max_message_bytes=1 << 20)


def test_run_that_is_over_is_told_without_asking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end_run(tmp_path)
    asked = Asked(open_no_link, "tcp://127.0.0.1:1", tmp_path, 100)
    print_status(asked, as_json=False)
    *lines, files = capsys.readouterr().out.splitlines()
    assert lines == [
        "failed: step 12 of 100   wall time 61 s   reward 0.250 at the last step",
        "no actor for 20 s",
        "! No signal. Look at it.",
        "set: train.learning_rate = 0.3, was 1e-6; by me",
    ]
    assert files.startswith(f"files in {tmp_path}: ")
    print_status(asked, as_json=True)
    ended = msgspec.json.decode(capsys.readouterr().out, type=EndedRun)
    assert (ended.outcome, ended.policy_version, ended.reward) == ("failed", 12, 0.25)
    assert ended.health == {"no_signal": "No signal. Look at it."}


def test_wall_time_of_a_resumed_run_is_that_of_its_processes_without_the_time_between_them(tmp_path: Path) -> None:
    ledger = LedgerSums(leased=0, trained=0, dropped={}, expired=0, in_flight=0)
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(EventRow(time=1000.0, event="run_started", detail=""))
        metrics.write(StepRow(time=1060.0, policy_version=1, metrics={}))
        metrics.write(EventRow(time=4600.0, event="run_started", detail=""))
        metrics.write(StepRow(time=4620.0, policy_version=2, metrics={}))
        # It had worked for ten seconds before its first row.
        metrics.write(FinalRow(time=4630.0, policy_version=2, wall_s=40.0, ledger=ledger, outcome="finished", detail=""))
    end = read_end(tmp_path)
    assert end is not None
    assert end.wall_s == 60 + 40


def test_run_that_was_resumed_and_killed_is_asked_and_then_told_by_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(questions, "ANSWER_S", 0.1)
    end_run(tmp_path)
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(EventRow(event="run_started", detail="x"))
        metrics.write(StepRow(policy_version=13, metrics={"reward/mean": 0.5}))
    with pytest.raises(ServiceError, match=r"no answer from .* its rows end \d+ s ago without a final one"):
        print_status(Asked(open_link, "tcp://a", tmp_path, 100), as_json=False)
    assert capsys.readouterr().out.startswith("no final row: step 13 of 100   reward 0.500 at the last step\n")


def test_watching_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end_run(tmp_path, "finished")
    watch_status(Asked(open_link, "x", tmp_path, 100), StopRequest())
    assert "finished: step 12 of 100" in capsys.readouterr().out


def test_folder_without_rows_tells_nothing(tmp_path: Path) -> None:
    assert read_end(tmp_path) is None
