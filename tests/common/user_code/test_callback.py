"""The user's callback gets every row, may stop the run, and can neither hold the learner up nor end it."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.processes import process_table as processes
from offbeat.common.records import row_process
from offbeat.common.records.rows import EventRow, StepRow
from offbeat.common.user_code.callback import Callback
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

MODULE = """
import json, os, sys, time
from pathlib import Path
import offbeat

def keep(row):
    with open("rows.jsonl", "a") as file:
        print(json.dumps(row), file=file)

def fails_on_even(row):
    keep(row)
    if row["policy_version"] % 2 == 0:
        raise KeyError(f"reward at {row['policy_version']}")

def leaves(row):
    keep(row)
    sys.exit(0)

def stops(row):
    keep(row)
    if row["policy_version"] >= 2:
        raise offbeat.StopRun("reward is\\nhigh enough")

def hangs(row):
    Path("hangs").touch()
    while True:
        time.sleep(1)

def waits(row):
    Path("waits").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    keep(row)

def dies(row):
    keep(row)
    os._exit(7)

def two(row, other):
    pass
"""
ENDS = "import os\nos._exit(0)\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, logger="offbeat")
    (tmp_path / "mine.py").write_text(MODULE)
    return tmp_path


@contextmanager
def callback(function: str, reasons: list[str] | None = None, module: str = "mine") -> Iterator[Callback]:
    ask_to_stop = [].append if reasons is None else reasons.append
    with closing(Callback(f"{module}:{function}", Path("logs/callback.log"), ask_to_stop)) as made:
        made.wait_loaded()
        yield made


def step(version: int, **metrics: float) -> StepRow:
    return StepRow(time=1.5, policy_version=version, metrics=metrics)


def kept(name: str = "policy_version") -> list[object]:
    lines = Path("rows.jsonl").read_text().splitlines() if Path("rows.jsonl").exists() else []
    return [json.loads(line)[name] for line in lines]


def test_function_gets_each_row_as_it_stands_in_the_file_and_the_last_before_the_end() -> None:
    with callback("keep") as made:
        made.add(step(1, **{"reward/mean": 0.5, "clip/fraction": float("nan")}))
        made.add(EventRow(time=2.0, event="actor_joined", detail="a"))
    lines = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert lines == [
        {"kind": "step", "time": 1.5, "policy_version": 1, "reward/mean": 0.5, "clip/fraction": None},
        {"kind": "event", "time": 2.0, "event": "actor_joined", "detail": "a"},
    ]


@pytest.mark.parametrize(
    ("function", "error", "num_failed"),
    [("fails_on_even", "KeyError: 'reward at 2'", 20), ("leaves", "SystemExit: 0", 40)],
)
def test_function_that_raises_is_called_again_and_told_about_once_with_the_count(
    function: str, error: str, num_failed: int, caplog: pytest.LogCaptureFixture
) -> None:
    with callback(function) as made:
        for version in range(1, 41):
            made.add(step(version))
    assert kept() == list(range(1, 41))
    first, last = [record.getMessage() for record in caplog.records]
    assert f"mine:{function} raised {error} (" in first
    assert "mine.py:" in first
    assert "1 calls failed so far" in first
    assert f"in all {num_failed} calls failed and 0 rows were dropped" in last
    assert "Traceback" in Path("logs/callback.log").read_text()


def test_stop_run_asks_to_stop_once_with_its_reason_and_rows_go_on() -> None:
    reasons: list[str] = []
    with callback("stops", reasons) as made:
        for version in range(1, 6):
            made.add(step(version))
    assert reasons == ["metrics.callback: reward is high enough"]
    assert kept() == [1, 2, 3, 4, 5]


def test_slow_function_loses_the_oldest_rows_which_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(row_process, "MAX_WAITING_ROWS", 3)
    with callback("waits") as made:
        made.add(step(1))
        wait_for(Path("waits").exists)
        # The pipe takes some before the queue fills.
        for version in range(2, 10_001):
            made.add(step(version))
        Path("go").touch()
    versions = kept()
    num_dropped = 10_000 - len(versions)
    assert num_dropped > 100
    assert versions[-3:] == [9998, 9999, 10_000]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "rows are dropped, 1 so far" in messages[0]
    assert f"in all 0 calls failed and {num_dropped} rows were dropped" in messages[1]


def test_function_that_hangs_is_killed_at_the_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(row_process, "CLOSE_S", 0.5)
    with callback("hangs") as made:
        made.add(step(1))
        wait_for(Path("hangs").exists)
        # As Ctrl-C on a terminal does.
        os.kill(made._rows._process.pid, signal.SIGINT)
    assert made._rows._process.poll() == -signal.SIGKILL
    assert "its process is killed" in caplog.text


HOLDER = """
import sys, time
from pathlib import Path
from offbeat.common.user_code.callback import Callback
from offbeat.common.records.rows import StepRow

callback = Callback("mine:hangs", Path("logs/callback.log"), print)
callback.add(StepRow(time=1.5, policy_version=1, metrics={}))
print(callback._rows._process.pid, flush=True)
time.sleep(60)
"""


def test_process_dies_with_its_learner_even_while_the_function_hangs() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as learner:
        assert learner.stdout is not None
        pid = int(learner.stdout.readline())
        wait_for(Path("hangs").exists)
        learner.kill()
    wait_for(lambda: processes.has_ended(pid))


def test_process_that_dies_is_said_and_later_rows_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with callback("dies") as made:
        made.add(step(1))
        wait_for(lambda: "gets no more rows (status 7)" in caplog.text)
        made.add(step(2))
    assert kept() == [1]
    assert "1 rows were dropped" in caplog.text


@pytest.mark.parametrize(("path", "words"), [("absent", "has no 'absent'"), ("two", "two(row, other) cannot take (row)")])
def test_function_that_cannot_be_called_is_refused_at_the_start(path: str, words: str) -> None:
    with pytest.raises(SettingError) as raised, callback(path):
        pass
    assert str(raised.value).startswith(f'metrics.callback = "mine:{path}"')
    assert words in str(raised.value)


def test_module_that_ends_its_process_is_refused_at_the_start(home: Path) -> None:
    (home / "ends.py").write_text(ENDS)
    with (
        pytest.raises(SettingError, match=r'metrics\.callback = "ends:f": importing it ended the process'),
        callback("f", module="ends"),
    ):
        pass
