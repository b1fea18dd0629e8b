"""Claims about `common.logs`, each checked in a fresh process: logging is process-wide."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SPEAK = """
import logging
logging.getLogger("offbeat.learner.service").debug("own debug")
logging.getLogger("offbeat.learner.service").info("own info [1/2]")
logging.getLogger("httpx").info("foreign info")
logging.getLogger("httpx").warning("foreign warning")
"""


def run(code: str, stderr: int = subprocess.PIPE, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "OFFBEAT_LOG_LEVEL"} | variables
    code = "from offbeat.common.logs import configure_logs\n" + code
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
    )


def test_plain_lines_hold_time_level_service_message():
    result = run("configure_logs('actor-0')" + SPEAK)
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(f"{time} INFO actor-0 own info \\[1/2\\]\n{time} WARNING actor-0 foreign warning\n", result.stderr)
    assert result.stdout == ""


def test_terminal_gets_one_short_line_per_event():
    ours, theirs = pty.openpty()
    run("configure_logs('learner')" + SPEAK, stderr=theirs, TERM="xterm", COLUMNS="100")
    os.close(theirs)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(ours, 65536).decode())
    os.close(ours)
    lines = [line.rstrip() for line in text.splitlines()]
    assert len(lines) == 2
    assert lines[0].endswith("learner  own info [1/2]")
    assert lines[1].endswith("learner  foreign warning")
    assert "Z " not in lines[0], "rich's own time, not the plain one"


def test_variable_sets_the_level_and_the_argument_wins():
    assert "own debug" in run("configure_logs('learner')" + SPEAK, OFFBEAT_LOG_LEVEL="debug").stderr
    assert "own info" not in run("configure_logs('learner', level='warning')" + SPEAK, OFFBEAT_LOG_LEVEL="debug").stderr


def test_unknown_level_is_refused_by_the_name_of_its_source():
    result = run("configure_logs('learner')", OFFBEAT_LOG_LEVEL="loud")
    assert result.returncode != 0
    assert "OFFBEAT_LOG_LEVEL = 'loud' is not a log level; use one of: debug, info, warning, error" in result.stderr


def test_second_call_replaces_the_first():
    result = run("configure_logs('a'); configure_logs('b')" + SPEAK)
    assert result.stderr.count("own info") == 1
    assert " b own info" in result.stderr


@pytest.mark.engine
def test_vllm_shows_warnings_but_no_infos():
    code = """
configure_logs('actor-0')
from vllm.logger import init_logger
init_logger('vllm.engine').info('quiet please')
init_logger('vllm.engine').warning('this matters')
"""
    result = run(code, VLLM_TARGET_DEVICE="cpu")
    assert "this matters" in result.stderr
    assert "quiet please" not in result.stdout + result.stderr


def test_event_that_quotes_hostile_text_is_one_line_without_control_characters():
    speak = r"""
configure_logs('learner')
import logging
try:
    raise ValueError("bad\x1b[31m\n2026-01-01T00:00:00.000Z INFO learner forged")
except ValueError as error:
    logging.getLogger("offbeat.x").warning("%s", error)
    logging.getLogger("offbeat.x").exception("traceback")
"""
    lines = run(speak).stderr.splitlines()
    assert lines[0].endswith(r"bad\x1b[31m\n2026-01-01T00:00:00.000Z INFO learner forged")
    assert not any("\x1b" in line for line in lines)
    assert sum(line.endswith("ERROR learner traceback") for line in lines) == 1
