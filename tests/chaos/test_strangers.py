"""The fault that takes the learner's descriptors: a crowd of silent connections at the hub."""

import contextlib
import resource
import threading
import time
from pathlib import Path

import pytest

from offbeat.common.processes.files import raise_limit
from offbeat.protocols.channels import Hub, Link
from tests.chaos import chaos, faults
from tests.chaos.faults import Attempt, Committed, Scene, commit
from tests.chaos.machine import Clock
from tests.chaos.network import Proxy
from tests.chaos.schedule import Fault, Target
from tests.chaos.strangers import crowd
from tests.chaos.test_chaos import Sleepers, fault
from tests.process_ends import kill_and_wait
from tests.protocols.sockets import ANY_PORT, LIMIT, PATIENCE_S, introduce, port_of


class Bystanders:
    """Services that the fault does not touch itself."""

    def find(self, target: Target) -> int:
        raise AssertionError("no process is needed")

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def try_learner(self, *settings: str) -> Attempt:
        raise AssertionError("no second learner is needed")


class EnoughError(Exception):
    """Raised in the pause of a crowd that may go."""


def test_crowd_is_replaced_as_the_hub_sends_it_away_and_honest_peers_are_heard() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Tests before this one may have left the process with many files open.
    highest = max(int(descriptor.name) for descriptor in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 200, hard[1]))
    try:
        hub = Hub(ANY_PORT, max_message_bytes=LIMIT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, hard)

    def pause(seconds: float) -> None:
        time.sleep(seconds)
        # Of the first hundred a quarter of a third of the limit may stay. More were sent away: they had come again.
        if hub.connections.num_closed > 100:
            raise EnoughError

    def gather() -> None:
        with contextlib.suppress(EnoughError):
            crowd("127.0.0.1", port_of(hub), size=100, duration_s=PATIENCE_S, pause=pause)

    with hub, Link(hub.address, identity=b"a", max_message_bytes=LIMIT) as link:
        crowding = threading.Thread(target=gather)
        crowding.start()
        introduce(hub, link)
        crowding.join()
        introduce(hub, link)
    assert hub.connections.num_closed > 100


def test_fault_says_how_many_came_and_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "NUM_STRANGERS", 20)
    raise_limit()
    network = Proxy()
    with Hub(ANY_PORT, max_message_bytes=LIMIT) as hub:
        scene = Scene(Bystanders(), network, Clock(tmp_path), None, None, tmp_path, tmp_path, port_of(hub))
        committed = commit(Fault("descriptors gone", "learner", at_step=1, delay_s=0.0, duration_s=0.2, seed=1), scene)
    network.close()
    assert committed.detail == "20 silent connections to the hub in 0.2 s"


def test_strangers_of_other_protocols_are_said_to_have_spoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "STRANGERS_S", 0.1)
    sleepers, network = Sleepers(), Proxy()
    with Hub(ANY_PORT, max_message_bytes=LIMIT) as hub:
        scene = Scene(sleepers, network, Clock(tmp_path), None, None, tmp_path, tmp_path, port_of(hub))
        committed = commit(fault("strangers speak"), scene)
        assert committed == Committed("7 strangers spoke other protocols to the hub", has_hit=True)
        monkeypatch.setattr(sleepers, "pause", lambda _: kill_and_wait(sleepers.find("learner")))
        assert commit(fault("strangers speak"), scene).violations == ("strangers of other protocols ended the learner",)
    sleepers.close()
    network.close()


def test_semaphore_that_no_living_process_has_is_left_over(tmp_path: Path) -> None:
    before = chaos._semaphores()
    left = Path(f"/dev/shm/sem.mp-{tmp_path.name[-8:]}{time.time_ns()}")
    left.write_bytes(b"")
    try:
        assert str(left) in chaos._left_over(tmp_path / "gone", "no such mark", before)
    finally:
        left.unlink()
