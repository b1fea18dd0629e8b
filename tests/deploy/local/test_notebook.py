"""`offbeat.train` from Python: rows as they come, errors in the command's words, and no process left however it ends."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.common.processes import process_table as processes
from offbeat.deploy.local import notebook
from offbeat.deploy.local.notebook import Run, start
from tests.deploy.services import SERVICES_S, write_config
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

COMMAND = '''
"""Stands for `offbeat`: notes its arguments, dies with its parent as `offbeat` does, then does what the file `script` says."""
import json, os, signal, sys, time
from pathlib import Path
from offbeat.common.processes.shutdown import PARENT_VARIABLE, StopRequest, die_with_parent

die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
stop = StopRequest().install()
here = Path(__file__).parent
(here / "arguments").write_text(json.dumps(sys.argv[1:]))
(here / "pid").write_text(str(os.getpid()))
folder = Path(json.loads(sys.argv[-1].removeprefix("run.dir=")))
file = folder / "metrics.jsonl"

def write(**row):
    with file.open("a") as rows:
        print(json.dumps(row), file=rows)

def begin():
    write(kind="event", event="run_started")

def end(outcome, detail=""):
    write(kind="final", outcome=outcome, detail=detail)

exec((here / "script").read_text())
'''
WORKS = """
begin()
while not stop:
    time.sleep(0.01)
time.sleep(0.2)
end("stopped", stop.reason)
sys.exit(130)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "command.py").write_text(COMMAND)
    (tmp_path / "run.toml").write_text('[run]\ndir = "runs/{time}"\n')
    return tmp_path


def train(script: str, **settings: object) -> Run:
    """Start the stand-in; it does what the script says."""
    Path("script").write_text(textwrap.dedent(script))
    return start("run.toml", settings, (sys.executable, str(Path("command.py").absolute())))


def pid() -> int:
    return int(Path("pid").read_text())


def interrupt_when(claim: Callable[[], bool]) -> None:
    """Send this process Ctrl-C once the claim holds."""

    def wait() -> None:
        wait_for(claim)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def test_rows_are_yielded_once_when_a_long_run_shortens_their_file() -> None:
    run = train("""
        start = time.time()
        begin()
        for version in (1, 2):
            write(kind="step", policy_version=version, time=start + version)
        while not (folder / "go").exists():
            time.sleep(0.01)
        (folder / "shorter").write_text('{"kind": "step", "policy_version": 2, "time": %r}\\n' % (start + 2))
        (folder / "shorter").rename(file)
        write(kind="step", policy_version=3, time=start + 3)
        end("finished")
    """)
    rows = run.rows()
    assert [next(rows).get("policy_version") for _ in range(3)] == [None, 1, 2]
    (run.folder / "go").touch()
    assert [row.get("policy_version") for row in rows] == [3, None]


def test_rows_come_as_they_are_written_and_the_final_one_is_the_result() -> None:
    run = train("""
        begin()
        write(kind="step", policy_version=1)
        while not (folder / "go").exists():
            time.sleep(0.01)
        with file.open("a") as rows:
            rows.write('{"kind": "step", "pol\\n{"kind": "st')
            rows.flush()
            time.sleep(0.3)
            rows.write('ep", "policy_version": 2}\\n')
        end("finished")
    """)
    rows = run.rows()
    assert next(rows) == {"kind": "event", "event": "run_started"}
    assert next(rows) == {"kind": "step", "policy_version": 1}
    (run.folder / "go").touch()
    last = {"kind": "final", "outcome": "finished", "detail": ""}
    assert list(rows) == [{"kind": "step", "policy_version": 2}, last]
    assert run.wait() == last
    assert len(list(run.rows())) == 4, "a second look begins again"
    run.stop()
    assert "ended" in repr(run)


def test_rows_of_earlier_starts_in_the_folder_are_left_out() -> None:
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"kind": "event", "event": "run_started"}\n')
    resumed = train('begin(); end("finished", "resumed")', dir="run")
    assert [row.get("detail") for row in resumed.rows()] == [None, "resumed"]
    # A new run moves the rows of a failed start away.
    again = train('file.rename(folder / "old.jsonl"); time.sleep(0.3); begin(); end("finished", "new")', dir="run")
    assert [row.get("detail") for row in again.rows()] == [None, "new"]


def test_settings_reach_the_command_line_as_they_are_given() -> None:
    run = train(
        'begin(); end("finished")',
        learning_rate=1e-5,
        resume=True,
        train_data=Path("my data.jsonl"),
        hard_max_staleness=None,
        **{"task.reward": "exact_match", "actor.engine_options": {"max_num_seqs": 4, "name": 'a "b"'}},
    )
    arguments = json.loads(Path("arguments").read_text())
    assert arguments == [
        *("train", "run.toml", "learning_rate=1e-05", "resume=true", 'train_data="my data.jsonl"', "hard_max_staleness=none"),
        *('task.reward="exact_match"', 'actor.engine_options={"max_num_seqs" = 4, "name" = "a \\"b\\""}'),
        f'run.dir="runs/{run.folder.name}"',
    ]
    assert run.folder.parent == Path("runs").absolute()
    assert "{" not in run.folder.name


