"""Encoded messages are decoded unchanged; any other bytes raise `WireError`."""

import itertools
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offbeat.protocols.fields import PART_NAME
from offbeat.protocols.message_parts import Vitals
from offbeat.protocols.messages import (
    ActorMessage,
    CanaryRouted,
    CanaryScored,
    Credit,
    GroupDone,
    LearnerMessage,
    Lease,
    SayHello,
    Welcome,
)
from offbeat.protocols.payload import CompletionMeta, ExpertsMeta, Segment, Turn
from offbeat.protocols.wire import (
    MAGIC,
    Array,
    WireError,
    decode_from_actor,
    decode_from_learner,
    encode,
    has_context,
    logprobs,
    routed_experts,
    token_ids,
)
from tests.protocols.sample_messages import (
    BYTES,
    FLOATS,
    FROM_ACTOR,
    FROM_LEARNER,
    INTS,
    LEASE,
    STATUS,
    WELCOME,
    as_sent,
    name_of,
    routed,
)


@st.composite
def segments(draw: st.DrawFn, num_tokens: int) -> tuple[Segment, ...]:
    starts = sorted({0, *draw(st.lists(st.integers(0, num_tokens - 1), max_size=4))})
    versions = draw(st.lists(st.integers(0, 1000), min_size=len(starts), max_size=len(starts)))
    return tuple(Segment(version, start) for version, start in zip(versions, starts, strict=True))


@st.composite
def turns(draw: st.DrawFn, num_tokens: int) -> tuple[Turn, ...]:
    ends = sorted({*draw(st.lists(st.integers(1, num_tokens), max_size=4)), num_tokens})
    lengths = [end - start for start, end in itertools.pairwise([0, *ends])]
    backs = [draw(st.integers(0, index + 1)) for index in range(len(lengths))]
    return tuple(
        Turn(draw(st.integers(not back, 5)), length, back, draw(st.floats(-1e6, 1e6)))
        for back, length in zip(backs, lengths, strict=True)
    )


