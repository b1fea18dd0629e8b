"""A trace holds the stages of each group by the log's stamps, as a file that Perfetto's importer can nest."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import CommitRow, PullRow, StepRow, WeightsRow
from offbeat.common.records.writer import MetricsWriter
from offbeat.common.settings.config import Config, RunSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.common.settings.loading import resolved_toml
from offbeat.lab.lease_history import LeaseHistories
from offbeat.lab.tracing import (
    TraceProcess,
    TraceSpan,
    choose,
    lease_span,
    read_trace,
    trace_file,
    write_trace,
)
from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.payload import CompletionMeta, Segment, Turn
from tests.learner.leases.event_makers import make_accepted, make_granted, make_trained


def started(version: int = 0, at: float = 0.0) -> Started:
    return Started(at=at, run_id="the-run", learner_incarnation=1, policy_version=version)


def granted(lease_id: int, at: float, actor: str = "a") -> Granted:
    return make_granted(lease_id, at=at, prompt_id=7, actor=actor, policy_version=3, oldest_version=2)


def accepted(lease_id: int, at: float, generate_s: float, reward_s: float = 0.0) -> Accepted:
    completions = (
        CompletionMeta(4, "stop", 1.0, (Segment(2, 0), Segment(3, 2))),
        CompletionMeta(6, "length", 0.0, (Segment(3, 0),), turns=(Turn(0, 2), Turn(3, 4)), environment_s=0.5),
    )
    return make_accepted(lease_id, at=at, completions=completions, generate_s=generate_s, policy_version=3, reward_s=reward_s)


def trained(version: int, *lease_ids: int, selected_at: float, at: float, num_steps: int = 1) -> Trained:
    return make_trained(*lease_ids, at=at, policy_version=version, num_steps=num_steps, selected_at=selected_at)


def stages(span: TraceSpan) -> list[tuple[str, float, float]]:
    return [(child.name, child.start, child.end) for child in span.children]


def test_stages_of_a_trained_group_lie_between_its_stamps() -> None:
    events = [
        started(),
        granted(5, at=10.0),
        accepted(5, at=20.0, generate_s=6.0, reward_s=1.0),
        trained(5, 9, 5, selected_at=23.0, at=25.0, num_steps=2),
    ]
    leases = LeaseHistories(events)
    span = lease_span(leases.by_lease[5])
    assert (span.name, span.start, span.end) == ("lease 5", 10.0, 25.0)
    assert stages(span) == [
        ("wait", 10.0, 13.0),
        ("generate", 13.0, 19.0),
        ("reward", 19.0, 20.0),
        ("queue", 20.0, 23.0),
        ("train", 23.0, 25.0),
    ]
    assert span.attributes["outcome"] == "trained"
    assert span.attributes["policy_lag"] == 4
    assert span.children[-1].attributes == {"step": 7}
    generated = span.children[1].attributes
    assert generated["policy_versions"] == "2, 3"
    assert (generated["tokens"], generated["longest_completion"], generated["mean_reward"]) == (10, 6, 0.5)
    assert (generated["turns"], generated["longest_environment_s"]) == (3, 0.5)


@pytest.mark.parametrize(
    ("events", "expected", "outcome"),
    [
        ([], [], "in flight"),
        ([Expired(at=14.0, lease_id=5, reason="late")], [("wait", 10.0, 14.0)], "expired"),
        ([accepted(5, 12.0, 2.0)], [("wait", 10.0, 10.0), ("generate", 10.0, 12.0)], "in flight"),
        (
            [accepted(5, 12.0, 2.0), Dropped(at=15.0, lease_id=5, reason="stale", is_final=False)],
            [("wait", 10.0, 10.0), ("generate", 10.0, 12.0), ("queue", 12.0, 15.0)],
            "dropped",
        ),
    ],
    ids=["granted", "expired", "accepted", "dropped"],
)
def test_other_ends(events: list[LeaseEvent], expected: list[tuple[str, float, float]], outcome: str) -> None:
    span = lease_span(LeaseHistories([granted(5, at=10.0), *events]).by_lease[5])
    assert stages(span) == expected
    assert span.attributes["outcome"] == outcome
    assert span.attributes.get("reason") == {"expired": "late", "dropped": "stale"}.get(outcome)


def test_steps_that_a_restart_undid_are_not_shown() -> None:
    events = [
        granted(1, at=0.0),
        accepted(1, 1.0, 1.0),
        trained(0, 1, selected_at=2.0, at=3.0),
        started(version=0, at=9.0),
        trained(0, 1, selected_at=10.0, at=11.0),
    ]
    assert lease_span(LeaseHistories(events[:4]).by_lease[1]).attributes["outcome"] == "in flight"
    leases = LeaseHistories(events)
    assert stages(lease_span(leases.by_lease[1]))[-2:] == [("queue", 1.0, 10.0), ("train", 10.0, 11.0)]
    assert [batch.at for batch in leases.batches] == [11.0]


def test_groups_are_chosen_by_lease_step_or_duration() -> None:
    events: list[LeaseEvent] = []
    for lease_id, ended in ((1, 5.0), (2, 9.0), (3, 7.0)):
        events += [granted(lease_id, at=float(lease_id)), trained(lease_id, lease_id, selected_at=4.0, at=ended)]
    leases = LeaseHistories([*events, granted(4, at=4.0)])

    def chosen(lease: int | None = None, step: int | None = None, slowest: int = 20) -> list[int]:
        return [history.lease_id for history in choose(leases, lease=lease, step=step, slowest=slowest)]

    assert chosen(lease=4) == [4]
    assert chosen(step=3) == [2]
    assert chosen(slowest=1) == [2]
    assert chosen(slowest=2) == [1, 2], "3 lived as long as 1, which was granted first"
    assert chosen() == [1, 2, 3]
    for wrong in ({"lease": 9}, {"step": 9}):
        with pytest.raises(SettingError, match="the log has no"):
            chosen(**wrong)


def importer_checks(content: bytes) -> list[dict[str, Any]]:
    """Check what the importers of the format ask for; return the complete events."""
    events = msgspec.json.decode(content)["traceEvents"]
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} <= {"M", "X"}
    for event in complete:
        assert event["pid"] in named
        assert type(event["ts"]) is int
        assert type(event["dur"]) is int
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    for track in {(event["pid"], event["tid"]) for event in complete}:
        open_ends: list[int] = []
        for event in (event for event in complete if (event["pid"], event["tid"]) == track):
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1], "it overlaps another one of its thread"
            open_ends.append(event["ts"] + event["dur"])
    return complete


TIMES = st.floats(1.7e9, 1.7e9 + 100)


@given(
    stamps=st.lists(st.tuples(TIMES, TIMES, TIMES, TIMES, st.floats(0, 200), st.floats(0, 200)), min_size=1, max_size=8),
)
def test_whatever_the_clocks_say_no_stage_is_negative_and_all_nest(stamps: list[tuple[float, ...]]) -> None:
    events: list[LeaseEvent] = []
    for lease_id, (grant, accept, select, train, generate_s, reward_s) in enumerate(stamps):
        events += [granted(lease_id, grant), accepted(lease_id, accept, generate_s, reward_s)]
        events += [trained(lease_id, lease_id, selected_at=select, at=train)]
    spans = [lease_span(lease) for lease in LeaseHistories(events).by_lease.values()]
    for span in spans:
        edges = [span.start, *(edge for child in span.children for edge in (child.start, child.end)), span.end]
        assert edges == sorted(edges)
    complete = importer_checks(trace_file([TraceProcess("a", tuple(spans))]))
    assert len(complete) == sum(1 + len(span.children) for span in spans)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one group, and the rows of that time."""
    (tmp_path / "config.toml").write_text(
        resolved_toml(Config(run=RunSection(dir=str(tmp_path)), train=TrainSection(groups_per_step=1)))
    )
    log = RolloutLog(tmp_path / "log", run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 30, min_free_bytes=0)
    for event in (started(), granted(1, 100.0), trained(0, 1, selected_at=110.0, at=112.0)):
        log.append(event)
    log.close()
    with MetricsWriter(tmp_path) as rows:
        metrics = {"reward/mean": 0.5, "time/wait_rollouts_s": 8.0}
        rows.write(StepRow(time=112.1, policy_version=1, metrics=metrics))
        rows.write(WeightsRow(time=101.0, policy_version=0, publish_s=0.5, num_members=1, num_excluded=0))
        rows.write(WeightsRow(time=999.0, policy_version=9, publish_s=0.5, num_members=1, num_excluded=0))
        rows.write(PullRow(time=102.0, actor="a", policy_version=0, pull_s=1.0, sent_bytes=5, full_bytes=9))
        rows.write(CommitRow(time=102.5, actor="a", policy_version=0, stall_s=0.25))
    return tmp_path


