"""Memory that processes share is found by its address alone, and freed with its owner."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from offbeat.common.weights.flat import Address, WeightBuffer, make_layout, map_bytes

LAYOUT = make_layout([("weight", (128,))], torch.uint8)


def write(address: Address, value: int) -> None:
    map_bytes(address, 128).fill_(value)


@pytest.mark.slow
def test_other_process_writes_what_the_owner_reads() -> None:
    memory = WeightBuffer(LAYOUT)
    assert torch.equal(memory.flat, torch.zeros(128, dtype=torch.uint8))
    process = multiprocessing.get_context("spawn").Process(target=write, args=(memory.address, 7))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert torch.equal(memory.flat, torch.full((128,), 7, dtype=torch.uint8))


@pytest.mark.parametrize("is_reserved", [True, False])
def test_address_leads_nowhere_when_its_owner_is_gone_and_mapped_bytes_stay(is_reserved: bool) -> None:
    memory = WeightBuffer(LAYOUT, is_reserved=is_reserved)
    address, flat = memory.address, memory.flat
    mapped = map_bytes(address, 128)
    del memory
    with pytest.raises(OSError, match="proc"):
        map_bytes(address, 128)
    flat.fill_(3)
    assert mapped.sum() == 384


def test_number_of_another_file_is_not_taken_for_the_memory() -> None:
    first = WeightBuffer(LAYOUT)
    address = first.address
    del first
    # The file descriptor of the first one comes again.
    second = WeightBuffer(LAYOUT)
    assert second.address.path == address.path
    with pytest.raises(FileNotFoundError, match="the memory is not of this machine, or its process is gone"):
        map_bytes(address, 128)
    map_bytes(second.address, 128)


def test_owner_that_is_forgotten_leaves_no_file_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    flats = [WeightBuffer(LAYOUT).flat for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
    assert all(int(flat.sum()) == 0 for flat in flats)


def test_empty_memory_has_no_bytes() -> None:
    assert len(WeightBuffer(()).flat) == 0
