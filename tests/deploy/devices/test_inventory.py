"""The GPUs that a run may use: what the driver lists, through what `CUDA_VISIBLE_DEVICES` left."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from offbeat.deploy.devices import inventory
from offbeat.deploy.devices.inventory import Device, find_gpus, list_devices, visible_gpus

TWO = [Device(0, "GPU-aa11", "H100", 80, 79), Device(1, "GPU-aa22", "H100", 80, 70)]
DIVIDED = [
    Device(0, "GPU-aa11", "A100", 80, 79, is_divided=True),
    Device(0, "MIG-bb11", "A100 MIG 3g.40gb", 40, 40),
    Device(0, "MIG-bb22", "A100 MIG 3g.40gb", 40, 39),
    Device(1, "GPU-aa22", "A100", 80, 70),
]

DRIVER = """
#include <stdio.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(unsigned long)(index + 1); return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    unsigned long number = (unsigned long)device;
    return snprintf(text, size, number < 10 ? "GPU-%lu" : "MIG-%lu", number), 0;
}
int nvmlDeviceGetName(void *device, char *text, unsigned size) { return snprintf(text, size, "Card"), 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory *found) {
    found->total = 1000 * (unsigned long)device; found->free = found->total - 1; return 0;
}
int nvmlDeviceGetMigMode(void *device, unsigned *mode, unsigned *pending) {
    if ((unsigned long)device == 1) return 3;  /* NVML_ERROR_NOT_SUPPORTED */
    *mode = 1; *pending = 1; return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **handle) {
    if (index != 0 && index != 4) return 6;  /* NVML_ERROR_NOT_FOUND */
    *handle = (void *)(unsigned long)(10 + index); return 0;
}
"""
"""Stands for NVIDIA's library: a GPU that cannot be divided, and one with two instances."""


@pytest.mark.parametrize(
    ("inherited", "entries"),
    [
        (None, ["GPU-aa11", "GPU-aa22"]),
        ("1,0", ["1", "0"]),
        ("1", ["1"]),
        ("GPU-aa22", ["GPU-aa22"]),
        ("GPU-aa2", ["GPU-aa2"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,7,0", ["1"]),
        ("GPU-aa", []),
    ],
)
def test_inherited_list_stays_in_its_order_and_words_and_ends_at_what_names_nothing(
    inherited: str | None, entries: list[str]
) -> None:
    gpus = visible_gpus(TWO, inherited)
    assert [gpu.entry for gpu in gpus] == entries
    assert {gpu.entry: gpu.free_bytes for gpu in gpus}.items() <= {
        *{"0": 79, "GPU-aa11": 79, "1": 70, "GPU-aa22": 70, "GPU-aa2": 70}.items()
    }


def test_of_a_divided_gpu_only_its_instances_can_be_used() -> None:
    assert [gpu.entry for gpu in visible_gpus(DIVIDED, None)] == ["MIG-bb11", "MIG-bb22", "GPU-aa22"]
    (named,) = visible_gpus(DIVIDED, "MIG-bb22")
    assert (named.entry, named.free_bytes, named.is_instance) == ("MIG-bb22", 39, True)
    (first,) = visible_gpus(DIVIDED, "0")
    assert (first.entry, first.total_bytes) == ("0", 40), "as CUDA does, the first instance"


def test_library_of_the_driver_is_asked_for_gpus_and_their_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libnvidia-ml.so.1"
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    monkeypatch.setattr(inventory, "NVML", str(library))
    assert list_devices() == [
        Device(0, "GPU-1", "Card", 1000, 999),
        Device(1, "GPU-2", "Card", 2000, 1999, is_divided=True),
        Device(1, "MIG-10", "Card", 10_000, 9_999),
        Device(1, "MIG-14", "Card", 14_000, 13_999),
    ]


def test_machine_without_the_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert find_gpus({}) == inventory.Inventory()


@pytest.mark.parametrize(
    ("is_built", "environment", "unused"),
    [
        (True, {}, ""),
        (False, {}, "./dev setup cuda"),
        (True, {"CUDA_VISIBLE_DEVICES": ""}, 'CUDA_VISIBLE_DEVICES="" leaves none'),
    ],
)
def test_gpus_that_a_run_does_not_use_are_told_with_the_reason(
    is_built: bool, environment: dict[str, str], unused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "list_devices", lambda: TWO)
    monkeypatch.setattr(inventory, "torch_is_built_for_gpus", lambda: is_built)
    found = find_gpus(environment)
    assert unused in found.unused
    assert bool(found.gpus) == (unused == "")
