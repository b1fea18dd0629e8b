"""Checks of the machine, on GPUs and disks that are not there."""

import importlib.metadata
import json
import shutil
import socket
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest

from offbeat.common.settings.config import (
    Config,
    DataSection,
    HubSection,
    LaunchSection,
    ModelSection,
    ScaleSection,
    WeightsSection,
)
from offbeat.common.settings.learning_sections import AdvantageSection, CriticSection, LoraSection
from offbeat.deploy.checks.findings import findings_of
from offbeat.deploy.checks.machine import (
    check_actor_port,
    check_companions,
    check_devices,
    check_folder,
    check_ports,
    check_variables,
    memory_here,
    show_devices,
)
from offbeat.deploy.local import devices
from offbeat.deploy.local.devices import Device
from offbeat.deploy.local.memory import cpu_actor_need, cpu_learner_need, engine_need, learner_need
from offbeat.deploy.local.model_sizes import sizes_of
from tests.deploy.local.machines import QWEN3_600M

# The model is a folder, so that no hub is asked.
CONFIG = Config(model=ModelSection(path="."), data=DataSection(train_data="data.jsonl"))


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, ["pip uninstall torchvision"]),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "torchaudio": "2.11.0"}, ["pip uninstall torchaudio"]),
        ({"torch": "2.13.0+cpu"}, []),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, []),
    ],
)
def test_package_of_another_build_than_torch_is_told_with_its_cure(
    installed: dict[str, str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = list(check_companions(CONFIG))
    assert [finding.kind for finding in found] == ["warning"] * len(said)
    for finding, cure in zip(found, said, strict=True):
        assert finding.text.endswith(cure)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_devices", lambda: [Device(0, "GPU-a", "L4", 24, 24), Device(1, "GPU-b", "L4", 24, 24)])
    monkeypatch.setattr(devices, "torch_is_built_for_gpus", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def with_learner_gpu(gpu: int) -> Config:
    return msgspec.structs.replace(CONFIG, launch=LaunchSection(learner_gpus=(gpu,)))


def test_check_and_train_tell_the_plan_of_a_machine_with_gpus(two_gpus: None, tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, model=ModelSection(path=str(tmp_path)))
    for check in (check_devices, show_devices):
        notes = [finding.text for finding in check(config) if finding.kind == "note"]
        assert [note.partition(": ")[2] for note in notes[:2]] == ["learner", "actor-0"]


def test_gpu_that_the_machine_lacks_is_a_mistake(two_gpus: None) -> None:
    assert [finding.kind for finding in findings_of(lambda: check_devices(with_learner_gpu(2)))] == ["mistake"]


def test_config_for_another_machine_is_checked_but_not_trained_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_devices", list)
    (warning,) = show_devices(with_learner_gpu(0))
    assert (warning.kind, "launch.learner_gpus = [0]" in warning.text) == ("warning", True)
    assert list(show_devices(CONFIG)) == []
    (refusal,) = findings_of(lambda: check_devices(with_learner_gpu(0)))
    assert "this run has 0 GPUs" in refusal.text
    assert list(check_devices(CONFIG)) == []
    with_nccl = msgspec.structs.replace(CONFIG, weights=WeightsSection(backend="nccl"))
    for check, kind in ((check_devices, "mistake"), (show_devices, "warning")):
        (finding,) = findings_of(partial(check, with_nccl))
        assert (finding.kind, "NCCL needs one" in finding.text) == (kind, True)


def test_gpus_that_an_environment_for_cpus_leaves_idle_are_told(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_is_built_for_gpus", lambda: False)
    for check in (check_devices, show_devices):
        (note,) = check(CONFIG)
        assert note.kind == "note"
        assert "./dev setup cuda" in note.text


@pytest.mark.parametrize("num_processes", [1, 3])
def test_sums_are_told_where_the_gpus_are_on_other_machines(
    num_processes: int, two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_600M))
    launch = LaunchSection(learner_processes=num_processes)
    config = msgspec.structs.replace(CONFIG, model=ModelSection(path=str(tmp_path), dtype="bfloat16"), launch=launch)
    if num_processes == 1:
        monkeypatch.setattr(devices, "list_devices", list)
    notes = [finding.text.partition(": ")[::2] for finding in show_devices(config) if "on a GPU" in finding.text]
    sizes = sizes_of(QWEN3_600M)
    assert notes == [
        ("on a GPU each learner process would take, estimated", str(learner_need(config, sizes))),
        ("on a GPU each actor would take at least", str(engine_need(config, sizes))),
    ]


class Memory(NamedTuple):
    """The part of `psutil.virtual_memory()` that the check reads."""

    total: int
    available: int


@pytest.fixture
def cpu_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run of Qwen3-0.6B on a machine without GPUs."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_600M))
    monkeypatch.setattr(devices, "list_devices", list)
    return msgspec.structs.replace(CONFIG, model=ModelSection(path=str(tmp_path), dtype="bfloat16", max_length=64))


@pytest.mark.parametrize(("gib", "fits"), [(64, True), (8, False)])
def test_run_without_gpus_is_refused_where_its_certain_memory_exceeds_the_machines(
    gib: int, fits: bool, cpu_run: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(gib << 30, 5 << 30))
    (found,) = findings_of(lambda: check_devices(cpu_run))
    assert found.kind == ("note" if fits else "mistake")
    assert f"5.0 of {gib}.0 GiB are free" in found.text
    sizes = sizes_of(QWEN3_600M)
    assert f"1 x learner: {cpu_learner_need(cpu_run, sizes)}; 1 x actor: {cpu_actor_need(cpu_run, sizes)}" in found.text
    # It may be meant for another machine.
    assert [finding.kind for finding in show_devices(cpu_run)][-1] == ("note" if fits else "warning")


@pytest.mark.parametrize(
    ("launch", "scale", "cure"),
    [
        (LaunchSection(num_actors=16), ScaleSection(), "launch.num_actors=1"),
        (LaunchSection(), ScaleSection(actors=16), "scale.actors=1"),
        (LaunchSection(), ScaleSection(auto=True, max=16), "scale.max=1"),
        # Without scale.auto, the user's scale.max would be refused.
        (LaunchSection(num_actors=2), ScaleSection(auto=True, max=16), "launch.num_actors=1, scale.max=1"),
        (LaunchSection(), ScaleSection(actors=3, auto=True, min=2, max=16), "scale.actors=1, scale.min=1, scale.max=1"),
    ],
)
def test_memory_of_a_run_without_gpus_counts_every_actor_that_it_may_have(
    launch: LaunchSection, scale: ScaleSection, cure: str, cpu_run: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(32 << 30, 5 << 30))
    many = msgspec.structs.replace(cpu_run, launch=launch, scale=scale)
    (found,) = findings_of(lambda: check_devices(many))
    assert found.kind == "mistake"
    assert "16 x actor" in found.text and f"Set {cure}, train" in found.text


@pytest.mark.parametrize("scale", [ScaleSection(), ScaleSection(auto=True, max=40)])
def test_run_without_gpus_is_told_of_the_most_actors_that_fit(
    scale: ScaleSection, cpu_run: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(64 << 30, 5 << 30))
    many = msgspec.structs.replace(cpu_run, launch=LaunchSection(num_actors=1 if scale.auto else 40), scale=scale)
    (found,) = findings_of(lambda: check_devices(many))
    setting, _, number = found.text.rpartition("Set ")[2].rstrip(".").partition("=")
    assert setting == ("scale.max" if scale.auto else "launch.num_actors")
    total = [cpu_learner_need(many, sizes_of(QWEN3_600M)).num_bytes, cpu_actor_need(many, sizes_of(QWEN3_600M)).num_bytes]
    assert total[0] + int(number) * total[1] <= 64 << 30 < total[0] + (int(number) + 1) * total[1]


@pytest.mark.parametrize(("text", "gib"), [("max", 8), (f"{2 << 30}", 2), (f"{64 << 30}", 8)])
def test_containers_limit_of_memory_counts(text: str, gib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(8 << 30, 4 << 30))
    (tmp_path / "memory.max").write_text(f"{text}\n")
    assert memory_here(tmp_path / "memory.max") == (gib << 30, min(gib, 4) << 30)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, True),
        ({"LOCAL_SIZE": "8", "WORLD_SIZE": "16"}, True),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8"}, False),
        ({"WORLD_SIZE": "2"}, False),
    ],
)
def test_rank_0_that_takes_its_address_for_loopback_is_a_mistake_where_ranks_are_elsewhere(
    variables: dict[str, str], said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # As a host's own name on Debian.
    for name, value in {**variables, "RANK": "0", "MASTER_ADDR": "127.0.1.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    found = [finding.text for finding in findings_of(lambda: check_variables(CONFIG))]
    assert ["its own loopback (127.0.1.1)" in text for text in found] == [True] * said
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    check_variables(CONFIG)


def test_address_of_another_machine_and_a_taken_port_have_cures_of_their_own() -> None:
    def found(address: str) -> str:
        (finding,) = check_ports(msgspec.structs.replace(CONFIG, hub=HubSection(address=address)))
        return finding.text

    assert "is no address of this machine. Choose an address and port of this machine" in found("tcp://192.0.2.7:5700")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "End the process that has it, or choose another port" in found(f"tcp://127.0.0.1:{taken.getsockname()[1]}")


def test_pages_may_be_at_an_ipv6_address() -> None:
    metrics = msgspec.structs.replace(CONFIG.metrics, bind="[::1]:0", actor_bind="[::1]:0")
    config = msgspec.structs.replace(CONFIG, metrics=metrics)
    found = [*check_ports(config), *check_actor_port(config)]
    # A machine without such addresses says so in other words.
    assert not [finding.text for finding in found if "is not known" in finding.text]


@pytest.mark.parametrize(("free_gb", "kind"), [(100, "note"), (1, "warning")])
def test_disk_that_checkpoints_take_is_named(free_gb: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_600M))
    run = msgspec.structs.replace(CONFIG.run, dir=str(tmp_path / "run"))
    config = msgspec.structs.replace(CONFIG, model=ModelSection(path=str(tmp_path)), run=run)
    usage = shutil.disk_usage(tmp_path)._replace(free=free_gb << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    (finding,) = check_folder(config)
    one_mb = 16 * sizes_of(QWEN3_600M).num_parameters >> 20
    assert finding.kind == kind
    assert finding.text.startswith(f"a checkpoint takes up to {one_mb:,} MB, and up to 4 lie in run.dir at once")
    assert ("but its disk has 1,024 MB free" in finding.text) == (kind == "warning")
    advantage, critic = AdvantageSection(baseline="critic"), CriticSection(trunk="own")
    (finding,) = check_folder(msgspec.structs.replace(config, advantage=advantage, critic=critic))
    assert finding.text.startswith(f"a checkpoint takes up to {32 * sizes_of(QWEN3_600M).num_parameters >> 20:,} MB")
    (finding,) = check_folder(msgspec.structs.replace(config, lora=LoraSection(rank=8)))
    # Frozen weights in bfloat16, and the adapter of 28 layers, whose matrices have 22,528 rows and columns in a layer.
    num_bytes = 2 * sizes_of(QWEN3_600M).num_parameters + 16 * 8 * 28 * 22_528
    assert finding.text.startswith(f"a checkpoint takes up to {num_bytes >> 20:,} MB")
    train = msgspec.structs.replace(config.train, checkpoint_interval=0)
    assert list(check_folder(msgspec.structs.replace(config, train=train))) == []
