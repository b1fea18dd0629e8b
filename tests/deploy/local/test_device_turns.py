"""Processes on GPUs: what each is told, and who waits for whom; stand-ins replace the services, and there is no GPU."""

import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offbeat.common.processes.own_process import GPU_BYTES_VARIABLE, READY_VARIABLE, TURN_VARIABLE, report_ready
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import load
from offbeat.deploy.local import launcher
from offbeat.deploy.local.launcher import Launcher
from offbeat.deploy.local.model_sizes import sizes_of
from offbeat.deploy.local.plan import DevicePlan, DeviceTurns, make_plan
from offbeat.deploy.local.starts import FreshStarts
from offbeat.learner.policy import process_group
from tests.deploy.local.machines import QWEN3_600M, machine

SERVICE = '''
"""Stands for a service on a GPU: notes when it comes and what it is told, is ready after a while, and does what `NAME` says."""
import os, sys, time
from pathlib import Path

folder, name = Path(sys.argv[1]), sys.argv[2]
if name == "actor":
    name = sys.argv[5].split('"')[1]

def note(*words):
    with (folder / "events").open("a") as file:
        print(name, *words, file=file)

settings = [word.removeprefix("actor.engine_options.") for word in sys.argv[6:]]
note("starts", os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("OFFBEAT_GPU_BYTES"), *settings)
time.sleep(0.3)
if "OFFBEAT_READY_FILE" in os.environ:
    note("ready")
    Path(os.environ["OFFBEAT_READY_FILE"]).touch()
exec((folder / name).read_text())
while not (folder / "end").exists():
    time.sleep(0.02)
'''


def planned(*overrides: str, gpus: int) -> tuple[Config, DevicePlan]:
    settings = ["model.path=m", "data.train_data=d", "train.activation_checkpointing=true", "hub.address=tcp://127.0.0.1:0"]
    config = load(None, [*settings, *overrides])
    return config, make_plan(config, machine(gpus, 48), sizes_of(QWEN3_600M))


def run(folder: Path, *overrides: str, gpus: int, **scripts: str) -> list[str]:
    """Run stand-ins under the plan until all actors have come; return the notes."""
    config, plan = planned(f"run.dir={folder / 'run'}", *overrides, gpus=gpus)
    (folder / "services.py").write_text(SERVICE)
    names = ["learner", *(f"actor-{index}" for index in range(config.launch.num_actors))]
    for name in names:
        (folder / name).write_text(textwrap.dedent(scripts.get(name.replace("-", ""), "")))
    with (folder / "learner").open("a") as script:
        # The last actor ends the run.
        script.write(f"""
while not any(line.startswith("{names[-1]} starts") for line in (folder / "events").read_text().splitlines()):
    time.sleep(0.02)
time.sleep(0.5)
(folder / "end").touch()
""")
    program = (sys.executable, str(folder / "services.py"), str(folder))
    assert Launcher(config, StopRequest(), FreshStarts(program), plan).run() == 0
    return (folder / "events").read_text().splitlines()


@pytest.mark.slow
def test_actors_on_the_learners_gpu_start_one_after_the_other_once_it_has_its_memory(tmp_path: Path) -> None:
    # 16.0 GiB less 1 for CUDA's own; (48 - 16.0 - 5%) / 2 of 48.
    events = run(tmp_path, "launch.num_actors=2", gpus=1)
    first, *rest = events
    name, _, visible, num_bytes = first.split()
    assert (name, visible) == ("learner", "GPU-0")
    assert int(num_bytes) / 2**30 == pytest.approx(15.0, abs=0.1)
    assert rest == [
        "learner ready",
        "actor-0 starts GPU-0 None gpu_memory_utilization=0.3",
        "actor-0 ready",
        "actor-1 starts GPU-0 None gpu_memory_utilization=0.3",
        "actor-1 ready",
    ]
    assert list((tmp_path / "run/logs").glob("*.ready")) == []


@pytest.mark.slow
def test_actors_with_gpus_of_their_own_wait_for_nobody(tmp_path: Path) -> None:
    events = run(tmp_path, "launch.num_actors=2", gpus=3)
    assert sorted(events) == [
        "actor-0 starts GPU-1 None",
        "actor-1 starts GPU-2 None",
        "learner starts GPU-0 None",
    ]


