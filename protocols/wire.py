"""Messages as ZeroMQ frames: `[protocol version, msgpack body, array, ...]`. Never pickle.

Arrays are raw little-endian int32 or float32 buffers: a group of 8 x 4096 tokens decodes in microseconds, where lists of
numbers take tens of milliseconds. Everything received is untrusted: counts and sizes are checked before use.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocols.messages import (
    PROTOCOL_VERSION,
    ActorMessage,
    CanaryScored,
    CompletionMeta,
    GroupDone,
    LearnerMessage,
    Lease,
    Welcome,
)

MAGIC = b"offbeat" + bytes([PROTOCOL_VERSION])
ITEM_BYTES = 4
ARRAY_FRAMES: dict[type, int] = {Lease: 1, Welcome: 1, CanaryScored: 1, GroupDone: 2}
"""How many array frames follow the body; none for the messages not named."""

_encoder = msgspec.msgpack.Encoder()
_actor_decoder = msgspec.msgpack.Decoder(ActorMessage)
_learner_decoder = msgspec.msgpack.Decoder(LearnerMessage)

Frame = bytes | bytearray | memoryview


class WireError(ValueError):
    """A message that is not one of ours; its text says why and is fit to be sent back."""


class FromActor(NamedTuple):
    """A decoded message of an actor."""

    message: ActorMessage
    arrays: tuple[Frame, ...]


class FromLearner(NamedTuple):
    """A decoded message of the learner."""

    message: LearnerMessage
    arrays: tuple[Frame, ...]


def encode(message: ActorMessage | LearnerMessage, *arrays: NDArray[np.int32] | NDArray[np.float32]) -> list[Frame]:
    """The frames of a message and its arrays."""
    expected = ARRAY_FRAMES.get(type(message), 0)
    assert len(arrays) == expected, f"{type(message).__name__} takes {expected} arrays, got {len(arrays)}"
    return [MAGIC, _encoder.encode(message), *(_array_frame(array) for array in arrays)]


def decode_from_actor(frames: Sequence[Frame]) -> FromActor:
    """What an actor sent; `WireError` when it is malformed."""
    body, arrays = _split(frames)
    try:
        message = _actor_decoder.decode(body)
    # msgspec reports text that is not UTF-8 as UnicodeDecodeError, which is none of its own errors.
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"malformed message: {error}") from error
    _check_arrays(message, arrays)
    if isinstance(message, GroupDone):
        _check_group(message.completions, arrays)
    return FromActor(message, arrays)


def decode_from_learner(frames: Sequence[Frame]) -> FromLearner:
    """What the learner sent; `WireError` when it is malformed."""
    body, arrays = _split(frames)
    try:
        message = _learner_decoder.decode(body)
    # msgspec reports text that is not UTF-8 as UnicodeDecodeError, which is none of its own errors.
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"malformed message: {error}") from error
    _check_arrays(message, arrays)
    return FromLearner(message, arrays)


def token_ids(frame: Frame) -> NDArray[np.int32]:
    """The int32 array in a frame: a read-only view, no copy."""
    return np.frombuffer(frame, dtype="<i4")


def logprobs(frame: Frame) -> NDArray[np.float32]:
    """The float32 array in a frame: a read-only view, no copy."""
    return np.frombuffer(frame, dtype="<f4")


def _array_frame(array: NDArray[np.int32] | NDArray[np.float32]) -> memoryview:
    kind = "<i4" if np.issubdtype(array.dtype, np.integer) else "<f4"
    return np.ascontiguousarray(array, dtype=kind).data.cast("B")


def _split(frames: Sequence[Frame]) -> tuple[Frame, tuple[Frame, ...]]:
    if len(frames) < 2:
        raise WireError(f"a message has at least 2 frames, got {len(frames)}")
    magic = bytes(frames[0][:16])
    if magic[:-1] != MAGIC[:-1]:
        raise WireError("the first frame is not offbeat's")
    if magic != MAGIC:
        raise WireError(
            f"protocol version {magic[-1]}, but this side speaks {PROTOCOL_VERSION}: install the same offbeat everywhere"
        )
    return frames[1], tuple(frames[2:])


def _check_arrays(message: ActorMessage | LearnerMessage, arrays: Sequence[Frame]) -> None:
    expected = ARRAY_FRAMES.get(type(message), 0)
    if len(arrays) != expected:
        raise WireError(f"{type(message).__name__} has {expected} array frames, got {len(arrays)}")
    for index, array in enumerate(arrays):
        if len(array) % ITEM_BYTES:
            raise WireError(f"array frame {index} has {len(array)} bytes, not a multiple of {ITEM_BYTES}")


def _check_group(completions: Sequence[CompletionMeta], arrays: Sequence[Frame]) -> None:
    if not completions:
        raise WireError("a group has at least one completion")
    num_tokens = 0
    for index, completion in enumerate(completions):
        if completion.num_tokens < 1:
            raise WireError(f"completion {index} has {completion.num_tokens} tokens")
        _check_segments(index, completion)
        num_tokens += completion.num_tokens
    for array, content in zip(arrays, ("token ids", "log-probs"), strict=True):
        if len(array) != num_tokens * ITEM_BYTES:
            raise WireError(f"{num_tokens} tokens announced, but the {content} have {len(array)} bytes")


def _check_segments(index: int, completion: CompletionMeta) -> None:
    starts = [segment.first_token for segment in completion.segments]
    versions = [segment.policy_version for segment in completion.segments]
    increasing = all(a < b for a, b in itertools.pairwise(starts)) and versions == sorted(versions)
    if not starts or starts[0] != 0 or starts[-1] >= completion.num_tokens or not increasing or versions[0] < 0:
        raise WireError(f"completion {index} of {completion.num_tokens} tokens has impossible segments")
