"""The dispatcher's handling of messages, and its interface to the training thread."""

import threading

import numpy as np
import pytest

from offbeat.common.records.rows import CommitRow
from offbeat.learner.dispatch.canary import CanaryVerdict
from offbeat.learner.dispatch.send_queue import Outgoing
from offbeat.learner.leases.groups import Group
from offbeat.learner.leases.prompt_stream import PromptTurn
from offbeat.protocols.keys import Sender
from offbeat.protocols.messages import (
    ActorHeartbeat,
    ActorMessage,
    ActorStats,
    CanaryRouted,
    CanaryScored,
    ChunkRequest,
    Credit,
    FilesScored,
    Goodbye,
    LeaseFailed,
    Refused,
    SayHello,
    StatusReport,
    StatusRequest,
    Stop,
    WeightsCommitted,
    WeightsStaged,
)
from offbeat.protocols.wire import WireError
from tests.learner.dispatch.dispatch_desk import (
    DEAD_AFTER_S,
    OPERATOR,
    Actor,
    Desk,
    prompts_in_order,
)


@pytest.mark.parametrize(
    "message",
    [
        Credit(capacity=1),
        ActorHeartbeat(policy_version=0, stats=ActorStats(), lease_ids=(0,), seen_lease_id=3),
        LeaseFailed(lease_id=0, reason="x"),
    ],
)
def test_strangers_are_told_so_and_change_nothing(message: ActorMessage) -> None:
    desk = Desk()
    stranger = Actor(desk, "stranger")
    stranger.say(message)
    assert stranger.heard(SayHello) == [SayHello()]
    assert desk.dispatcher.members() == []
    assert desk.rows == []


def test_goodbye_of_a_stranger_is_not_answered() -> None:
    desk = Desk()
    Actor(desk, "stranger").say(Goodbye(reason="x"))
    assert desk.dispatcher.take_outgoing() == []


def test_bad_message_is_counted_and_answered_with_its_reason() -> None:
    desk = Desk()
    for _ in range(11):
        desk.dispatcher.refuse(b"\xff\x00", WireError("protocol version 9"))
    outgoing = desk.dispatcher.take_outgoing()
    assert outgoing == [Outgoing(b"\xff\x00", Refused(reason="protocol version 9"))] * 11
    assert len(desk.events("bad_message")) == 2, "the first and the tenth are told"
    assert list(desk.status().rejected.values()) == [11]


def test_weights_and_canary_messages_reach_their_parts_by_the_actors_name() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=0, policy_version=None)
    staged = WeightsStaged(policy_version=1, epoch=3)
    desk.dispatcher.publish(1)
    actor.say(staged)
    actor.commit(1)
    actor.say(CanaryScored(policy_version=1), np.array([-1.0, -2.0], np.float32))
    assert desk.weights == [("a", staged), ("a", WeightsCommitted(policy_version=1, stall_s=0.0))]
    assert desk.canaries == [("a", 1, [-1.0, -2.0])]
    actor.say(FilesScored(), np.array([-1.0, -2.5], np.float32))
    assert desk.file_scores == [("a", [-1.0, -2.5])]
    routed = CanaryRouted(policy_version=1, num_tokens=1, num_layers=2, top_k=1)
    actor.say(routed, np.array([[[3], [0]]], np.int32))
    assert desk.routings == [("a", 1, [[[3], [0]]])]
    assert [row.policy_version for row in desk.rows_of(CommitRow)] == [1]


@pytest.mark.parametrize("is_certain", [True, False])
def test_verdict_that_the_next_version_may_overturn_moves_no_good_version(is_certain: bool) -> None:
    desk = Desk(policy_version=3)
    desk.verdict = CanaryVerdict(None, is_certain=is_certain)
    actor = Actor(desk, "a").join(capacity=1, policy_version=3)
    actor.say(CanaryScored(policy_version=3), np.array([-1.0], np.float32))
    (member,) = desk.roster
    assert member.good_version == (3 if is_certain else None)


def test_nothing_is_granted_after_stop_and_every_actor_is_told() -> None:
    desk = Desk()
    actors = [Actor(desk, name).join(capacity=1) for name in "ab"]
    desk.dispatcher.stop("finished")
    assert [actor.leases() for actor in actors] == [[], []]
    assert [actor.heard(Stop) for actor in actors] == [[Stop(reason="finished")]] * 2


def test_actor_that_did_not_hear_of_the_end_is_told_when_it_speaks() -> None:
    desk = Desk()
    cut_off = Actor(desk, "cut off").join(capacity=1)
    desk.dispatcher.stop("finished")
    cut_off.heard(Stop)
    cut_off.beat()
    assert cut_off.heard(Stop) == [Stop(reason="finished")]
    late = Actor(desk, "late")
    late.hello()
    assert late.heard(Stop) == [Stop(reason="finished")]


