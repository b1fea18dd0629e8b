"""Differences of weights are exact for any words, and bytes that are no difference change nothing."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.common.weights.deltas import HEADER_BYTES, STRIDE, DeltaError, apply_delta, encode_delta, word_bytes
from offbeat.common.weights.flat import ALIGNMENT, WeightBuffer, make_layout

SIZES = (1, 2, 4, 8)


def random_piece(generator: np.random.Generator, num_bytes: int) -> NDArray[np.uint8]:
    return generator.integers(0, 256, num_bytes, dtype=np.uint8)


def changed(generator: np.random.Generator, piece: NDArray[np.uint8], size: int, share: float) -> NDArray[np.uint8]:
    """Return a copy in which this share of the words is random."""
    words = piece.copy().view(f"<u{size}")
    is_changed = generator.random(len(words)) < share
    words[is_changed] = random_piece(generator, int(is_changed.sum()) * size).view(f"<u{size}")
    return words.view(np.uint8)


@given(
    st.sampled_from(SIZES),
    st.integers(0, 40),
    st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
def test_chain_of_differences_in_any_order_gives_the_last_version_bit_for_bit(
    size: int, num_lines: int, shares: list[float], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    versions = [random_piece(generator, num_lines * ALIGNMENT)]
    for share in shares:
        versions.append(changed(generator, versions[-1], size, share))
    deltas = [encode_delta(old, new, size) for old, new in itertools.pairwise(versions)]
    held = versions[0].copy()
    for index in generator.permutation(len(deltas)):
        apply_delta(deltas[index].tobytes(), held, size)
    assert held.tobytes() == versions[-1].tobytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("index", [0, STRIDE - 2, STRIDE - 1, STRIDE, 2 * STRIDE - 1, 2 * STRIDE])
def test_one_changed_word_is_found_wherever_it_is(size: int, index: int) -> None:
    old = np.zeros((2 * STRIDE + 8) * size, dtype=np.uint8)
    new = old.copy()
    new.view(f"<u{size}")[index : index + 1] -= 1
    delta = encode_delta(old, new, size)
    assert len(delta) % 8 == 0
    apply_delta(delta.tobytes(), old, size)
    assert old.tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_nan_infinity_and_signed_zero_keep_their_bits(dtype: torch.dtype) -> None:
    layout = make_layout([("w", (64,))], dtype)
    old, new = WeightBuffer(layout), WeightBuffer(layout)
    dict(old.views())["w"].copy_(torch.tensor([0.0, -0.0, 1.0, -1.0] * 16))
    dict(new.views())["w"].copy_(torch.tensor([-0.0, 0.0, float("nan"), -float("inf")] * 16))
    apply_delta(
        encode_delta(old.flat.numpy(), new.flat.numpy(), word_bytes(layout)).tobytes(), old.flat.numpy(), word_bytes(layout)
    )
    assert torch.equal(old.flat, new.flat)


def test_word_is_that_of_the_dtype_with_the_most_bytes() -> None:
    halves = make_layout([("a", (100,))], torch.bfloat16)
    assert word_bytes(halves) == 2
    assert word_bytes((*halves, *make_layout([("b", (49,))], torch.float32))) == 2
    assert word_bytes((*halves, *make_layout([("b", (25,)), ("c", (26,))], torch.float32))) == 4
    assert word_bytes(make_layout([("a", (3,))], torch.complex128)) == 1
    assert word_bytes(()) == 1


def test_small_steps_of_bfloat16_take_a_fraction_of_the_weights() -> None:
    generator = np.random.default_rng(0)
    old = random_piece(generator, 1 << 18)
    words = old.copy().view("<u2")
    # One weight in a hundred goes to a neighbor.
    at = generator.random(len(words)) < 0.01
    words[at] += generator.choice(np.array([1, 65535], dtype=np.uint16), int(at.sum()))
    assert len(encode_delta(old, words.view(np.uint8), 2)) * 50 < len(old)


PIECE = random_piece(np.random.default_rng(0), 1 << 12)
LONGER = np.zeros(1 << 13, np.uint8)
DELTA = encode_delta(PIECE, changed(np.random.default_rng(1), PIECE, 2, 0.1), 2).tobytes()


def with_header(num_entries: int, num_compressed: int, rest: bytes = DELTA[HEADER_BYTES:]) -> bytes:
    return np.array([num_entries, num_compressed], dtype="<u8").tobytes() + rest


@pytest.mark.parametrize(
    ("delta", "why"),
    [
        (b"", "no header"),
        (DELTA[: HEADER_BYTES - 1], "no header"),
        (with_header(2049, 8), "2049 entries"),
        (with_header(2**64 - 1, 8), "do not fit"),
        (with_header(1, 2**63), "do not fit"),
        (with_header(1, 0), "cannot be decompressed"),
        (with_header(9, 8, b"not zstd"), "cannot be decompressed"),
        (DELTA[:8] + DELTA[:8] + DELTA[HEADER_BYTES:], "cannot be decompressed"),
        # Differences of longer pieces.
        (encode_delta(LONGER, LONGER ^ (np.arange(1 << 13) == 1 << 12), 2).tobytes(), "an entry is for word 2048 of 2048"),
        (
            encode_delta(np.zeros(1 << 18, np.uint8), np.zeros(1 << 18, np.uint8), 2).tobytes(),
            "an entry is for word 131071 of 2048",
        ),
    ],
)
def test_bytes_that_are_no_difference_are_refused_and_change_nothing(delta: bytes, why: str) -> None:
    piece = PIECE.copy()
    with pytest.raises(DeltaError, match=why):
        apply_delta(delta, piece, 2)
    assert piece.tobytes() == PIECE.tobytes()


@given(
    st.lists(st.tuples(st.integers(0, len(DELTA) - 1), st.integers(1, 255)), min_size=1, max_size=4), st.integers(0, len(DELTA))
)
def test_damaged_difference_is_an_error_or_a_wrong_piece_never_a_crash(damage: list[tuple[int, int]], length: int) -> None:
    delta = bytearray(DELTA)
    for at, mask in damage:
        delta[at] ^= mask
    piece = PIECE.copy()
    try:
        apply_delta(bytes(delta[:length]), piece, 2)
    except DeltaError:
        assert piece.tobytes() == PIECE.tobytes()


@pytest.mark.slow
def test_difference_that_expands_without_end_takes_little_memory() -> None:
    zeros = np.zeros(1 << 24, dtype=np.uint8)
    bomb = encode_delta(zeros, np.ones_like(zeros), 1).tobytes()
    assert len(bomb) < 1 << 16
    num_compressed = int(np.frombuffer(bomb[8:16], "<u8")[0])
    piece = PIECE.copy()
    for num_entries in (len(piece), 1 << 24):
        tracemalloc.start()
        with pytest.raises(DeltaError):
            apply_delta(with_header(num_entries, num_compressed, bomb[HEADER_BYTES:]), piece, 1)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 32 * len(piece)
