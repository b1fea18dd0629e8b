"""The lossless difference of two versions of the weights: which words changed, and by how much.

A word is one weight's bits as an unsigned integer. A small step of the optimizer changes few words of bfloat16, and those by
one or two. The difference of a piece of the flat buffer is

    number of entries (uint64) | number of compressed bytes (uint64) | compressed entries | zeros up to a multiple of 8 bytes

An entry is the number of words left out since the entry before it (uint16) and the word's difference modulo its size, zigzag
coded, so that small steps down are small numbers too. Entries are stored byte plane by byte plane: the low bytes of all gaps,
their high bytes, the low bytes of all differences, ...
Additions commute, so the differences between several versions may be applied in any order.
"""

import numpy as np
from numpy.typing import NDArray

from offbeat.common.weights.flat import tensor_dtype
from offbeat.protocols.messages import TensorSpec
from offbeat.protocols.payload import CompressionError, compress, decompress
from offbeat.protocols.wire import Frame

HEADER_BYTES = 16
STRIDE = 1 << 16
"""Every word whose index is one less than a multiple of this has an entry, so that each gap fits."""
GAP_BYTES = 2


class DeltaError(ValueError):
    """The bytes are no difference of two such pieces."""


def word_bytes(layout: tuple[TensorSpec, ...]) -> int:
    """Return the size of a word: that of the dtype with the most bytes. Other dtypes only compress worse."""
    bytes_by_size: dict[int, int] = {}
    for spec in layout:
        size = tensor_dtype(spec.dtype).itemsize
        bytes_by_size[size] = bytes_by_size.get(size, 0) + size * int(np.prod(spec.shape, dtype=np.int64))
    return max((size for size in bytes_by_size if size in (1, 2, 4, 8)), key=lambda size: bytes_by_size[size], default=1)


def encode_delta(old: NDArray[np.uint8], new: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Return the difference between two pieces of equal length, a multiple of 8 bytes; `size` is that of a word."""
    before, after = old.view(f"<u{size}"), new.view(f"<u{size}")
    has_entry = before != after
    has_entry[STRIDE - 1 :: STRIDE] = True
    indices = np.flatnonzero(has_entry)
    gaps = (np.diff(indices, prepend=-1) - 1).astype("<u2")
    differences = after[indices] - before[indices]
    zigzag = (differences << 1) ^ -(differences >> (8 * size - 1))
    compressed = compress(_planes(gaps) + _planes(zigzag))
    header = np.array([len(indices), len(compressed)], dtype="<u8").tobytes()
    # A bytearray: torch takes no memory that cannot be written.
    return np.frombuffer(bytearray(header + compressed + bytes(-len(compressed) % 8)), dtype=np.uint8)


def apply_delta(delta: Frame, piece: NDArray[np.uint8], size: int) -> None:
    """Add a difference to a piece in place. Raise `DeltaError`, with the piece as it was, for bytes that are none.

    Memory is bounded by a small multiple of the piece, whatever the bytes say.
    """
    words = piece.view(f"<u{size}")
    if len(delta) < HEADER_BYTES:
        raise DeltaError(f"a difference of {len(delta)} bytes has no header")
    num_entries, num_compressed = np.frombuffer(delta[:HEADER_BYTES], dtype="<u8").tolist()
    if num_entries > len(words) or num_compressed > len(delta) - HEADER_BYTES:
        raise DeltaError(f"{num_entries} entries in {num_compressed} bytes do not fit {len(words)} words in {len(delta)} bytes")
    try:
        entries = decompress(memoryview(delta)[HEADER_BYTES : HEADER_BYTES + num_compressed], num_entries * (GAP_BYTES + size))
    except CompressionError as error:
        raise DeltaError(f"a difference cannot be decompressed: {error}") from error
    gaps = _from_planes(entries[: num_entries * GAP_BYTES], GAP_BYTES)
    indices = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if num_entries and indices[-1] >= len(words):
        raise DeltaError(f"an entry is for word {indices[-1]} of {len(words)}")
    zigzag = _from_planes(entries[num_entries * GAP_BYTES :], size)
    words[indices] += (zigzag >> 1) ^ -(zigzag & 1)


def _planes(values: NDArray[np.integer]) -> bytes:
    """Return the first bytes of all values, then their second bytes, and so on."""
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _from_planes(planes: NDArray[np.uint8], size: int) -> NDArray[np.integer]:
    return np.ascontiguousarray(planes.reshape(size, -1).T).view(f"<u{size}").reshape(-1)
