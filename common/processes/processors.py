"""The name of the processor that a service computes on."""

import platform
from pathlib import Path

import torch

_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve")
"""Instruction sets, as Linux calls them, by which libraries choose the kernels of bfloat16 and float32."""
_MOST_LETTERS = 160


def processor_name(device_type: str, cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the GPU's name for a `device_type` of cuda, else the CPU's model and its instruction sets for matrix products.

    Hypervisors may hide the model's name: family and model numbers are told, too.
    """
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = cpu_info.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    first: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        first.setdefault(name.strip(), value.strip())
    name = first.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in first:
        name += f", family {first['cpu family']} model {first.get('model', '?')}"
    flags = set((first.get("flags") or first.get("Features") or "").split())
    sets = " ".join(name for name in _INSTRUCTION_SETS if name in flags)
    return f"{name[:_MOST_LETTERS]} ({sets})" if sets else name[:_MOST_LETTERS]
