"""The floating-point operations per second that a device can do at most: published for GPUs, else measured."""

import time
from functools import cache

import torch

PUBLISHED = {
    "GB300": 2.5e15,
    "B300": 2.25e15,
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989.4e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H800 PCIe": 756e12,
    "H800": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""Dense bfloat16 operations per second with float32 sums, from NVIDIA's data sheets and architecture papers, without sparsity.

A key is a run of words of torch's device name. Of several that fit, the first counts.
"""

_MEASURE_S = 0.05
"""Seconds for which products are repeated; one more may begin within them."""
_SIZES = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the measured matrices: large enough for the device's full speed, on a CPU a few milliseconds."""


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the device's operations per second: published for bfloat16 on a known GPU, else those of a product, once."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        published = published_flops(torch.cuda.get_device_name(device))
        if published is not None:
            return published
    return _measure_flops(device, dtype)


def published_flops(name: str) -> float | None:
    """Return what `PUBLISHED` says of a device name; None for an unknown one, and for a slice of a GPU (MIG)."""
    # A10 is not A10G, and L4 not L40.
    words = f" {name.replace('-', ' ')} "
    if " MIG " in words:
        return None
    return next((flops for model, flops in PUBLISHED.items() if f" {model} " in words), None)


def _measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of the fastest of some products, with torch's current number of threads."""
    size = _SIZES[device.type]
    left = torch.ones(size, size, device=device, dtype=dtype)
    right, out = torch.ones_like(left), torch.empty_like(left)
    shortest_s = float("inf")
    until = time.perf_counter() + _MEASURE_S
    while (start := time.perf_counter()) < until:
        torch.mm(left, right, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        shortest_s = min(shortest_s, time.perf_counter() - start)
    return 2.0 * size**3 / shortest_s
