"""Signals: heeded at once where nothing would look at a flag, and orderly elsewhere."""

import signal
import subprocess
import sys

import pytest

LOADING = """
import time
from offbeat.common.shutdown import StopRequest
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
from offbeat.common.shutdown import StopRequest
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


def test_second_signal_ends_the_process_at_once() -> None:
    process = start(WORKING.replace("AFTER", "time.sleep(60)"))
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "asked by SIGINT\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
