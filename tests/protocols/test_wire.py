"""What is encoded is decoded unchanged; whatever else arrives is a `WireError`."""

import math
from typing import Union, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.protocols import wire
from offbeat.protocols.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    ActorMessage,
    CanaryRouted,
    CanaryScored,
    CompletionMeta,
    Credit,
    CreditLimit,
    Goodbye,
    GroupDone,
    LearnerMessage,
    Lease,
    LiveSettingsReport,
    LiveSettingsRequest,
    SayHello,
    Segment,
    Welcome,
)
from offbeat.protocols.wire import (
    MAGIC,
    MAX_ACTOR_BODY_BYTES,
    MAX_FRAMES,
    Array,
    Frame,
    UnknownMessageError,
    VersionError,
    WireError,
    decode_from_actor,
    decode_from_learner,
    encode,
    logprobs,
    refusal_for,
    routed_experts,
    token_ids,
)
from tests.protocols.sample_messages import BYTES, FLOATS, FROM_ACTOR, FROM_LEARNER, INTS, LEASE, STATUS, WELCOME

NEWER = MAGIC[:-1] + bytes([PROTOCOL_MINOR + 1])


@st.composite
def segments(draw: st.DrawFn, num_tokens: int) -> tuple[Segment, ...]:
    starts = sorted({0, *draw(st.lists(st.integers(0, num_tokens - 1), max_size=4))})
    versions = draw(st.lists(st.integers(0, 1000), min_size=len(starts), max_size=len(starts)))
    return tuple(Segment(version, start) for version, start in zip(versions, starts, strict=True))


@st.composite
def groups(draw: st.DrawFn) -> tuple[GroupDone, np.ndarray, np.ndarray]:
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))
    rewards = st.floats(allow_nan=False, width=32)
    completions = tuple(
        CompletionMeta(length, draw(st.sampled_from(["stop", "length"])), draw(rewards), draw(segments(length)))
        for length in lengths
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = random.integers(-(2**31), 2**31, sum(lengths), dtype=np.int32)
    values = random.normal(size=sum(lengths)).astype(np.float32)
    return GroupDone(lease_id=draw(st.integers(0, 2**63 - 1)), completions=completions, generate_s=0.5), ids, values


def as_sent(frames: list[Frame]) -> list[bytes]:
    """The frames as they come out of a socket."""
    return [bytes(frame) for frame in frames]


def group_frames(*completions: CompletionMeta, num_ids: int, num_logprobs: int) -> list[Frame]:
    done = GroupDone(lease_id=1, completions=completions, generate_s=0.0)
    return encode(done, np.zeros(num_ids, np.int32), np.zeros(num_logprobs, np.float32))


def name_of(value: object) -> str:
    return type(value).__name__ if not isinstance(value, tuple) else ""


@pytest.mark.parametrize(("message", "arrays"), FROM_ACTOR, ids=name_of)
def test_message_of_an_actor_survives_the_wire(message: ActorMessage, arrays: tuple[Array, ...]) -> None:
    assert decode_from_actor(as_sent(encode(message, *arrays))) == (message, tuple(array.tobytes() for array in arrays))


@pytest.mark.parametrize(("message", "arrays"), FROM_LEARNER, ids=name_of)
def test_message_of_the_learner_survives_the_wire(message: LearnerMessage, arrays: tuple[Array, ...]) -> None:
    assert decode_from_learner(as_sent(encode(message, *arrays))) == (message, tuple(array.tobytes() for array in arrays))


@pytest.mark.parametrize("message", [WELCOME, LEASE], ids=["Welcome", "Lease"])
def test_token_ids_of_the_learner_survive_the_wire(message: Welcome | Lease) -> None:
    decoded, arrays = decode_from_learner(as_sent(encode(message, INTS)))
    assert decoded == message
    np.testing.assert_array_equal(token_ids(arrays[0]), INTS, strict=True)


def test_logprobs_survive_the_wire_bit_by_bit() -> None:
    _, arrays = decode_from_actor(as_sent(encode(CanaryScored(policy_version=3), FLOATS)))
    assert logprobs(arrays[0]).tobytes() == FLOATS.tobytes()


def test_arrays_of_other_width_order_and_stride_are_sent_as_little_endian_four_bytes() -> None:
    ids = np.arange(8, dtype=">i8")[::2]
    _, arrays = decode_from_learner(as_sent(encode(LEASE, ids)))  # pyright: ignore[reportArgumentType]
    assert token_ids(arrays[0]).tolist() == [0, 2, 4, 6]
    values = np.array([-0.5, 9.0, -0.25], dtype=np.float64)[::2]
    _, arrays = decode_from_actor(as_sent(encode(CanaryScored(policy_version=0), values)))  # pyright: ignore[reportArgumentType]
    assert logprobs(arrays[0]).tolist() == [-0.5, -0.25]


@settings(deadline=None)
@given(groups())
def test_group_survives_the_wire(group: tuple[GroupDone, np.ndarray, np.ndarray]) -> None:
    done, ids, values = group
    decoded, arrays = decode_from_actor(as_sent(encode(done, ids, values)))
    assert decoded == done
    np.testing.assert_array_equal(token_ids(arrays[0]), ids, strict=True)
    np.testing.assert_array_equal(logprobs(arrays[1]), values, strict=True)


def test_every_message_type_is_among_the_round_trips() -> None:
    assert {type(message) for message, _ in FROM_ACTOR} == {*ActorMessage.__args__}
    assert {type(message) for message, _ in FROM_LEARNER} == {*LearnerMessage.__args__}


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=5))
def test_random_frames_raise_wire_error_and_nothing_else(frames: list[bytes]) -> None:
    for decode in (decode_from_actor, decode_from_learner):
        with pytest.raises(WireError):
            decode(frames)
        # Chance seldom finds a body behind a good first frame that decodes.
        with pytest.raises(WireError):
            decode([MAGIC, b"\xc1", *frames])


