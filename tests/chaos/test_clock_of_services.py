"""The clock that a chaos round's services see."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.machine import Clock


def test_clocks_of_the_services_jump_and_return_and_this_process_keeps_its_own(tmp_path: Path) -> None:
    clock = Clock(tmp_path)

    def seen_by(role: str) -> tuple[float, float]:
        program = "import time; print(time.time(), time.time_ns())"
        environment = {**os.environ, **clock.environment()}
        output = subprocess.run(
            [sys.executable, "-c", program, role], env=environment, capture_output=True, text=True, check=True
        ).stdout
        seconds, nanoseconds = output.split()
        return float(seconds) - time.time(), int(nanoseconds) / 1e9 - time.time()

    clock.jump("learner", -86_400.0)
    assert seen_by("learner") == pytest.approx((-86_400, -86_400), abs=30)
    assert seen_by("actor") == pytest.approx((0, 0), abs=30)
    clock.jump("learner", 0.0)
    assert seen_by("learner") == pytest.approx((0, 0), abs=30)


def test_clock_can_be_read_where_no_descriptor_is_left(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    clock.jump("learner", 3600.0)
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))"
    program = f"import time, resource; before = time.time(); {limit}; print(time.time() - before)"
    environment = {**os.environ, **clock.environment()}
    output = subprocess.run(
        [sys.executable, "-c", program, "learner"], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert 0 <= float(output) < 60
