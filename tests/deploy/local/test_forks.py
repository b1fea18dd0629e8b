"""Services forked from a process with the imports are like new interpreters, and outlive or replace what forked them."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from offbeat.common.processes.environment import DEFAULT_THREADS_VARIABLE
from offbeat.common.settings.config import Config
from offbeat.deploy.local.forks import ForkedProcess, Process, WarmStarts, adopt_orphans, choose_starts
from offbeat.deploy.local.starts import FreshStarts, ProcessStart
from tests.deploy.services import SERVICES_S, free_port, write_config
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.service,
    pytest.mark.timeout(SERVICES_S),
    pytest.mark.skipif(sys.platform != "linux", reason="processes become children of another one on Linux only"),
]

REWARD = """
import json, os, sys
from pathlib import Path

facts = {"parent": os.getppid(), "group": os.getpgid(0), "argv": sys.argv, "variables": dict(os.environ)}
# Reward workers load this too.
partial = Path(f"facts-{os.getpid()}.partial")
partial.write_text(json.dumps(facts))
partial.rename(partial.with_suffix(".json"))

def digits(prompt, completion, row):
    return 0.0
"""


class _RecordedStarts(WarmStarts):
    def __init__(self, engine: str) -> None:
        super().__init__(engine)
        self.started: list[Process] = []

    def start(self, start: ProcessStart) -> Process:
        self.started.append(super().start(start))
        return self.started[-1]


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmStarts]:
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", DEFAULT_THREADS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    starts = _RecordedStarts("transformers")
    yield starts
    for process in starts.started:
        process.kill()
    starts.close()
    adopt_orphans(False)


def refused(folder: Path) -> ProcessStart:
    """Return the start of a learner that ends with status 2 for want of a config."""
    return ProcessStart(["learner", "nowhere.toml"], {}, folder / "refused.log")


def warm_pid(starts: WarmStarts) -> int:
    assert starts._warm is not None
    return starts._warm.pid


def forked_pid(process: object) -> int:
    assert isinstance(process, ForkedProcess)
    wait_for(lambda: process.status() is not None or process._pid is not None or process._fresh is not None)
    assert process._pid is not None, "it was not forked"
    return process._pid


def test_forked_service_is_like_a_new_interpreter_and_outlives_the_process_that_forked_it(
    starts: WarmStarts, tmp_path: Path, tiny_model: Path
) -> None:
    config = write_config(tmp_path, tiny_model, actor={"engine": "transformers", "engine_options": {}})
    (tmp_path / "my_reward.py").write_text(REWARD)
    arguments = ["actor", config, f'hub.address="tcp://127.0.0.1:{free_port()}"']
    actor = starts.start(ProcessStart(arguments, {"RANK": "7"}, tmp_path / "actor.log"))
    pid = forked_pid(actor)
    facts = tmp_path / f"facts-{pid}.json"
    wait_for(facts.exists)
    known = json.loads(facts.read_text())
    assert (known["parent"], known["group"]) == (os.getpid(), pid)
    assert known["argv"][1:] == arguments
    assert known["variables"]["RANK"] == "7"
    assert "OFFBEAT_PARENT" not in known["variables"]
    # A learner may then take more than its one thread.
    assert known["variables"]["OMP_NUM_THREADS"] == known["variables"][DEFAULT_THREADS_VARIABLE] == "1"
    process = psutil.Process(pid)
    wait_for(lambda: "engine ready" in (tmp_path / "actor.log").read_text())
    assert [word for word in process.cmdline() if word][-4:] == ["offbeat.deploy.cli.main", *arguments]
    # The death of the warm process is nothing to it, and another one forks the next service.
    os.kill(warm_pid(starts), signal.SIGKILL)
    dead = warm_pid(starts)
    wait_for(lambda: not psutil.pid_exists(dead) or psutil.Process(dead).status() == psutil.STATUS_ZOMBIE)
    learner = starts.start(refused(tmp_path))
    forked_pid(learner)
    wait_for(lambda: learner.status() is not None)
    assert learner.status() == 2
    assert "nowhere.toml" in (tmp_path / "refused.log").read_text()
    assert warm_pid(starts) != dead
    assert actor.status() is None
    children = process.children()
    actor.kill()
    assert actor.status() == -signal.SIGKILL
    # Nor does a zombie of it stay.
    wait_for(lambda: not any(child.is_running() for child in children))


def test_start_that_the_warm_process_did_not_live_to_make_is_made_without_it(
    starts: WarmStarts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = starts.start(refused(tmp_path))
    os.kill(warm_pid(starts), signal.SIGKILL)
    wait_for(lambda: learner.status() is not None)
    assert learner.status() == 2
    assert "learner could not be forked" in caplog.text
    # Nothing was ever forked, so nobody tries again.
    second = starts.start(refused(tmp_path))
    wait_for(lambda: second.status() is not None)
    assert second.status() == 2
    assert starts._warm is None


def test_imports_begin_early_and_a_service_that_is_ended_before_it_was_forked_never_runs(
    starts: WarmStarts, tmp_path: Path
) -> None:
    starts.prepare()
    warm = warm_pid(starts)
    wait_for(lambda: "libtorch" in Path(f"/proc/{warm}/maps").read_text())
    killed, stopped = starts.start(refused(tmp_path)), starts.start(refused(tmp_path))
    other = starts.start(refused(tmp_path)._replace(log=tmp_path / "other.log"))
    killed.kill()
    stopped.ask_to_stop()
    assert (killed.status(), stopped.status()) == (0, 0)
    # The warm process serves in order: when the last is here, the others have come and gone.
    forked_pid(other)
    assert warm_pid(starts) == warm
    wait_for(lambda: other.status() is not None)
    assert (tmp_path / "refused.log").read_text() == ""


def test_imports_that_start_threads_are_not_forked(
    starts: WarmStarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    learner = starts.start(refused(tmp_path))
    wait_for(lambda: learner.status() is not None)
    assert learner.status() == 2
    assert isinstance(learner, ForkedProcess)
    assert learner._pid is None
    assert "have started threads" in caplog.text


def test_several_threads_of_openmp_are_left_to_new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.deploy.local.forks.has_gpu", lambda: False)
    kinds: dict[str, type] = {}
    for number in ("1", "4"):
        monkeypatch.setenv("OMP_NUM_THREADS", number)
        kinds[number] = type(choose_starts(Config()))
    assert kinds == {"1": WarmStarts, "4": FreshStarts}
