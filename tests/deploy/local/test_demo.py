"""`offbeat demo` kills services and changes settings of a run, each after the one before, and proves what was kept."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import typer
from msgspec.structs import replace

from offbeat.common.errors import ServiceError
from offbeat.common.processes.shutdown import INTERRUPTED_STATUS
from offbeat.common.settings.config import Config, LaunchSection
from offbeat.common.settings.loading import resolved_toml
from offbeat.deploy.cli.start import demo_command
from offbeat.deploy.local import demo
from offbeat.deploy.local.demo import has_browser, run_demo, tell_end
from offbeat.lab.audit import Check
from tests.learner.training.trainer_cases import make_config

TRAIN = '''
"""Stands for `offbeat train`: steps, with two processes that die and come back."""
import json, os, subprocess, sys, time
from pathlib import Path
from offbeat.common.processes.shutdown import PARENT_VARIABLE, die_with_parent

die_with_parent(int(os.environ[PARENT_VARIABLE]))
folder = Path(sys.argv[1])
rows = (folder / "metrics.jsonl").open("a", buffering=1)

def write(**row):
    print(json.dumps(row), file=rows)

def steps(first, last):
    for step in range(first, last + 1):
        write(kind="step", policy_version=step, **{"reward/mean": step / 30, "lag/mean": 1.0})

def sleeper(*names):
    # It ends with this process, whose end closes the pipe.
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", *names], stdin=subprocess.PIPE)

def killed(process):
    assert process.wait() == -9

actor, learner = sleeper("actor", 'actor.name="actor-1"'), sleeper("learner")
(folder / "learner.lock").write_text(json.dumps({"pid": learner.pid, "host": "here"}))
if "--pageless" not in sys.argv:
    (folder / "page.port").write_text("4321")
write(kind="event", event="run_started")
steps(1, 8)
killed(actor)
steps(9, 16)
if "--broken" in sys.argv:
    write(kind="final", outcome="failed")
    print("error: the disk is full")
    sys.exit(3)
if "--interrupted" in sys.argv:
    os.kill(os.getppid(), 2)
    time.sleep(600)
# The actor is not back yet: the learner's scene, at step 14, waits for it.
assert learner.poll() is None
write(kind="event", event="actor_joined", actor="actor-1")
steps(17, 17)
killed(learner)
write(kind="event", event="run_started")
steps(16, 27)
write(kind="event", event="actor_joined", actor="actor-2")
steps(28, 30)
write(kind="final", outcome="finished",
      ledger={"leased": 12, "trained": 8, "dropped": {"hard_stale": 2}, "expired": 1, "in_flight": 1})
'''


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Play":
    return Play(tmp_path, monkeypatch)


class Play:
    """A demo whose run is the stand-in, whose learner's answers are noted, and whose audit is given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.opened: list[str] = []
        self.asked: list[Mapping[str, str]] = []
        self.violations: list[str] = []
        config = make_config(folder)
        self.folder = folder / "run"
        self.config = replace(
            config,
            run=replace(config.run, dir=str(self.folder)),
            launch=LaunchSection(num_actors=2),
            train=replace(config.train, num_steps=30),
        )
        (self.folder / "log").mkdir(parents=True)
        (self.folder / "config.toml").write_text(resolved_toml(self.config))
        monkeypatch.setattr(demo, "SAY_S", 0.0)
        monkeypatch.setattr(demo, "tune", lambda open_link, address, settings: self.asked.append(settings))
        monkeypatch.setattr(demo, "audit", lambda folder, config: [Check("a claim", self.violations, "seen")])
        monkeypatch.setattr(demo, "has_browser", lambda: True)
        monkeypatch.setattr(demo.webbrowser, "open", self.opened.append)

    def run(self, *options: str) -> int:
        command = [sys.executable, "-c", TRAIN, str(self.folder), *options]
        return run_demo(self.config, command, self.said.append, opens_browser=True)


def test_scenes_are_played_one_after_the_other_and_the_end_is_proved(stage: Play) -> None:
    assert stage.run() == 0
    told = "\n".join(stage.said)
    scenes = ["live page: http://127.0.0.1:4321/", "step   8/30", "actor-1 dies", "actor-1 is at work", "the learner dies"]
    scenes += ["the learner is at work", "max_staleness=", "offbeat scale run 3", "actor-2 is at work", "report: "]
    places = [told.index(scene) for scene in scenes]
    assert places == sorted(places)
    bound = stage.asked[0]["staleness.max_staleness"]
    assert [list(settings.items()) for settings in stage.asked] == [
        [("staleness.max_staleness", bound)],
        [("scale.actors", "3")],
    ]
    assert "ledger: 12 leased = 8 trained + 2 hard_stale + 1 expired + 1 in flight" in stage.said
    assert stage.said[-1] == "Nothing was lost, and nothing was trained twice."
    assert stage.opened == ["http://127.0.0.1:4321/"]


def test_scenes_of_a_run_without_a_page_are_played(stage: Play) -> None:
    stage.config = replace(stage.config, metrics=replace(stage.config.metrics, bind=""))
    assert stage.run("--pageless") == 0
    assert "live page" not in "\n".join(stage.said)
    assert stage.opened == []


def test_run_has_the_folder_that_the_demo_follows_also_where_the_time_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, str]] = []

    def note(config: Config, command: list[str], say: Callable[[str], None], *, opens_browser: bool) -> int:
        given.append((config.run.dir, command[-1]))
        return 0

    monkeypatch.setattr(demo, "run_demo", note)
    (tmp_path / "config.toml").write_text(resolved_toml(make_config(tmp_path)))
    with pytest.raises(typer.Exit):
        demo_command([str(tmp_path / "config.toml"), f'run.dir="{tmp_path}/mine-{{time}}"'], small=True, browser=False)
    ((folder, setting),) = given
    assert "{" not in folder
    assert setting == f'run.dir="{folder}"'


def test_violation_is_the_demos_failure(stage: Play) -> None:
    stage.violations.append("lease 3 was trained twice")
    assert stage.run() == 1
    assert stage.said[-1] == "The audit found violations."


@pytest.mark.parametrize(
    ("leased", "has_log", "status", "said"),
    [
        (12, True, 0, "Nothing was lost, and nothing was trained twice."),
        (12, False, 0, "Without a rollout log (log.enabled=false) no lease was audited."),
        (13, True, 1, "The ledger does not add up."),
        (13, False, 1, "The ledger does not add up."),
    ],
)
def test_nothing_is_called_proved_that_no_log_and_no_sum_shows(
    leased: int, has_log: bool, status: int, said: str, stage: Play
) -> None:
    if not has_log:
        (stage.folder / "log").rmdir()
    ledger = {"leased": leased, "trained": 9, "dropped": {"hard_stale": 2}, "expired": 1, "in_flight": 0}
    assert tell_end(stage.folder, {"ledger": ledger}, stage.said.append) == status
    assert stage.said[-1] == said


def test_run_that_fails_is_told_in_its_own_words(stage: Play) -> None:
    with pytest.raises(ServiceError, match="the disk is full"):
        stage.run("--broken")


def test_interrupt_ends_the_run(stage: Play) -> None:
    assert stage.run("--interrupted") == INTERRUPTED_STATUS
    assert stage.said[-1] == "stopped; no process is left"


def test_browser_that_would_take_the_terminal_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert not has_browser()
