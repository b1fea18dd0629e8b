"""Forked services are like started ones: what tests rely on when they start, signal, kill and await them."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.deploy.services import SERVICES_S, Services, free_port, write_config

pytestmark = pytest.mark.timeout(SERVICES_S)

OF_ITS_TIME = re.compile(r"^\S+Z (.* still checking .*\n)?|\d+\.\d+(?= of \S+ GiB are free)", re.MULTILINE)
"""Parts of the output that differ between two runs of a command: times, lines about a check that takes long, free memory."""


@pytest.mark.parametrize("arguments", [("check", "run.toml"), ("check", "run.toml", "train.num_step=3"), ("report", "nowhere")])
def test_fork_says_and_returns_what_a_real_start_does(
    services: Services, tmp_path: Path, tiny_model: Path, arguments: tuple[str, ...]
) -> None:
    write_config(tmp_path, tiny_model)
    forked, real = services.run(*arguments), services.run(*arguments, is_real=True)
    assert forked.returncode == real.returncode
    for said, expected in ((forked.stdout, real.stdout), (forked.stderr, real.stderr)):
        assert OF_ITS_TIME.sub("", said) == OF_ITS_TIME.sub("", expected)


def test_fork_is_a_process_of_its_own_with_its_command_line_folder_and_group(
    services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    config = write_config(tmp_path, tiny_model, actor={"engine": "transformers", "engine_options": {}})
    actor = services.start("actor", config, f"hub.address=tcp://127.0.0.1:{free_port()}")
    process = psutil.Process(actor.pid)
    services.wait_for(lambda: len(process.children()) >= 2, "a reward worker, and what tracks its resources")
    assert [word for word in process.cmdline() if word][-4:-1] == ["offbeat.deploy.cli.main", "actor", config]
    assert process.cwd() == str(tmp_path)
    assert os.getpgid(actor.pid) == actor.pid
    assert not process.open_files() or all(str(tmp_path) in file.path for file in process.open_files())
    workers = process.children()
    assert actor.poll() is None
    actor.kill()
    assert services.wait(actor, "actor") == -signal.SIGKILL
    services.wait_for(lambda: not any(worker.is_running() for worker in workers), "the end of its reward workers")


def test_fork_drains_on_sigterm(services: Services, tmp_path: Path, tiny_model: Path) -> None:
    config = write_config(tmp_path, tiny_model)
    learner = services.start("learner", config)
    # While it still loads the model, a signal ends it at once.
    services.wait_for(lambda: bool(services.rows("run", "event")), "the start of the run")
    learner.terminate()
    assert services.wait(learner, "learner") == 0
    assert "stopped: step 0/6" in services.output("learner")


def test_changed_environment_needs_a_real_start(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    assert services.run("check").returncode == 0
    with monkeypatch.context() as changed:
        changed.setenv("TORCHDYNAMO_DISABLE", "0")
        with pytest.raises(ValueError, match="real start"):
            services.run("check")
    monkeypatch.setenv("OFFBEAT_LOG_LEVEL", "error")
    assert services.run("check").returncode == 0
