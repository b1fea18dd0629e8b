"""A killed group of processes leaves nothing behind."""

import subprocess
import sys
import time
from pathlib import Path

from offbeat.common.processes import process_table as processes
from tests.process_ends import is_mapped, kill_and_wait

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
    assert is_mapped(semaphores[0])
    processes.kill_group(process.pid)
    process.wait()
    assert not [path for path in semaphores if path.exists()]
    assert not is_mapped(semaphores[0])


def test_group_whose_leader_was_killed_before_leaves_none_either() -> None:
    process, semaphores = start()
    kill_and_wait(process.pid)
    processes.kill_group(process.pid)
    process.wait()
    assert not [path for path in semaphores if path.exists()]


def test_process_whose_first_thread_alone_has_ended_has_not() -> None:
    program = (
        "import ctypes, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print(flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    status = Path(f"/proc/{process.pid}/stat")
    while status.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert not processes.has_ended(process.pid)
    kill_and_wait(process.pid)
    assert processes.has_ended(process.pid)
    process.wait()
    process.stdin.close()
    process.stdout.close()
