"""A pool of actors on a real Ray, with a script in the place of `offbeat`."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offbeat.common.processes import process_table as processes
from offbeat.deploy.clusters.ray_pool import LearnerAccess, RayPool

pytestmark = pytest.mark.extras

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
folder, arguments = Path(sys.argv[1]), sys.argv[2:]
stays = []
signal.signal(signal.SIGTERM, lambda *_: stays.append(False))
name = next(word for word in arguments if word.startswith("actor.name=")).removeprefix("actor.name=")
(folder / name).write_text(f"{os.getpid()} {' '.join(arguments)}")
while not stays or (folder / "hold").exists():
    time.sleep(0.05)
"""
WAIT_S = 60.0


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the package, connected to a cluster of one node with room for two actors, in namespaces of the test's own."""
    import ray  # pyright: ignore[reportMissingImports]

    # Ray keeps a token there.
    monkeypatch.setenv("HOME", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {"OFFBEAT_TEST_SCRIPT": str(script), "OFFBEAT_TEST_FOLDER": str(tmp_path)}
    # The paths of sockets have to be short.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        namespace="offbeat:a",
        runtime_env={"env_vars": variables},
        _temp_dir=str(folder),
    )
    yield ray
    ray.shutdown()
    shutil.rmtree(folder)


def wait_for(claim: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not claim():
        assert time.monotonic() < deadline, f"not so: {what}"
        time.sleep(0.1)


def holder() -> Any:
    """Return a holder that starts the script; it is sent to Ray's processes as it stands here."""
    from offbeat.deploy.clusters import ray_pool as ray_host

    class Holder(ray_host.Host):
        def __init__(self, name: str, meeting: LearnerAccess) -> None:
            import os
            import sys

            ray_host.PROGRAM = (sys.executable, os.environ["OFFBEAT_TEST_SCRIPT"], os.environ["OFFBEAT_TEST_FOLDER"])
            super().__init__(name, meeting)

    return Holder


def test_actors_start_wait_for_room_leave_and_leave_nothing_behind(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.deploy.clusters.ray_pool.ANSWER_S", 1.0)
    meeting = LearnerAccess("tcp://learner:5700", "the secret key", "the learner's")
    pool = RayPool(meeting, 0, holder())
    assert pool.running() == []
    pool.start(3)
    wait_for(lambda: len(list(tmp_path.glob("actor-*"))) == 2, "two actors found room")
    wait_for(lambda: [actor.state for actor in pool.running()] == ["working", "working", "starting"], "the third waits")
    first, second, third = (actor.name for actor in pool.running())
    pid, *arguments = (tmp_path / first).read_text().split()
    assert arguments[:4] == ["actor", "--join", "tcp://learner:5700", f"actor.name={first}"]
    key = Path(arguments[arguments.index("--key") + 1].replace("self", pid))
    assert key.read_text() == "the secret key"
    assert key.stat().st_mode & 0o777 == 0o600

    (tmp_path / "hold").touch()
    pool.release([first, third])
    wait_for(lambda: [actor.state for actor in pool.running()] == ["leaving", "working"], "one leaves, the wish is taken back")
    again = RayPool(meeting, 0, holder())
    assert [actor.state for actor in again.running()] == ["leaving", "working"]
    (tmp_path / "hold").unlink()
    wait_for(lambda: [actor.name for actor in again.running()] == [second], "the first has left")
    assert processes.has_ended(int(pid))

    # Room came free, and an actor that dies frees its own.
    killed = int((tmp_path / second).read_text().split()[0])
    ray.kill(ray.get_actor(second))
    wait_for(lambda: pool.running() == [], "the dead one is not counted")
    wait_for(lambda: processes.has_ended(killed), "its process died with it")
