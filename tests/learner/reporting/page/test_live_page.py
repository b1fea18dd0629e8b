"""The live page shows the rows so far as data, stays small on a long run, and answers monitors truthfully."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from offbeat.common.records.exported import exposition
from offbeat.common.records.probes import TURNED_WITHIN_S
from offbeat.common.records.rows import EvalRow, EventRow, SampleRow, StepRow
from offbeat.common.records.step_metrics import step_metric
from offbeat.learner.reporting.page.exported import EXPORTED, FROM_STEP, families
from offbeat.learner.reporting.page.live_page import CURVES, HELD_OUT, MOST_POINTS, NUM_SAMPLES, LivePage, serving
from offbeat.protocols.messages import MemberStatus, StatusReport, Vitals

ASSETS = Path(__file__).parents[4] / "learner" / "reporting" / "page"


def member(name: str, state: Any = "working", version: int = 5) -> MemberStatus:
    return MemberStatus(
        name=name,
        state=state,
        policy_version=version,
        num_leases=3,
        capacity=4,
        tokens_per_s=100.0,
        last_seen_s=0.5,
        engine="vllm",
    )


def report(published: int = 7, *members: MemberStatus) -> StatusReport:
    return StatusReport(
        run_id="r",
        policy_version=7,
        num_steps=10,
        published_version=published,
        doing="training step 8",
        doing_s=1.5,
        waiting_for="",
        uptime_s=60.0,
        members=members,
        ledger={"leased": 9, "trained": 8, "dropped/stale": 1},
        num_ready=2,
        num_generating=4,
        epoch=1,
        epoch_position=0.25,
        log_bytes=4096,
        problems=("the disk is full",),
        rejected={"a: b": 2, "c: d": 3},
        vitals=Vitals(health=("no signal",)),
    )


def step(version: int, **metrics: float) -> StepRow:
    return StepRow(time=0.0, policy_version=version, metrics=dict(metrics))


def state_of(page: LivePage) -> dict[str, Any]:
    return json.loads(page.routes(report, lambda: 0.0)["/state.json"]().content)


def sample(completion: str) -> SampleRow:
    return SampleRow(
        time=0.0,
        policy_version=1,
        lease_id=1,
        prompt_id=1,
        policy_lag=0,
        reward=1.0,
        above_mean=0.5,
        finish_reason="stop",
        num_tokens=3,
        prompt="p",
        completion=completion,
    )


def test_state_has_curves_samples_and_events_the_newest_first() -> None:
    page = LivePage("a run")
    for version in (1, 2):
        page.add(step(version, **{"reward/mean": version / 10, "lag/mean": 1.0}))
    page.add(EvalRow(time=0.0, policy_version=2, reward=0.75, length=4.0, num_completions=8, num_failed=0))
    for number in range(NUM_SAMPLES + 2):
        page.add(sample(f"completion {number}"))
    page.add(EventRow(time=0.0, event="health", detail="first"))
    page.add(EventRow(time=0.0, event="health", detail="second"))
    state = state_of(page)
    assert state["name"] == "a run"
    assert state["curves"]["reward/mean"] == {"xs": [1, 2], "ys": [0.1, 0.2]}
    assert state["curves"][HELD_OUT] == {"xs": [2], "ys": [0.75]}
    assert [one["completion"] for one in state["samples"]][:2] == [f"completion {NUM_SAMPLES + 1}", f"completion {NUM_SAMPLES}"]
    assert len(state["samples"]) == NUM_SAMPLES
    assert [one["detail"] for one in state["events"]] == ["second", "first"]
    assert state["status"]["ledger"] == {"leased": 9, "trained": 8, "dropped/stale": 1}


def test_state_of_a_long_run_stays_small() -> None:
    page = LivePage("long")
    for version in range(10_000):
        page.add(step(version, **dict.fromkeys(CURVES, 1 / 3)))
    content = page.routes(report, lambda: 0.0)["/state.json"]().content
    assert len(json.loads(content)["curves"]["reward/mean"]["xs"]) <= MOST_POINTS
    assert len(content) < 60 * MOST_POINTS * len(CURVES)


def test_rows_of_former_processes_are_shown(tmp_path: Path) -> None:
    lines = ['{"kind":"step","time":0,"policy_version":1,"lag/counts":{},"reward/mean":0.5}', "{torn"]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    page = LivePage("resumed")
    page.add_former(tmp_path)
    page.add_former(tmp_path / "a folder without rows")
    assert state_of(page)["curves"]["reward/mean"] == {"xs": [1], "ys": [0.5]}


def test_probes_tell_a_hub_that_hangs_and_weights_that_are_not_there() -> None:
    page = LivePage("probed")
    assert page.routes(report, lambda: TURNED_WITHIN_S)["/healthz"]().status == 200
    assert page.routes(report, lambda: TURNED_WITHIN_S + 1)["/healthz"]().status == 503
    assert page.routes(report, lambda: 0.0)["/readyz"]().status == 200
    assert page.routes(lambda: report(-1), lambda: 0.0)["/readyz"]().status == 503


def test_numbers_are_prometheus_text_with_names_and_labels_of_the_table() -> None:
    members = (member("a"), member('b"\n', "quarantined", version=-1), member("c", version=9))
    row = step(7, **{"reward/mean": 0.5, "lag/max": 3.0, "clip/fraction": float("nan")})
    found = {one.name: one for one in text_string_to_metric_families(exposition(families(report(7, *members), row)).decode())}
    assert set(found) <= {one.name for one in EXPORTED}
    value = {name: [sample.value for sample in family.samples] for name, family in found.items()}
    assert value["offbeat_policy_version"] == [7]
    assert value["offbeat_reward_mean"] == [0.5]
    assert value["offbeat_policy_lag_max"] == [3]
    assert "offbeat_clipped_ratio" not in value, "it was no number"
    assert value["offbeat_refused_messages"] == [5]
    assert value["offbeat_epoch"] == [1.25]
    labels = {tuple(one.labels.items()): one.value for one in found["offbeat_actors"].samples}
    assert labels == {(("state", "working"),): 2, (("state", "quarantined"),): 1}
    lags = {one.labels["actor"]: one.value for one in found["offbeat_actor_policy_lag"].samples}
    assert lags == {"a": 2, "c": 0}
    assert {one.labels["actor"] for one in found["offbeat_actor_leases"].samples} == {"a", 'b"\n', "c"}
    assert {one.labels["state"]: one.value for one in found["offbeat_leases"].samples}["dropped/stale"] == 1


def test_before_the_first_step_there_are_the_numbers_of_the_status() -> None:
    names = {one.name for one in text_string_to_metric_families(exposition(families(report(), None)).decode())}
    assert "offbeat_policy_version" in names
    assert names.isdisjoint(one.exported.name for one in FROM_STEP)


def test_every_curve_and_number_is_a_metric_of_steps() -> None:
    assert all(step_metric(name) for name in (*CURVES, *(one.metric for one in FROM_STEP)))
    names = [one.name for one in EXPORTED]
    assert len(set(names)) == len(names)


def test_page_finds_everything_that_it_loads() -> None:
    routes = LivePage("whole").routes(report, lambda: 0.0)
    loaded = re.findall(r'(?:src|href)="([^"]+)"', (ASSETS / "live.html").read_text())
    assert len(loaded) == 4
    assert all(routes[f"/{name}"]().content for name in loaded)


def test_script_draws_the_curves_that_the_server_sends_and_nothing_comes_from_elsewhere() -> None:
    script = (ASSETS / "live.js").read_text()
    drawn = set(re.findall(r'\["([a-z_]+/[a-z_]+)"', script))
    assert drawn == {*CURVES, HELD_OUT}
    files = (ASSETS / "live.html", ASSETS / "live.css", ASSETS.parents[2] / "common" / "pages" / "page.css")
    assets = script + "".join(file.read_text() for file in files)
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", assets)
    # Texts from outside could be markup.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)


def test_a_resumed_run_is_found_at_the_same_address(tmp_path: Path) -> None:
    ports = []
    for _ in range(2):
        with serving({}, "127.0.0.1:0", tmp_path):
            ports.append((tmp_path / "page.port").read_text())
    assert ports[0] == ports[1]
    (tmp_path / "page.port").write_text("no port")
    with serving({}, "127.0.0.1:0", tmp_path):
        assert (tmp_path / "page.port").read_text().strip().isdecimal()
