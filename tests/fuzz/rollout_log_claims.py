"""What must hold for any bytes that lie where a segment of the rollout log is expected."""

import contextlib
from pathlib import Path

import xxhash

from offbeat.learner.leases.rollout_log import (
    ALIGNMENT,
    HEADER_BYTES,
    LogDamagedError,
    LogFormatError,
    RawRecord,
    decode_record,
    encode_record,
    read_segment_header,
    segment_header,
    whole_records,
)

PATH = Path("00000001.log")
RECORD_BYTES = 16
"""Of a record's header."""


def check_segment(data: bytes) -> int:
    """Read a segment made of `data`; how many whole records it held.

    The first byte says how it is made: 0 as it is; 1 with every checksum made right, otherwise hardly any input would come as
    far as the decoder; 2 as one record, with the body that follows after a byte that says how long the arrays are.
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
            previous_end = read_segment_header(view, PATH)
            assert segment_header(previous_end) == view[:HEADER_BYTES]
    offset = HEADER_BYTES
    num_records = 0
    for raw in whole_records(view, offset):
        assert raw.offset == offset < raw.end <= len(view)
        check_record(raw, view[raw.offset : raw.end])
        offset = raw.end
        num_records += 1
    return num_records


def check_record(raw: RawRecord, whole: memoryview) -> None:
    """A record is refused, or is what its event and arrays are encoded to."""
    try:
        record = decode_record(raw, 1, PATH)
    except LogDamagedError:
        return
    assert b"".join(record.arrays) == raw.arrays
    encoded = b"".join(encode_record(record.event, *record.arrays))
    again = next(whole_records(memoryview(encoded), 0))
    assert again.end == len(encoded)
    # An event can be spelled in several ways in msgpack, and zeros are not the only padding: ours must come back unchanged.
    padding = whole[RECORD_BYTES + len(raw.body) : len(whole) - len(raw.arrays)]
    assert encoded == whole or again.body != raw.body or any(padding)
    decoded = decode_record(again, 1, PATH)
    assert b"".join(encode_record(decoded.event, *decoded.arrays)) == encoded


def one_record(content: bytearray) -> bytearray:
    """A segment whose only record has this body, and zeros for arrays: 8 bytes for each token that the first byte says."""
    body, arrays = content[1:], bytes(8 * sum(content[:1]))
    lengths = len(body).to_bytes(4, "little") + len(arrays).to_bytes(4, "little")
    segment = bytearray(HEADER_BYTES + 8) + lengths + body + bytes(-len(body) % ALIGNMENT) + arrays
    make_checksums_right(segment)
    return segment


def make_checksums_right(segment: bytearray) -> None:
    """Of the header, and of every record that lies within the segment."""
    if len(segment) >= HEADER_BYTES:
        segment[HEADER_BYTES - 8 : HEADER_BYTES] = checksum(segment[: HEADER_BYTES - 8])
    offset = HEADER_BYTES
    while offset + RECORD_BYTES <= len(segment):
        num_body_bytes = int.from_bytes(segment[offset + 8 : offset + 12], "little")
        num_array_bytes = int.from_bytes(segment[offset + 12 : offset + 16], "little")
        end = offset + RECORD_BYTES + num_body_bytes + -num_body_bytes % ALIGNMENT + num_array_bytes
        if end > len(segment):
            return
        segment[offset : offset + 8] = checksum(segment[offset + 8 : end])
        offset = end


def checksum(data: bytes | bytearray) -> bytes:
    """As it lies in the file."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")
