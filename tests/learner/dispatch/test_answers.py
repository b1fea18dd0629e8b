"""Groups and failures, as actors send them for their leases."""

import math
from typing import Any

import numpy as np
import pytest

from offbeat.learner.dispatch.run_state import RunFailedError
from offbeat.learner.leases.groups import ExpertLimits
from offbeat.protocols.messages import Ack, GroupDone, LeaseFailed
from offbeat.protocols.payload import CompletionMeta, ExpertsMeta, Segment, encode_experts
from tests.learner.dispatch.dispatch_desk import (
    CONTRACT,
    NUM_PROMPTS,
    VOCABULARY_SIZE,
    Actor,
    Desk,
    make_prompts,
    prompts_in_order,
)


def test_group_sent_twice_is_acknowledged_twice_and_trained_once() -> None:
    desk = Desk("train.groups_per_step=1")
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    assert actor.answer(lease.lease_id).outcome == "accepted"
    assert actor.answer(lease.lease_id).outcome == "duplicate"
    assert len(desk.train()) == 1
    assert actor.answer(lease.lease_id).outcome == "duplicate"
    assert desk.batch() is None
    assert desk.dispatcher.counts().trained == 1


def test_a_run_that_replays_the_engines_routing_takes_no_group_without_it() -> None:
    desk = Desk("train.groups_per_step=1", contract=CONTRACT._replace(experts=ExpertLimits(1, 2, 4)))
    actor = Actor(desk, "a").join(capacity=2)
    first, second = actor.leases()
    ack = actor.answer(first.lease_id)
    assert (ack.outcome, ack.detail) == (
        "rejected",
        'no experts, and loss.routing_replay = "sampled" replays those of the engine',
    )
    prompt = make_prompts(NUM_PROMPTS, "train", ())[second.prompt_id]
    completion = CompletionMeta(2, "stop", 0.0, (Segment(0, 0),))
    content = encode_experts(np.zeros((len(prompt.token_ids) + 2, 1, 2), np.uint8))
    experts = ExpertsMeta(len(prompt.token_ids), 1, 2, len(content))
    done = GroupDone(lease_id=second.lease_id, completions=(completion, completion), generate_s=0.1, experts=experts)
    actor.say(done, np.ones(4, np.int32), np.full(4, -1, np.float32), content)
    (ack,) = actor.heard(Ack)
    assert ack.outcome == "accepted", ack.detail
    (group,) = desk.train()
    assert group.experts is not None
    assert group.experts.load().shape == (len(prompt.token_ids) + 2, 1, 2)


@pytest.mark.parametrize("lease_id", [-1, 1, 10**9])
def test_group_for_a_lease_that_was_never_granted_is_unknown(lease_id: int) -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    actor.leases()
    assert actor.answer(lease_id).outcome == "unknown"
    assert desk.dispatcher.counts().in_flight == 1


def test_answer_to_the_lease_of_another_actor_changes_nothing() -> None:
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=0")
    holder = Actor(desk, "holder").join(capacity=1)
    (lease,) = holder.leases()
    thief = Actor(desk, "thief").join(capacity=1)
    assert thief.answer(lease.lease_id).outcome == "unknown"
    thief.say(LeaseFailed(lease_id=lease.lease_id, reason="reward_error"))
    assert desk.batch() is None
    assert holder.answer(lease.lease_id).outcome == "accepted"
    desk.train()
    holder.commit(1)
    thief.commit(1)
    assert len(holder.leases() + thief.leases()) == 1


