"""The recipe of docs/deployment.md for a learner on several machines, run on two that share nothing but a cable."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.common.processes import process_table as processes
from offbeat.deploy.local.keygen import make_keys
from offbeat.learner.training.checkpoints import find_damage
from tests.deploy.local.warm import PROGRAM, service_environment
from tests.deploy.machines_apart import SOURCE_PORTS, listening_ports, two_machines
from tests.deploy.services import SERVICES_S, Services, write_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(SERVICES_S)]
ROOT = Path(__file__).parents[2]
HUB, PULLS, STORE = 5700, 5701, 5702
"""The ports of the page."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def recipe() -> list[list[str]]:
    """Return the words of the page's commands: the learner on each machine, then an actor."""
    page = (ROOT / "docs/deployment.md").read_text().partition("## A learner on several machines")[2]
    block = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)[0].replace("\\\n", " ")
    return [line.partition("#")[0].split() for line in block.splitlines() if line.partition("#")[0].strip()]


def adapted(words: list[str], host: str) -> list[str]:
    """Return a command of the page for these machines: with the host's address, a process each, and this environment."""
    text = " ".join(words).replace("10.0.0.1", host).replace("--nproc-per-node 8", "--nproc-per-node 1")
    program, *arguments = text.split()
    return [*{"torchrun": TORCHRUN, "offbeat": PROGRAM}[program], *arguments]


def test_learner_on_two_machines_trains_and_saves_without_a_shared_folder(
    services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    with two_machines() as machines:
        write_config(
            tmp_path,
            tiny_model,
            hub={
                "address": f"tcp://{machines.hosts[0]}:{HUB}",
                "bind": f"tcp://{machines.hosts[0]}:{HUB}",
                "key": str(tmp_path / "keys/{name}.key"),
                "learner_key": str(tmp_path / "keys/learner.pub"),
                "allowed_keys": str(tmp_path / "keys/allowed_keys"),
            },
            weights={"port": STORE, "pull_port": PULLS, "timeout_s": 20.0},
            train={"num_steps": 4, "groups_per_step": 4, "learning_rate": 1e-3, "zero_stage": 3, "checkpoint_interval": 2},
            actor={"engine": "transformers", "engine_options": {}, "max_inflight_groups": 4},
        )
        make_keys(tmp_path / "keys", ["a"])
        places = (0, 1, 1)
        started: list[subprocess.Popen[bytes]] = []
        seen: tuple[set[int], set[int]] = (set(), set())
        try:
            for index, (words, place) in enumerate(zip(recipe(), places, strict=True)):
                folder = tmp_path / f"machine-{place}"
                folder.mkdir(exist_ok=True)
                for name in ("run.toml", "my_reward.py"):
                    shutil.copy(tmp_path / name, folder)
                command = [*machines.prefixes[place], *adapted(words, machines.hosts[0])]
                with (tmp_path / f"process-{index}.log").open("wb") as log:
                    started.append(
                        subprocess.Popen(
                            command, cwd=folder, env=service_environment(), stdout=log, stderr=log, process_group=0
                        )
                    )

            def have_ended() -> bool:
                for place, ports in enumerate(seen if machines.are_apart else ()):
                    ports |= listening_ports(machines.prefixes[place])
                return all(process.poll() is not None for process in started) or any(process.poll() for process in started)

            services.wait_for(have_ended, "the end of all")
        finally:
            # torchrun's processes are in sessions of their own.
            for pid in [pid for process in started for pid in (process.pid, *processes.descendants(process.pid))]:
                processes.kill_group(pid)
            for process in started:
                process.wait()
    logs = "\n".join((tmp_path / f"process-{index}.log").read_text() for index in range(3))
    assert [process.returncode for process in started] == [0, 0, 0], logs

    run = "machine-0/run"
    assert services.rows(run, "final")[-1]["ledger"]["trained"] == 16
    assert sum(row["num_members"] for row in services.rows(run, "weights")) > 0, "by the collective, not by pull"
    assert max(row["max_abs_diff"] for row in services.rows(run, "canary")) < 1e-3
    checkpoint = tmp_path / run / "checkpoints/step-00000004"
    assert find_damage(checkpoint) is None
    assert (checkpoint / "rank-00001.safetensors").exists()
    assert not (tmp_path / "machine-1/run").exists(), "the run is in one place"
    for place, named in enumerate([{HUB, PULLS, STORE, 29500}, set[int]()] if machines.are_apart else []):
        assert seen[place] - set(range(SOURCE_PORTS[0], SOURCE_PORTS[1] + 1)) == named
