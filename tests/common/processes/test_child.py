"""Nothing that a guarded child has started outlives it, whatever ends it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
from offbeat.common.processes.child import guard_session

guard_session()
memory = SharedMemory(create=True, size=64)
child = subprocess.Popen(["sh", "-c", "sleep 60 & echo started; wait"], stdout=subprocess.PIPE, text=True, process_group=0)
child.stdout.readline()
print("ready", memory.name, flush=True)
sys.stdin.read(1)
"""


def session_of(leader: int) -> list[int]:
    """Return the living processes of a session."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[3]) == leader:
            members.append(int(stat.parent.name))
    return members


def wait_for(is_so: Callable[[], bool]) -> bool:
    """Return True when the claim comes true within ten seconds."""
    deadline = time.monotonic() + 10
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_so()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the guard")
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_what_a_guarded_process_has_started_ends_with_it(end: str) -> None:
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        ready, _, name = process.stdout.readline().strip().partition(" ")
        assert ready == "ready"
        memory = Path("/dev/shm") / name
        assert memory.exists()
        # The guard leaves the session a moment after its fork.
        assert wait_for(lambda: len(session_of(process.pid)) == 4), "the process, its child, its grandchild, and their tracker"
        if end == "kill":
            process.send_signal(signal.SIGKILL)
        else:
            process.stdin.write("x")
            process.stdin.close()
        process.wait(10)
    assert wait_for(lambda: session_of(process.pid) == [])
    assert not memory.exists()
