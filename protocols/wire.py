"""Messages as ZeroMQ frames: `[magic and protocol version, msgpack body, array, ...]`. Never pickle.

Arrays are raw little-endian int32 or float32 buffers: a group of 8 x 4096 tokens decodes in microseconds, where lists of
numbers take tens of milliseconds. Everything received is untrusted: counts and sizes are checked before use.

When the peer's minor version is newer, fields that this side does not know are left out, and a message that it does not know
is an `UnknownMessageError`, which needs no answer. A peer of another major version gets a refusal that it can
read (`refusal_for`): `Refused` must stay as it is in every version to come.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
import msgspec.inspect as types
import numpy as np
from numpy.typing import NDArray

from offbeat.protocols import messages
from offbeat.protocols.payload import CompletionMeta, ExpertsMeta
from offbeat.protocols.text import plain, plain_tree

_NAME = b"offbeat"
MAGIC = _NAME + bytes([messages.PROTOCOL_MAJOR, messages.PROTOCOL_MINOR])
ITEM_BYTES = 4
_TOKEN_ID = np.dtype("<i4")
_LOGPROB = np.dtype("<f4")
MAX_FRAMES = 8
"""Most frames that a message of this major version may have."""
MAX_ACTOR_BODY_BYTES = 4 << 20
"""Largest body of an actor's message. Decoded, it may take many times its size."""
_FOR_PEOPLE = (
    messages.Ack,
    messages.Goodbye,
    messages.Hello,
    messages.LeaseFailed,
    messages.LiveSettingsReport,
    messages.LiveSettingsRequest,
    messages.Refused,
    messages.StatusReport,
    messages.Stop,
    messages.WeightsStaged,
)
"""Messages with text that is printed, logged or drawn. The text of all others is names, or data such as a lease's prompt."""

_encoder = msgspec.msgpack.Encoder()

Frame = bytes | bytearray | memoryview
Array = NDArray[np.int32] | NDArray[np.float32] | NDArray[np.uint8]


class WireError(ValueError):
    """A message that cannot be decoded. The text says why, and may be sent back."""


class UnknownMessageError(WireError):
    """A message that only a newer minor version has. It is counted and ignored."""


class VersionError(WireError):
    """A message of another major version. The only answer to it is `refusal_for`."""

    def __init__(self, first_frame: bytes) -> None:
        theirs = ".".join(str(number) for number in first_frame[len(_NAME) : len(MAGIC)])
        ours = f"{messages.PROTOCOL_MAJOR}.{messages.PROTOCOL_MINOR}"
        super().__init__(
            f"the sender speaks version {theirs} of offbeat's protocol, this side speaks {ours}: install the same release of "
            "offbeat for the learner and all actors"
        )
        self.first_frame = first_frame


class FromActor(NamedTuple):
    """A decoded message of an actor."""

    message: messages.ActorMessage
    arrays: tuple[Frame, ...]


class FromLearner(NamedTuple):
    """A decoded message of the learner."""

    message: messages.LearnerMessage
    arrays: tuple[Frame, ...]


def encode(message: messages.ActorMessage | messages.LearnerMessage, *arrays: Array) -> list[Frame]:
    """Return the frames of a message and its arrays."""
    expected = len(_item_sizes(message))
    assert len(arrays) == expected, f"{type(message).__name__} takes {expected} arrays, got {len(arrays)}"
    return [MAGIC, _encoder.encode(message), *(_array_frame(array) for array in arrays)]


def refusal_for(error: VersionError) -> list[Frame]:
    """Return the frames of a `Refused` behind the sender's own first frame, so that another major version understands it."""
    return [error.first_frame, _encoder.encode(messages.Refused(reason=str(error)))]


def decode_from_actor(frames: Sequence[Frame]) -> FromActor:
    """Return the actor's message in these frames. Raise `WireError` when it is malformed."""
    minor, body, arrays = _split(frames)
    if len(body) > MAX_ACTOR_BODY_BYTES:
        raise WireError(f"the body has {len(body)} bytes, more than {MAX_ACTOR_BODY_BYTES}")
    message = _from_actor(minor, body)
    _check_arrays(message, arrays)
    if isinstance(message, messages.GroupDone):
        _check_group(message, arrays)
    if isinstance(message, messages.CanaryRouted):
        _check_routing(message, arrays[0])
    return FromActor(message, arrays)


