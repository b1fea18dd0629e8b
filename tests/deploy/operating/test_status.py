"""`offbeat status` shows a run to an operator, and ends when nobody answers."""

import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from offbeat.common.errors import ServiceError
from offbeat.common.records.rows import EventRow, StepRow
from offbeat.common.records.writer import MetricsWriter
from offbeat.deploy.operating import link as questions
from offbeat.deploy.operating.link import OpenLink
from offbeat.deploy.operating.status import Asked, print_status, render_files, render_status
from offbeat.lab.run_summary import ProcessTimes, read_end
from offbeat.protocols.channels import Link
from offbeat.protocols.messages import Refused, SettingChange, StatusReport, StatusRequest, Vitals
from tests.deploy.operating.operator_desk import REPORT, Desk
from tests.deploy.services import free_port


def asked(open_link: OpenLink, address: str, folder: Path) -> Asked:
    return Asked(open_link, address, folder, num_steps=100)


def shown(report: StatusReport, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render_status(report))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_report_shows_members_sums_and_what_the_run_waits_for() -> None:
    text = shown(REPORT)
    for wanted in (
        "step 7 of 100",
        "1 h 02 min",
        "training step 8 for 2.5 s",
        "3 groups ready, 5 being generated",
        "epoch 1 (25%)",
    ):
        assert wanted in text
    assert "leased 12   trained 4   dropped/stale 1   expired 0   in flight 7" in text
    good = next(line for line in text.splitlines() if line.startswith("good "))
    assert re.split(" {2,}", good.strip()) == ["good", "working", "6", "1", "3/4", "1234", "0.2 s", "vllm 1"]
    assert "! the disk is full" in text
    assert "a lease that is not its own" in text


def test_report_shows_how_many_actors_the_run_wants() -> None:
    assert "actors: 2 connected, 8 wanted" in shown(msgspec.structs.replace(REPORT, actors_wanted=8))


def test_report_shows_which_settings_are_not_the_configs_and_whose_they_are() -> None:
    change = SettingChange("staleness.max_staleness", "4", "8", "me@host (key ops)", 0.0, 12)
    text = shown(msgspec.structs.replace(REPORT, changed_settings=(change,)))
    assert "set: staleness.max_staleness = 8 (config: 4), by me@host (key ops) at version 12, 19" in text


def test_report_shows_reward_lag_bound_time_left_and_health() -> None:
    vitals = Vitals(reward=0.4125, lag_mean=1.25, lag_max=3, bound=4, step_s=2.0, health=("All cut [red]. Raise it.",))
    text = shown(msgspec.structs.replace(REPORT, vitals=vitals))
    # 93 steps of 2 s are left.
    assert "reward 0.412   lag 1.2, largest 3, bound 4   2.0 s a step, 3 min 06 s left" in text
    assert "! All cut [red]. Raise it." in text, "it is text, not markup"
    assert "no step yet" in shown(REPORT)
    vitals = msgspec.structs.replace(vitals, reward_by_task={"sums": 0.5, "letters": 0.25}, share_by_task={"sums": 0.125})
    text = shown(msgspec.structs.replace(REPORT, vitals=vitals))
    assert "by task: sums 0.500, letters 0.250   leased: 12% of sums" in text


def test_files_of_a_run_are_shown_with_their_growth(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(EventRow(time=1000.0, event="run_started", detail="x" * (1 << 20)))
        metrics.write(StepRow(time=1900.0, policy_version=1, metrics={}))
        # The pause before a restart does not count.
        metrics.write(EventRow(time=90000.0, event="run_started", detail=""))
        metrics.write(StepRow(time=90900.0, policy_version=2, metrics={}))
    for name, num_mb in (("log/00000001.log", 3), ("checkpoints/step-00000001/model.bin", 5)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(bytes(num_mb << 20))
    read_end(tmp_path, times := ProcessTimes())
    (text,) = (text.plain for text in render_files(tmp_path, times.wall_s))
    assert text == (
        f"files in {tmp_path}: 9 MB (checkpoints 5 MB, log 3 MB, metrics.jsonl 1 MB); 8 MB an hour besides checkpoints"
    )
    assert list(render_files(tmp_path / "elsewhere", times.wall_s)) == []


def test_narrow_terminal_drops_columns_and_no_words() -> None:
    lines = shown(msgspec.structs.replace(REPORT, rejected={}), width=60).splitlines()
    heads = next(line for line in lines if "actor" in line and "state" in line)
    assert heads.split() == ["actor", "state", "version", "lag", "leases", "tokens/s"]
    good = next(line for line in lines if line.startswith("good "))
    assert good.split() == ["good", "working", "6", "1", "3/4", "1234"]
    assert lines[-1] == "left out at 60 columns: last seen, engine"


def test_report_without_actors_says_so() -> None:
    assert "no actor is connected" in shown(msgspec.structs.replace(REPORT, members=()))


def test_status_asks_with_the_operators_key_and_prints_json(
    desks: list[Desk], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desks.append(Desk(tmp_path / "keys", REPORT))
    print_status(asked(desks[0].open_link, desks[0].address, tmp_path), as_json=True)
    assert msgspec.json.decode(capsys.readouterr().out, type=StatusReport) == REPORT
    assert desks[0].asked == [StatusRequest()]


def test_refusal_is_told_with_its_reason(desks: list[Desk], tmp_path: Path) -> None:
    desks.append(Desk(tmp_path / "keys", Refused(reason="an actor's key")))
    with pytest.raises(ServiceError, match="refused to answer: an actor's key"):
        print_status(asked(desks[0].open_link, desks[0].address, tmp_path), as_json=False)


def test_nobody_there_is_told_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(questions, "ANSWER_S", 0.5)
    address = f"tcp://127.0.0.1:{free_port()}"

    def open_link() -> Link:
        return Link(address, identity=b"ops", max_message_bytes=1 << 20)

    with pytest.raises(ServiceError, match=r"no answer from .* within 0.5 s: nothing listens there"):
        print_status(asked(open_link, address, tmp_path), as_json=False)