def test_mistake_in_a_setting_is_told_in_the_commands_words_and_starts_nothing() -> None:
    with pytest.raises(offbeat.RunError) as raised:
        train("begin()", num_step=3, max_new_tokens=-1)
    said = str(raised.value)
    assert "Did you mean train.num_steps?" in said
    assert not Path("pid").exists()
    with pytest.raises(offbeat.RunError, match="the folder cannot be written"):
        train("begin()", dir="run.toml/run")
    assert not Path("pid").exists()


def test_function_of_the_notebook_is_refused_with_the_cure() -> None:
    def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
        return 0.0

    reward.__qualname__, reward.__module__ = "reward", "__main__"
    with pytest.raises(offbeat.RunError, match=r'%%writefile my_code.py, and name it: "my_code:reward"'):
        train("begin()", reward=reward)
    with pytest.raises(offbeat.RunError, match=r'Name it: "json:dumps"'):
        train("begin()", reward=json.dumps)


def test_start_that_fails_raises_what_the_command_prints_and_leaves_no_folder() -> None:
    with pytest.raises(offbeat.RunError) as raised:
        train("""
            print("2026-11-22T10:00:00.000Z INFO train reading", file=sys.stderr)
            print('error: model.path = "a": there is no such folder. Cure.', file=sys.stderr)
            print('error: task.reward = "b": no. Cure.', file=sys.stderr)
            sys.exit(2)
        """)
    assert str(raised.value) == 'model.path = "a": there is no such folder. Cure.\ntask.reward = "b": no. Cure.'
    assert list(Path("runs").iterdir()) == []


def test_start_that_ends_without_a_word_shows_the_end_of_its_log() -> None:
    with pytest.raises(offbeat.RunError, match=r"(?s)ended with status 1\. The end of .*train\.log:.*ZeroDivisionError"):
        train('write(kind="event", event="actor_joined"); 1 / 0')


def test_end_of_a_run_whose_log_was_deleted_is_told() -> None:
    with pytest.raises(offbeat.RunError, match=r"ended with status 2\. .*train\.log was deleted or renamed"):
        train('(folder / "logs" / "train.log").unlink(); sys.exit(2)')


def test_error_is_found_in_a_log_that_was_emptied_because_it_was_too_large() -> None:
    Path("run/logs").mkdir(parents=True)
    Path("run/logs/train.log").write_text("error: of an earlier start\n" * 10)
    with pytest.raises(offbeat.RunError) as raised:
        train(
            """
            os.truncate(folder / "logs" / "train.log", 0)
            print("error: the new one", file=sys.stderr)
            sys.exit(2)
            """,
            dir="run",
        )
    assert str(raised.value) == "the new one"


def test_run_that_fails_yields_its_rows_and_then_raises() -> None:
    run = train("""
        begin()
        end("failed", "the reward is broken")
        print("error: the last 3 leases failed", file=sys.stderr)
        print("2026-11-22T10:00:00.000Z INFO train writing the report", file=sys.stderr)
        print("error: learner ended. The end of learner.log:", file=sys.stderr)
        print("2026-11-22T10:00:00.000Z INFO actor-0 a quoted line", file=sys.stderr)
        print("2026-11-22T10:00:00.000Z WARNING train 2 more like this", file=sys.stderr)
        sys.exit(3)
    """)
    rows: list[dict[str, Any]] = []
    with pytest.raises(offbeat.RunError, match="the last 3 leases failed"):
        rows.extend(run.rows())
    assert [row["kind"] for row in rows] == ["event", "final"]
    with pytest.raises(offbeat.RunError) as raised:
        run.wait()
    assert str(raised.value).splitlines() == [
        "the last 3 leases failed",
        "learner ended. The end of learner.log:",
        "2026-11-22T10:00:00.000Z INFO actor-0 a quoted line",
    ]


def test_leaving_the_context_ends_the_run_in_order_whatever_happens_in_it() -> None:
    with pytest.raises(LookupError), train(WORKS) as run:
        assert "at work" in repr(run)
        raise LookupError
    assert run.wait() == {"kind": "final", "outcome": "stopped", "detail": "SIGTERM"}
    assert processes.has_ended(pid())


def test_interrupt_while_it_waits_ends_the_run_in_order_and_is_raised() -> None:
    run = train(WORKS)
    interrupt_when(lambda: True)
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert processes.has_ended(pid())
    assert run.wait()["outcome"] == "stopped"
    run = train(WORKS)
    interrupt_when(lambda: True)
    with pytest.raises(KeyboardInterrupt):
        list(run.rows())
    assert run.wait()["outcome"] == "stopped"


