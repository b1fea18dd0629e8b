"""Groups are views of their frames, and groups that cannot be trained on are refused with a reason."""

import math
import re
from itertools import starmap
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.learner.leases.groups import (
    LARGEST_LOGPROB,
    SMALLEST_LOGPROB,
    ExpertLimits,
    Group,
    Limits,
    Rollout,
    expert_flaw,
    flaw,
    make_group,
    unpack,
)
from offbeat.learner.leases.prompts import Prompt
from offbeat.protocols.messages import GroupDone
from offbeat.protocols.payload import CompletionMeta, ExpertsMeta, Segment, Turn, encode_experts
from tests.learner.leases.event_makers import make_accepted

LIMITS = Limits(group_size=2, max_new_tokens=4, vocabulary_size=50, max_length=0, max_episode_tokens=100)
NEWEST_VERSION = 3


def frames(ids: list[int], logprobs: list[float]) -> list[memoryview]:
    return [memoryview(np.array(ids, np.int32).tobytes()), memoryview(np.array(logprobs, np.float32).tobytes())]


def meta(num_tokens: int = 2, reward: float = 0.5, versions: tuple[int, ...] = (0,)) -> CompletionMeta:
    return CompletionMeta(num_tokens, "stop", reward, tuple(Segment(version, at) for at, version in enumerate(versions)))


def flaw_of(
    *completions: CompletionMeta, ids: list[int] | None = None, logprobs: list[float] | None = None, **limits: Any
) -> str | None:
    num_tokens = sum(completion.num_tokens for completion in completions)
    arrays = frames(ids or [1] * num_tokens, logprobs or [-1.0] * num_tokens)
    return flaw(completions, arrays, LIMITS._replace(**limits), NEWEST_VERSION)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_completion_gets_its_own_tokens(lengths: list[int]) -> None:
    total = sum(lengths)
    rollouts = unpack([meta(length) for length in lengths], frames([*range(total)], [-float(id) for id in range(total)]))
    assert [len(rollout.token_ids) for rollout in rollouts] == lengths
    assert np.concatenate([rollout.token_ids for rollout in rollouts]).tolist() == [*range(total)]
    for rollout in rollouts:
        assert rollout.behavior_logprobs.tolist() == (-rollout.token_ids.astype(np.float32)).tolist()


def with_turns(*turns: tuple[int, ...]) -> CompletionMeta:
    """Return a completion with these turns: context, sampled tokens, and turns to go back."""
    return CompletionMeta(sum(turn[1] for turn in turns), "stop", 0.5, (Segment(0, 0),), turns=tuple(starmap(Turn, turns)))


def test_context_stands_where_it_was_read() -> None:
    completions = [with_turns((0, 2), (3, 1)), meta(2), with_turns((1, 1))]
    arrays = [*frames([1, 2, 3, 4, 5, 6], [-1.0] * 6), frames([11, 12, 13, 14], [])[0]]
    rollouts = unpack(completions, arrays)
    pieces = [[(context.tolist(), sampled.tolist()) for _, context, sampled in rollout.pieces()] for rollout in rollouts]
    assert pieces == [[([], [1, 2]), ([11, 12, 13], [3])], [], [([14], [6])]]
    assert rollouts[1].token_ids.tolist() == [4, 5]


def test_turns_are_bounded_one_by_one_and_all_together() -> None:
    completion = with_turns((0, 4), (2, 4))
    arrays = [*frames([1] * 8, [-1.0] * 8), frames([1, 49], [])[0]]
    limits = LIMITS._replace(group_size=1, max_length=10)
    assert flaw([completion], arrays, limits, NEWEST_VERSION) is None
    assert "8 tokens" not in str(flaw([completion], arrays, limits, NEWEST_VERSION))
    for change, why in (
        ({"max_length": 9}, "10 tokens with its context, more than 9"),
        ({"max_length": 0}, "10 tokens with its context, more than 0"),
        ({"max_episode_tokens": 9}, "10 tokens in its sequences, more than 9"),
        ({"max_new_tokens": 3}, "completion 0 has 4 tokens, more than 3"),
        ({"vocabulary_size": 49}, "outside the vocabulary"),
    ):
        assert why in str(flaw([completion], arrays, limits._replace(**change), NEWEST_VERSION))


def test_each_sequence_is_bounded_and_all_together() -> None:
    # The longest sequence, turns 0 and 2, has 9 tokens; a turn that two continue counts once in the 14 of all.
    completion = with_turns((1, 4), (0, 2, 1), (2, 2, 2), (2, 1, 0))
    arrays = [*frames([1] * 9, [-1.0] * 9), frames([2] * 5, [])[0]]
    limits = LIMITS._replace(group_size=1, max_length=9, max_episode_tokens=14)
    assert flaw([completion], arrays, limits, NEWEST_VERSION) is None
    assert "9 tokens with its context, more than 8" in str(
        flaw([completion], arrays, limits._replace(max_length=8), NEWEST_VERSION)
    )
    few = limits._replace(max_episode_tokens=13)
    assert "14 tokens in its sequences, more than 13" in str(flaw([completion], arrays, few, NEWEST_VERSION))


def test_group_has_weight_and_task_of_its_prompt() -> None:
    completions = (CompletionMeta(1, "stop", 1.0, (Segment(0, 0),)),)
    accepted = make_accepted(1, at=7.0, completions=completions, generate_s=0.5)
    prompt = Prompt(3, "p", np.array([1], np.int32), "{}", weight=2.0, task="sums")
    group = make_group(accepted, [memoryview(bytes(4)), memoryview(bytes(4))], prompt)
    assert (group.prompt_id, group.weight, group.task) == (3, 2.0, "sums")


