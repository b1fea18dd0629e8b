"""Real services for end-to-end tests: `offbeat` commands as processes that no test leaves behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from offbeat.common.config import Config
from offbeat.common.settings import resolved_toml

REWARD_MODULE = '''
import time

def digits(prompt, completion, row):
    """The share of digits: it varies within a group, so that there is something to learn."""
    return sum(character.isdigit() for character in completion) / 16

def slow_digits(prompt, completion, row):
    """The same, so slowly that learner and actors leave the cores to whoever starts meanwhile."""
    time.sleep(0.05)
    return digits(prompt, completion, row)
'''
SLOW_REWARD = {"reward": "my_reward:slow_digits"}


class Services:
    """Commands started in one working folder, and what they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen] = []
        (folder / "my_reward.py").write_text(REWARD_MODULE)

    def start(self, *arguments: str, log: str = "", environment: Mapping[str, str] | None = None) -> subprocess.Popen:
        """Start `offbeat ARGUMENTS`; its output goes to the file `log`."""
        with (self.folder / f"{log or arguments[0]}.log").open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "offbeat.deploy.cli", *arguments],
                cwd=self.folder,
                stdout=stream,
                stderr=subprocess.STDOUT,
                process_group=0,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )
        self._processes.append(process)
        return process

    def output(self, log: str) -> str:
        """What a command has written so far."""
        return (self.folder / f"{log}.log").read_text(errors="replace")

    def rows(self, run: str, kind: str = "") -> list[dict[str, Any]]:
        """The metrics rows of a run, of one kind if asked."""
        file = self.folder / run / "metrics.jsonl"
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        rows = [msgspec.json.decode(line) for line in lines if line.endswith(b"\n")]
        return [row for row in rows if not kind or row["kind"] == kind]

    def wait(self, process: subprocess.Popen, log: str, timeout_s: float) -> int:
        """The exit status; a process that does not end in time fails the test with its output."""
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{log} did not end within {timeout_s:g} s:\n{self.output(log)[-4000:]}") from None

    def wait_for(self, claim: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Until the claim holds."""
        deadline = time.monotonic() + timeout_s
        while not claim():
            logs = {file.stem: file.read_text(errors="replace")[-1500:] for file in self.folder.glob("*.log")}
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s; {logs}"
            time.sleep(0.1)

    def kill_all(self) -> None:
        """Whatever is left."""
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()


@contextmanager
def services_in(folder: Path) -> Iterator[Services]:
    """Services that end with the context."""
    services = Services(folder)
    try:
        yield services
    finally:
        services.kill_all()


def free_port() -> int:
    """A port on loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def write_config(folder: Path, model_path: Path, **sections: dict[str, Any]) -> str:
    """A small run on a tiny model, as a file; keyword arguments are sections that are merged over it. Returns its path."""
    (folder / "train.jsonl").write_text(
        "".join(f'{{"prompt": "{index:03d}+{index % 7}>", "answer": "{index}"}}\n' for index in range(64))
    )
    config: dict[str, dict[str, Any]] = {
        "run": {"dir": "run"},
        "model": {"path": str(model_path), "dtype": "float32", "max_length": 64},
        "task": {"train_data": str(folder / "train.jsonl"), "max_prompt_tokens": 8, "reward": "my_reward:digits"},
        "rollout": {"group_size": 4, "max_new_tokens": 16, "lease_timeout_s": 60.0},
        "train": {"num_steps": 6, "groups_per_step": 4, "learning_rate": 1e-3},
        "hub": {"address": f"tcp://127.0.0.1:{free_port()}", "dead_after_s": 10.0},
        "weights": {"timeout_s": 20.0},
        "actor": {"max_inflight_groups": 4, "engine_options": {"kv_cache_memory_bytes": 1 << 26}},
    }
    for name, settings in sections.items():
        config[name] = {**config.get(name, {}), **settings}
    path = folder / "run.toml"
    path.write_text(resolved_toml(msgspec.convert(config, Config)))
    return str(path)
