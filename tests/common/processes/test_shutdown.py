"""Signals: they take effect at once where nothing would look at a flag, and orderly elsewhere."""

import os
import signal
import subprocess
import sys

import pytest

LOADING = """
import time
from offbeat.common.processes.shutdown import StopRequest
stop = StopRequest().install()
try:
    with stop.at_once("nothing is lost; to go on: offbeat train run.toml"):
        print("ready", flush=True)
        time.sleep(60)
finally:
    print("closed", flush=True)
"""

WORKING = """
import time
from offbeat.common.processes.shutdown import StopRequest
stop = StopRequest().install()
with stop.at_once("never said"):
    pass
print("ready", flush=True)
while not stop:
    time.sleep(0.01)
print("asked by", stop.reason, flush=True)
AFTER
"""


def start(program: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signal_during_work_that_looks_at_no_flag_ends_the_process_with_what_was_kept(number: int, status: int) -> None:
    process = start(LOADING)
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == status
    assert errors == f"{signal.Signals(number).name}: nothing is lost; to go on: offbeat train run.toml\n"
    assert output == "closed\n", "contexts are left in order"


def test_signal_elsewhere_is_acknowledged_at_once_and_ends_the_work_in_order() -> None:
    process = start(WORKING.replace("AFTER", ""))
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "asked by SIGINT\n")
    assert errors == "SIGINT: stops after the work under way; again: ends at once\n"


def test_closed_terminal_ends_the_work_in_order_although_it_says_so_twice() -> None:
    # The tests may be run by nohup.
    heeded = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    process = start(heeded + WORKING.replace("AFTER", "time.sleep(0.5)"))
    assert process.stderr is not None
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    assert process.stdout is not None and process.stdout.readline() == "asked by SIGHUP\n"
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=30) == 0


def test_nohup_keeps_the_work_going_when_its_terminal_is_closed() -> None:
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    process = start(ignored + WORKING.replace("AFTER", ""))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert output == "asked by SIGTERM\n"


def test_signal_after_a_wish_to_stop_is_a_first_signal_and_the_wish_stays_the_reason() -> None:
    asked = WORKING.replace('print("ready"', "stop.ask('enough')\nprint(\"ready\"", 1)
    asked = asked.replace("while not stop:", "while not stop._is_signalled:").replace("AFTER", "")
    process = start(asked)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "asked by enough\n")
    assert errors == "SIGTERM: stops after the work under way; again: ends at once\n"


def test_second_signal_ends_the_process_at_once() -> None:
    process = start(WORKING.replace("AFTER", "time.sleep(60)"))
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "asked by SIGINT\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT


ENDING = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from offbeat.common.processes.shutdown import end_process

class Module:
    def __del__(self):
        print("torn down")

kept = Module()
atexit.register(print, "exit function")
written = threading.Event()
threading.Thread(target=lambda: (written.wait(), time.sleep(0.2), print("thread"))).start()
ThreadPoolExecutor(1).submit(print, "pool").result()
sys.stdout.write("flushed ")
written.set()
end_process(7)
"""


def test_process_ends_with_its_threads_exit_functions_and_output_but_frees_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 7
    assert ended.stdout.splitlines() == ["pool", "flushed thread", "exit function"]
    assert ended.stderr == ""


def test_process_whose_output_nobody_reads_any_more_ends_with_its_own_status() -> None:
    program = (
        "import sys; from offbeat.common.processes.shutdown import end_process; sys.stdout.write('x' * 10); end_process(3)"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(30) == 3
    assert process.stderr.read() == b""
    process.stderr.close()