@pytest.mark.slow
def test_actor_that_dies_before_it_is_ready_keeps_no_other_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "FIRST_WAIT_S", 1.0)
    script = """
    Path(os.environ["OFFBEAT_READY_FILE"]).unlink()
    sys.exit(1)
    """
    events = run(tmp_path, "launch.num_actors=2", gpus=1, actor0=script)
    starts = [event.split()[0] for event in events if "starts" in event]
    assert starts[:3] == ["learner", "actor-0", "actor-1"]


@pytest.mark.slow
def test_actor_that_still_starts_when_the_run_ends_is_asked_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "TOLD_S", 0.2)
    script = """
    import signal
    signal.signal(signal.SIGTERM, lambda *_: (note("was asked"), os._exit(0)))
    time.sleep(60)
    """
    started = time.monotonic()
    assert "actor-0 was asked" in run(tmp_path, "launch.num_actors=1", gpus=1, actor0=script)
    assert time.monotonic() - started < launcher.LEAVE_S


def test_an_actor_waits_for_those_of_its_gpu_that_run_and_for_no_others(tmp_path: Path) -> None:
    _, plan = planned("launch.num_actors=3", gpus=2)
    assert [actor.gpus for actor in plan.actors] == [(1,), (1,), (1,)]
    turns = DeviceTurns(plan, tmp_path)
    assert turns.may_start(1, set())
    assert not turns.may_start(1, {0})
    Path(turns.actor_variables(0)[READY_VARIABLE]).touch()
    assert turns.may_start(1, {0})
    assert not turns.may_start(1, {0, 2})
    turns.actor_variables(0)
    assert not turns.may_start(1, {0}), "it is being started again"


def test_all_ranks_see_all_of_the_learners_gpus_in_their_order(tmp_path: Path) -> None:
    _, plan = planned("launch.learner_processes=2", "launch.learner_gpus=[2, 1]", "train.zero_stage=2", gpus=4)
    turns = DeviceTurns(plan, tmp_path)
    assert [turns.learner_variables(rank) for rank in (0, 1)] == [{"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-1"}] * 2


def test_processes_that_use_a_gpu_in_turns_get_the_same_file_and_start_one_after_the_other(tmp_path: Path) -> None:
    _, plan = planned("launch.num_actors=2", "launch.gpu_sharing=turns", gpus=1)
    turns = DeviceTurns(plan, tmp_path)
    learner = turns.learner_variables(0)
    files = {variables[TURN_VARIABLE] for variables in (learner, turns.actor_variables(0), turns.actor_variables(1))}
    assert files == {str(tmp_path / "gpu.turn")}
    assert GPU_BYTES_VARIABLE not in learner, "it keeps no memory between two batches that it does not need"
    assert not turns.may_start(0, set())
    Path(learner[READY_VARIABLE]).touch()
    assert turns.may_start(0, set())


def test_without_a_plan_nothing_is_said_and_nobody_waits(tmp_path: Path) -> None:
    turns = DeviceTurns(None, tmp_path)
    assert (turns.learner_variables(0), turns.actor_variables(0), turns.actor_settings(0)) == ({}, {}, [])
    assert turns.may_start(0, {0, 1})
    assert not turns.needs_gloo


@pytest.mark.parametrize(("backend", "gpus", "used"), [("auto", 1, "gloo"), ("auto", 2, "auto"), ("pull", 1, "pull")])
def test_weights_travel_by_gloo_where_processes_share_a_gpu(backend: str, gpus: int, used: str, tmp_path: Path) -> None:
    config, plan = planned(f"weights.backend={backend}", f"run.dir={tmp_path}", gpus=gpus)
    assert Launcher(config, StopRequest(), FreshStarts(), plan)._config.weights.backend == used


def test_learner_takes_its_part_of_a_shared_gpu_and_then_tells_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    file = tmp_path / "learner.ready"

    def empty(num_bytes: int, *, dtype: torch.dtype, device: torch.device) -> None:
        assert not file.exists()
        taken.append((num_bytes, dtype, device))

    monkeypatch.setattr(process_group.torch, "empty", empty)
    device = torch.device("cuda", 1)
    process_group.take_memory(device)
    assert taken == []
    monkeypatch.setenv(GPU_BYTES_VARIABLE, "12345")
    monkeypatch.setenv(READY_VARIABLE, str(file))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 345)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=123450))
    limits = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    process_group.take_memory(device)
    assert taken == [(12000, torch.uint8, device)]
    assert limits == [(pytest.approx(0.15), device)], "its share, and the reserve"
    assert file.exists()


def test_service_that_shares_no_gpu_makes_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(READY_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    report_ready()
    assert list(tmp_path.iterdir()) == []