def decode_from_learner(frames: Sequence[Frame]) -> FromLearner:
    """Return the learner's message in these frames. Raise `WireError` when it is malformed."""
    minor, body, arrays = _split(frames)
    message = _from_learner(minor, body)
    _check_arrays(message, arrays)
    if isinstance(message, messages.Lease) and message.images:
        num_bytes = sum(image.num_bytes for image in message.images)
        if len(arrays[1]) != num_bytes:
            raise WireError(f"{num_bytes} bytes of images announced, but they have {len(arrays[1])}")
    return FromLearner(message, arrays)


def token_ids(frame: Frame) -> NDArray[np.int32]:
    """Return the int32 array in a frame: a read-only view, no copy."""
    return np.frombuffer(frame, dtype=_TOKEN_ID)


def logprobs(frame: Frame) -> NDArray[np.float32]:
    """Return the float32 array in a frame: a read-only view, no copy."""
    return np.frombuffer(frame, dtype=_LOGPROB)


def routed_experts(message: messages.CanaryRouted, frame: Frame) -> NDArray[np.int32]:
    """Return the experts in a frame, int32 `[num_tokens, num_layers, top_k]`: a read-only, unchecked view."""
    return np.frombuffer(frame, dtype=_TOKEN_ID).reshape(message.num_tokens, message.num_layers, message.top_k)


def _array_frame(array: Array) -> memoryview:
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array).data
    kind = _TOKEN_ID if array.dtype.kind in "iu" else _LOGPROB
    return np.ascontiguousarray(array, dtype=kind).data.cast("B")


def _split(frames: Sequence[Frame]) -> tuple[int, Frame, tuple[Frame, ...]]:
    """Return the sender's minor version, the body and the arrays."""
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"a message has 2 to {MAX_FRAMES} frames, got {len(frames)}")
    first = bytes(frames[0][:16])
    if not first.startswith(_NAME) or len(first) == len(_NAME):
        raise WireError("the first frame is not offbeat's")
    if first[len(_NAME)] != messages.PROTOCOL_MAJOR:
        raise VersionError(first)
    if len(first) != len(MAGIC):
        raise WireError("the first frame is not offbeat's")
    return first[-1], frames[1], tuple(frames[2:])


def _body_decoder(union: Any) -> Callable[[int, Frame], Any]:
    """Return a decoder of this union; it takes the sender's minor version and the body."""
    strict = msgspec.msgpack.Decoder(union)
    kinds: dict[str, tuple[type, types.Type]] = {
        kind.__struct_config__.tag: (kind, types.type_info(kind)) for kind in get_args(union)
    }

    def decode(minor: int, body: Frame) -> Any:
        try:
            return _in_plain_text(strict.decode(body) if minor <= messages.PROTOCOL_MINOR else decode_newer(minor, body))
        # msgspec raises these two builtin errors for text that is not UTF-8 and for deep nesting.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"malformed message: {plain(str(error), 200)}") from error

    def decode_newer(minor: int, body: Frame) -> Any:
        tree = msgspec.msgpack.decode(body)
        tag = tree.get("type") if isinstance(tree, Mapping) else None
        if not isinstance(tag, str):
            raise WireError("malformed message: it has no type")
        if tag not in kinds:
            raise UnknownMessageError(
                f"{plain(tag, 64)} is a message of a newer offbeat (protocol {messages.PROTOCOL_MAJOR}.{minor})"
            )
        kind, described = kinds[tag]
        return msgspec.convert(_known_part(tree, described), kind)

    return decode


def _in_plain_text(message: Any) -> Any:
    """Return the message with all text for people made plain."""
    if isinstance(message, messages.ActorHeartbeat) and message.reward_trouble is not None:
        # Only this part: a heartbeat is frequent, and may be long.
        trouble = msgspec.structs.replace(message.reward_trouble, problem=plain(message.reward_trouble.problem))
        return msgspec.structs.replace(message, reward_trouble=trouble)
    if not isinstance(message, _FOR_PEOPLE):
        return message
    return msgspec.convert(plain_tree(msgspec.to_builtins(message)), type(message))


def _known_part(value: Any, described: types.Type) -> Any:
    """Return a decoded value without the fields that this version of its struct does not have."""
    match described:
        case types.StructType(array_like=True, fields=fields) if isinstance(value, list):
            return [_known_part(item, field.type) for item, field in zip(value, fields, strict=False)]
        case types.StructType(fields=fields, tag_field=tag_field) if isinstance(value, dict):
            known = {field.encode_name: field.type for field in fields}
            return {
                key: _known_part(item, known[key]) if key in known else item
                for key, item in value.items()
                if key in known or key == tag_field
            }
        case types.VarTupleType(item_type=item_type) if isinstance(value, list):
            return [_known_part(item, item_type) for item in value]
        case types.UnionType(types=(types.StructType() as struct, types.NoneType())) if value is not None:
            return _known_part(value, struct)
        case _:
            return value


