"""Torch's companion packages, as every process sees them; variables that a launcher sets."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.processes import environment
from offbeat.common.processes.environment import (
    BROKEN_VARIABLE,
    DEFAULT_THREADS_VARIABLE,
    LARGE_MODEL_BYTES,
    fast_imports,
    launcher_number,
    launcher_rank,
)

ROOT = Path(__file__).parents[3]

LOOK = """
import importlib.util, sys
from offbeat.common.processes.environment import prepare_environment
prepare_environment()
print([name for name in ("torchvision", "torchaudio", "torchcodec") if importlib.util.find_spec(name) is not None])
if len(sys.argv) > 1:
    import subprocess
    subprocess.run([sys.executable, *sys.argv[1:]], check=True)
"""


def test_broken_packages_look_absent_and_are_tried_by_the_first_process_alone(tmp_path: Path) -> None:
    tried = tmp_path / "tried"
    for name in ("torchvision", "torchaudio", "torchcodec"):
        code = f"open({str(tried)!r}, 'a').write('{name} ')\n"
        (tmp_path / f"{name}.py").write_text(code + ("" if name == "torchaudio" else "raise OSError('another build')\n"))
    script = tmp_path / "look.py"
    script.write_text(LOOK)
    environment = {name: value for name, value in os.environ.items() if name != BROKEN_VARIABLE}
    environment["PYTHONPATH"] = f"{tmp_path}:{ROOT / 'src'}"
    result = subprocess.run(
        [sys.executable, str(script), str(script)], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["['torchaudio']", "['torchaudio']"]
    assert tried.read_text().split() == ["torchvision", "torchaudio", "torchcodec"]


def test_collector_rests_while_modules_are_imported_and_works_again_afterwards() -> None:
    enabled_within = []
    with pytest.raises(ImportError), fast_imports():
        enabled_within.append(gc.isenabled())
        raise ImportError
    assert enabled_within == [False]
    assert gc.isenabled()


def test_launchers_variable_that_is_no_number_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert launcher_number("RANK", 0) == 3
    monkeypatch.delenv("RANK")
    assert launcher_number("RANK", 0) == 0
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(SettingError, match='environment variable RANK = "first"'):
        launcher_number("RANK", 0)


@pytest.mark.parametrize(("rank", "world_size"), [("3", None), ("2", "2"), ("0", "0")])
def test_rank_that_no_launcher_sets_is_a_mistake(rank: str, world_size: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(SettingError, match=r"MASTER_ADDR = .*it is not set, and WORLD_SIZE is 2\. Run `unset RANK"):
        launcher_rank()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert launcher_rank() == 1
    monkeypatch.setenv("RANK", rank)
    # As after a launcher's shell: one of the two is left.
    if world_size is None:
        monkeypatch.delenv("WORLD_SIZE")
    else:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(SettingError, match=f"RANK = {rank}: .*WORLD_SIZE is {world_size or 1}. Run `unset RANK WORLD_SIZE`"):
        launcher_rank()


TORCH_OF_GPUS = "from typing import Optional\n__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n"
TORCH_OF_CPUS = "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"


@pytest.mark.parametrize(
    ("version_file", "has_driver", "visible", "computes_on_gpu"),
    [
        (TORCH_OF_GPUS, True, None, True),
        (TORCH_OF_GPUS, True, "2,3", True),
        (TORCH_OF_GPUS, True, "", False),
        (TORCH_OF_GPUS, False, None, False),
        (TORCH_OF_CPUS, True, None, False),
    ],
)
def test_defaults_of_a_cpu_are_those_of_a_torch_that_cannot_use_the_gpu(
    version_file: str,
    has_driver: bool,
    visible: str | None,
    computes_on_gpu: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver alone decides nothing: an environment for CPUs on a machine with GPUs trains on the CPU."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text(version_file)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(environment, "GPU_FILES", (str(tmp_path / "torch") if has_driver else "/nowhere/nvidiactl",))
    variables = {"PATH": os.environ["PATH"], BROKEN_VARIABLE: ""}
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    monkeypatch.setattr(os, "environ", variables)
    environment.prepare_environment()
    assert (variables.get("DS_ACCELERATOR") == "cpu") == (not computes_on_gpu)
    assert ("OMP_NUM_THREADS" in variables) == (not computes_on_gpu)
    assert variables["VLLM_LOGGING_LEVEL"] == ("WARNING" if computes_on_gpu else "ERROR")
    assert ("TORCH_CPP_LOG_LEVEL" in variables) == (not computes_on_gpu)
    assert ("ONEDNN_PRIMITIVE_CACHE_CAPACITY" in variables) == (not computes_on_gpu)


THREADS = """
import json, os, sys
from offbeat.common.processes import environment
environment.num_cores = lambda: 5
given = dict(os.environ)
for variables, model in json.loads(sys.argv[1]):
    os.environ.clear()
    os.environ.update(given, **variables)
    environment.prepare_environment()
    environment.use_every_core(model, 2)
    import torch
    print(torch.get_num_threads(), os.environ["OMP_WAIT_POLICY"])
    torch.set_num_threads(1)
"""


@pytest.mark.slow
def test_learner_of_a_large_model_has_its_share_of_the_cores_unless_the_user_chose(tmp_path: Path) -> None:
    for name, num_bytes in (("large", LARGE_MODEL_BYTES), ("small", LARGE_MODEL_BYTES - 1)):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.truncate(num_bytes)
    # The small model is first: for it torch has the number of threads that it is imported with.
    cases: list[tuple[dict[str, str], str, int]] = [
        ({}, "small", 1),
        ({}, "large", 2),
        # A child process of one whose user has set nothing, and a user who wants one thread.
        ({"OMP_NUM_THREADS": "1", DEFAULT_THREADS_VARIABLE: "1"}, "large", 2),
        ({"OMP_NUM_THREADS": "1"}, "large", 1),
        ({}, "a hub's name", 2),
    ]
    # vLLM leaves libraries to preload, OpenMP's among them, in the environment of a process that has run it.
    unset = ("OMP_NUM_THREADS", DEFAULT_THREADS_VARIABLE, "LD_PRELOAD")
    others = {name: value for name, value in os.environ.items() if name not in unset}
    env = {**others, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    told = json.dumps([(variables, str(tmp_path / model)) for variables, model, _ in cases])
    result = subprocess.run([sys.executable, "-c", THREADS, told], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [f"{num_threads} PASSIVE" for *_, num_threads in cases]


@pytest.mark.parametrize(
    ("quota", "num_cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 8), (None, 8)]
)
def test_containers_quota_of_processors_is_known(
    quota: str | None, num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(environment, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert environment.num_cores() == num_cores


def test_build_of_the_installed_torch_is_read_from_its_files() -> None:
    import torch

    assert environment.torch_is_built_for_gpus() == (torch.version.cuda is not None)
