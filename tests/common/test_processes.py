"""A killed group of processes leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

from offbeat.common import processes

PROGRAM = """
import multiprocessing, time
context = multiprocessing.get_context("spawn")
locks = [context.Lock() for _ in range(4)]
print(*(lock._semlock.name for lock in locks), flush=True)
time.sleep(60)
"""


def start() -> tuple[subprocess.Popen, list[Path]]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], process_group=0, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [Path(f"/dev/shm/sem.{name.removeprefix('/')}") for name in process.stdout.readline().split()]


def test_killed_group_leaves_no_semaphores() -> None:
    process, semaphores = start()
    assert all(path.exists() for path in semaphores)
    assert processes.is_mapped(semaphores[0])
    processes.kill_group(process.pid)
    process.wait()
    assert not [path for path in semaphores if path.exists()]
    assert not processes.is_mapped(semaphores[0])


def test_group_whose_leader_was_killed_before_leaves_none_either() -> None:
    process, semaphores = start()
    processes.kill(process.pid)
    processes.kill_group(process.pid)
    process.wait()
    assert not [path for path in semaphores if path.exists()]