@settings(deadline=None)
@given(group=groups(), data=st.data())
def test_mutated_group_is_a_wire_error_or_a_group_that_checks_out(
    group: tuple[GroupDone, np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    frames = [bytearray(frame) for frame in encode(group[0], *group[1:])]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from([frame for frame in frames if frame]))
        position = data.draw(st.integers(0, len(frame) - 1))
        match data.draw(st.sampled_from(["replace", "remove", "insert", "cut"])):
            case "replace":
                frame[position] = data.draw(st.integers(0, 255))
            case "remove":
                del frame[position]
            case "insert":
                frame.insert(position, data.draw(st.integers(0, 255)))
            case "cut":
                del frame[position:]
    assert_wire_error_or_sound([bytes(frame) for frame in frames])


@settings(deadline=None)
@given(st.sampled_from(FROM_ACTOR), st.data())
def test_mutated_message_raises_nothing_but_wire_error(
    sample: tuple[ActorMessage, tuple[Array, ...]], data: st.DataObject
) -> None:
    frames = as_sent(encode(sample[0], *sample[1]))
    body = bytearray(frames[1])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    assert_wire_error_or_sound([frames[0], bytes(body), *frames[2:]])


def assert_wire_error_or_sound(frames: list[bytes]) -> None:
    try:
        message, arrays = decode_from_actor(frames)
    except WireError as error:
        assert str(error)
        return
    if isinstance(message, GroupDone):
        num_tokens = sum(completion.num_tokens for completion in message.completions)
        assert min(completion.num_tokens for completion in message.completions) >= 1
        assert len(token_ids(arrays[0])) == len(logprobs(arrays[1])) == num_tokens


@pytest.mark.parametrize("text", [b"\xff", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
def test_text_that_is_not_utf8_is_a_wire_error(text: bytes) -> None:
    body = b"\x82\xa4type\xa7Goodbye\xa6reason" + bytes([0xA0 | len(text)]) + text
    with pytest.raises(WireError, match="malformed"):
        decode_from_actor([MAGIC, body])
    with pytest.raises(WireError, match="malformed"):
        decode_from_learner([MAGIC, body.replace(b"\xa7Goodbye", b"\xa4Stop")])


@pytest.mark.parametrize(
    ("first", "theirs"), [(b"offbeat\x01", "1"), (b"offbeat\x03\x00", "3.0"), (b"offbeat\xff\x07", "255.7")]
)
@pytest.mark.parametrize("decode", [decode_from_actor, decode_from_learner])
def test_other_major_version_is_named_with_ours_and_the_cure(decode, first: bytes, theirs: str) -> None:
    ours = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    with pytest.raises(VersionError, match=rf"version {theirs} of .* speaks {ours}: install the same release"):
        decode([first, b"whatever"])


def test_refusal_of_another_major_is_in_its_own_version() -> None:
    with pytest.raises(VersionError) as raised:
        decode_from_actor([b"offbeat\x01", b"whatever"])
    first, body = refusal_for(raised.value)
    assert first == b"offbeat\x01"
    # What every version must keep understanding.
    assert msgspec.msgpack.decode(body) == {"type": "Refused", "reason": str(raised.value)}


def extended(message: ActorMessage | LearnerMessage) -> bytes:
    """The body as a newer minor might send it: more fields in every struct, also in nested ones."""

    def extend(value: object) -> object:
        if isinstance(value, dict):
            return {key: extend(item) for key, item in value.items()} | {"from_the_future": {"a": [1, 2]}}
        return [extend(item) for item in value] if isinstance(value, list) else value

    tree = msgspec.to_builtins(message)
    assert isinstance(tree, dict)
    # Dictionaries with free keys are no structs.
    free = {key: tree[key] for key in ("ledger", "rejected", "settings") if key in tree}
    if "stats" in tree:
        free["stats"] = tree["stats"] | {"from_the_future": 1}
    whole = extend(tree)
    assert isinstance(whole, dict)
    return msgspec.msgpack.encode(whole | free)


@pytest.mark.parametrize(("message", "arrays"), FROM_ACTOR + FROM_LEARNER, ids=name_of)
def test_of_a_newer_minor_what_is_known_is_taken(message: ActorMessage | LearnerMessage, arrays: tuple[Array, ...]) -> None:
    decode = decode_from_actor if isinstance(message, ActorMessage) else decode_from_learner
    _, body, *rest = as_sent(encode(message, *arrays))
    assert decode([NEWER, body, *rest]).message == message
    assert extended(message) != body
    assert decode([NEWER, extended(message), *rest]).message == message
    with pytest.raises(WireError, match="unknown field"):
        decode([MAGIC, extended(message), *rest])


def test_of_a_newer_minor_ends_of_arrays_are_left_out() -> None:
    body = msgspec.to_builtins(GroupDone(lease_id=1, completions=(CompletionMeta(1, "stop", 1.0, ()),), generate_s=0.0))
    body["completions"][0]["segments"] = [[4, 0, "added later"]]
    frames = [msgspec.msgpack.encode(body), bytes(4), bytes(4)]
    message = decode_from_actor([NEWER, *frames]).message
    assert isinstance(message, GroupDone)
    assert message.completions[0].segments == (Segment(4, 0),)
    with pytest.raises(WireError):
        decode_from_actor([MAGIC, *frames])


@pytest.mark.parametrize("decode", [decode_from_actor, decode_from_learner])
def test_message_that_only_a_newer_minor_has_is_told_from_a_malformed_one(decode) -> None:
    body = msgspec.msgpack.encode({"type": "Gossip", "about": "weights"})
    with pytest.raises(UnknownMessageError, match=r"Gossip is a message of a newer offbeat"):
        decode([NEWER, body])
    with pytest.raises(WireError, match="malformed") as raised:
        decode([MAGIC, body])
    assert not isinstance(raised.value, UnknownMessageError)
    with pytest.raises(UnknownMessageError) as raised:
        decode([NEWER, msgspec.msgpack.encode({"type": "x" * 1000})])
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x01",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode({"type": 1}),
        msgspec.msgpack.encode({"type": "Credit"}),
        msgspec.msgpack.encode({"type": "Credit", "capacity": -1}),
        msgspec.msgpack.encode({"type": "Credit", "capacity": "1"}),
        msgspec.msgpack.encode({"type": "Hello", "engine": [1]}),
        msgspec.msgpack.encode({"type": "GroupDone", "completions": {"a": 1}}),
        b"\x81\xa4type" + b"\x91" * 100_000 + b"\x01",
        b"\x81\xa4type\xd6\xff\0\0\0\0",
        b"\x81\x81\x01\x02\x03",
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_newer_minor_is_no_excuse_for_nonsense(body: bytes) -> None:
    with pytest.raises(WireError, match="malformed"):
        decode_from_actor([NEWER, body])


def test_older_minor_may_leave_out_what_has_a_default_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PROTOCOL_MINOR", PROTOCOL_MINOR + 1)
    body = {"type": "LeaseFailed", "lease_id": 3, "reason": "returned"}
    assert decode_from_actor([MAGIC, msgspec.msgpack.encode(body)]).message == msgspec.convert(body, wire.ActorMessage)
    with pytest.raises(WireError, match="missing required field"):
        decode_from_actor([MAGIC, msgspec.msgpack.encode({"type": "LeaseFailed", "lease_id": 3})])
    with pytest.raises(WireError, match="unknown field"):
        decode_from_actor([MAGIC, msgspec.msgpack.encode(body | {"more": 1})])


@pytest.mark.parametrize("first", [b"", b"offbeat", b"GET / HTTP/1.1", MAGIC + b"x"])
def test_foreign_first_frame_is_refused(first: bytes) -> None:
    with pytest.raises(WireError, match=r"not offbeat's"):
        decode_from_actor([first, msgspec.msgpack.encode(Credit(capacity=1))])


def test_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(WireError, match="malformed"):
        decode_from_actor(as_sent(encode(SayHello())))
    with pytest.raises(WireError, match="malformed"):
        decode_from_learner(as_sent(encode(Credit(capacity=1))))


def test_unknown_field_is_refused() -> None:
    body = msgspec.msgpack.encode({"type": "Credit", "capacity": 1, "extra": 2})
    with pytest.raises(WireError, match="unknown field"):
        decode_from_actor([MAGIC, body])


@pytest.mark.parametrize("num_arrays", [0, 1, 3])
def test_wrong_number_of_array_frames_is_refused(num_arrays: int) -> None:
    frames = group_frames(CompletionMeta(1, "stop", 1.0, (Segment(0, 0),)), num_ids=1, num_logprobs=1)
    with pytest.raises(WireError, match="2 array frames"):
        decode_from_actor([*frames[:2], *[b"\0\0\0\0"] * num_arrays])
    with pytest.raises(WireError, match="0 array frames"):
        decode_from_actor([*encode(Credit(capacity=1)), b""])


def test_array_of_broken_items_is_refused() -> None:
    frames = encode(CanaryScored(policy_version=0), FLOATS)
    with pytest.raises(WireError, match="not a multiple of 4"):
        decode_from_actor([*frames[:2], bytes(frames[2])[:-1]])


@pytest.mark.parametrize(("num_ids", "num_logprobs"), [(4, 5), (5, 4), (6, 5), (5, 6), (0, 5), (6, 6)])
def test_announced_and_sent_lengths_must_agree(num_ids: int, num_logprobs: int) -> None:
    completions = [CompletionMeta(length, "stop", 0.0, (Segment(0, 0),)) for length in (2, 3)]
    with pytest.raises(WireError, match="5 tokens announced"):
        decode_from_actor(group_frames(*completions, num_ids=num_ids, num_logprobs=num_logprobs))


def routed(num_tokens: int, num_layers: int, top_k: int) -> CanaryRouted:
    return CanaryRouted(policy_version=1, num_tokens=num_tokens, num_layers=num_layers, top_k=top_k)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32))
def test_routed_experts_survive_the_wire(num_tokens: int, num_layers: int, top_k: int, seed: int) -> None:
    experts = np.random.default_rng(seed).integers(-(2**31), 2**31, (num_tokens, num_layers, top_k), dtype=np.int32)
    message, arrays = decode_from_actor(as_sent(encode(routed(num_tokens, num_layers, top_k), experts)))
    assert isinstance(message, CanaryRouted)
    np.testing.assert_array_equal(routed_experts(message, arrays[0]), experts, strict=True)


@pytest.mark.parametrize("num_experts", [0, 23, 25, 48])
def test_announced_and_sent_routed_experts_must_agree(num_experts: int) -> None:
    with pytest.raises(WireError, match=f"24 routed experts announced, but they have {4 * num_experts} bytes"):
        decode_from_actor(as_sent(encode(routed(2, 3, 4), np.zeros(num_experts, np.int32))))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (-1, -1, 4), (2**63, 1, 1), (1, 4097, 1), (1, 1, 1025)])
