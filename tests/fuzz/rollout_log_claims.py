"""Claims about the rollout log's reader that must hold for a segment of any bytes."""

import contextlib
from pathlib import Path

import xxhash

from offbeat.learner.leases.log_reading import (
    ALIGNMENT,
    HEADER_BYTES,
    LogDamagedError,
    LogFormatError,
    RawRecord,
    decode_header,
    decode_record,
    encode_header,
    encode_record,
    whole_records,
)

PATH = Path("00000001.log")
RECORD_BYTES = 16
"""Size of a record's header."""


def check_segment(data: bytes) -> int:
    """Check the reader on a segment made from `data`; return the number of whole records.

    The first byte of `data` selects the segment: 1, the other bytes with every checksum corrected, because hardly any other
    input reaches the decoder; 2, one record, whose array length is the second byte and whose body follows; else, the other
    bytes unchanged.
    """
    if not data:
        return 0
    segment = bytearray(data[1:])
    if data[0] == 1:
        make_checksums_right(segment)
    elif data[0] == 2:
        segment = one_record(segment)
    view = memoryview(segment).toreadonly()
    if len(view) >= HEADER_BYTES:
        with contextlib.suppress(LogDamagedError, LogFormatError):
            header = decode_header(view, PATH)
            assert encode_header(header) == view[:HEADER_BYTES]
    offset = HEADER_BYTES
    num_records = 0
    for raw in whole_records(view, offset):
        assert raw.offset == offset < raw.end <= len(view)
        check_record(raw, view[raw.offset : raw.end])
        offset = raw.end
        num_records += 1
    return num_records


def check_record(raw: RawRecord, whole: memoryview) -> None:
    """Check that a record is refused, or equals the encoding of its event and arrays."""
    try:
        record = decode_record(raw, 1, PATH)
    except LogDamagedError:
        return
    arrays = b"".join(record.arrays)
    # Older programs wrote no zeros behind the arrays.
    assert raw.arrays[: len(arrays)] == arrays
    assert len(raw.arrays) - len(arrays) in (0, -len(arrays) % ALIGNMENT)
    encoded = b"".join(encode_record(0, record.event, *record.arrays))
    again = next(whole_records(memoryview(encoded), 0))
    assert again.end == len(encoded)
    # Msgpack has several encodings of one event, and padding may be nonzero; our own encoding must come back unchanged.
    padding = whole[RECORD_BYTES + len(raw.body) : len(whole) - len(raw.arrays)]
    is_ours = not any(padding) and bytes(raw.arrays[len(arrays) :]) == bytes(-len(arrays) % ALIGNMENT)
    # The checksum is seeded with the offset, which differs.
    assert encoded[8:] == whole[8:] or again.body != raw.body or not is_ours
    decoded = decode_record(again, 1, PATH)
    assert b"".join(encode_record(0, decoded.event, *decoded.arrays)) == encoded


def one_record(content: bytearray) -> bytearray:
    """Return a segment of one record: the first byte of `content` is its number of tokens, all zeros; the rest is its body."""
    body, arrays = content[1:], bytes(8 * sum(content[:1]))
    lengths = len(body).to_bytes(4, "little") + len(arrays).to_bytes(4, "little")
    segment = bytearray(HEADER_BYTES + 8) + lengths + body + bytes(-len(body) % ALIGNMENT) + arrays
    make_checksums_right(segment)
    return segment


def make_checksums_right(segment: bytearray) -> None:
    """Correct the checksums of the header and of every record within the segment."""
    if len(segment) >= HEADER_BYTES:
        segment[HEADER_BYTES - 8 : HEADER_BYTES] = checksum(segment[: HEADER_BYTES - 8], 0)
    offset = HEADER_BYTES
    while offset + RECORD_BYTES <= len(segment):
        num_body_bytes = int.from_bytes(segment[offset + 8 : offset + 12], "little")
        num_array_bytes = int.from_bytes(segment[offset + 12 : offset + 16], "little")
        end = offset + RECORD_BYTES + num_body_bytes + -num_body_bytes % ALIGNMENT + num_array_bytes
        if end > len(segment):
            return
        segment[offset : offset + 8] = checksum(segment[offset + 8 : end], offset)
        offset = end


def checksum(data: bytes | bytearray, offset: int) -> bytes:
    """Return the checksum as stored in the file, of data at this offset; that of a header is not seeded."""
    return xxhash.xxh3_64_intdigest(data, seed=offset).to_bytes(8, "little")
