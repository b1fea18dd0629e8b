"""A program that wants too much is ended at a limit, and the result says which."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offbeat.actor.sandbox import Local, Result, confine, run_sync, use
from offbeat.actor.sandbox.landlock import Landlock
from offbeat.common.processes import process_table as processes

pytestmark = pytest.mark.slow


def run(box: Local, code: str, *, stdin: str = "", timeout_s: float = 5.0, memory_mb: int = 128) -> Result:
    use(box)
    return run_sync(code, stdin=stdin, timeout_s=timeout_s, memory_mb=memory_mb)


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal, time\nfor number in (15, 2, 1, 24): signal.signal(number, signal.SIG_IGN)\ntime.sleep(60)",
        "import os, time\nfor number in range(3): os.close(number)\ntime.sleep(60)",
        "import os, signal, time; os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)",
        "import os, signal, time; os.setsid() if os.getsid(0) != os.getpid() else 0; time.sleep(60)",
    ],
    ids=["busy", "asleep", "ignores signals", "closes its output", "stops itself", "leaves the session"],
)
def test_program_that_does_not_end_is_killed_at_its_deadline(box: Local, code: str) -> None:
    before = set(processes.descendants(os.getpid()))
    result = run(box, code, timeout_s=0.1)
    assert (result.is_timeout, result.exit_code, result.is_out_of_memory) == (True, 137, False), result
    assert result.stderr.endswith("[ended: timeout]")
    assert set(processes.descendants(os.getpid())) <= before


def test_several_threads_have_no_more_cpu_time_than_one(box: Local) -> None:
    # Hashing large data holds no lock, so that the threads run at the same time.
    code = """
import hashlib, threading
data = bytes(1 << 20)
def work():
    while True: hashlib.sha256(data)
