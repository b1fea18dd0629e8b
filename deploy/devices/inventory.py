"""The GPUs that this machine lends to a run: those of the driver, or those that `CUDA_VISIBLE_DEVICES` left of them.

They are read through NVML, which needs no CUDA context: the launcher must not take memory of a GPU that it deals out.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from ctypes import byref, c_char_p, c_uint, c_void_p, create_string_buffer
from typing import NamedTuple

from offbeat.common.environment import torch_is_built_for_gpus

NVML = "libnvidia-ml.so.1"
"""The library of NVIDIA's driver."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
_MAX_TEXT_BYTES = 96


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

    @property
    def is_instance(self) -> bool:
        return self.uuid.startswith("MIG-")


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
    try:
        library = ctypes.CDLL(NVML)
    except OSError:
        return []
    if library.nvmlInit_v2() != 0:
        return []
    try:
        return list(_devices(library))
    finally:
        library.nvmlShutdown()


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _devices(library: ctypes.CDLL) -> Iterator[Device]:
    count = c_uint()
    if library.nvmlDeviceGetCount_v2(byref(count)) != 0:
        return
    for index in range(count.value):
        handle = c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, byref(handle)) != 0:
            continue
        mode, pending, num_instances = c_uint(), c_uint(), c_uint()
        # Refused by GPUs that cannot be divided.
        is_divided = library.nvmlDeviceGetMigMode(handle, byref(mode), byref(pending)) == 0 and mode.value == 1
        yield _device(library, index, handle, is_divided=is_divided)
        if is_divided and library.nvmlDeviceGetMaxMigDeviceCount(handle, byref(num_instances)) == 0:
            for number in range(num_instances.value):
                instance = c_void_p()
                # Numbers without an instance are refused.
                if library.nvmlDeviceGetMigDeviceHandleByIndex(handle, number, byref(instance)) == 0:
                    yield _device(library, index, instance, is_divided=False)


def _device(library: ctypes.CDLL, index: int, handle: c_void_p, *, is_divided: bool) -> Device:
    uuid, name, memory = create_string_buffer(_MAX_TEXT_BYTES), create_string_buffer(_MAX_TEXT_BYTES), _Memory()
    library.nvmlDeviceGetUUID(handle, uuid, c_uint(_MAX_TEXT_BYTES))
    library.nvmlDeviceGetName(handle, name, c_uint(_MAX_TEXT_BYTES))
    library.nvmlDeviceGetMemoryInfo(handle, byref(memory))
    return Device(index, _text(uuid), _text(name), memory.total, memory.free, is_divided)


def _text(buffer: "ctypes.Array[ctypes.c_char]") -> str:
    return (c_char_p(bytes(buffer.raw)).value or b"").decode(errors="replace")
