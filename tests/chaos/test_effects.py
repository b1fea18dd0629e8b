"""Chaos knows which of its faults have hit."""

from pathlib import Path

import pytest

from offbeat.common.records.rows import EventRow
from offbeat.common.records.writer import MetricsWriter
from tests.chaos.effects import CERTAIN, EVENTS, has_hit
from tests.chaos.round import Happened, Watch, missed
from tests.chaos.schedule import KINDS, Kind
from tests.chaos.test_chaos import fault


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("append data", "data_appended"),
        ("fill disk in checkpoint", "checkpoint_failed"),
        ("corrupt log's middle", "log_damaged"),
        ("doubt learner", "learner_doubted"),
    ],
)
def test_fault_is_known_by_the_event_that_the_learner_records(tmp_path: Path, kind: Kind, event: str) -> None:
    assert has_hit(kind, {event, "resumed"}, tmp_path) is True
    assert has_hit(kind, {"resumed"}, tmp_path) is False
    assert has_hit("kill learner", {event}, tmp_path) is None


def test_damaged_checkpoint_is_known_by_the_folder_that_was_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-00000010"
    folder.mkdir(parents=True)
    assert has_hit("damage checkpoint", {"checkpoint_damaged"}, tmp_path) is False
    folder.rename(folder.with_name("step-00000010.damaged"))
    assert has_hit("damage checkpoint", set(), tmp_path) is True


def test_every_fault_that_cannot_miss_can_be_known() -> None:
    assert set(CERTAIN) <= {*EVENTS, "damage checkpoint"} <= set(KINDS)


def test_only_a_fault_that_cannot_miss_is_a_violation_without_its_effect() -> None:
    def missed_of(kind: Kind, detail: str, has_hit: bool | None) -> list[str]:
        return missed([Happened(fault(kind), 1.0, detail, None, has_hit)])

    assert missed_of("append data", "added 2 rows", False) == ["append data: it had no effect (added 2 rows)"]
    assert missed_of("append data", "added 2 rows", True) == []
    assert missed_of("append data", "", False) == [], "it was not committed"
    assert missed_of("fill disk in checkpoint", "left no room", False) == []
    assert missed_of("kill learner", "killed", None) == []


def test_watch_keeps_events_with_their_times(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "metrics.jsonl")
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(EventRow(event="data_appended", detail=""))
    watch.look()
    assert [sight.row.event for sight in watch.events] == ["data_appended"]