def test_the_end_is_reached_when_every_actor_has_said_goodbye() -> None:
    desk = Desk()
    actors = [Actor(desk, name).join(capacity=1) for name in "ab"]
    desk.dispatcher.stop("finished")
    actors[0].say(Goodbye(reason="told to"))
    assert not desk.dispatcher.wait_left(0.0)
    actors[1].say(Goodbye(reason="told to"))
    assert desk.dispatcher.wait_left(0.0)


def test_operator_asks_and_does_nothing_else() -> None:
    desk = Desk()
    assert desk.status(OPERATOR).run_id == "run"
    operator = Actor(desk, "ops", sender=OPERATOR)
    operator.hello()
    operator.credit(1)
    assert "role actor" in operator.heard(Refused)[0].reason
    assert desk.dispatcher.members() == []


def test_actor_works_and_does_not_ask() -> None:
    desk = Desk()
    actor = Actor(desk, "a", sender=Sender("a", "actor")).join(capacity=1)
    actor.say(StatusRequest())
    assert "role operator" in actor.heard(Refused)[0].reason
    assert actor.heard(StatusReport) == []
    assert len(actor.leases()) == 1


def test_message_under_another_actors_address_needs_that_actors_key() -> None:
    # The address is the sender's to choose; the key is not.
    desk = Desk()
    actor = Actor(desk, "a", sender=Sender("a", "actor")).join(capacity=1)
    (lease,) = actor.leases()
    forger = Actor(desk, "a", sender=Sender("b", "actor"))
    assert forger.peer == actor.peer
    forger.send_group(lease.lease_id)
    forger.say(Goodbye(reason="x"))
    assert len(forger.heard(Refused)) == 2
    assert desk.dispatcher.members() == [(actor.peer, "a", 0, None)]
    assert desk.ledger.num_ready == 0
    assert {name for name in desk.status(OPERATOR).rejected if name.startswith("b: ")}


def test_chunk_request_at_the_hub_is_refused() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    actor.say(ChunkRequest(policy_version=0, index=0))
    assert "weights.pull_port" in actor.heard(Refused)[0].reason


def test_waiting_for_a_batch_ends_when_its_last_group_arrives() -> None:
    desk = Desk("train.groups_per_step=1")
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    batches: list[list[Group] | None] = []
    trainer = threading.Thread(target=lambda: batches.append(desk.dispatcher.take_batch(10.0)))
    trainer.start()
    actor.answer(lease.lease_id)
    trainer.join(5.0)
    assert not trainer.is_alive()
    assert batches[0] is not None


def test_death_of_the_hub_thread_raises_in_the_training_thread() -> None:
    desk = Desk()
    caught: list[BaseException] = []

    def train() -> None:
        try:
            desk.dispatcher.take_batch(10.0)
        except OSError as error:
            caught.append(error)

    trainer = threading.Thread(target=train)
    trainer.start()
    desk.dispatcher.fail(OSError("hub"))
    trainer.join(5.0)
    assert [str(error) for error in caught] == ["hub"]


def test_state_holds_every_open_prompt_in_order() -> None:
    desk = Desk("train.groups_per_step=2", "staleness.max_staleness=2")
    actor = Actor(desk, "a").join(capacity=6)
    leases = actor.leases()
    order = prompts_in_order()
    assert [lease.prompt_id for lease in leases] == [next(order) for _ in range(6)]
    for index in (4, 0, 1):
        actor.answer(leases[index].lease_id)
    desk.train()
    actor.say(LeaseFailed(lease_id=leases[2].lease_id, reason="reward_error"))
    state = desk.dispatcher.state()
    opened = state.ledger.open
    assert [(saved.lease_id, saved.is_ready) for saved in opened] == [
        (leases[index].lease_id, is_ready) for index, is_ready in ((3, False), (4, True), (5, False))
    ]
    assert [saved.prompt_id for saved in opened] == [leases[index].prompt_id for index in (3, 4, 5)]
    assert state.stream.returned == (PromptTurn(leases[2].prompt_id, 0),)
    assert state.stream.position == 6
    counts = state.ledger.counts
    assert (counts.trained, counts.in_flight) == (2, 3)
    assert counts.adds_up
    assert state.log_end is None


@pytest.mark.parametrize("share", [0.6, 1.2, 3.0])
def test_learner_that_was_paused_does_not_lose_its_actors_for_that(share: float) -> None:
    desk = Desk()
    Actor(desk, "a").join(capacity=1)
    desk.tick(0.3 * DEAD_AFTER_S)
    desk.jump(share * DEAD_AFTER_S)
    assert not desk.events("actor_lost")
    # Later silence counts.
    desk.tick(1.1 * DEAD_AFTER_S)
    assert len(desk.events("actor_lost")) == 1
