"""Harbor's task folders are played in boxes of bubblewrap, or by a container engine, and their own tests write the reward."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from offbeat.actor.sandbox.bubblewrap import find_bubblewrap
from offbeat.common.errors import SettingError
from offbeat.common.processes.process_table import arguments, descendants
from offbeat.common.settings.config import Environment
from offbeat.common.user_code.external_environment import check_external, environment_rows
from tests.actor.environments.scripted_model import Model, play

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not find_bubblewrap(), reason="there is no bwrap")]

TEST = """#!/bin/bash
if [ "$(cat hello.txt)" = "$WANTED" ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
DOCKERFILE = """FROM python:3.13-slim
WORKDIR /work
# What's there for the model.
ENV SIZE very small
ENV COLOR=blue \\
    SHAPE=round
COPY note.txt data /work/
COPY . all/
COPY *.txt renamed.txt
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task that is solved by a file with the word hello."""
    task = tmp_path / "tasks" / "hello"
    for folder in ("environment/data", "tests"):
        (task / folder).mkdir(parents=True)
    (task / "task.toml").write_text('schema_version = "1.0"\n[verifier]\ntimeout_sec = 20.0\nenv = {WANTED = "hello"}\n')
    (task / "instruction.md").write_text("Write hello into hello.txt.")
    (task / "environment" / "Dockerfile").write_text(DOCKERFILE)
    (task / "environment" / "note.txt").write_text("a note\n")
    (task / "environment" / "data" / "deep.txt").write_text("deep\n")
    (task / "tests" / "test.sh").write_text(TEST)
    return task


def environment(task: Path, **arguments: Any) -> Environment:
    return Environment(f"harbor:{task.parent}", arguments=arguments)


def played(task: Path, model: Model, *texts: str, **arguments: Any) -> dict[str, Any]:
    """Return the end of an episode in which the model writes these texts."""
    (row,) = environment_rows(environment(task, **arguments), "task-environment:train", "data.train_data")
    model.texts = list(texts)
    (end,), printed = play(environment(task, **arguments), row, model.url)
    print(printed)
    return end


def block(command: str) -> str:
    return f"I try this.\n```sh\n{command}\n```"


def test_commands_run_in_a_box_with_the_tasks_files_and_the_tests_write_the_reward(task: Path, model: Model) -> None:
    end = played(task, model, block("pwd; ls; echo $COLOR $SHAPE $SIZE"), block("echo hello > hello.txt; false"), "done")
    assert (end.get("reward"), end.get("metrics")) == ({"reward": 1.0}, {"turns": 3.0}), end
    assert model.read[0].endswith("Task:\nWrite hello into hello.txt.")
    assert model.read[1:] == [
        "/work\nall\ndeep.txt\nnote.txt\nrenamed.txt\nblue round very small\n\n(exit status 0)",
        "\n(exit status 1)",
    ]


def test_reward_may_be_json_with_other_numbers(task: Path, model: Model) -> None:
    (task / "tests" / "test.sh").write_text("""echo '{"reward": 0.5, "speed/s": 2}' > /logs/verifier/reward.json""")
    end = played(task, model, "done")
    assert (end.get("reward"), end.get("metrics")) == ({"reward": 0.5}, {"turns": 1.0, "speed_s": 2.0}), end


def test_box_is_tested_where_the_next_turn_does_not_fit(task: Path, model: Model) -> None:
    end = played(task, model, block("echo hello > hello.txt"))
    assert (end.get("reward"), end.get("metrics")) == ({"reward": 1.0}, {"turns": 1.0}), end


def test_tests_that_write_no_reward_are_no_reward_of_zero(task: Path, model: Model) -> None:
    (task / "tests" / "test.sh").write_text("echo no such tool; exit 7")
    end = played(task, model, "done")
    assert (end["type"], end["is_transient"]) == ("failed", False)
    assert "its tests wrote no reward (exit status 7): no such tool" in end["error"]


def test_model_cannot_write_the_reward_or_leave_its_box(task: Path, model: Model) -> None:
    forge = "mkdir -p /tests /logs/verifier; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh"
    keep = "(while true; do echo 1 > /logs/verifier/reward.txt; done) >&- 2>&- &"
    secret = f"cat {task}/tests/test.sh /proc/1/environ; echo > /usr/lib/x; ls {Path.home()}/.ssh; echo $OFFBEAT_SECRET"
    network = "python3 -c \"import socket; socket.create_connection(('127.0.0.1', 80))\""
    end = played(task, model, block(forge), block(keep), block(secret), block(network), "done", max_output_chars=5000)
    assert end.get("reward") == {"reward": 0.0}, end
    assert model.read[3].count("No such file") == 3
    assert "Read-only file system" in model.read[3]
    assert "refused" in model.read[4]


def test_commands_have_limits(task: Path, model: Model) -> None:
    commands = (
        "echo hello > hello.txt",
        "python3 -c 'bytearray(8 << 30)'",
        "for i in 1 2 3; do head -c 250000000 /dev/zero > $i; done; rm -f 1 2 3",
        "yes | head -c 1000000",
    )
    end = played(task, model, *map(block, commands), "done")
    assert end.get("reward") == {"reward": 1.0}, end
    assert "MemoryError" in model.read[2]
    assert "No space left on device" in model.read[3]
    assert len(model.read[4]) < 2100


def test_command_ends_at_its_time_and_what_it_leaves_before_the_tests_begin(task: Path, model: Model) -> None:
    commands = ("echo hello > hello.txt", "sleep 60", "nohup sleep 60 &")
    end = played(task, model, *map(block, commands), "done", command_timeout_s=1.5)
    # What was in its box before the tests began is gone, but for its files.
    assert end.get("reward") == {"reward": 1.0}, end
    assert model.read[2] == "\n(ended after 1.5 s)"


def test_box_of_too_many_processes_is_worth_nothing_and_leaves_none(task: Path, model: Model) -> None:
    end = played(task, model, block("bash -c 'bomb() { bomb | bomb & }; bomb'; echo hello > hello.txt; sleep 617"))
    assert (end.get("reward"), end.get("metrics")) == ({"reward": 0.0}, {"turns": 1.0, "broken_box": 1.0}), end
    assert not [pid for pid in descendants(os.getpid()) if "617" in arguments(pid)]


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("task.toml", "[[steps]]\nname = 'one'", "several steps"),
        ("task.toml", "[verifier]\nenvironment_mode = 'separate'", "their own image"),
        ("task.toml", "[verifier.env]\nKEY = '${OPENAI_API_KEY}'", "secrets"),
        ("task.toml", "[environment]\ndocker_image = 'python:3.13'", "needs podman or docker"),
        ("environment/docker-compose.yaml", "services: {}", "several services"),
        ("environment/Dockerfile", "FROM python\nRUN apt-get install gcc", "needs podman or docker"),
        ("environment/Dockerfile", "FROM python\nCOPY nothing.txt .", "copies nothing.txt, which is not there"),
    ],
)
def test_task_that_cannot_be_played_here_is_refused_before_the_run(
    task: Path, file: str, text: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(task))
    (task / file).write_text(text)
    with pytest.raises(SettingError, match=problem):
        check_external(environment(task))


def test_container_engine_builds_and_runs_an_image_that_installs_something(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for podman notes what it is asked, and answers as the first process of a box does."""
    podman = tmp_path / "podman"
    answer = """{"status": 0, "output": "begun\\\\n"}"""
    podman.write_text(
        f"""#!/bin/sh\necho "$@" >> {tmp_path}/asked\n"""
        f"""case $1 in build) echo sha256:feed;; run) read line; printf '{answer}\\n';; esac\n"""
    )
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{Path(shutil.which('sh') or '/bin/sh').parent}")
    (task / "environment" / "Dockerfile").write_text("FROM python\nRUN pip install numpy\n")
    check_external(environment(task))
    asked = (tmp_path / "asked").read_text().splitlines()
    assert f"build -q {task}/environment" in [line.strip() for line in asked]
    assert any(line.startswith("run -i --rm --network=none --pids-limit=256 sha256:feed python3 -I -S -c") for line in asked)