@st.composite
def groups(draw: st.DrawFn) -> tuple[GroupDone, *tuple[np.ndarray, ...]]:
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))
    rewards = st.floats(allow_nan=False, width=32)
    completions = tuple(
        CompletionMeta(
            length,
            draw(st.sampled_from(["stop", "length"])),
            draw(rewards),
            draw(segments(length)),
            turns=draw(turns(length)) if draw(st.booleans()) else (),
        )
        for length in lengths
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = random.integers(-(2**31), 2**31, sum(lengths), dtype=np.int32)
    values = random.normal(size=sum(lengths)).astype(np.float32)
    done = GroupDone(lease_id=draw(st.integers(0, 2**63 - 1)), completions=completions, generate_s=0.5)
    if not has_context(completions) and draw(st.booleans()):
        content = random.integers(0, 256, draw(st.integers(1, 30)), dtype=np.uint8)
        return msgspec.structs.replace(done, experts=ExpertsMeta(3, 2, 2, len(content))), ids, values, content
    if not has_context(completions):
        return done, ids, values
    num_context = sum(turn.num_context for completion in completions for turn in completion.turns)
    return done, ids, values, random.integers(0, 2**31, num_context, dtype=np.int32)


@pytest.mark.parametrize(("message", "arrays"), FROM_ACTOR, ids=name_of)
def test_message_of_an_actor_survives_the_wire(message: ActorMessage, arrays: tuple[Array, ...]) -> None:
    assert decode_from_actor(as_sent(encode(message, *arrays))) == (message, tuple(array.tobytes() for array in arrays))


@pytest.mark.parametrize(("message", "arrays"), FROM_LEARNER, ids=name_of)
def test_message_of_the_learner_survives_the_wire(message: LearnerMessage, arrays: tuple[Array, ...]) -> None:
    assert decode_from_learner(as_sent(encode(message, *arrays))) == (message, tuple(array.tobytes() for array in arrays))


@pytest.mark.parametrize("task", ["_other", "level-5.a", "x" * 64])
def test_status_tells_of_each_task_that_data_may_name(task: str) -> None:
    assert re.match(PART_NAME, task)
    status = msgspec.structs.replace(STATUS, vitals=Vitals(reward_by_task={task: 0.5}, share_by_task={task: 0.25}))
    assert decode_from_learner(as_sent(encode(status))).message == status


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
def test_group_survives_the_wire(group: tuple[GroupDone, *tuple[np.ndarray, ...]]) -> None:
    done, ids, values, *further = group
    decoded, arrays = decode_from_actor(as_sent(encode(done, ids, values, *further)))
    assert decoded == done
    assert [bytes(array) for array in arrays[2:]] == [array.tobytes() for array in further]
    np.testing.assert_array_equal(token_ids(arrays[0]), ids, strict=True)
    np.testing.assert_array_equal(logprobs(arrays[1]), values, strict=True)


def test_experts_of_another_length_and_beside_turns_are_refused() -> None:
    completion = CompletionMeta(2, "stop", 0.0, (Segment(0, 0),))
    ids, values, content = np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(5, np.uint8)
    done = GroupDone(lease_id=1, completions=(completion,), generate_s=0.0, experts=ExpertsMeta(3, 2, 2, 6))
    with pytest.raises(WireError, match="6 bytes of experts announced, but they have 5"):
        decode_from_actor(as_sent(encode(done, ids, values, content)))
    with pytest.raises(WireError, match="3 array frames, got 2"):
        decode_from_actor(as_sent([*encode(done, ids, values, content)][:-1]))
    turned = msgspec.structs.replace(completion, turns=(Turn(1, 2),))
    done = msgspec.structs.replace(done, completions=(turned,), experts=ExpertsMeta(3, 2, 2, 5))
    with pytest.raises(WireError, match="a group with turns has experts"):
        decode_from_actor(as_sent(encode(done, ids, values, np.zeros(1, np.int32), content)))


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
    group: tuple[GroupDone, *tuple[np.ndarray, ...]], data: st.DataObject
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
        for completion in message.completions:
            assert not completion.turns or sum(turn.num_sampled for turn in completion.turns) == completion.num_tokens
            for index, turn in enumerate(completion.turns):
                assert turn.back <= index + 1 and (turn.back or turn.num_context)
        num_context = sum(turn.num_context for completion in message.completions for turn in completion.turns)
        further = [len(array) for array in arrays[2:]]
        if message.experts is not None:
            assert further == [message.experts.num_bytes]
            assert not has_context(message.completions)
        else:
            assert further == [4 * num_context] * has_context(message.completions)


@given(groups(), st.data())
def test_turn_that_continues_what_is_not_there_is_a_wire_error(group: Any, data: st.DataObject) -> None:
    done, *arrays = group
    chosen = [index for index, completion in enumerate(done.completions) if completion.turns]
    assume(chosen)
    index = data.draw(st.sampled_from(chosen))
    of_completion = list(done.completions[index].turns)
    number = data.draw(st.integers(0, len(of_completion) - 1))
    turn = of_completion[number]
    if data.draw(st.booleans()):
        of_completion[number], why = (
            Turn(turn.num_context, turn.num_sampled, number + data.draw(st.integers(2, 9))),
            "goes back",
        )
    else:
        of_completion[number], why = Turn(0, turn.num_sampled, 0), "from nothing"
        arrays[2] = arrays[2][turn.num_context :]
    completions = list(done.completions)
    completions[index] = msgspec.structs.replace(completions[index], turns=tuple(of_completion))
    frames = encode(msgspec.structs.replace(done, completions=tuple(completions)), *arrays)
    with pytest.raises(WireError, match=f"turn {number} of completion {index} .*{why}"):
        decode_from_actor(as_sent(frames))


@pytest.mark.parametrize("text", [b"\xff", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
def test_text_that_is_not_utf8_is_a_wire_error(text: bytes) -> None:
    body = b"\x82\xa4type\xa7Goodbye\xa6reason" + bytes([0xA0 | len(text)]) + text
    with pytest.raises(WireError, match="malformed"):
        decode_from_actor([MAGIC, body])
    with pytest.raises(WireError, match="malformed"):
        decode_from_learner([MAGIC, body.replace(b"\xa7Goodbye", b"\xa4Stop")])


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


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32))
def test_routed_experts_survive_the_wire(num_tokens: int, num_layers: int, top_k: int, seed: int) -> None:
    experts = np.random.default_rng(seed).integers(-(2**31), 2**31, (num_tokens, num_layers, top_k), dtype=np.int32)
    message, arrays = decode_from_actor(as_sent(encode(routed(num_tokens, num_layers, top_k), experts)))
    assert isinstance(message, CanaryRouted)
    np.testing.assert_array_equal(routed_experts(message, arrays[0]), experts, strict=True)


def test_bytes_of_a_chunk_are_sent_as_they_are() -> None:
    chunk = next(message for message, _ in FROM_LEARNER if type(message).__name__ == "Chunk")
    _, arrays = decode_from_learner(as_sent(encode(chunk, BYTES)))
    assert arrays == (BYTES.tobytes(),)


def test_group_takes_little_more_than_the_bytes_of_its_numbers() -> None:
    completions = tuple(CompletionMeta(2048, "stop", 0.25, (Segment(10**6, 0),)) for _ in range(8))
    num_tokens = 8 * 2048
    done = GroupDone(lease_id=10**9, completions=completions, generate_s=12.5)
    frames = encode(done, np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.float32))
    # 4 for the token, 4 for its log-prob.
    assert sum(map(len, frames)) / num_tokens < 8.2
