"""Claims about the wire's decoder that must hold for any frames."""

import struct
from collections.abc import Sequence

import numpy as np

from offbeat.protocols.messages import CanaryRouted, CanaryScored, Chunk, FilesScored, GroupDone, Lease, RunPart, Welcome
from offbeat.protocols.wire import (
    MAGIC,
    FromActor,
    FromLearner,
    WireError,
    decode_from_actor,
    decode_from_learner,
    encode,
    logprobs,
    routed_experts,
    token_ids,
)

WITH_ARRAY = Welcome | CanaryScored | FilesScored | CanaryRouted | Chunk | RunPart
"""Messages with one array frame after the body; all others but groups and leases have none."""
LENGTH = struct.Struct("<I")
FIRST_FRAMES = (MAGIC, MAGIC[:-1] + bytes([MAGIC[-1] + 1]), b"offbeat\x02")
"""First frames of this version, a newer minor version and another major version.

A selector beyond the three takes the first frame from the input.
"""


def pack(is_from_learner: bool, first: int, frames: Sequence[bytes]) -> bytes:
    """Return an input: a byte for the direction and the first frame, then every other frame after its length."""
    return bytes([is_from_learner | first << 1]) + b"".join(LENGTH.pack(len(frame)) + frame for frame in frames)


def unpack(data: bytes) -> tuple[bool, int, list[bytes]]:
    """Return direction, first frame and other frames of an input. Cut a frame at the end; drop an incomplete length."""
    frames: list[bytes] = []
    at = 1
    while at + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        frames.append(data[at + LENGTH.size : at + LENGTH.size + length])
        at += LENGTH.size + length
    head = data[0] if data else 0
    return bool(head & 1), head >> 1, frames


def check_frames(data: bytes) -> FromActor | FromLearner | None:
    """Decode an input and check the claims; return the packet, or None after a `WireError`. Any other error is a finding."""
    is_from_learner, first, frames = unpack(data)
    if first < len(FIRST_FRAMES):
        frames = [FIRST_FRAMES[first], *frames]
    decode = decode_from_learner if is_from_learner else decode_from_actor
    try:
        packet = decode(frames)
    except WireError as error:
        assert str(error)
        return None
    # Compared as bytes: a reward may be NaN, which equals nothing.
    arrays = [np.frombuffer(array, dtype=np.uint8) for array in packet.arrays]
    if isinstance(packet.message, Lease):
        assert len(arrays) == 1 + bool(packet.message.images)
    elif not isinstance(packet.message, GroupDone):
        assert len(arrays) == isinstance(packet.message, WITH_ARRAY)
    again = encode(packet.message, *arrays)
    twice = decode([bytes(frame) for frame in again])
    assert encode(twice.message, *arrays) == again
    if isinstance(packet.message, CanaryRouted):
        assert routed_experts(packet.message, packet.arrays[0]).size > 0
    if isinstance(packet.message, GroupDone):
        num_tokens = sum(completion.num_tokens for completion in packet.message.completions)
        assert len(token_ids(packet.arrays[0])) == len(logprobs(packet.arrays[1])) == num_tokens
        turns = [turn for completion in packet.message.completions for turn in completion.turns]
        experts = packet.message.experts
        of_context = [4 * sum(turn.num_context for turn in turns)] * bool(turns)
        assert [len(array) for array in packet.arrays[2:]] == (of_context if experts is None else [experts.num_bytes])
        assert experts is None or not turns
        for completion in packet.message.completions:
            starts = [segment.first_token for segment in completion.segments]
            assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < completion.num_tokens
            assert min(segment.policy_version for segment in completion.segments) >= 0
            if completion.turns:
                assert sum(turn.num_sampled for turn in completion.turns) == completion.num_tokens
                assert all(turn.back <= index + 1 for index, turn in enumerate(completion.turns))
                assert all(turn.back or turn.num_context for turn in completion.turns)
    return packet
