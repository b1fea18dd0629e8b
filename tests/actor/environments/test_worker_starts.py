"""Workers are forks of a process with their imports, and end with it; where there can be none they are new interpreters."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from offbeat.actor.environments import worker_starts
from offbeat.actor.environments import workers as workers_module
from offbeat.actor.environments.messages import Begin
from offbeat.actor.environments.worker_starts import FORKER, WORKER, WorkerStarts, can_fork
from offbeat.actor.environments.workers import Workers
from offbeat.common.errors import ServiceError
from offbeat.common.processes import process_table as processes
from offbeat.common.processes.child import Fork
from offbeat.common.processes.own_process import ROOM, ROOM_VARIABLE
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import load

pytestmark = pytest.mark.slow

ACTOR = """
import logging, os, signal, sys, types

# It takes seconds to import.
transformers = sys.modules["transformers"] = types.ModuleType("transformers")
transformers.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda folder: None)

from offbeat.actor.environments.messages import Begin, PlayEpisode
from offbeat.actor.environments.worker_starts import WorkerStarts
from offbeat.actor.environments.workers import Workers
from offbeat.common.processes.child import Fork
from offbeat.common.settings.loading import load

logging.basicConfig()
signal.signal(signal.SIGTERM, lambda *_: None)
print("once", end=" ")
starts = WorkerStarts(forks=True, has_parser=False)
workers = Workers(Begin(config=load(None, ["task.environment=games:play", "environment.workers=2"]), model=""), starts)
print(type(starts._forker) is Fork, flush=True)
print(os.getpid(), starts._forker.pid, *[one._process.pid for one in workers._workers], flush=True)
for line in sys.stdin:
    for name in "ab":
        play = PlayEpisode(
            episode=name, row="{}", prompt="", num_prompt_tokens=1, max_new_tokens=1, seed=0, is_evaluation=False
        )
        workers.play(name, play)
    ended = []
    while len(ended) < 2:
        ended += workers.poll()
    workers.end("a")
    workers.end("b")
    print([getattr(one, "reward", one) for one in ended], workers.num_restarts, flush=True)
"""
GAMES = """
import logging, numpy, random, sys

async def play(chat, row):
    logging.getLogger("games").warning("a library speaks")
    assert sys.stdin.read() == "", "the worker reads what the actor was told"
    print(numpy.random.rand(), random.random(), flush=True)
    return float(sys.modules["transformers"].__spec__ is None)
"""


FORK_SERVER = """
import os, socket, threading, time
from offbeat.actor.environments import worker_starts as starts
from offbeat.common.processes.child import join_parent
requests = socket.socket(fileno=join_parent())
"""


@pytest.fixture
def end() -> Iterator[socket.socket]:
    """A worker's end of its pipe."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs


