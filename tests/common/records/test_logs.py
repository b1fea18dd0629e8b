"""Claims about `common.records.logs`, most of them checked in a fresh process: logging is process-wide."""

import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from offbeat.common.records.logs import bound_log

ROOT = Path(__file__).parents[3]

SPEAK = """
import logging
logging.getLogger("offbeat.learner.service").debug("own debug")
logging.getLogger("offbeat.learner.service").info("own info [1/2]")
logging.getLogger("httpx").info("foreign info")
logging.getLogger("httpx").warning("foreign warning")
"""


def run(code: str, stderr: int = subprocess.PIPE, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "OFFBEAT_LOG_LEVEL"} | variables
    code = "from offbeat.common.records.logs import configure_logs\n" + code
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
    )


def test_plain_lines_hold_time_level_service_message():
    result = run("configure_logs('actor-0')" + SPEAK)
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(f"{time} INFO actor-0 own info \\[1/2\\]\n{time} WARNING actor-0 foreign warning\n", result.stderr)
    assert result.stdout == ""


def test_json_lines_hold_the_same_for_collectors(tmp_path: Path):
    code = f"""
from pathlib import Path
from offbeat.common.records.logs import log_to_file
configure_logs('actor-0')
log_to_file(Path({str(tmp_path / "actor.log")!r}), 'actor-0')
{SPEAK}
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("offbeat.x").exception("two\\nlines")
"""
    lines = run(code, OFFBEAT_LOG_FORMAT="json").stderr.splitlines()
    first, foreign, failed = [json.loads(line) for line in lines]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "INFO",
        "service": "actor-0",
        "logger": "offbeat.learner.service",
        "message": "own info [1/2]",
    }
    assert foreign["level"] == "WARNING" and failed["message"] == "two\nlines"
    assert failed["exception"].endswith("ZeroDivisionError: division by zero")
    assert (tmp_path / "actor.log").read_text().splitlines() == lines
    refused = run("configure_logs('learner')", OFFBEAT_LOG_FORMAT="xml")
    assert 'OFFBEAT_LOG_FORMAT = "xml": this is not a log format. Use one of: text, json.' in refused.stderr


def test_log_leaves_the_level_of_vllm_to_the_environment_of_the_service():
    code = "import os\nos.environ.pop('VLLM_LOGGING_LEVEL', None)\nconfigure_logs('actor-0')\n"
    assert run(f"{code}assert 'VLLM_LOGGING_LEVEL' not in os.environ").returncode == 0


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


def test_variable_sets_the_level():
    assert "own debug" in run("configure_logs('learner')" + SPEAK, OFFBEAT_LOG_LEVEL="debug").stderr
    assert "own info" not in run("configure_logs('learner')" + SPEAK, OFFBEAT_LOG_LEVEL="warning").stderr


def test_unknown_level_is_refused_by_the_name_of_its_source():
    result = run("configure_logs('learner')", OFFBEAT_LOG_LEVEL="loud")
    assert result.returncode != 0
    assert 'OFFBEAT_LOG_LEVEL = "loud": this is not a log level. Use one of: debug, info, warning, error' in result.stderr


def test_second_call_replaces_the_first():
    result = run("configure_logs('a'); configure_logs('b')" + SPEAK)
    assert result.stderr.count("own info") == 1
    assert " b own info" in result.stderr


@pytest.mark.engine
@pytest.mark.vllm
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


def test_repeated_warnings_are_shown_with_a_count_and_the_file_has_them_all(tmp_path: Path):
    log = tmp_path / "logs" / "learner.log"
    code = f"""
import logging
from pathlib import Path
from offbeat.common.records.logs import log_to_file
configure_logs('learner')
log_to_file(Path({str(log)!r}), 'learner')
for lease in range(28):
    logging.getLogger('offbeat.learner').warning('reward_error lease %d', lease)
"""
    lines = run(code).stderr.splitlines()
    assert [line.split("learner ", 1)[1] for line in lines] == [
        "reward_error lease 0",
        "27 more like this, the last one: reward_error lease 27",
    ]
    kept = log.read_text().splitlines()
    assert len(kept) == 28 and kept[27].endswith("WARNING learner reward_error lease 27")


def test_log_file_goes_on_and_is_bounded(tmp_path: Path):
    log = tmp_path / "learner.log"
    log.write_text("earlier\n")
    code = f"""
import logging
from pathlib import Path
from offbeat.common.records import logs
logs.MAX_FILE_BYTES = 4000
configure_logs('learner')
logs.log_to_file(Path({str(log)!r}), 'learner')
logging.getLogger('offbeat').info('first')
if MANY:
    for index in range(500):
        logging.getLogger('offbeat').info('line %d', index)
"""
    run(code.replace("MANY", "False"))
    assert [line.split()[-1] for line in log.read_text().splitlines()] == ["earlier", "first"]
    run(code.replace("MANY", "True"))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"learner.log", "learner.log.1"} and max(sizes.values()) <= 4000
    assert log.read_text().endswith("line 499\n")


