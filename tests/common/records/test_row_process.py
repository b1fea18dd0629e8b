"""A process that gets rows is waited for until its deadline, which counts from the first request to end."""

import logging
import sys
from pathlib import Path

import pytest

from offbeat.common.records import row_process
from offbeat.common.records.row_process import RowProcess

pytestmark = pytest.mark.slow


def test_several_processes_that_were_asked_to_end_together_have_one_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="offbeat")
    command = [sys.executable, "-c", "import time; time.sleep(100)"]
    process = RowProcess("metrics.mine", command, tmp_path / "log", lambda line: None, lambda process: "")
    monkeypatch.setattr(row_process, "CLOSE_S", 0.0)
    process.ask_to_end()
    # The time that waiting for another one took.
    monkeypatch.setattr(row_process, "CLOSE_S", 1000.0)
    assert process.close() == 0
    assert "its process is killed" in caplog.text
