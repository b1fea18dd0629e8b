"""Pinned host memory: a GPU copies from and into it at the speed of the bus, beside what the host does."""

import contextlib
import weakref

import torch

PORTABLE = 1
"""CUDA's flag for memory that is pinned for every GPU of the process."""


def pin(storage: torch.UntypedStorage, gpu_index: int) -> None:
    """Pin memory until it is freed, unless it is pinned already. Where the driver refuses, copies are slower.

    torch's own pinned memory comes in powers of two: up to twice as much as is asked for.
    """
    runtime = torch.cuda.cudart()
    assert runtime is not None, "torch is built for GPUs"
    # A thread without a device of its own would make a context on the first one.
    with torch.cuda.device(gpu_index):
        if storage.is_pinned():
            return
        address = storage.data_ptr()
        if runtime.cudaHostRegister(address, storage.nbytes(), PORTABLE) == runtime.cudaError.success:
            # At the process's end CUDA may be gone first, and has no need of it.
            weakref.finalize(storage, runtime.cudaHostUnregister, address).atexit = False
            return
        # CUDA reports a refusal once more, at the next kernel.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
