"""The GPUs that a run may use: what the driver lists, through what `CUDA_VISIBLE_DEVICES` left."""

import sys
from types import SimpleNamespace

import pytest

from offbeat.deploy.local import devices
from offbeat.deploy.local.devices import Device, find_gpus, list_devices, visible_gpus

TWO = [Device(0, "GPU-aa11", "H100", 80, 79), Device(1, "GPU-aa22", "H100", 80, 70)]
DIVIDED = [
    Device(0, "GPU-aa11", "A100", 80, 79, is_divided=True),
    Device(0, "MIG-bb11", "A100 MIG 3g.40gb", 40, 40),
    Device(0, "MIG-bb22", "A100 MIG 3g.40gb", 40, 39),
    Device(1, "GPU-aa22", "A100", 80, 70),
]


class NvmlError(Exception):
    """An error as NVML raises it."""


class Nvml:
    """Stands for `pynvml`: a GPU that cannot be divided, one that has fallen off the bus, and one with two instances."""

    NVMLError = NvmlError
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, *, has_driver: bool = True) -> None:
        self._has_driver = has_driver
        self.is_open = False

    def nvmlInit(self) -> None:  # noqa: N802
        if not self._has_driver:
            raise NvmlError("no driver")
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index == 1:
            raise NvmlError("lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}" if handle < 10 else f"MIG-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "Card"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=1000 * (handle + 1), free=1000 * handle)

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:  # noqa: N802
        if handle == 0:
            raise NvmlError("not supported")
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> int:  # noqa: N802
        if index not in (0, 4):
            raise NvmlError("not found")
        return 10 + index


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


def test_driver_is_asked_for_gpus_and_their_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # pyright: ignore[reportArgumentType]
    assert list_devices() == [
        Device(0, "GPU-0", "Card", 1000, 0),
        Device(2, "GPU-2", "Card", 3000, 2000, is_divided=True),
        Device(2, "MIG-10", "Card", 11_000, 10_000),
        Device(2, "MIG-14", "Card", 15_000, 14_000),
    ]
    assert not nvml.is_open


def test_machine_without_the_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(has_driver=False))  # pyright: ignore[reportArgumentType]
    assert find_gpus({}) == devices.Inventory()


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
    monkeypatch.setattr(devices, "list_devices", lambda: TWO)
    monkeypatch.setattr(devices, "torch_is_built_for_gpus", lambda: is_built)
    found = find_gpus(environment)
    assert unused in found.unused
    assert bool(found.gpus) == (unused == "")
