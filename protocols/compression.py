"""Compression of bytes that travel: zstd, as pyarrow has it."""

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray


class CompressionError(ValueError):
    """Bytes that are not compressed, or not so many."""


def compress(content: bytes) -> bytes:
    """Return the bytes compressed."""
    return _codec().compress(content, asbytes=True)


def decompress(compressed: bytes | bytearray | memoryview, num_bytes: int) -> NDArray[np.uint8]:
    """Return exactly `num_bytes` of content, and never hold more; raise `CompressionError` where there are others."""
    try:
        content = _codec().decompress(compressed, decompressed_size=num_bytes, asbytes=True)
    # The codec's errors.
    except (_pyarrow().ArrowException, OSError) as error:
        raise CompressionError(str(error)) from error
    return np.frombuffer(content, dtype=np.uint8)


@cache
def _codec() -> Any:
    return _pyarrow().Codec("zstd", compression_level=1)


def _pyarrow() -> ModuleType:
    # Imported late: its import starts a thread, and the process that services are forked from can have none.
    import pyarrow

    return pyarrow
