"""The flat weight buffer and its checksum."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.weights.flat import (
    CHECKSUM_BLOCK_BYTES,
    CHECKSUM_PART_BYTES,
    CHECKSUM_PIECE_BYTES,
    WeightBuffer,
    buffer_bytes,
    checksum,
    make_layout,
)

SIZES = st.integers(1, 5 * CHECKSUM_BLOCK_BYTES // 8).map(lambda words: 8 * words)


def random_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_buffer_holds_every_tensor_under_its_name_and_shape() -> None:
    layout = make_layout([("a", (3, 5)), ("b", ()), ("c", (7,))], torch.float32)
    buffer = WeightBuffer(layout)
    for index, (_, view) in enumerate(buffer.views()):
        view.fill_(index + 1)
    assert {name: (tuple(view.shape), float(view.sum())) for name, view in buffer.views()} == {
        "a": ((3, 5), 15.0),
        "b": ((), 2.0),
        "c": ((7,), 21.0),
    }
    assert len(buffer.flat) == buffer_bytes(layout) == 64 + 64 + 64


@given(num_bytes=SIZES, data=st.data())
def test_a_changed_bit_changes_the_checksum(num_bytes: int, data: st.DataObject) -> None:
    flat = random_bytes(num_bytes)
    before = checksum(flat)
    flat[data.draw(st.integers(0, num_bytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(flat) != before
    assert 0 <= before < 1 << 32


@given(blocks=st.lists(st.integers(0, 20), min_size=2, max_size=2, unique=True), seed=st.integers(0, 1000))
def test_exchanged_blocks_change_the_checksum(blocks: list[int], seed: int) -> None:
    flat = random_bytes(21 * CHECKSUM_BLOCK_BYTES, seed)
    before = checksum(flat)
    first, second = (slice(block * CHECKSUM_BLOCK_BYTES, (block + 1) * CHECKSUM_BLOCK_BYTES) for block in blocks)
    flat[first], flat[second] = flat[second].clone(), flat[first].clone()
    assert checksum(flat) != before


def test_checksum_of_a_large_buffer_sees_all_of_it_and_where_it_lies() -> None:
    flat = random_bytes(3 * CHECKSUM_PIECE_BYTES + 64)
    before = checksum(flat)
    for index in (0, CHECKSUM_PIECE_BYTES - 1, CHECKSUM_PIECE_BYTES, len(flat) - 1):
        flat[index] ^= 1
        assert checksum(flat) != before
        flat[index] ^= 1
    assert checksum(flat) == before
    assert checksum(flat.roll(CHECKSUM_PIECE_BYTES)) != before


def test_checksum_is_that_of_older_actors_whatever_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = random_bytes(CHECKSUM_PART_BYTES + CHECKSUM_PIECE_BYTES + 520, seed=1)
    expected = 0
    for piece in flat.split(CHECKSUM_PIECE_BYTES):
        words = piece.numpy().view("<u8")
        num_whole = len(words) // 64 * 64
        sums = np.append(words[:num_whole].reshape(-1, 64).sum(axis=1), words[num_whole:].sum())
        expected = zlib.crc32(sums.tobytes(), expected)
    for num_cores in (None, 1, 2, 8, 512):
        monkeypatch.setattr("os.cpu_count", lambda num_cores=num_cores: num_cores)
        assert checksum(flat) == expected


def test_checksum_is_the_same_whatever_lies_around_the_buffer() -> None:
    flat = random_bytes(4096)
    shifted = torch.zeros(4096 + 192, dtype=torch.uint8)
    shifted[64 : 64 + 4096] = flat
    assert checksum(shifted[64 : 64 + 4096]) == checksum(flat)
