"""Chaos: learners that the run's folder must refuse, tried on a stand-in of a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.processes import process_table as processes
from offbeat.learner.restart.resume import require_own_log
from tests.chaos.faults import MORE_DATA, Attempt, Committed, Scene, commit
from tests.chaos.machine import Clock
from tests.chaos.network import Network
from tests.chaos.schedule import Kind
from tests.chaos.test_chaos import Sleepers, fault

pytestmark = pytest.mark.slow


@pytest.fixture
def started() -> Iterator[Sleepers]:
    sleepers = Sleepers()
    yield sleepers
    sleepers.close()


@pytest.fixture
def scene(started: Sleepers, tmp_path: Path) -> Scene:
    """Return a run that a learner has locked, with two rows of data."""
    network = cast(Network, None)
    scene = Scene(started, network, Clock(tmp_path), None, None, tmp_path / "run", tmp_path / "train.jsonl", 0)
    scene.run.mkdir()
    (scene.run / "learner.lock").write_text(f'{{"pid": {started.find("learner")}, "host": "here"}}')
    (scene.run / "config.toml").write_text("[run]")
    scene.train_data.write_text("first\nsecond\n")
    return scene


def test_second_learner_is_refused_and_the_first_lives(scene: Scene, started: Sleepers) -> None:
    assert commit(fault("second learner"), scene) == Committed("started a second learner")
    assert started.tried == [()]
    assert not processes.has_ended(started.find("learner"))


def test_second_learner_comes_when_the_first_has_written_its_settings(
    scene: Scene, started: Sleepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scene.run / "learner.lock").touch()
    config = scene.run / "config.toml"

    def write_settings(_: float) -> None:
        assert started.tried == []
        config.write_text("[run]\nresume = true")

    monkeypatch.setattr(started, "pause", write_settings)
    assert commit(fault("second learner"), scene).violations == ()
    assert config.read_text() == "[run]\nresume = true"
    assert started.tried == [()]


def test_resume_with_reversed_rows_is_tried_while_the_launcher_stands_still(scene: Scene, started: Sleepers) -> None:
    assert commit(fault("resume with changes"), scene).violations == ()
    assert started.tried == [(f"data.train_data={scene.run.parent / 'reversed.jsonl'}",)]
    assert (scene.run.parent / "reversed.jsonl").read_text() == "second\nfirst\n"
    assert processes.has_ended(started.find("learner"))
    stat = Path(f"/proc/{started.find('launcher')}/stat").read_text()
    assert stat.rpartition(")")[2].split()[0] in "SR"


def test_resume_with_another_runs_segment_is_tried_and_the_segment_removed(
    scene: Scene, started: Sleepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scene.run / "log").mkdir()
    (scene.run / "log" / "00000004.log").write_bytes(b"")

    def try_learner(*_: str) -> Attempt:
        with pytest.raises(SettingError) as raised:
            require_own_log(scene.run, "run")
        return Attempt(2, str(raised.value))

    monkeypatch.setattr(started, "try_learner", try_learner)
    committed = commit(fault("another run's log"), scene)
    assert committed == Committed("killed the learner and resumed with 00000005.log of another run")
    assert [path.name for path in (scene.run / "log").iterdir()] == ["00000004.log"]
    assert processes.has_ended(started.find("learner"))


@pytest.mark.parametrize("kind", ["second learner", "resume with changes"])
def test_learner_that_is_not_refused_is_a_violation(scene: Scene, started: Sleepers, kind: Kind) -> None:
    started.attempt = Attempt(0, "finished")
    (violation,) = commit(fault(kind), scene).violations
    assert "was not refused for" in violation
    assert "exit status 0, finished" in violation


def test_data_that_cannot_be_reversed_line_by_line_is_left_alone(scene: Scene, started: Sleepers) -> None:
    assert commit(fault("resume with changes"), scene._replace(train_data=Path("owner/name"))).detail is None
    assert not processes.has_ended(started.find("learner"))


def test_rows_are_added_to_the_data_and_the_learner_is_killed(scene: Scene, started: Sleepers) -> None:
    assert commit(fault("append data"), scene).detail is None, "there are no more rows"
    assert not processes.has_ended(started.find("learner"))
    scene.train_data.with_name(MORE_DATA).write_text("third\nfourth\n")
    assert commit(fault("append data"), scene).detail == "killed the learner and added 2 rows to the data"
    assert scene.train_data.read_text() == "first\nsecond\nthird\nfourth\n"
    assert processes.has_ended(started.find("learner"))
