"""What is encoded is decoded unchanged; whatever else arrives is a `WireError`."""

from itertools import accumulate

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.messages import (
    Ack,
    ActorHeartbeat,
    ActorMessage,
    ActorStats,
    CanaryScored,
    Cancel,
    CompletionMeta,
    Credit,
    EngineInfo,
    Goodbye,
    GroupDone,
    Hello,
    LearnerHeartbeat,
    LearnerMessage,
    Lease,
    LeaseFailed,
    Refused,
    Sampling,
    Segment,
    Stop,
    TensorSpec,
    Unknown,
    WeightsCommitted,
    WeightsStaged,
    WeightUpdate,
    Welcome,
)
from protocols.wire import (
    MAGIC,
    Frame,
    WireError,
    decode_from_actor,
    decode_from_learner,
    encode,
    logprobs,
    token_ids,
)

ENGINE = EngineInfo("vllm", "0.32.0", "bfloat16", "cpu", 4096, "0123456789abcdef")
STATS = ActorStats(num_generated_tokens=9, num_groups_sent=1, num_running_completions=2, seconds={"generate": 1.5})
SMALL_ACTOR_MESSAGES: list[ActorMessage] = [
    Hello(actor="actor-é", incarnation=2**62, engine=ENGINE, policy_version=-1),
    Credit(capacity=16),
    LeaseFailed(lease_id=3, reason="reward_error", detail="ZeroDivisionError"),
    ActorHeartbeat(policy_version=4, stats=STATS),
    WeightsStaged(policy_version=4, epoch=2, error="bucket 3 of 9: closed"),
    WeightsCommitted(policy_version=4, stall_s=0.25),
    Goodbye(reason="SIGTERM"),
]
SMALL_LEARNER_MESSAGES: list[LearnerMessage] = [
    Refused(reason="another dtype"),
    Unknown(),
    Ack(lease_id=3, outcome="duplicate"),
    Cancel(lease_ids=(1, 2)),
    WeightUpdate(
        policy_version=4,
        epoch=2,
        rank=1,
        world_size=3,
        store_host="127.0.0.1",
        store_port=29500,
        backend="gloo",
        bucket_bytes=1 << 23,
        timeout_s=60.0,
    ),
    LearnerHeartbeat(policy_version=4),
    Stop(reason="finished"),
]
WELCOME = Welcome(
    run_id="r",
    learner_incarnation=7,
    layout=(TensorSpec("lm_head.weight", (3, 4), "float32"), TensorSpec("b", (), "bfloat16")),
    policy_version=2,
)
LEASE = Lease(
    lease_id=1 << 60,
    prompt_id=5,
    group_size=8,
    sampling=Sampling(max_new_tokens=16, temperature=0.0),
    min_policy_version=3,
    timeout_s=600.0,
    prompt="1+1=",
    row='{"answer": "2"}',
)
INTS = np.arange(-2, 5, dtype=np.int32)
FLOATS = np.array([-0.0, -1.5, np.nan, -np.inf], dtype=np.float32)


@st.composite
def segments(draw: st.DrawFn, num_tokens: int) -> tuple[Segment, ...]:
    starts = sorted({0, *draw(st.lists(st.integers(0, num_tokens - 1), max_size=4))})
    versions = sorted(draw(st.lists(st.integers(0, 1000), min_size=len(starts), max_size=len(starts))))
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


@pytest.mark.parametrize("message", SMALL_ACTOR_MESSAGES, ids=lambda message: type(message).__name__)
def test_message_of_an_actor_survives_the_wire(message: ActorMessage) -> None:
    assert decode_from_actor(as_sent(encode(message))) == (message, ())


@pytest.mark.parametrize("message", SMALL_LEARNER_MESSAGES, ids=lambda message: type(message).__name__)
def test_message_of_the_learner_survives_the_wire(message: LearnerMessage) -> None:
    assert decode_from_learner(as_sent(encode(message))) == (message, ())


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
    seen = {type(message) for message in [*SMALL_ACTOR_MESSAGES, *SMALL_LEARNER_MESSAGES]}
    seen |= {Welcome, Lease, CanaryScored, GroupDone}
    assert seen == {*ActorMessage.__args__, *LearnerMessage.__args__}


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
@given(st.sampled_from(SMALL_ACTOR_MESSAGES), st.data())
def test_mutated_message_raises_nothing_but_wire_error(message: ActorMessage, data: st.DataObject) -> None:
    frames = as_sent(encode(message))
    body = bytearray(frames[1])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    assert_wire_error_or_sound([frames[0], bytes(body)])


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


def test_other_protocol_version_says_what_to_do() -> None:
    frames = as_sent(encode(Credit(capacity=1)))
    frames[0] = MAGIC[:-1] + bytes([PROTOCOL_VERSION + 1])
    with pytest.raises(WireError, match=f"version {PROTOCOL_VERSION + 1}.*speaks {PROTOCOL_VERSION}.*install the same"):
        decode_from_actor(frames)


@pytest.mark.parametrize("first", [b"", b"offbeat", b"GET / HTTP/1.1", MAGIC + b"x"])
def test_foreign_first_frame_is_refused(first: bytes) -> None:
    with pytest.raises(WireError, match=r"not offbeat's"):
        decode_from_actor([first, msgspec.msgpack.encode(Credit(capacity=1))])


def test_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(WireError, match="malformed"):
        decode_from_actor(as_sent(encode(Unknown())))
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


@pytest.mark.parametrize("lengths", [(0,), (3, 0), (-1, 6), (2**63,)])
def test_impossible_completion_lengths_are_refused(lengths: tuple[int, ...]) -> None:
    completions = [CompletionMeta(length, "stop", 0.0, (Segment(0, 0),)) for length in lengths]
    with pytest.raises(WireError):
        decode_from_actor(group_frames(*completions, num_ids=5, num_logprobs=5))


def test_empty_group_is_refused() -> None:
    with pytest.raises(WireError, match="at least one completion"):
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
        ((2, 0), (1, 2)),
    ],
    ids=[
        "none",
        "late start",
        "before the start",
        "negative version",
        "empty",
        "past the end",
        "out of order",
        "version falls",
    ],
)
def test_impossible_segments_are_refused(pairs: tuple[tuple[int, int], ...]) -> None:
    completion = CompletionMeta(4, "stop", 0.0, tuple(Segment(*pair) for pair in pairs))
    with pytest.raises(WireError, match="impossible segments"):
        decode_from_actor(group_frames(completion, num_ids=4, num_logprobs=4))


def test_segments_of_many_versions_pass() -> None:
    starts = accumulate([0, 1, 1, 1])
    completion = CompletionMeta(4, "length", 0.0, tuple(Segment(version, start) for version, start in enumerate(starts)))
    message, _ = decode_from_actor(group_frames(completion, num_ids=4, num_logprobs=4))
    assert isinstance(message, GroupDone)
    assert message.completions == (completion,)
