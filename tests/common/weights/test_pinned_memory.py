"""Pinned memory, with a recorder in place of CUDA's runtime, and on a GPU."""

import contextlib
import gc
from collections.abc import Iterator
from enum import Enum

import pytest
import torch

from offbeat.common.weights.flat import pin
from tests.gpu_report import MEASURED


class Status(Enum):
    """The runtime's `cudaError`."""

    success = 0
    memoryAllocation = 2  # noqa: N815, CUDA's name


class Runtime:
    """Records what is pinned, by address, and the GPU that was current then."""

    cudaError = Status  # noqa: N815, torch's name

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.gpus: list[int] = []
        self.gpu = -1
        self.status = Status.success
        self.num_kernels = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Status:  # noqa: N802, CUDA's name
        assert address not in self.pinned, "CUDA refuses memory that is pinned already"
        assert flags == 1
        self.gpus.append(self.gpu)
        if self.status is Status.success:
            self.pinned[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> Status:  # noqa: N802, CUDA's name
        del self.pinned[address]
        return Status.success

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.gpu = index
        yield
        self.gpu = -1

    def zeros(self, size: int, device: str) -> None:
        self.num_kernels += 1
        raise RuntimeError("CUDA error: out of memory")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", runtime.device)
    monkeypatch.setattr(torch.UntypedStorage, "is_pinned", lambda storage: storage.data_ptr() in runtime.pinned)
    return runtime


def test_memory_is_pinned_once_whole_and_for_the_given_gpu(runtime: Runtime) -> None:
    flat = torch.zeros(4096, dtype=torch.uint8)
    pin(flat[100:200].untyped_storage(), 3)
    pin(flat.untyped_storage(), 3)
    assert runtime.pinned == {flat.data_ptr(): 4096}
    assert runtime.gpus == [3]


def test_memory_stays_pinned_as_long_as_any_view_of_it_lives(runtime: Runtime) -> None:
    flat = torch.zeros(4096, dtype=torch.uint8)
    pin(flat.untyped_storage(), 0)
    view = flat[64:128].view(torch.float32)
    del flat
    gc.collect()
    assert len(runtime.pinned) == 1
    del view
    assert runtime.pinned == {}


def test_refused_memory_stays_as_it_is_and_no_later_kernel_reports_it(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = torch.zeros(4096, dtype=torch.uint8)
    runtime.status = Status.memoryAllocation
    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", runtime.zeros)
        pin(flat.untyped_storage(), 0)
    assert runtime.num_kernels == 1
    del flat
    assert runtime.pinned == {}


@pytest.mark.gpu
def test_on_a_gpu_pinned_memory_is_copied_faster_and_may_be_pinned_again_after_it_is_freed(record_property) -> None:
    source = torch.randint(0, 256, (256 << 20,), dtype=torch.uint8, device="cuda")
    speeds = []
    for is_pinned in (False, True, True):
        flat = torch.zeros(len(source), dtype=torch.uint8)
        if is_pinned:
            pin(flat.untyped_storage(), 0)
        assert flat.is_pinned() == is_pinned
        flat.copy_(source)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        flat.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.current_stream().synchronize()
        speeds.append(len(source) / begin.elapsed_time(end) / 1e6)
        assert torch.equal(flat, source.cpu())
        del flat
    record_property(MEASURED, f"GPU to host: {speeds[0]:.1f} GB/s, to pinned memory {speeds[-1]:.1f} GB/s")
