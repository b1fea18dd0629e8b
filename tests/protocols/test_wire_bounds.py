"""Sizes, counts and numbers of a message outside their bounds raise `WireError`."""

import math

import msgspec
import numpy as np
import pytest

from offbeat.protocols.messages import CanaryScored, Credit, Goodbye, GroupDone, LiveSettingsRequest
from offbeat.protocols.payload import CompletionMeta, Segment
from offbeat.protocols.wire import (
    MAGIC,
    MAX_ACTOR_BODY_BYTES,
    MAX_FRAMES,
    WireError,
    decode_from_actor,
    encode,
)
from tests.protocols.sample_messages import (
    FLOATS,
    FROM_ACTOR,
    NEWER,
    as_sent,
    group_frames,
    routed,
)


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


@pytest.mark.parametrize("num_experts", [0, 23, 25, 48])
def test_announced_and_sent_routed_experts_must_agree(num_experts: int) -> None:
    with pytest.raises(WireError, match=f"24 routed experts announced, but they have {4 * num_experts} bytes"):
        decode_from_actor(as_sent(encode(routed(2, 3, 4), np.zeros(num_experts, np.int32))))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (-1, -1, 4), (2**63, 1, 1), (1, 4097, 1), (1, 1, 1025)])
def test_impossible_shapes_of_routed_experts_are_refused(shape: tuple[int, int, int]) -> None:
    num_experts = max(0, min(math.prod(shape), 5000))
    with pytest.raises(WireError, match="malformed"):
        decode_from_actor(as_sent(encode(routed(*shape), np.zeros(num_experts, np.int32))))


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
    # A learner that restarted from a checkpoint assigns the later versions again.
    completion = CompletionMeta(4, "length", 0.0, tuple(Segment(version, start) for start, version in enumerate(versions)))
    message, _ = decode_from_actor(group_frames(completion, num_ids=4, num_logprobs=4))
    assert isinstance(message, GroupDone)
    assert message.completions == (completion,)


@pytest.mark.parametrize("num_frames", [0, 1, MAX_FRAMES + 1, 100_000])
def test_too_few_and_too_many_frames_are_refused(num_frames: int) -> None:
    for first in (MAGIC, NEWER, b"offbeat\x02"):
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
    # A group refused by the decoder would never be acknowledged, and its actor would send it forever.
    completion = CompletionMeta(1, "stop", reward, (Segment(0, 0),))
    assert isinstance(decode_from_actor(group_frames(completion, num_ids=1, num_logprobs=1)).message, GroupDone)
