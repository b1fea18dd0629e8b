"""The GPUs that this machine lends to a run: those of the driver, or those that `CUDA_VISIBLE_DEVICES` left of them.

They are read through NVML, which needs no CUDA context: the launcher must not take memory of a GPU that it assigns.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from offbeat.common.processes.environment import torch_is_built_for_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Device(NamedTuple):
    """A GPU of the machine, or an instance (MIG) of one, as the driver lists it."""

    number: int
    """The GPU's index in the order of the PCI bus; that of its GPU for an instance."""
    uuid: str
    """`GPU-...`, or `MIG-...` for an instance."""
    name: str
    total_bytes: int
    free_bytes: int
    is_divided: bool = False
    """The GPU is in MIG mode: processes can use only its instances."""


class Gpu(NamedTuple):
    """A GPU that a process of the run may be given."""

    entry: str
    """The entry of `CUDA_VISIBLE_DEVICES` that names it: an inherited one, or the UUID."""
    name: str
    total_bytes: int
    free_bytes: int

    @property
    def is_instance(self) -> bool:
        return self.entry.startswith("MIG-")


class Inventory(NamedTuple):
    """The GPUs for the run, in the order in which `launch.learner_gpus` and `launch.actor_gpus` count them."""

    gpus: tuple[Gpu, ...] = ()
    unused: str = ""
    """The reason why the run uses none of the machine's GPUs; empty when it uses them, or there is none."""


def find_gpus(environment: Mapping[str, str] = os.environ) -> Inventory:
    """Return the GPUs of this machine that processes of this environment can use."""
    devices = list_devices()
    if devices and not torch_is_built_for_gpus():
        return Inventory((), "torch is built for CPUs; `./dev setup cuda` makes an environment that uses GPUs")
    gpus = visible_gpus(devices, environment.get(VISIBLE))
    if devices and not gpus:
        return Inventory((), f'{VISIBLE}="{environment[VISIBLE]}" leaves none')
    return Inventory(gpus)


def visible_gpus(devices: Sequence[Device], inherited: str | None) -> tuple[Gpu, ...]:
    """Return the devices that CUDA would show under this value of `CUDA_VISIBLE_DEVICES`; None: it is not set.

    The entries of an inherited list stay as they are. As in CUDA, a list ends at its first entry that names nothing. An index
    counts in the order of the PCI bus, which is also CUDA's where all GPUs are of one kind or `CUDA_DEVICE_ORDER` says so.
    """
    if inherited is None:
        # By UUID: CUDA's own order of indices may be another than the driver's.
        return tuple(_gpu(one.uuid, one) for one in devices if not one.is_divided)
    gpus: list[Gpu] = []
    for entry in inherited.split(","):
        device = _find(devices, entry.strip())
        if device is None:
            break
        gpus.append(_gpu(entry.strip(), device))
    return tuple(gpus)


def _gpu(entry: str, device: Device) -> Gpu:
    return Gpu(entry, device.name, device.total_bytes, device.free_bytes)


def _find(devices: Sequence[Device], entry: str) -> Device | None:
    """Return the device that an entry names: an index, or the beginning of a UUID that fits only one device."""
    if entry.isdecimal():
        # Of a divided GPU, CUDA takes the first instance.
        return next((one for one in devices if one.number == int(entry) and not one.is_divided), None)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    named = [one for one in devices if one.uuid.startswith(entry) and not one.is_divided]
    return named[0] if len(named) == 1 else None


def list_devices() -> list[Device]:
    """Return the machine's GPUs, instances after their GPU; none without NVIDIA's driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return list(_devices(pynvml))
    finally:
        pynvml.nvmlShutdown()


def _devices(nvml: Any) -> Iterator[Device]:
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            is_divided = False
            # Refused by GPUs that cannot be divided.
            with contextlib.suppress(nvml.NVMLError):
                is_divided = nvml.nvmlDeviceGetMigMode(gpu)[0] == nvml.NVML_DEVICE_MIG_ENABLE
            yield _device(nvml, index, gpu, is_divided=is_divided)
            for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu) if is_divided else 0):
                # Numbers without an instance are refused.
                with contextlib.suppress(nvml.NVMLError):
                    instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
                    yield _device(nvml, index, instance, is_divided=False)


def _device(nvml: Any, index: int, handle: Any, *, is_divided: bool) -> Device:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    return Device(index, uuid, name, memory.total, memory.free, is_divided)