def test_impossible_shapes_of_routed_experts_are_refused(shape: tuple[int, int, int]) -> None:
    num_experts = max(0, min(math.prod(shape), 5000))
    with pytest.raises(WireError, match="malformed"):
        decode_from_actor(as_sent(encode(routed(*shape), np.zeros(num_experts, np.int32))))


def test_learner_before_routed_experts_leaves_them_out_and_takes_the_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minor version 0 had no such message; two arrays in `CanaryScored` it would have taken for nonsense."""
    monkeypatch.setattr(wire, "PROTOCOL_MINOR", 0)
    before = Union[tuple(kind for kind in get_args(ActorMessage) if kind is not CanaryRouted)]  # noqa: UP007
    monkeypatch.setattr(wire, "_from_actor", wire._body_decoder(before))
    with pytest.raises(UnknownMessageError, match="CanaryRouted is a message of a newer offbeat"):
        decode_from_actor(as_sent(encode(routed(1, 1, 1), np.zeros(1, np.int32))))
    scored = CanaryScored(policy_version=1)
    assert decode_from_actor(as_sent(encode(scored, FLOATS))).message == scored


def test_actor_before_routed_experts_is_understood() -> None:
    scored = CanaryScored(policy_version=1)
    _, *rest = as_sent(encode(scored, FLOATS))
    assert decode_from_actor([MAGIC[:-1] + b"\0", *rest]).message == scored


def test_actor_before_live_tuning_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PROTOCOL_MINOR", 1)
    before = Union[tuple(kind for kind in get_args(LearnerMessage) if kind is not CreditLimit)]  # noqa: UP007
    monkeypatch.setattr(wire, "_from_learner", wire._body_decoder(before))
    with pytest.raises(UnknownMessageError, match="Concurrency is a message of a newer offbeat"):
        decode_from_learner(as_sent(encode(CreditLimit(capacity=3))))


def test_report_of_a_learner_before_live_tuning_is_understood() -> None:
    body = msgspec.to_builtins(STATUS)
    del body["tuned"]
    report = decode_from_learner([MAGIC[:-1] + b"\1", msgspec.msgpack.encode(body)]).message
    assert report == msgspec.structs.replace(STATUS, changed_settings=())


@pytest.mark.parametrize("number", [0, 65])
def test_request_to_change_nothing_or_too_much_is_refused(number: int) -> None:
    request = LiveSettingsRequest(settings={f"train.setting_{index}": "1" for index in range(number)}, who="me")
    with pytest.raises(WireError, match="malformed"):
        decode_from_actor(as_sent(encode(request)))


@pytest.mark.parametrize("lengths", [(0,), (3, 0), (-1, 6), (2**63,)])
def test_impossible_completion_lengths_are_refused(lengths: tuple[int, ...]) -> None:
    completions = [CompletionMeta(length, "stop", 0.0, (Segment(0, 0),)) for length in lengths]
    with pytest.raises(WireError):
        decode_from_actor(group_frames(*completions, num_ids=5, num_logprobs=5))


def test_empty_group_is_refused() -> None:
    with pytest.raises(WireError, match="malformed"):
        decode_from_actor(group_frames(num_ids=0, num_logprobs=0))


@pytest.mark.parametrize(
    "pairs",
    [
        (),
        ((0, 1),),
        ((0, -1),),
        ((-1, 0),),
        ((0, 0), (1, 0)),
        ((0, 0), (1, 4)),
        ((0, 0), (1, 3), (2, 2)),
        ((0, 0), (0, 2**40)),
    ],
    ids=[
        "none",
        "late start",
        "before the start",
        "negative version",
        "empty",
        "past the end",
        "out of order",
        "far past the end",
    ],
)
def test_impossible_segments_are_refused(pairs: tuple[tuple[int, int], ...]) -> None:
    completion = CompletionMeta(4, "stop", 0.0, tuple(Segment(*pair) for pair in pairs))
    with pytest.raises(WireError, match=r"impossible segments|malformed"):
        decode_from_actor(group_frames(completion, num_ids=4, num_logprobs=4))


@pytest.mark.parametrize("versions", [(0, 1, 2, 3), (3, 2, 1, 0), (7, 7, 3, 4)], ids=["rising", "falling", "restarted"])
def test_segments_of_many_versions_pass_in_any_order(versions: tuple[int, ...]) -> None:
    # A learner that restarted from a checkpoint makes the numbers after it again.
    completion = CompletionMeta(4, "length", 0.0, tuple(Segment(version, start) for start, version in enumerate(versions)))
    message, _ = decode_from_actor(group_frames(completion, num_ids=4, num_logprobs=4))
    assert isinstance(message, GroupDone)
    assert message.completions == (completion,)


def test_bytes_of_a_chunk_are_sent_as_they_are() -> None:
    chunk = next(message for message, _ in FROM_LEARNER if type(message).__name__ == "Chunk")
    _, arrays = decode_from_learner(as_sent(encode(chunk, BYTES)))
    assert arrays == (BYTES.tobytes(),)


@pytest.mark.parametrize("num_frames", [0, 1, MAX_FRAMES + 1, 100_000])
def test_too_few_and_too_many_frames_are_refused(num_frames: int) -> None:
    for first in (MAGIC, NEWER, b"offbeat\x01"):
        with pytest.raises(WireError, match=f"2 to {MAX_FRAMES} frames, got {num_frames}"):
            decode_from_actor([first] * num_frames)


def test_body_of_an_actor_is_bounded() -> None:
    fits = msgspec.msgpack.encode(Goodbye(reason="x" * 60_000))
    assert decode_from_actor([MAGIC, fits])
    with pytest.raises(WireError, match="the body has"):
        decode_from_actor([MAGIC, bytes(MAX_ACTOR_BODY_BYTES + 1)])
    with pytest.raises(WireError, match="malformed"):
        decode_from_actor([MAGIC, bytes(MAX_ACTOR_BODY_BYTES)])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Credit", {"capacity": -1}),
        ("Credit", {"capacity": 1 << 40}),
        ("Credit", {"capacity": 1.0}),
        ("Credit", {"capacity": True}),
        ("GroupDone", {"lease_id": -1}),
        ("GroupDone", {"lease_id": 1 << 63}),
        ("GroupDone", {"generate_s": float("nan")}),
        ("GroupDone", {"generate_s": float("inf")}),
        ("GroupDone", {"generate_s": -1.0}),
        ("LeaseFailed", {"reason": "x" * 257}),
        ("LeaseFailed", {"detail": "x" * 70_000}),
        ("Goodbye", {"reason": "x" * 70_000}),
        ("Hello", {"actor": ""}),
        ("Hello", {"actor": "x" * 257}),
        ("Hello", {"lease_ids": [-1]}),
        ("Hello", {"lease_ids": [1] * ((1 << 18) + 1)}),
        ("Hello", {"temperature": float("nan")}),
        ("ActorHeartbeat", {"policy_version": -2}),
        ("ActorHeartbeat", {"seen_lease_id": -2}),
        ("ActorHeartbeat", {"stats": {"seconds": {"generate": float("inf")}}}),
        ("ActorHeartbeat", {"stats": {"seconds": {"x" * 257: 1.0}}}),
        ("ActorHeartbeat", {"stats": {"seconds": {str(number): 1.0 for number in range(65)}}}),
        ("ActorHeartbeat", {"stats": {"num_generated_tokens": -1}}),
        ("WeightsCommitted", {"policy_version": -1}),
        ("WeightsCommitted", {"stall_s": float("nan")}),
        ("WeightsStaged", {"error": "x" * 70_000}),
        ("ChunkRequest", {"index": -1}),
    ],
)
@pytest.mark.parametrize("first", [MAGIC, NEWER], ids=["ours", "newer"])
def test_number_or_text_out_of_bounds_is_refused(kind: str, changes: dict, first: bytes) -> None:
    message, arrays = next((message, arrays) for message, arrays in FROM_ACTOR if type(message).__name__ == kind)
    _, body, *rest = as_sent(encode(message, *arrays))
    tree = msgspec.msgpack.decode(body)
    decode_from_actor([first, msgspec.msgpack.encode(tree), *rest])
    with pytest.raises(WireError, match="malformed"):
        decode_from_actor([first, msgspec.msgpack.encode(tree | changes), *rest])


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_reward_that_is_no_number_reaches_the_learner_which_answers_by_lease(reward: float) -> None:
    # Refused here, it could not be acknowledged, and its actor would send it for ever.
    completion = CompletionMeta(1, "stop", reward, (Segment(0, 0),))
    assert isinstance(decode_from_actor(group_frames(completion, num_ids=1, num_logprobs=1)).message, GroupDone)


@pytest.mark.parametrize(
    ("message", "tag"),
    [
        (SayHello(), "Unknown"),
        (CreditLimit(capacity=3), "Concurrency"),
        (LiveSettingsRequest(settings={"a.b": "1"}, who="me"), "TuneRequest"),
        (LiveSettingsReport(policy_version=3), "TuneReport"),
    ],
)
def test_renamed_class_keeps_its_tag_on_the_wire(message: ActorMessage | LearnerMessage, tag: str) -> None:
    assert msgspec.msgpack.decode(encode(message)[1])["type"] == tag
