"""A tracker gets the rows in order, and its failures are told once, counted and outlived."""

import time
from collections.abc import Callable

import pytest

from offbeat.common.records.rows import FinalRow, LedgerSums, Row, StepRow, encode_row
from offbeat.learner.reporting import tracker_worker
from offbeat.learner.reporting.tracker_worker import TrackerHealth, track
from offbeat.learner.reporting.trackers import Opening, Tracker

OPENING = Opening("mlflow", "mine", "run", {})
LEDGER = LedgerSums(leased=0, trained=0, dropped={}, expired=0, in_flight=0)


class Kept:
    """A tracker in memory, whose `add` calls `before` first."""

    def __init__(self, before: Callable[[Row], None] = lambda row: None) -> None:
        self.before = before
        self.rows: list[Row] = []
        self.outcomes: list[str | None] = []

    def add(self, row: Row) -> None:
        self.before(row)
        self.rows.append(row)

    def close(self, outcome: str | None) -> None:
        self.outcomes.append(outcome)


def step(version: int) -> StepRow:
    return StepRow(time=1.5, policy_version=version, metrics={"reward/mean": 0.5})


def final(outcome: str) -> FinalRow:
    return FinalRow(time=2.0, policy_version=2, wall_s=1.0, ledger=LEDGER, outcome=outcome, detail="")


def tracked(tracker: Tracker, rows: list[Row]) -> list[TrackerHealth]:
    """Return what is reported while the tracker gets these rows."""
    reports: list[TrackerHealth] = []
    track(OPENING, [encode_row(row) for row in rows], reports.append, lambda opening: tracker)
    return reports


def test_rows_come_in_order_and_the_outcome_at_the_end() -> None:
    tracker = Kept()
    assert tracked(tracker, [step(1), step(2), final("stopped")]) == []
    assert tracker.rows == [step(1), step(2)]
    assert tracker.outcomes == ["stopped"]


def test_run_that_did_not_come_to_its_end_has_no_outcome() -> None:
    tracker = Kept()
    tracked(tracker, [step(1)])
    assert tracker.outcomes == [None]


def test_rows_of_another_version_are_left_out() -> None:
    tracker = Kept()
    lines = [b'{"kind":"of another version","time":1.0}\n', b'{"kind":"st', encode_row(step(1))]
    track(OPENING, lines, lambda health: None, lambda opening: tracker)
    assert tracker.rows == [step(1)]


def test_failure_is_told_once_until_the_tracker_works_again_with_the_count() -> None:
    def fail(row: Row) -> None:
        if isinstance(row, StepRow) and row.policy_version < 4:
            raise ConnectionError(f"no route\nto https://me:secret@host/{row.policy_version}")

    tracker = Kept(fail)
    reports = tracked(tracker, [step(1), step(2), step(3), step(4), final("finished")])
    assert reports == [TrackerHealth("ConnectionError: no route to https://********@host/1"), TrackerHealth(num_lost=3)]
    assert tracker.rows == [step(4)]
    assert tracker.outcomes == ["finished"]


def test_secrets_are_in_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(row: Row) -> None:
        raise ConnectionError("https://me:secret@host")

    tracked(Kept(fail), [step(1)])
    printed = capfd.readouterr().err
    assert "Traceback" in printed
    assert "https://********@host" in printed
    assert "secret" not in printed


def test_library_that_leaves_by_sys_exit_costs_a_row() -> None:
    def leave(row: Row) -> None:
        if row == step(1):
            raise SystemExit(1)

    tracker = Kept(leave)
    assert [health.num_lost for health in tracked(tracker, [step(1), step(2)])] == [0, 1]
    assert tracker.rows == [step(2)]


def test_tracker_that_cannot_be_opened_is_tried_again_and_gets_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_worker, "RETRY_S", 0.0)
    tracker, reports, tries = Kept(), [], []

    def open_tracker(opening: Opening) -> Tracker:
        tries.append(opening)
        if len(tries) < 3:
            raise OSError("no server")
        return tracker

    track(OPENING, [encode_row(step(1))], reports.append, open_tracker)
    assert tries == [OPENING] * 3
    assert reports == [TrackerHealth("OSError: no server"), TrackerHealth()]
    assert tracker.rows == [step(1)]


def test_call_that_does_not_return_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_worker, "SLOW_S", 0.01)
    reports: list[TrackerHealth] = []

    def wait(row: Row) -> None:
        deadline = time.monotonic() + 20
        while not reports and time.monotonic() < deadline:
            time.sleep(0.005)

    tracker = Kept(wait)
    track(OPENING, [encode_row(step(1))], reports.append, lambda opening: tracker)
    assert reports == [TrackerHealth("no answer for 0.01 s; it goes on trying"), TrackerHealth()]


def test_failing_end_is_told() -> None:
    class EndsBadly(Kept):
        def close(self, outcome: str | None) -> None:
            raise TimeoutError("no answer")

    assert tracked(EndsBadly(), [step(1)]) == [TrackerHealth("TimeoutError: no answer")]