for n in range(8): threading.Thread(target=work).start()
"""
    result = run(box, code, timeout_s=0.3)
    assert result.is_timeout


def test_program_that_limits_its_own_cpu_time_has_a_result(box: Local) -> None:
    # At a hard limit of CPU time the kernel sends SIGKILL, as an administrator does who is short of memory.
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n"
    assert run(box, f"{limit}print(resource.getrlimit(resource.RLIMIT_CPU))").stdout == "(-1, -1)\n"
    assert run(box, f"{limit}while True: pass", timeout_s=1.5).is_timeout


def test_no_dead_process_is_left_to_the_first_one_of_a_container(box: Local) -> None:
    adopts_orphans = 36
    ctypes.CDLL(None).prctl(adopts_orphans, 1, 0, 0, 0)
    try:
        before = set(_children())
        run(box, "pass")
        run(box, "import time; time.sleep(60)", timeout_s=0.05)
        assert set(_children()) <= before
    finally:
        ctypes.CDLL(None).prctl(adopts_orphans, 0, 0, 0, 0)


def _children() -> list[str]:
    """Return this process's children, also dead ones."""
    return [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def test_program_ends_with_the_process_that_wanted_it(box: Local, tmp_path: Path) -> None:
    code = f"import time; time.sleep(60)  # {tmp_path}"
    # Without the program that tries the sandbox first, and ends by itself.
    own = f"own = Local({box.backend!r}); own._working = own._candidates()[0]; use(own)"
    asks = f"from offbeat.actor.sandbox import *; {own}; run_sync({code!r}, timeout_s=60)"
    with subprocess.Popen([sys.executable, "-c", asks]) as worker:
        deadline = time.monotonic() + 60
        try:
            while not (started := _programs(worker.pid)) and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            worker.kill()
    assert started
    while not all(map(processes.has_ended, started)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(map(processes.has_ended, started))


def _programs(worker: int) -> list[int]:
    """Return the programs of a worker that have begun: those whose interpreter has taken its limits."""
    candidates = [pid for pid in processes.descendants(worker) if "inside.py" in " ".join(processes.arguments(pid)[-1:])]
    return [pid for pid in candidates if resource.prlimit(pid, resource.RLIMIT_NOFILE) == (64, 64)]


@pytest.mark.parametrize(
    "code",
    ["x = bytearray(200 << 20)", "import mmap; mmap.mmap(-1, 200 << 20)", "x = [0]\nwhile True: x += x"],
)
def test_program_is_out_of_memory(box: Local, code: str) -> None:
    result = run(box, code)
    assert (result.is_out_of_memory, result.exit_code, result.is_timeout) == (True, 1, False), result


def test_program_has_the_memory_that_it_was_given(box: Local) -> None:
    assert run(box, "x = bytearray(200 << 20)", memory_mb=300).exit_code == 0


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_and_the_program_ended(box: Local, stream: str) -> None:
    result = run(box, f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    text = result.stdout if stream == "stdout" else result.stderr.removesuffix("\n[ended: more than 1048576 bytes of output]")
    assert text == "x" * 1048576 + "\n[cut at 1048576 bytes]"
    assert result.exit_code == 137 and not result.is_timeout


DISK = {
    "one file": "file = open('large', 'wb')\nwhile True: file.write(bytes(1 << 20))",
    "many files": "for n in range(64): open(str(n), 'wb').write(bytes(8 << 20))",
    "files without a name": """
import os
held = []
for n in range(40):
    held.append(open('unnamed', 'wb'))
    held[-1].write(bytes(8 << 20))
    os.unlink('unnamed')
import time; time.sleep(1)
""",
    "a tree of folders": """
import os
for n in range(100):
    os.makedirs(f'a/b/{n}')
    open(f'a/b/{n}/file', 'wb').write(bytes(1 << 20))
import time; time.sleep(1)
""",
}


@pytest.mark.parametrize("code", DISK.values(), ids=DISK)
def test_disk_is_bounded(box: Local, code: str) -> None:
    result = run(box, code)
    ends = ("File too large", "No space left on device", "bytes in files]")
    assert result.exit_code in (1, 137) and any(end in result.stderr for end in ends), result


def test_number_of_files_is_bounded(box: Local) -> None:
    result = run(box, "import time\nfor n in range(3000): open(str(n), 'w').close()\ntime.sleep(5)")
    assert result.stderr.endswith("[ended: more than 1000 files]")


def test_number_of_threads_is_bounded(box: Local) -> None:
    code = """
import threading, time
threading.stack_size(1 << 16)
for n in range(200): threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
time.sleep(5)
"""
    assert run(box, code).stderr.endswith("[ended: more than 64 threads]")


def test_program_that_leaves_its_input_alone_ends_well(box: Local) -> None:
    result = run(box, "print('done')", stdin="x" * (4 << 20))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "done\n", "")


def test_folder_of_a_program_is_gone_when_it_ends(box: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run(box, "open('left', 'w').write('x')").exit_code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("last", ["", "\n    os.chmod('.', 0)"], ids=["deep", "without rights"])
def test_folders_that_a_program_nests_are_gone_when_it_ends(
    box: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = f"import os\nwhile True:\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200){last}"
    result = run(box, code, timeout_s=30.0)
    assert result.exit_code != 0 and not result.is_timeout, "it is ended by a limit"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not confine.landlock_version(), reason="the kernel has no Landlock")
def test_folders_of_killed_workers_are_gone_at_the_next_start_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    box = Local("landlock")
    with Landlock().launch(()) as in_use:
        asks = f"import os, tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        asks += "from offbeat.actor.sandbox.landlock import Landlock\n"
        asks += "with Landlock().launch(()) as launch: os.kill(os.getpid(), 9)"
        assert subprocess.run([sys.executable, "-c", asks], check=False).returncode == -signal.SIGKILL
        assert len(list(tmp_path.iterdir())) == 2
        box.check()
        assert len(list(tmp_path.iterdir())) == 2, "a new folder may be locked in a moment"
        for folder in tmp_path.iterdir():
            (folder / "left").mkdir()
            os.utime(folder, (0, 0))
        Local("landlock").check()
        assert [str(folder) for folder in tmp_path.iterdir()] == [in_use.folder]


def test_time_of_a_program_does_not_include_the_start_of_its_sandbox(box: Local) -> None:
    started = time.monotonic()
    result = run(box, "pass")
    assert 0 < result.seconds < time.monotonic() - started
