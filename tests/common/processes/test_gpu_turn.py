"""Learner and actors use a GPU in turns, whoever dies or gets stuck."""

import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from offbeat.common.errors import ServiceError
from offbeat.common.processes import gpu_turn
from offbeat.common.processes.gpu_turn import ActorTurn, LearnerTurn
from offbeat.common.processes.shutdown import StopRequest
from tests.process_ends import kill_and_wait
from tests.waiting import wait_for

HOLDER = """
import sys, time
from pathlib import Path
from offbeat.common.processes.gpu_turn import ActorTurn, LearnerTurn
from offbeat.common.processes.shutdown import StopRequest

file = Path(sys.argv[2])
if sys.argv[1] == "actor":
    ActorTurn(file).begin()
    print("has the GPU", flush=True)
    time.sleep(60)
with LearnerTurn(file).taken(StopRequest()):
    print("has the GPU", flush=True)
    time.sleep(60)
"""


class Engine:
    """An engine that notes when it was put to sleep and woken."""

    def __init__(self, file: Path, events: list[str], name: str) -> None:
        turn = ActorTurn(file)
        turn.begin()
        self.look = partial(turn.look, lambda: events.append(f"{name} sleeps"), lambda: events.append(f"{name} wakes"))


def test_learner_trains_while_all_engines_sleep_and_they_wake_afterwards(tmp_path: Path) -> None:
    events: list[str] = []
    first, second = (Engine(tmp_path / "turn", events, name) for name in ("a", "b"))
    learner, may_end = LearnerTurn(tmp_path / "turn"), threading.Event()

    def train() -> None:
        with learner.taken(StopRequest()):
            events.append("trains")
            may_end.wait()
            events.append("has trained")

    assert first.look()
    training = threading.Thread(target=train, daemon=True)
    training.start()
    wait_for(lambda: not first.look())
    # The second one's step goes on.
    time.sleep(5 * gpu_turn.LOOK_S)
    assert events == ["a sleeps"]
    wait_for(lambda: not second.look())
    wait_for(lambda: "trains" in events)
    assert not first.look()
    assert not second.look()
    may_end.set()
    training.join()
    assert first.look()
    assert second.look()
    assert events == ["a sleeps", "b sleeps", "trains", "has trained", "a wakes", "b wakes"]


def test_actor_that_starts_waits_for_the_end_of_the_learners_turn(tmp_path: Path) -> None:
    with LearnerTurn(tmp_path / "turn").taken(StopRequest()):
        assert not ActorTurn(tmp_path / "turn").try_to_begin()
        started = threading.Thread(target=ActorTurn(tmp_path / "turn").begin, daemon=True)
        started.start()
        started.join(5 * gpu_turn.LOOK_S)
        assert started.is_alive()
    started.join(20)
    assert not started.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("service", ["actor", "learner"])
def test_turn_of_a_killed_process_is_over(tmp_path: Path, service: str) -> None:
    arguments = [sys.executable, "-c", HOLDER, service, str(tmp_path / "turn")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    actor = ActorTurn(tmp_path / "turn")
    assert actor.is_wanted() is (service == "learner")
    kill_and_wait(process.pid)
    process.wait()
    assert actor.try_to_begin()
    actor.end()
    with LearnerTurn(tmp_path / "turn").taken(StopRequest()):
        assert actor.is_wanted()


def test_actor_that_keeps_the_gpu_ends_the_learners_wait_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu_turn, "LONGEST_S", 0.1)
    monkeypatch.setattr(gpu_turn, "LONG_S", 0.03)
    stuck = ActorTurn(tmp_path / "turn")
    stuck.begin()
    with (
        pytest.raises(ServiceError, match=r"an actor has kept the GPU for 0\.1 s"),
        LearnerTurn(tmp_path / "turn").taken(StopRequest()),
    ):
        pytest.fail("the engine is awake")
    assert "waiting for the actors to give up the GPU" in caplog.text
    # The learner wants it no more.
    assert ActorTurn(tmp_path / "turn").try_to_begin()


def test_learner_that_is_asked_to_stop_does_not_wait_for_an_actor_that_keeps_the_gpu(tmp_path: Path) -> None:
    stuck, stop = ActorTurn(tmp_path / "turn"), StopRequest()
    stuck.begin()
    signal = threading.Timer(5 * gpu_turn.LOOK_S, stop.ask, ["SIGINT"])
    signal.start()
    with LearnerTurn(tmp_path / "turn").taken(stop) as is_taken:
        assert not is_taken
    signal.join()
    assert ActorTurn(tmp_path / "turn").try_to_begin()