def test_file_shows_the_learners_work_beside_the_groups(run: Path) -> None:
    trace = read_trace(run, lease=None, step=1, slowest=20)
    found = {process.name: [(one.name, one.start, one.end) for one in process.spans] for process in trace.processes}
    assert found == {
        "learner": [("wait for rollouts", 102.0, 110.0), ("step 1", 110.0, 112.0)],
        "learner: weights": [("publish weights 0", 100.5, 101.0)],
        "a: weights": [("pull weights 0", 101.0, 102.0), ("commit weights 0", 102.25, 102.5)],
        "a": [("lease 1", 100.0, 112.0)],
    }
    assert trace.run_id == "the-run"
    complete = importer_checks(write_trace(trace, run / "trace.json").read_bytes())
    assert {event["name"] for event in complete} >= {"lease 1", "step 1", "train"}
    step = next(event for event in complete if event["name"] == "step 1")
    assert (step["ts"], step["dur"]) == (10_000_000, 2_000_000)
    assert step["args"] == {"groups": 1, "reward/mean": 0.5, "time/wait_rollouts_s": 8.0}


def test_run_without_a_log_is_a_mistake(run: Path) -> None:
    (run / "log").rename(run / "moved")
    with pytest.raises(SettingError, match="no rollout log"):
        read_trace(run, lease=None, step=None, slowest=20)
