"""The experts that a mixture sent a group's tokens to, as bytes on the wire and in the log.

A byte for each token, layer and slot, compressed: the experts of a token in a layer, a set, rise from slot to slot, and each
stands as its distance from the one before. Distances are small numbers, so they take two thirds of the space.
"""

import numpy as np
from numpy.typing import NDArray

from offbeat.protocols.compression import CompressionError, compress, decompress

MAX_EXPERTS = 256
"""Most experts in a layer: their numbers are bytes."""


class ExpertsError(ValueError):
    """Bytes that are not the experts of so many tokens."""


def encode_experts(experts: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Return the bytes of experts `[tokens, layers, top_k]`, each below `MAX_EXPERTS`."""
    rising = np.sort(experts.astype(np.uint8), axis=-1)
    return np.frombuffer(compress(np.diff(rising, axis=-1, prepend=np.uint8(0)).tobytes()), dtype=np.uint8)


def decode_experts(content: bytes | bytearray | memoryview, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return the experts `[tokens, layers, top_k]` in these bytes, rising; raise `ExpertsError` where they have another shape.

    Memory is bounded by the shape, whatever the bytes say. Experts that no layer has are the caller's to find.
    """
    try:
        distances = decompress(content, int(np.prod(shape, dtype=np.int64)))
    except CompressionError as error:
        raise ExpertsError(f"{len(content)} bytes are not the experts of {shape[0]} tokens: {error}") from error
    return np.cumsum(distances.reshape(shape), axis=-1, dtype=np.uint8)