def use_forker(monkeypatch: pytest.MonkeyPatch, *, imports: str = "None", worker: str = "time.sleep(600)") -> None:
    """Make the forker import, and its workers do, something that takes no time to begin."""
    code = f"{FORK_SERVER}starts._import = lambda **_: {imports}\nstarts.run_worker = lambda end: {worker}\n"
    code += "starts.serve_forks(requests, has_parser=False)"
    monkeypatch.setattr(worker_starts, "FORKER", (sys.executable, "-c", code))


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forker without imports, whose workers do nothing."""
    use_forker(monkeypatch)


def test_forks_of_an_actor_with_one_thread_share_its_imports_and_die_with_it(tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text(GAMES)
    variables = {ROOM_VARIABLE: ROOM, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""}
    actor = subprocess.Popen(
        [sys.executable, "-c", ACTOR], cwd=tmp_path, env={**os.environ, **variables}, process_group=0, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(tmp_path / "errors").open("w"),
    )  # fmt: skip
    assert actor.stdin is not None
    assert actor.stdout is not None
    with actor, actor.stdin, actor.stdout:
        assert actor.stdout.readline() == "once True\n"
        pids = [int(pid) for pid in actor.stdout.readline().split()]
        assert [processes.arguments(pid)[2] for pid in pids[1:]] == [FORKER[2], WORKER[2], WORKER[2]]
        draws: set[str] = set()
        for _ in range(2):
            actor.stdin.write("play\n")
            actor.stdin.flush()
            draws |= {*actor.stdout.readline().split(), *actor.stdout.readline().split()}
            # The reward says that they have the module that the actor made.
            assert actor.stdout.readline() == "[1.0, 1.0] 0\n"
            # Reaches every process but the workers, which lead sessions of their own, and ends none.
            os.killpg(actor.pid, signal.SIGTERM)
        assert len(draws - {"printed:"}) == 8, "they draw the same numbers"
        assert (tmp_path / "errors").read_text() == "printed: a library speaks\n" * 4, "a handler of the actor's has written it"
        actor.kill()
        until(lambda: all(processes.has_ended(pid) for pid in pids))
    assert len(set(pids)) == 4


def test_signals_of_the_group_end_neither_forker_nor_worker(light: None, end: socket.socket) -> None:
    forks = WorkerStarts(forks=True, has_parser=False)
    worker = forks.start(end)
    assert isinstance(worker, Fork)
    assert isinstance(forks._forker, subprocess.Popen)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(forks._forker.pid, number)
    second = forks.start(end)
    assert isinstance(second, Fork)
    assert not processes.has_ended(worker.pid)
    end_now(worker)
    assert processes.has_ended(worker.pid)
    # A second time it may mean another process.
    end_now(worker)
    forks.close()
    until(lambda: processes.has_ended(second.pid))
    forks.close()


def test_dead_forker_is_replaced_by_new_interpreters(light: None, end: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    forks = WorkerStarts(forks=True, has_parser=False)
    first = forks.start(end)
    assert forks._forker is not None
    forks._forker.kill()
    until(lambda: processes.has_ended(first.pid))
    second = forks.start(end)
    assert isinstance(second, subprocess.Popen)
    assert "environment workers cannot be forked" in caplog.text
    end_now(second)
    end_now(forks.start(end))
    assert caplog.text.count("cannot be forked") == 1


def test_process_whose_imports_start_threads_is_not_forked(
    end: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_forker(monkeypatch, imports="threading.Thread(target=time.sleep, args=(600,), daemon=True).start()")
    forks = WorkerStarts(forks=True, has_parser=False)
    worker = forks.start(end)
    assert isinstance(worker, subprocess.Popen)
    assert "the imports have started threads" in caplog.text
    end_now(worker)


def test_starts_are_closed_with_their_workers_also_where_none_could_start(monkeypatch: pytest.MonkeyPatch) -> None:
    use_forker(monkeypatch, worker="os._exit(0)")
    starts = WorkerStarts(forks=True, has_parser=False)
    forker = starts._forker
    assert forker is not None
    with pytest.raises(ServiceError, match="an environment worker cannot start"):
        Workers(Begin(config=Config(), model=""), starts)
    until(lambda: processes.has_ended(forker.pid))


@pytest.mark.parametrize(
    ("name", "value"), [("has_gpu", lambda: True), ("_can_watch_processes", lambda: False), ("OMP_NUM_THREADS", "4")]
)
def test_nothing_is_forked_where_a_fork_is_not_safe_or_not_known(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | Callable[[], bool]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(worker_starts, "has_gpu", lambda: False)
    assert can_fork()
    if isinstance(value, str):
        monkeypatch.setenv(name, value)
    else:
        monkeypatch.setattr(worker_starts, name, value)
    assert not can_fork()


def end_now(process: Fork | subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def until(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_the_settings_file_says_of_an_environment_reaches_its_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[task]\nenvironment = "games:play"\n[environment]\nidentical_requests = "sample_again"\nsampling = "override"\n'
        "workers = 3\narguments = { level = 2 }\n[model]\nmax_length = 77\n"
    )
    monkeypatch.setattr(workers_module, "Workers", lambda begin, starts: begin)
    begin = cast(Begin, workers_module.start_workers(load(file), tmp_path))
    config, settings = begin.config, begin.config.environment
    assert (config.task.environment, config.model.max_length, settings.workers) == ("games:play", 77, 3)
    assert (settings.identical_requests, settings.sampling, settings.arguments) == ("sample_again", "override", {"level": 2})
