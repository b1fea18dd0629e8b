"""The live page shows the state and the report so far, costs little for it, and answers monitors truthfully."""

import importlib.metadata
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from offbeat.common.records.exported import TURNED_WITHIN_S, numbers
from offbeat.common.records.rows import StepRow
from offbeat.common.records.step_metrics import step_metric
from offbeat.learner.reporting.exported import EXPORTED, FROM_STEP, families
from offbeat.learner.reporting.live_page import REPORT_PAUSE_S, LivePage, LiveReport, serving
from offbeat.protocols.messages import MemberStatus, StatusReport, Vitals

NO_REPORT = ("false",)
ASSETS = Path(__file__).parents[3] / "learner" / "reporting"


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
        actors_wanted=1,
    )


def step(version: int, **metrics: float) -> StepRow:
    return StepRow(time=0.0, policy_version=version, metrics=dict(metrics))


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def printing(program: str) -> tuple[str, ...]:
    """Return the command of a Python program."""
    return (sys.executable, "-c", program)


@contextmanager
def live_report(program: str, clock: Clock) -> Iterator[LiveReport]:
    made = LiveReport(printing(program), clock=clock)
    try:
        yield made
    finally:
        made.close()


def wait_until_idle(report: LiveReport) -> None:
    deadline = time.monotonic() + 20
    while report._process is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert report._process is None


def test_state_is_the_status_with_the_number_of_the_newest_report() -> None:
    page = LivePage("a run", NO_REPORT)
    state = json.loads(page.routes(report, lambda: 0.0)["/state.json"]().content)
    assert (state["name"], state["report"]) == ("a run", 0)
    assert state["status"]["ledger"] == {"leased": 9, "trained": 8, "dropped/stale": 1}
    assert set(state) == {"name", "status", "report"}, "the curves are in the report"
    page.close()


def test_report_is_made_only_when_it_is_asked_for_and_due(tmp_path: Path) -> None:
    clock, count = Clock(), tmp_path / "count"
    program = f"open({str(count)!r}, 'a').write('x'); print(len(open({str(count)!r}).read()), end='')"
    with live_report(program, clock) as made:
        assert made.newest().status == 404 and not count.exists(), "nobody has asked"
        for number, wait_s in ((1, REPORT_PAUSE_S - 1), (1, 2.0), (2, 2.0)):
            made.number()
            wait_until_idle(made)
            assert (made.newest().content, count.read_text()) == (str(number).encode(), "x" * number)
            clock.now += wait_s
        assert made.number() == 2


def test_report_that_takes_long_is_made_less_often(tmp_path: Path) -> None:
    clock, go = Clock(), tmp_path / "go"
    with live_report(f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)", clock) as made:
        made.number()
        clock.now += 30
        go.touch()
        wait_until_idle(made)
        # It took 30 s: a tenth of a processor is 270 s of rest.
        clock.now += 269
        assert made.number() == 1 and made._process is None
        clock.now += 2
        made.number()
        wait_until_idle(made)
        assert made.number() == 2


def test_report_that_fails_keeps_the_former_and_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, bad = Clock(), tmp_path / "bad"
    program = f"import pathlib, sys; sys.exit('x\x1bno rows') if pathlib.Path({str(bad)!r}).exists() else print('good')"
    with live_report(program, clock) as made:
        made.number()
        wait_until_idle(made)
        bad.touch()
        clock.now += REPORT_PAUSE_S + 1
        assert made.number() == 1
        wait_until_idle(made)
        assert (made.number(), made.newest().content) == (1, b"good\n")
        assert caplog.messages == ["the live page has no new report: x\\x1bno rows"]


def test_report_that_is_being_made_when_the_run_ends_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with live_report("import time; time.sleep(600)", Clock()) as made:
        made.number()
    wait_until_idle(made)
    assert made.number() == 0 and caplog.messages == []


def test_probes_tell_a_hub_that_hangs_and_weights_that_are_not_there() -> None:
    page = LivePage("probed", NO_REPORT)
    assert page.routes(report, lambda: TURNED_WITHIN_S)["/healthz"]().status == 200
    assert page.routes(report, lambda: TURNED_WITHIN_S + 1)["/healthz"]().status == 503
    assert page.routes(report, lambda: 0.0)["/readyz"]().status == 200
    assert page.routes(lambda: report(-1), lambda: 0.0)["/readyz"]().status == 503


def test_numbers_are_prometheus_text_with_names_and_labels_of_the_table() -> None:
    members = (member("a"), member('b"\n', "quarantined", version=-1), member("c", version=9))
    row = step(7, **{"reward/mean": 0.5, "lag/max": 3.0, "clip/fraction": float("nan")})
    found = {
        one.name: one for one in text_string_to_metric_families(numbers(families(report(7, *members), row)).content.decode())
    }
    assert set(found) <= {one.name.removesuffix("_total") for one in EXPORTED}
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
    leases = {one.labels["state"]: one.value for one in found["offbeat_leases"].samples}
    assert leases["dropped/stale"] == 1 and "in flight" not in leases
    kinds = {name: found[name].type for name in ("offbeat_leases", "offbeat_refused_messages", "offbeat_groups_ready")}
    assert list(kinds.values()) == ["counter", "counter", "gauge"]
    (build,) = found["offbeat_build_info"].samples
    assert build.labels == {"run": report().run_id, "version": importlib.metadata.version("offbeat")}


def test_before_the_first_step_there_are_the_numbers_of_the_status() -> None:
    names = [one.name for one in text_string_to_metric_families(numbers(families(report(), None)).content.decode())]
    assert sorted(names) == sorted(one.name.removesuffix("_total") for one in EXPORTED if one not in FROM_STEP)


def test_every_number_is_a_metric_of_steps() -> None:
    assert all(map(step_metric, FROM_STEP.values()))
    names = [one.name for one in EXPORTED]
    assert len(set(names)) == len(names)


def test_page_finds_everything_that_it_loads() -> None:
    routes = LivePage("whole", NO_REPORT).routes(report, lambda: 0.0)
    loaded = re.findall(r'(?:src|href)="([^"]+)"', (ASSETS / "live.html").read_text())
    assert len(loaded) == 5
    assert all(routes[f"/{name}"]().content for name in loaded)


def test_newest_step_is_told_to_monitors() -> None:
    page = LivePage("told", NO_REPORT)
    page.add(step(1, **{"reward/mean": 0.25}))
    page.add(step(2, **{"reward/mean": 0.5}))
    assert b"offbeat_reward_mean 0.5" in page.routes(report, lambda: 0.0)["/metrics"]().content


def test_nothing_comes_from_elsewhere_and_texts_of_the_state_are_no_markup() -> None:
    pages = ASSETS.parents[1] / "common" / "pages"
    script = (ASSETS / "live.js").read_text() + (pages / "figures.js").read_text()
    assets = script + "".join(file.read_text() for file in (ASSETS / "live.html", ASSETS / "live.css", pages / "page.css"))
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", assets)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)
    assert script.count("parseFromString") == 1, "the report alone, whose templates escape every text"


def test_a_resumed_run_is_found_at_the_same_address(tmp_path: Path) -> None:
    ports = []
    for _ in range(2):
        with serving({}, "127.0.0.1:0", tmp_path):
            ports.append((tmp_path / "page.port").read_text())
    assert ports[0] == ports[1]
    (tmp_path / "page.port").write_text("no port")
    with serving({}, "127.0.0.1:0", tmp_path):
        assert (tmp_path / "page.port").read_text().strip().isdecimal()