def test_interrupt_of_the_start_and_a_second_one_leave_no_process() -> None:
    interrupt_when(Path("pid").exists)
    with pytest.raises(KeyboardInterrupt):
        train("while not stop: time.sleep(0.01)")
    assert processes.has_ended(pid())
    run = train("begin()\nwhile True: time.sleep(0.01)")
    interrupt_when(lambda: True)
    with pytest.raises(KeyboardInterrupt):
        run.stop()
    assert processes.has_ended(pid())
    with pytest.raises(offbeat.RunError, match="ended with status -9"):
        run.wait()


def test_run_outlives_the_thread_that_started_it() -> None:
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(train(WORKS)))
    thread.start()
    thread.join()
    (run,) = runs
    time.sleep(0.5)
    assert not processes.has_ended(pid())
    run.stop()
    assert run.wait()["outcome"] == "stopped"


SCRIPT = """
import sys, time
from offbeat.deploy.local.notebook import start

run = start("run.toml", {}, (sys.executable, "command.py"))
print("started", flush=True)
AFTER
"""


@pytest.mark.parametrize("end", ["returns", "raises", "is interrupted", "is killed"])
def test_end_of_the_interpreter_is_the_end_of_the_run(end: str) -> None:
    Path("script").write_text(WORKS)
    after = {"returns": "", "raises": "1 / 0"}.get(end, "time.sleep(60)")
    command = [sys.executable, "-c", SCRIPT.replace("AFTER", after)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, process_group=0) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "started\n"
        if end == "is interrupted":
            # A terminal and Jupyter interrupt the whole group.
            os.killpg(program.pid, signal.SIGINT)
        if end == "is killed":
            program.kill()
        _, errors = program.communicate(timeout=30)
    wait_for(lambda: processes.has_ended(pid()))
    (rows,) = Path("runs").glob("*/metrics.jsonl")
    # SIGINT would mean that the interrupt reached the run itself, and the wish to stop it would then kill it.
    assert ('"outcome": "stopped", "detail": "SIGTERM"' in rows.read_text()) == (end != "is killed")
    assert ("is stopped; run.wait() waits for its end" in errors) == (end != "is killed")


def test_call_in_a_process_of_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # A module with the reward and an unguarded call would start runs without end.
    monkeypatch.setenv(notebook.IN_RUN_VARIABLE, "1")
    with pytest.raises(offbeat.RunError, match="if __name__"):
        train(WORKS)
    assert not Path("pid").exists()


REAL = """
import asyncio, json, threading
import offbeat

found = {}

def work():
    try:
        offbeat.train("run.toml", reward="my_reward:absent")
    except offbeat.RunError as error:
        found["refused"] = str(error)
    with offbeat.train("run.toml", num_steps=3) as run:
        rows = []
        for row in run.rows():
            rows.append(row)
            if row["kind"] == "step" and "status" not in found:
                found["status"] = run.status()
        found["kinds"] = [row["kind"] for row in rows if row["kind"] in ("step", "final")]
        found["lags"] = [row["lag/max"] for row in rows if row["kind"] == "step"]
        found["final"] = run.wait()
        found["ended"] = run.status()

async def main():
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

# In a thread where no signal handler can be set, while an event loop runs.
asyncio.run(main())
print(json.dumps(found))
"""


@pytest.mark.service
@pytest.mark.engine
@pytest.mark.timeout(SERVICES_S)
def test_real_run_from_a_thread_beside_an_event_loop(home: Path, tiny_model: Path) -> None:
    write_config(
        home,
        tiny_model,
        actor={"engine": "transformers", "engine_options": {}},
        train={"groups_per_step": 2},
        metrics={"tensorboard": False},
        staleness={"max_staleness": 0},
    )
    (home / "my_reward.py").write_text("def digits(prompt, completion, row):\n    return len(completion)\n")
    program = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=False)
    assert program.returncode == 0, program.stderr
    found = json.loads(program.stdout)
    assert found["refused"].startswith('task.reward = "my_reward:absent"')
    assert "has no 'absent'" in found["refused"]
    assert found["kinds"] == ["step", "step", "step", "final"]
    assert found["lags"] == [0, 0, 0]
    assert found["status"].get("num_steps", 3) == 3
    assert found["status"]["policy_version"] >= 1
    assert (found["final"]["outcome"], found["final"]["policy_version"]) == ("finished", 3)
    assert (found["ended"]["outcome"], found["ended"]["policy_version"]) == ("finished", 3)
    assert (home / "run" / "report.html").exists()
    assert "report: run/report.html" in (home / "run" / "logs" / "train.log").read_text()
