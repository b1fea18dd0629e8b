"""Real services for end-to-end tests: `offbeat` commands as processes that no test leaves behind."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from offbeat.common.processes import process_table as processes
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import resolved_toml
from tests.deploy.local.warm import PROGRAM, ForkedProcess, WarmProcess, service_environment

ROOT = Path(__file__).parents[2]
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
VLLM_OPTIONS = {"kv_cache_memory_bytes": 1 << 26} if importlib.util.find_spec("vllm") else {}
"""Options of the engine that `actor.engine = "auto"` chooses here."""
SLOW_REWARD = {"reward": "my_reward:slow_digits"}


QUIET_S = 300.0
"""Longest time a run may write no log line and no metrics row but heartbeats before its test fails.

A service needs ten seconds of CPU time to start and writes nothing meanwhile: minutes on a machine with ten times more
work than cores.
"""
CAP_S = 1800.0
"""Longest time for any wait. A service that logs without making progress fails its test only then."""
SERVICES_S = 2 * CAP_S
"""pytest's limit for a test that waits for services."""
LOOK_S = 0.1

Process = subprocess.Popen | ForkedProcess


class Services:
    """`offbeat` commands that run in one working folder, and their output."""

    def __init__(self, folder: Path, warm: WarmProcess) -> None:
        self.folder = folder
        self._warm = warm
        self._processes: list[Process] = []
        (folder / "my_reward.py").write_text(REWARD_MODULE)

    def start_chaos(self, *arguments: str) -> Process:
        """Start `python -m tests.chaos ARGUMENTS` with its output going to the file `chaos.log`."""
        with (self.folder / "chaos.log").open("ab") as stream:
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos", *arguments],
                cwd=self.folder,
                stdout=stream,
                stderr=stream,
                process_group=0,
                env={**service_environment(), "PYTHONPATH": path},
            )
        self._processes.append(process)
        return process

    def start(self, *arguments: str, log: str = "", is_real: bool = False) -> Process:
        """Start `offbeat ARGUMENTS` with its output going to the file `log`.

        Forks a process that has imported everything (`tests/deploy/local/warm.py`); `is_real` starts a new interpreter instead.
        """
        with (self.folder / f"{log or arguments[0]}.log").open("ab") as stream:
            return self._start(arguments, stream, stream, is_real=is_real)

    def run(self, *arguments: str, is_real: bool = False) -> subprocess.CompletedProcess[str]:
        """Run `offbeat ARGUMENTS` to its end. Return its exit status and output."""
        stdout, stderr = self.folder / "stdout", self.folder / "stderr"
        with stdout.open("wb") as output, stderr.open("wb") as errors:
            process = self._start(arguments, output, errors, is_real=is_real)
            self.wait_for(lambda: process.poll() is not None, f"the end of {arguments}")
        return subprocess.CompletedProcess(arguments, process.poll() or 0, stdout.read_text(), stderr.read_text())

    def output(self, log: str) -> str:
        """Return what a command has written so far."""
        return (self.folder / f"{log}.log").read_text(errors="replace")

    def rows(self, run: str, kind: str = "") -> list[dict[str, Any]]:
        """Return the metrics rows of a run, of one kind if asked."""
        file = self.folder / run / "metrics.jsonl"
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        rows = [msgspec.json.decode(line) for line in lines if line.endswith(b"\n")]
        return [row for row in rows if not kind or row["kind"] == kind]

    def events(self, run: str) -> set[tuple[str, str | None]]:
        """Return the name and the actor of each event of a run."""
        return {(row["event"], row.get("actor")) for row in self.rows(run, "event")}

    def wait(self, process: Process, log: str) -> int:
        """Return the exit status. Fail the test with the output when nothing in the folder makes progress any more."""
        self.wait_for(lambda: process.poll() is not None, f"the end of {log}")
        status = process.poll()
        assert status is not None
        return status

    def wait_for(self, claim: Callable[[], bool], what: str) -> None:
        """Return when the claim holds. Fail the test when nothing in the folder makes progress any more."""
        started = moved = time.monotonic()
        progress = self._progress()
        while not claim():
            time.sleep(LOOK_S)
            now = time.monotonic()
            if (newer := self._progress()) != progress:
                moved, progress = now, newer
            assert now - moved < QUIET_S, f"{what}: no progress for {QUIET_S:g} s\n{self._ends_of_logs()}"
            assert now - started < CAP_S, f"{what}: not within {CAP_S:g} s\n{self._ends_of_logs()}"

    def kill_all(self) -> None:
        """Kill what still runs, each process with its group."""
        for process in self._processes:
            processes.kill_group(process.pid)
            process.wait()

    def _start(self, arguments: Sequence[str], output: IO[bytes], errors: IO[bytes], *, is_real: bool) -> Process:
        if is_real:
            process = subprocess.Popen(
                [*PROGRAM, *arguments],
                cwd=self.folder,
                stdout=output,
                stderr=errors,
                process_group=0,
                env=service_environment(),
            )
        else:
            process = self._warm.start(arguments, self.folder, output.fileno(), errors.fileno())
        self._processes.append(process)
        return process

    def _progress(self) -> tuple[int, int]:
        """Return the bytes in all logs and the number of rows in all runs; an actor's heartbeat is no progress."""
        rows = [file.read_bytes() for file in self.folder.glob("*/metrics.jsonl")]
        num_rows = sum(text.count(b"\n") - text.count(b'"kind":"actor"') for text in rows)
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*/logs/*.log")]
        return sum(file.stat().st_size for file in logs), num_rows

    def _ends_of_logs(self) -> str:
        return "\n".join(f"{file.stem}: {file.read_text(errors='replace')[-1500:]}" for file in self.folder.glob("*.log"))


@contextmanager
def services_in(folder: Path, warm: WarmProcess) -> Iterator[Services]:
    """Yield services that end with the context."""
    services = Services(folder, warm)
    try:
        yield services
    finally:
        services.kill_all()


def free_port() -> int:
    """Return a port on loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def write_config(folder: Path, model_path: Path, **sections: dict[str, Any]) -> str:
    """Write the config of a small run on a tiny model, with `sections` merged over it. Return its path."""
    (folder / "train.jsonl").write_text(
        "".join(f'{{"prompt": "{index:03d}+{index % 7}>", "answer": "{index}"}}\n' for index in range(64))
    )
    config: dict[str, dict[str, Any]] = {
        "run": {"dir": "run"},
        "model": {"path": str(model_path), "dtype": "float32", "max_length": 64},
        "data": {"train_data": str(folder / "train.jsonl"), "max_prompt_tokens": 8},
        "task": {"reward": "my_reward:digits"},
        "rollout": {"group_size": 4, "max_new_tokens": 16, "lease_timeout_s": 60.0},
        "train": {"num_steps": 6, "groups_per_step": 4, "learning_rate": 1e-3},
        "hub": {"address": f"tcp://127.0.0.1:{free_port()}", "dead_after_s": 10.0},
        "weights": {"timeout_s": 20.0},
        "actor": {"max_inflight_groups": 4, "engine_options": VLLM_OPTIONS},
    }
    for name, settings in sections.items():
        config[name] = {**config.get(name, {}), **settings}
    path = folder / "run.toml"
    path.write_text(resolved_toml(msgspec.convert(config, Config)))
    return str(path)