def test_completions_are_views_of_the_frames() -> None:
    buffer = bytearray(np.array([1, 2, 3, 4], np.int32).tobytes())
    rollouts = unpack([meta(1), meta(3)], [memoryview(buffer), frames([], [-1.0] * 4)[1]])
    buffer[4] = 9
    assert rollouts[1].token_ids.tolist() == [9, 3, 4]


def test_good_group_has_no_flaw() -> None:
    assert flaw_of(meta(), meta()) is None


def test_what_is_just_allowed_has_no_flaw() -> None:
    largest = float(np.nextafter(np.float32(LARGEST_LOGPROB), np.float32(0)))
    logprobs = [largest, 0.0, SMALLEST_LOGPROB, -1.0, -1.0, -1.0]
    assert flaw_of(meta(4, versions=(0, 3)), meta(2), ids=[0, 49, 0, 49, 0, 49], logprobs=logprobs) is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"completions": (meta(),)}, "1 completions for a group of 2"),
        ({"completions": (meta(), meta(), meta())}, "3 completions for a group of 2"),
        ({"completions": (meta(), meta(5))}, "completion 1 has 5 tokens, more than 4"),
        ({"completions": (meta(), meta(reward=math.nan))}, "completion 1 has reward nan"),
        ({"completions": (meta(reward=-math.inf), meta())}, "completion 0 has reward -inf"),
        ({"completions": (meta(), meta(versions=(0, 4)))}, "completion 1 claims policy version 4, not made yet"),
        ({"ids": [1, 1, 1, 50]}, "outside the vocabulary"),
        ({"ids": [1, -1, 1, 1]}, "outside the vocabulary"),
        ({"logprobs": [-1, -1, -1, 0.01]}, "impossible log-probs"),
        ({"logprobs": [-1, math.nan, -1, -1]}, "impossible log-probs"),
        ({"logprobs": [-1, -math.inf, -1, -1]}, "impossible log-probs"),
        ({"logprobs": [-1, math.inf, -1, -1]}, "impossible log-probs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_group_that_cannot_be_trained_on_says_why(given: dict[str, Any], why: str) -> None:
    completions = given.pop("completions", (meta(), meta()))
    found = flaw_of(*completions, **given)
    assert found is not None and why in found


@given(st.floats(width=32), st.integers(0, 3))
def test_every_logprob_that_passes_is_that_of_a_token_that_could_be_sampled(value: float, at: int) -> None:
    values = [-1.0] * 4
    values[at] = value
    may_pass = SMALLEST_LOGPROB <= value <= np.float32(LARGEST_LOGPROB)
    assert (flaw_of(meta(), meta(), logprobs=values) is None) == may_pass


def test_group_of_several_versions_is_as_old_as_its_oldest_token() -> None:
    nothing = np.empty(0, np.int32), np.empty(0, np.float32)
    rollouts = tuple(
        Rollout(*nothing, 0.0, "stop", tuple(Segment(version, 0) for version in versions))
        for versions in ((5, 6), (4, 7), (6,))
    )
    group = Group(0, 0, nothing[0], rollouts, "a", 0.0)
    assert (group.oldest_version, group.newest_version) == (4, 7)
    assert group.policy_lag(9) == 5
    # Made by a learner that died, under weights that its successor has not made yet.
    assert group.policy_lag(2) == 0


ROUTERS = ExpertLimits(num_layers=2, top_k=2, num_experts=4)
EXPERTS = np.array([[[token % 4, 3], [0, 1 + token % 2]] for token in range(5)], np.uint8)
"""Of a prompt of two tokens and completions of two and three."""


def group_with(experts: np.ndarray | None, *, num_prompt_tokens: int = 2) -> tuple[GroupDone, list[memoryview]]:
    arrays = frames([1] * 5, [-1.0] * 5)
    done = GroupDone(lease_id=1, completions=(meta(2), meta(3)), generate_s=0.0)
    if experts is None:
        return done, arrays
    content = encode_experts(experts)
    _, num_layers, top_k = experts.shape
    described = ExpertsMeta(num_prompt_tokens, num_layers, top_k, len(content))
    return msgspec.structs.replace(done, experts=described), [*arrays, content.data]


def test_a_group_has_the_experts_of_its_last_frame() -> None:
    done, arrays = group_with(EXPERTS)
    assert expert_flaw(done, arrays[-1], ROUTERS, num_prompt_tokens=2) is None
    assert flaw(done.completions, arrays, LIMITS, NEWEST_VERSION) is None, "they are not token ids"
    prompt = Prompt(0, "56", np.array([5, 6], np.int32), "{}")
    accepted = make_accepted(1, completions=done.completions, experts=done.experts)
    group = make_group(accepted, arrays, prompt)
    assert group.experts is not None
    assert group.experts.load().tolist() == np.sort(EXPERTS, axis=-1).tolist()


@pytest.mark.parametrize(
    ("experts", "prompt", "why"),
    [
        (None, 2, 'no experts, and loss.routing_replay = "sampled"'),
        (EXPERTS, 3, r"experts of \(3, 2, 2\) prompt tokens, layers and slots, not \(2, 2, 2\)"),
        (EXPERTS[:, :1], 2, r"\(2, 1, 2\)"),
        (EXPERTS[..., :1], 2, r"\(2, 2, 1\)"),
        (EXPERTS[:4], 2, "broken experts: .* are not the experts of 5 tokens"),
        (EXPERTS + 1, 2, "experts that the model does not have"),
    ],
)
def test_experts_that_cannot_be_replayed_are_a_flaw(experts: np.ndarray | None, prompt: int, why: str) -> None:
    done, arrays = group_with(experts, num_prompt_tokens=prompt)
    found = expert_flaw(done, arrays[-1], ROUTERS, num_prompt_tokens=2)
    assert found is not None
    assert re.search(why, found), found