def test_work_that_takes_long_says_so():
    code = """
import logging, time
from offbeat.common.records import logs
logs.STILL_S = 0.02
configure_logs('learner')
with logs.doing(logging.getLogger('offbeat'), 'loading the model'):
    time.sleep(0.3)
"""
    lines = [line.split("learner ", 1)[1] for line in run(code).stderr.splitlines()]
    assert lines[:2] == ["loading the model ...", "still loading the model, 0 s so far"]
    assert all(line.startswith("still loading the model") for line in lines[1:])


STUCK = """
import logging, sys
from pathlib import Path
from offbeat.common.records.logs import configure_logs, log_to_file
configure_logs("learner")
log_to_file(Path(sys.argv[1]), "learner")
logger = logging.getLogger("offbeat.learner.service")
for number in range(3000):
    logger.info("step %d %s", number, "x" * 100)
print("done", flush=True)
sys.stdin.readline()
logger.info("somebody reads again")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "terminal that Ctrl-S stopped"])
def test_output_that_nobody_reads_costs_lines_and_stops_nothing(tmp_path: Path, kind: str):
    if kind == "pipe":
        ours, theirs = os.pipe()
    else:
        ours, theirs = pty.openpty()
        termios.tcflow(theirs, termios.TCOOFF)
    environment = {name: value for name, value in os.environ.items() if name != "OFFBEAT_LOG_LEVEL"} | {"TERM": "dumb"}
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(tmp_path / "learner.log")],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    assert process.stdin and process.stdout
    try:
        assert select.select([process.stdout], [], [], 60)[0], "the program waits for a reader"
        assert process.stdout.readline() == "done\n"
        if kind != "pipe":
            termios.tcflow(theirs, termios.TCOON)
        os.set_blocking(ours, False)
        before = read_all(ours)
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(60) == 0
        after = read_all(ours)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(ours)
        os.close(theirs)
    shown = before.count("step ")
    lines = (before + after).splitlines()
    assert f"... {3000 - shown - after.count('step ')} messages were not shown, because nobody read them" in after
    assert lines[-1].endswith("somebody reads again")
    assert all(line.endswith("x") for line in lines if "step " in line), "no line is torn"
    assert (tmp_path / "learner.log").read_text().count("step ") == 3000, "the file has all of them"


def read_all(descriptor: int) -> str:
    parts: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


def test_printed_text_cannot_pass_for_a_line_of_the_log():
    forged = "2026-01-01T00:00:00.000Z INFO learner step 999/100"
    code = f"""
import logging, sys
from offbeat.common.records.logs import PrintedText
configure_logs("actor-0")
sys.stdout, sys.stderr = PrintedText(sys.stdout), PrintedText(sys.stderr)
print("a\\n{forged}\\x1b[2J")
print("half ", end="", flush=True)
print("a line")
print("{forged}", file=sys.stderr)
logging.getLogger("offbeat.actor").info("own line")
"""
    result = run(code)
    assert result.stdout.splitlines() == ["printed: a", f"printed: {forged}\\x1b[2J", "printed: half a line"]
    printed, own = result.stderr.splitlines()
    assert printed == f"printed: {forged}"
    assert re.fullmatch(r"\S+Z INFO actor-0 own line", own)


def test_log_file_on_a_full_disk_costs_its_lines_and_no_tracebacks(tmp_path: Path):
    (tmp_path / "learner.log").symlink_to("/dev/full")
    code = "from pathlib import Path\nfrom offbeat.common.records.logs import log_to_file\nconfigure_logs('learner')\n"
    result = run(code + f"log_to_file(Path({str(tmp_path / 'learner.log')!r}), 'learner')" + SPEAK)
    assert result.returncode == 0
    assert [line.partition("Z ")[2] for line in result.stderr.splitlines()] == [
        "INFO learner own info [1/2]",
        "WARNING learner foreign warning",
    ]


def test_bounded_log_on_a_full_disk_loses_its_older_part_and_goes_on(tmp_path: Path):
    log, older = tmp_path / "actor-0.log", tmp_path / "actor-0.log.1"
    log.write_bytes(b"x" * 1001)
    older.symlink_to("/dev/full")
    bound_log(log, 1000)
    assert log.read_bytes() == b""
    # The part of it that fitted takes no room either.
    assert not os.path.lexists(older)