def has_context(completions: Sequence[CompletionMeta]) -> bool:
    """Return whether a group has an array of context tokens besides its two arrays of sampled ones."""
    # No `any`, whose generator takes three times the time: several parts of the hub ask about each group.
    for completion in completions:  # noqa: SIM110
        if completion.turns:
            return True
    return False


def _item_sizes(message: messages.ActorMessage | messages.LearnerMessage) -> tuple[int, ...]:
    """Return the size of an item of each array that a message has: `ITEM_BYTES` for numbers, 1 for bytes."""
    match message:
        case messages.GroupDone(experts=experts):
            return (ITEM_BYTES,) * (2 + has_context(message.completions)) + (1,) * (experts is not None)
        case messages.Lease(images=images):
            return (ITEM_BYTES, 1) if images else (ITEM_BYTES,)
        case messages.Welcome() | messages.CanaryScored() | messages.FilesScored() | messages.CanaryRouted():
            return (ITEM_BYTES,)
        case messages.Chunk() | messages.RunPart():
            return (1,)
        case _:
            return ()


def _check_arrays(message: messages.ActorMessage | messages.LearnerMessage, arrays: Sequence[Frame]) -> None:
    sizes = _item_sizes(message)
    if len(arrays) != len(sizes):
        raise WireError(f"{type(message).__name__} has {len(sizes)} array frames, got {len(arrays)}")
    for index, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
        if len(array) % size:
            raise WireError(f"array frame {index} has {len(array)} bytes, not a multiple of {size}")


def _check_group(message: messages.GroupDone, arrays: Sequence[Frame]) -> None:
    completions = message.completions
    if message.experts is not None:
        *arrays, content = arrays
        _check_experts(message.experts, completions, content)
    num_tokens = num_context = 0
    for index, completion in enumerate(completions):
        num_tokens += completion.num_tokens
        if completion.turns:
            num_context += sum(turn.num_context for turn in completion.turns)
            _check_turns(index, completion)
        # A single segment that begins at token 0, the common case, is always right.
        if len(completion.segments) != 1 or completion.segments[0].first_token:
            _check_segments(index, completion)
    numbers = num_tokens, num_tokens, num_context
    for array, content, number in zip(arrays, ("token ids", "log-probs", "context tokens"), numbers, strict=False):
        if len(array) != number * ITEM_BYTES:
            raise WireError(f"{number} tokens announced, but the {content} have {len(array)} bytes")


def _check_experts(experts: ExpertsMeta, completions: Sequence[CompletionMeta], content: Frame) -> None:
    if len(content) != experts.num_bytes:
        raise WireError(f"{experts.num_bytes} bytes of experts announced, but they have {len(content)}")
    if has_context(completions):
        raise WireError("a group with turns has experts")


def _check_turns(index: int, completion: CompletionMeta) -> None:
    if sum(turn.num_sampled for turn in completion.turns) != completion.num_tokens:
        raise WireError(f"the turns of completion {index} do not have its {completion.num_tokens} tokens")
    for number, turn in enumerate(completion.turns):
        if turn.back > number + 1:
            raise WireError(f"turn {number} of completion {index} goes back {turn.back} turns")
        if not turn.back and not turn.num_context:
            raise WireError(f"turn {number} of completion {index} samples its first token from nothing")


def _check_routing(message: messages.CanaryRouted, array: Frame) -> None:
    num_experts = message.num_tokens * message.num_layers * message.top_k
    if len(array) != num_experts * ITEM_BYTES:
        raise WireError(f"{num_experts} routed experts announced, but they have {len(array)} bytes")


def _check_segments(index: int, completion: CompletionMeta) -> None:
    # Versions may fall, because a learner that restarted from a checkpoint assigns the later numbers again.
    starts = [segment.first_token for segment in completion.segments]
    increasing = all(a < b for a, b in itertools.pairwise(starts))
    if not starts or starts[0] != 0 or starts[-1] >= completion.num_tokens or not increasing:
        raise WireError(f"completion {index} of {completion.num_tokens} tokens has impossible segments")


_from_actor: Callable[[int, Frame], messages.ActorMessage] = _body_decoder(messages.ActorMessage)
_from_learner: Callable[[int, Frame], messages.LearnerMessage] = _body_decoder(messages.LearnerMessage)