@pytest.mark.parametrize(
    ("flawed", "why"),
    [
        ({"rewards": (1.0,)}, "1 completions for a group of 2"),
        ({"rewards": (1.0, 1.0, 1.0)}, "3 completions"),
        ({"logprobs": (-1.0, math.nan)}, "impossible log-probs"),
        ({"logprobs": (-1.0, -math.inf)}, "impossible log-probs"),
        ({"logprobs": (-1.0, 0.01)}, "impossible log-probs"),
        ({"ids": (1, VOCABULARY_SIZE)}, "outside the vocabulary"),
        ({"ids": (-1, 1)}, "outside the vocabulary"),
        ({"ids": (1,) * 5, "logprobs": (-1,) * 5}, "5 tokens, more than 4"),
        ({"rewards": (1.0, math.nan)}, "reward nan"),
        ({"rewards": (1.0, math.inf)}, "reward inf"),
        ({"policy_version": 1}, "not made yet"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_group_that_cannot_be_trained_on_is_rejected_and_its_prompt_leased_again(flawed: dict[str, Any], why: str) -> None:
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=0")
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    ack = actor.answer(lease.lease_id, **flawed)
    assert ack.outcome == "rejected"
    assert why in ack.detail
    assert desk.batch() is None
    assert desk.dispatcher.counts().dropped == {"rejected": 1}
    assert len(desk.events("group_rejected")) == 1
    (again,) = actor.leases()
    assert again.prompt_id == lease.prompt_id
    assert actor.answer(again.lease_id).outcome == "accepted"


def test_rounded_sure_token_and_last_token_of_the_vocabulary_are_accepted() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    assert actor.answer(lease.lease_id, ids=(0, VOCABULARY_SIZE - 1), logprobs=(0.0, 1e-6)).outcome == "accepted"


@pytest.mark.parametrize("failure", ["rejected", "reward_error"])
def test_prompt_that_keeps_failing_is_tried_a_few_times_and_given_up(failure: str) -> None:
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=0")
    actor = Actor(desk, "a").join(capacity=1)
    order = prompts_in_order()
    bad = next(order)
    for _ in range(3):
        (lease,) = actor.leases()
        assert lease.prompt_id == bad
        if failure == "rejected":
            actor.answer(lease.lease_id, rewards=(0.0,))
        else:
            actor.say(LeaseFailed(lease_id=lease.lease_id, reason=failure))
    assert actor.leases()[0].prompt_id == next(order)
    assert desk.dispatcher.counts().dropped == {failure: 3}
    assert len(desk.events("prompt_dropped")) == 1


def test_reward_failures_in_a_row_end_the_run_and_say_why() -> None:
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=0", "run.max_failed_leases=3")
    actor = Actor(desk, "a").join(capacity=1)
    for _ in range(2):
        actor.say(LeaseFailed(lease_id=actor.leases()[0].lease_id, reason="reward_error", detail="ZeroDivisionError"))
    assert desk.batch() is None
    actor.say(LeaseFailed(lease_id=actor.leases()[0].lease_id, reason="reward_error", detail="ZeroDivisionError"))
    with pytest.raises(RunFailedError, match=r"3 leases failed.*run\.max_failed_leases.*ZeroDivisionError.*task\.reward"):
        desk.batch()


def test_one_good_group_between_failures_lets_the_run_go_on() -> None:
    desk = Desk("train.groups_per_step=9", "run.max_failed_leases=2")
    actor = Actor(desk, "a").join(capacity=1)
    for _ in range(4):
        actor.say(LeaseFailed(lease_id=actor.leases()[0].lease_id, reason="reward_error"))
        actor.heard(Ack)
        actor.answer(actor.leases()[0].lease_id)
    assert desk.batch() is None
    assert desk.dispatcher.counts().dropped == {"reward_error": 4}


def test_failure_reported_again_counts_once() -> None:
    desk = Desk("run.max_failed_leases=2")
    actor = Actor(desk, "a").join(capacity=1)
    failed = LeaseFailed(lease_id=actor.leases()[0].lease_id, reason="reward_error")
    for _ in range(3):
        actor.say(failed)
    assert [ack.lease_id for ack in actor.heard(Ack)] == [failed.lease_id] * 3
    assert desk.batch() is None
    assert len(desk.events("reward_error")) == 1
    assert desk.dispatcher.counts().dropped == {"reward_error": 1}


def test_rejected_groups_in_a_row_end_the_run() -> None:
    desk = Desk("run.max_failed_leases=3")
    actor = Actor(desk, "a").join(capacity=1)
    for _ in range(3):
        actor.answer(actor.leases()[0].lease_id, logprobs=(math.nan, -1.0))
    with pytest.raises(RunFailedError, match="impossible log-probs"):
        desk.batch()
