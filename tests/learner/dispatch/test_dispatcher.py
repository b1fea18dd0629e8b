"""What the learner decides about rollouts, with hand-made messages and a clock that the test moves."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pytest

from offbeat.common.config import (
    Config,
    EvaluationSection,
    HubSection,
    ModelSection,
    RolloutSection,
    StalenessSection,
    TaskSection,
    TrainSection,
)
from offbeat.common.rows import row_fields
from offbeat.learner.dispatch.contract import Contract
from offbeat.learner.dispatch.dispatcher import Dispatcher, Outgoing, RunFailedError
from offbeat.learner.dispatch.live_settings import Tuning
from offbeat.learner.dispatch.roster import MAX_REPLACED
from offbeat.learner.leases.events import Accepted, Expired, Granted, LeaseEvent, Started, Trained, Tuned
from offbeat.learner.leases.groups import Group
from offbeat.learner.leases.ledger import Ledger, needed_position
from offbeat.learner.leases.prompts import Prompt, PromptStream, Turn
from offbeat.learner.leases.rollout_log import LogFullError, Position, RolloutLog, read_log
from offbeat.learner.leases.staleness import StalenessPolicy
from offbeat.protocols.keys import NO_KEYS, Sender
from offbeat.protocols.messages import (
    Ack,
    ActorHeartbeat,
    ActorMessage,
    ActorStats,
    CanaryRouted,
    CanaryScored,
    Cancel,
    ChunkRequest,
    CompletionMeta,
    Credit,
    CreditLimit,
    EngineInfo,
    Goodbye,
    GroupDone,
    Hello,
    LearnerHeartbeat,
    LearnerMessage,
    Lease,
    LeaseFailed,
    LiveSettingsReport,
    LiveSettingsRequest,
    ModelHashes,
    Refused,
    SayHello,
    Segment,
    StatusReport,
    StatusRequest,
    Stop,
    TensorSpec,
    WeightsCommitted,
    WeightsStaged,
    Welcome,
)
from offbeat.protocols.wire import WireError, token_ids

GROUP_SIZE = 2
MAX_NEW_TOKENS = 4
VOCABULARY_SIZE = 50
LEASE_TIMEOUT_S = 100.0
DEAD_AFTER_S = 15.0
NUM_PROMPTS = 20
TICK_S = DEAD_AFTER_S / 3
"""Shorter than what the dispatcher takes for its own absence."""
HASHES = ModelHashes(config="c0", tokenizer="t0", chat_template="x0")
ENGINE = EngineInfo("vllm", "1", "float32", "cpu", 64, HASHES)
CONTRACT = Contract(
    run_id="run",
    learner_incarnation=77,
    layout=(TensorSpec("w", (2,), "float32"),),
    canary_token_ids=np.array([1, 2, 3], np.int32),
    dtype="float32",
    hashes=HASHES,
    max_length=64,
    vocabulary_size=VOCABULARY_SIZE,
    temperature=0.7,
    reward="rewards:solved",
    software="1.0",
    max_message_bytes=1 << 20,
)
OPERATOR = Sender("ops", "operator")

M = TypeVar("M", bound=LearnerMessage)


class Actor:
    """Says what an actor would say, and reads what it was sent."""

    def __init__(self, desk: "Desk", name: str, *, incarnation: int = 1, sender: Sender = NO_KEYS) -> None:
        self.desk = desk
        self.name = name
        self.incarnation = incarnation
        self.sender = sender
        self.peer = f"{name}/{incarnation}".encode()
        self.capacity = 0

    def say(self, message: ActorMessage, *arrays: np.ndarray) -> None:
        frames = [memoryview(array.tobytes()) for array in arrays]
        self.desk.dispatcher.handle(self.peer, message, frames, self.desk.now, self.sender)

    def hello(self, **fields: Any) -> None:
        self.say(make_hello(actor=self.name, incarnation=self.incarnation, **fields))

    def credit(self, capacity: int) -> None:
        self.capacity = capacity
        self.say(Credit(capacity=capacity))

    def beat(self, *lease_ids: int, seen: int = -1, policy_version: int = 0, stats: ActorStats | None = None) -> None:
        """A heartbeat of an actor that holds these leases."""
        stats = stats or ActorStats()
        self.say(
            ActorHeartbeat(policy_version=policy_version, stats=stats, lease_ids=lease_ids, seen_lease_id=seen),
        )

    def join(self, *, capacity: int, policy_version: int = 0, lease_ids: Sequence[int] = ()) -> "Actor":
        self.hello(lease_ids=tuple(lease_ids))
        self.credit(capacity)
        if policy_version >= 0:
            self.commit(policy_version)
        return self

    def commit(self, policy_version: int) -> None:
        self.say(WeightsCommitted(policy_version=policy_version, stall_s=0.0))

    def heard(self, kind: type[M]) -> list[M]:
        """Messages of this kind that it was sent and has not read."""
        return [message for message in self.desk.take(self.peer, kind) if isinstance(message, kind)]

    def leases(self) -> list[Lease]:
        """The leases that the next tick brings."""
        self.desk.tick()
        return self.heard(Lease)

    def answer(
        self,
        lease_id: int,
        *,
        rewards: Sequence[float] = (0.0, 1.0),
        policy_version: int = 0,
        ids: Sequence[int] = (1, 2),
        logprobs: Sequence[float] = (-0.5, -1.0),
    ) -> Ack:
        """Send a group of equal completions; what the learner says to it."""
        self.send_group(lease_id, rewards=rewards, policy_version=policy_version, ids=ids, logprobs=logprobs)
        (ack,) = self.heard(Ack)
        assert ack.lease_id == lease_id
        return ack

    def send_group(
        self,
        lease_id: int,
        *,
        rewards: Sequence[float] = (0.0, 1.0),
        policy_version: int = 0,
        ids: Sequence[int] = (1, 2),
        logprobs: Sequence[float] = (-0.5, -1.0),
    ) -> None:
        completions = tuple(CompletionMeta(len(ids), "stop", reward, (Segment(policy_version, 0),)) for reward in rewards)
        done = GroupDone(lease_id=lease_id, completions=completions, generate_s=0.1)
        self.say(
            done,
            np.array([*ids] * len(rewards), dtype=np.int32),
            np.array([*logprobs] * len(rewards), dtype=np.float32),
        )


class Desk:
    """A dispatcher with its clock, its outgoing messages and its rows."""

    def __init__(
        self,
        *,
        max_staleness: int = 1,
        groups_per_step: int = 2,
        steps_per_batch: int = 1,
        epochs_per_batch: int = 1,
        num_steps: int = 50,
        hard_max_staleness: int | None = None,
        staleness: StalenessSection | None = None,
        policy_version: int = 0,
        newest_version: int = 0,
        is_published: bool = True,
        max_failed_leases: int = 100,
        max_lease_attempts: int = 3,
        max_actors: int = 100,
        drop_zero_variance: bool = False,
        drop_quarantined: bool = True,
        eval_interval: int = 0,
        num_eval_prompts: int = 3,
        num_prompts: int = NUM_PROMPTS,
        stream: PromptStream | None = None,
        ledger: Ledger | None = None,
        log: RolloutLog | None = None,
        weight_problems: Callable[[], list[str]] = list,
        tuned: Mapping[str, Tuned] | None = None,
    ) -> None:
        self.now = 1000.0
        self.rows: list[dict[str, Any]] = []
        self.joined: list[bytes] = []
        self.weights: list[tuple[str, WeightsStaged | WeightsCommitted]] = []
        self.canaries: list[tuple[str, int, list[float]]] = []
        self.routings: list[tuple[str, int, list[list[list[int]]]]] = []
        self.distrusted: list[tuple[bytes, str, str]] = []
        self.unread: list[Outgoing] = []
        self.stream = stream or PromptStream(num_prompts, seed=0)
        self.ledger = ledger or Ledger()
        tuning = Tuning(
            Config(
                model=ModelSection(path="model"),
                task=TaskSection(train_data="data.jsonl"),
                staleness=staleness or StalenessSection(max_staleness=max_staleness, hard_max_staleness=hard_max_staleness),
                train=TrainSection(
                    groups_per_step=groups_per_step,
                    steps_per_batch=steps_per_batch,
                    epochs_per_batch=epochs_per_batch,
                    num_steps=num_steps,
                ),
            ),
            tuned or {},
        )
        self.dispatcher = Dispatcher(
            contract=CONTRACT,
            rollout=RolloutSection(
                group_size=GROUP_SIZE,
                max_new_tokens=MAX_NEW_TOKENS,
                temperature=0.7,
                lease_timeout_s=LEASE_TIMEOUT_S,
                max_lease_attempts=max_lease_attempts,
            ),
            evaluation=EvaluationSection(interval=eval_interval, num_prompts=num_eval_prompts, group_size=1),
            hub=HubSection(dead_after_s=DEAD_AFTER_S, max_actors=max_actors),
            prompts=make_prompts(num_prompts, "train"),
            eval_prompts=make_prompts(num_eval_prompts, "held-out"),
            stream=self.stream,
            ledger=self.ledger,
            log=log,
            staleness=StalenessPolicy(tuning.config.staleness, tuning.config.train),
            tuning=tuning,
            drop_zero_variance=drop_zero_variance,
            drop_quarantined=drop_quarantined,
            max_failed_leases=max_failed_leases,
            num_steps=num_steps,
            policy_version=policy_version,
            newest_version=newest_version,
            record=lambda row: self.rows.append(row_fields(row)),
            on_join=self.joined.append,
            on_weights=lambda actor, message: self.weights.append((actor, message)),
            on_canary=lambda actor, version, logprobs: self.canaries.append((actor, version, logprobs.tolist())),
            on_routed=lambda actor, version, experts: self.routings.append((actor, version, experts.tolist())),
            on_distrust=lambda peer, actor, why: self.distrusted.append((peer, actor, why)),
            weight_problems=weight_problems,
            clock=lambda: self.now,
            wall_clock=lambda: self.now - 993.0,
        )
        if is_published:
            self.dispatcher.publish(policy_version)

    def tick(self, seconds: float = 0.0, *alive: Actor) -> None:
        """Let time pass, in steps as the hub thread would; actors that are `alive` are heard at each."""
        end = self.now + seconds
        while True:
            self.now = min(end, self.now + TICK_S)
            for actor in alive:
                actor.say(Credit(capacity=actor.capacity))
            self.jump(0.0)
            if self.now >= end:
                return

    def jump(self, seconds: float) -> None:
        """One tick, as late as that."""
        self.now += seconds
        self.dispatcher.tick(self.now)
        counts = self.dispatcher.counts()
        assert counts.adds_up, counts

    def take(self, peer: bytes, kind: type) -> list[LearnerMessage]:
        self.unread += self.dispatcher.take_outgoing()
        taken = [outgoing for outgoing in self.unread if outgoing.peer == peer and isinstance(outgoing.message, kind)]
        self.unread = [outgoing for outgoing in self.unread if not any(outgoing is other for other in taken)]
        return [outgoing.message for outgoing in taken]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == "event" and row["event"] == name]

    def rows_of(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]

    def status(self, sender: Sender = NO_KEYS) -> StatusReport:
        """What an operator is told."""
        peer = b"operator"
        self.dispatcher.handle(peer, StatusRequest(), (), self.now, sender)
        (report,) = self.take(peer, StatusReport)
        assert isinstance(report, StatusReport)
        return report

    def tune(self, sender: Sender = NO_KEYS, **settings: str) -> LiveSettingsReport:
        """What an operator is told who asks for `section__key="value"`."""
        peer = b"operator"
        named = {name.replace("__", "."): value for name, value in settings.items()}
        self.dispatcher.handle(peer, LiveSettingsRequest(settings=named, who="me@host"), (), self.now, sender)
        (report,) = self.take(peer, LiveSettingsReport)
        assert isinstance(report, LiveSettingsReport)
        return report

    def batch(self) -> list[Group] | None:
        return self.dispatcher.take_batch(0.0)

    def train(self) -> list[Group]:
        """Take a batch, which must be there, and make one step on it."""
        groups = self.batch()
        assert groups is not None
        version = self.dispatcher._policy_version + 1
        self.dispatcher.finish_batch(groups, version)
        self.dispatcher.publish(version)
        return groups


def make_hello(actor: str = "a", incarnation: int = 1, **fields: Any) -> Hello:
    """A hello that agrees with `CONTRACT`, but for these fields."""
    given = {"engine": ENGINE, "temperature": 0.7, "reward": "rewards:solved", "software": "1.0", **fields}
    return Hello(actor=actor, incarnation=incarnation, **given)


def make_prompts(number: int, text: str) -> list[Prompt]:
    return [Prompt(index, f"{text} {index}", np.array([index], np.int32), f'{{"row": {index}}}') for index in range(number)]


def _order() -> Iterator[int]:
    """The prompts in the order of the stream."""
    stream = PromptStream(NUM_PROMPTS, seed=0)
    while True:
        yield stream.next().prompt_id


# Joining


def test_hello_is_answered_with_the_contract() -> None:
    desk = Desk(policy_version=3)
    actor = Actor(desk, "a")
    actor.hello()
    (outgoing,) = desk.dispatcher.take_outgoing()
    assert outgoing.peer == actor.peer
    assert outgoing.message == Welcome(
        run_id="run", learner_incarnation=77, max_message_bytes=1 << 20, layout=CONTRACT.layout, policy_version=3
    )
    assert outgoing.arrays[0].tolist() == [1, 2, 3]
    assert desk.joined == [actor.peer]
    assert desk.dispatcher.members() == [(actor.peer, "a", -1)]


def test_second_hello_is_welcomed_and_changes_nothing() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    held = tuple(lease.lease_id for lease in actor.leases())
    assert len(held) == 2
    actor.hello(lease_ids=held)
    assert len(actor.heard(Welcome)) == 2
    assert desk.joined == [actor.peer]
    assert desk.dispatcher.members() == [(actor.peer, "a", 0)]
    assert actor.leases() == []


def test_actor_that_does_not_keep_to_the_contract_is_refused_with_the_reason_and_counted() -> None:
    desk = Desk()
    actor = Actor(desk, "a")
    for _ in range(3):
        actor.hello(reward="others:solved")
    refused = actor.heard(Refused)
    assert len(refused) == 3
    assert "task.reward" in refused[0].reason
    assert desk.dispatcher.members() == []
    assert desk.joined == []
    assert len(desk.events("actor_refused")) == 1, "told once, counted three times"
    (number,) = desk.status().rejected.values()
    assert number == 3


def test_harmless_difference_is_recorded_when_the_actor_joins() -> None:
    desk = Desk()
    Actor(desk, "a").hello(software="0.9")
    assert [event["detail"] for event in desk.events("actor_joined")] == [
        "vllm 1 float32 on cpu; offbeat 0.9, the learner has 1.0"
    ]


def test_more_actors_than_the_run_takes_are_refused_and_those_in_it_stay() -> None:
    desk = Desk(max_actors=1)
    first = Actor(desk, "a").join(capacity=1)
    second = Actor(desk, "b")
    second.hello()
    assert "hub.max_actors = 1" in second.heard(Refused)[0].reason
    first.hello()
    assert len(first.heard(Welcome)) == 2
    assert [name for _, name, _ in desk.dispatcher.members()] == ["a"]


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


def test_newer_incarnation_replaces_the_older_one_and_its_leases_go_on() -> None:
    desk = Desk()
    older = Actor(desk, "a", incarnation=1).join(capacity=2)
    before = older.leases()
    newer = Actor(desk, "a", incarnation=2).join(capacity=2)
    assert desk.dispatcher.members() == [(newer.peer, "a", 0)]
    after = newer.leases()
    assert [lease.prompt_id for lease in after] == [lease.prompt_id for lease in before]
    assert {lease.lease_id for lease in after}.isdisjoint(lease.lease_id for lease in before)
    older.say(Credit(capacity=2))
    assert older.heard(SayHello) == [SayHello()]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_of_two_actors_with_one_name_the_one_that_came_last_stays(before: int, after: int) -> None:
    # Incarnations are random numbers: which one is larger says nothing.
    desk = Desk()
    first = Actor(desk, "a", incarnation=before).join(capacity=2)
    last = Actor(desk, "a", incarnation=after).join(capacity=2)
    first.hello()
    assert "actor.name" in first.heard(Refused)[0].reason
    assert desk.dispatcher.members() == [(last.peer, "a", 0)]
    assert len(last.leases()) == 2


def test_replaced_actor_is_refused_for_good_and_remembered_among_many() -> None:
    desk = Desk()
    Actor(desk, "a", incarnation=0).hello()
    for incarnation in range(1, MAX_REPLACED + 1):
        Actor(desk, "a", incarnation=incarnation).hello()
    first = Actor(desk, "a", incarnation=0)
    first.hello()
    assert len(first.heard(Refused)) == 1
    assert len(desk.dispatcher._members._replaced) == MAX_REPLACED
    Actor(desk, "a", incarnation=MAX_REPLACED + 1).hello()
    assert len(desk.dispatcher._members._replaced) == MAX_REPLACED


def test_bad_message_is_counted_and_answered_with_its_reason() -> None:
    desk = Desk()
    for _ in range(11):
        desk.dispatcher.refuse(b"\xff\x00", WireError("protocol version 9"))
    outgoing = desk.dispatcher.take_outgoing()
    assert outgoing == [Outgoing(b"\xff\x00", Refused(reason="protocol version 9"))] * 11
    assert len(desk.events("bad_message")) == 2, "the first and the tenth are told"
    assert list(desk.status().rejected.values()) == [11]


def test_heartbeat_is_recorded_and_answered_with_the_newest_lease() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=0)
    stats = ActorStats(num_generated_tokens=7, seconds={"generate": 1.0})
    actor.beat(policy_version=1, stats=stats)
    assert actor.heard(LearnerHeartbeat) == [LearnerHeartbeat(newest_lease_id=-1)]
    (row,) = desk.rows_of("actor")
    assert (row["actor"], row["policy_version"], row["num_generated_tokens"]) == ("a", 1, 7)
    assert row["seconds"] == {"generate": 1.0}
    actor.credit(2)
    held = [lease.lease_id for lease in actor.leases()]
    actor.beat(*held)
    assert actor.heard(LearnerHeartbeat) == [LearnerHeartbeat(newest_lease_id=held[-1])]


def test_flood_of_heartbeats_is_no_flood_of_rows() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=0)
    for _ in range(100):
        actor.beat()
    assert len(actor.heard(LearnerHeartbeat)) == 100
    assert len(desk.rows_of("actor")) == 1


def test_weights_and_canary_messages_reach_their_parts_by_the_actors_name() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=0, policy_version=-1)
    staged = WeightsStaged(policy_version=1, epoch=3)
    desk.dispatcher.publish(1)
    actor.say(staged)
    actor.commit(1)
    actor.say(CanaryScored(policy_version=1), np.array([-1.0, -2.0], np.float32))
    assert desk.weights == [("a", staged), ("a", WeightsCommitted(policy_version=1, stall_s=0.0))]
    assert desk.canaries == [("a", 1, [-1.0, -2.0])]
    routed = CanaryRouted(policy_version=1, num_tokens=1, num_layers=2, top_k=1)
    actor.say(routed, np.array([[[3], [0]]], np.int32))
    assert desk.routings == [("a", 1, [[[3], [0]]])]
    assert [row["policy_version"] for row in desk.rows_of("commit")] == [1]


# Granting


def test_lease_holds_what_the_actor_needs() -> None:
    desk = Desk()
    Actor(desk, "a").join(capacity=1)
    desk.tick()
    (outgoing,) = [outgoing for outgoing in desk.dispatcher.take_outgoing() if isinstance(outgoing.message, Lease)]
    lease = outgoing.message
    assert isinstance(lease, Lease)
    assert lease.prompt == f"train {lease.prompt_id}"
    assert lease.row == f'{{"row": {lease.prompt_id}}}'
    assert (lease.group_size, lease.timeout_s, lease.min_policy_version) == (GROUP_SIZE, LEASE_TIMEOUT_S, 0)
    assert (lease.sampling.max_new_tokens, lease.sampling.temperature) == (MAX_NEW_TOKENS, 0.7)
    assert token_ids(memoryview(outgoing.arrays[0].tobytes())).tolist() == [lease.prompt_id]


def test_no_lease_before_the_actor_has_committed_weights() -> None:
    actor = Actor(Desk(), "a").join(capacity=4, policy_version=-1)
    assert actor.leases() == []
    actor.commit(0)
    assert len(actor.leases()) == 4


def test_leases_go_only_to_actors_whose_weights_are_new_enough() -> None:
    desk = Desk(max_staleness=1, policy_version=5)
    old = Actor(desk, "old").join(capacity=9, policy_version=3)
    fair = Actor(desk, "fair").join(capacity=9, policy_version=4)
    # Two leases will be trained at version 5 and may be sampled under 4; the next two must wait for version 5.
    assert [lease.min_policy_version for lease in fair.leases()] == [4, 4]
    assert old.leases() == []
    old.commit(5)
    assert [lease.min_policy_version for lease in old.leases()] == [5, 5]


def test_prompts_are_leased_in_the_order_of_the_stream() -> None:
    desk = Desk(max_staleness=3)
    order = _order()
    assert [lease.prompt_id for lease in Actor(desk, "a").join(capacity=8).leases()] == [next(order) for _ in range(8)]


def test_no_prompt_is_taken_from_the_stream_while_nobody_can_have_it() -> None:
    desk = Desk()
    Actor(desk, "a").join(capacity=0)
    desk.tick()
    assert desk.stream.position == 0


def test_credit_is_never_exceeded_and_not_used_up_by_repeating_it() -> None:
    desk = Desk(max_staleness=9)
    actor = Actor(desk, "a").join(capacity=3)
    first = actor.leases()
    assert len(first) == 3
    actor.say(Credit(capacity=3))
    assert actor.leases() == []
    actor.answer(first[0].lease_id)
    assert len(actor.leases()) == 1
    actor.say(Credit(capacity=0))
    actor.answer(first[1].lease_id)
    assert actor.leases() == []


@pytest.mark.parametrize("capacity", [-3, 0])
def test_no_credit_no_lease(capacity: int) -> None:
    assert Actor(Desk(), "a").join(capacity=capacity).leases() == []


def test_leases_are_balanced_over_actors() -> None:
    desk = Desk(max_staleness=3, groups_per_step=3)
    actors = [Actor(desk, name).join(capacity=8) for name in "abc"]
    assert [len(actor.leases()) for actor in actors] == [4, 4, 4]


def test_no_more_is_granted_than_the_gate_allows() -> None:
    desk = Desk(max_staleness=1, groups_per_step=2)
    actor = Actor(desk, "a").join(capacity=100)
    leases = actor.leases()
    assert len(leases) == 4
    for lease in leases:
        actor.answer(lease.lease_id)
    assert actor.leases() == []
    desk.train()
    actor.commit(1)
    assert len(actor.leases()) == 2


def test_at_most_the_groups_of_the_run_are_leased() -> None:
    desk = Desk(max_staleness=9, groups_per_step=2, num_steps=3)
    actor = Actor(desk, "a").join(capacity=100)
    leases = actor.leases()
    assert len(leases) == 6
    for lease in leases:
        actor.answer(lease.lease_id)
    for _ in range(3):
        desk.train()
    assert actor.leases() == []
    assert desk.dispatcher.counts().trained == 6


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


# Leases that end without a group


def test_expired_lease_goes_to_another_actor_and_the_late_answer_is_a_duplicate() -> None:
    desk = Desk(groups_per_step=1, max_staleness=0)
    slow = Actor(desk, "slow").join(capacity=1)
    (late,) = slow.leases()
    slow.credit(0)
    other = Actor(desk, "other").join(capacity=1)
    desk.tick(LEASE_TIMEOUT_S, slow, other)
    assert slow.heard(Cancel) == []
    desk.tick(0.1)
    assert slow.heard(Cancel) == [Cancel(lease_ids=(late.lease_id,))]
    (again,) = other.leases()
    assert again.prompt_id == late.prompt_id
    assert again.lease_id != late.lease_id
    assert slow.answer(late.lease_id).outcome == "duplicate"
    assert desk.batch() is None
    assert other.answer(again.lease_id).outcome == "accepted"
    assert [group.lease_id for group in desk.train()] == [again.lease_id]
    assert slow.answer(late.lease_id).outcome == "duplicate"
    counts = desk.dispatcher.counts()
    assert (counts.leased, counts.trained, counts.expired, counts.in_flight) == (2, 1, 1, 0)
    assert len(desk.events("lease_expired")) == 1


def test_buffered_group_does_not_expire() -> None:
    desk = Desk(groups_per_step=2, max_staleness=0)
    actor = Actor(desk, "a").join(capacity=2)
    first, second = actor.leases()
    actor.answer(first.lease_id)
    desk.tick(LEASE_TIMEOUT_S + 1, actor)
    (again,) = actor.leases()
    assert again.prompt_id == second.prompt_id
    actor.answer(again.lease_id)
    assert [group.prompt_id for group in desk.train()] == [first.prompt_id, second.prompt_id]


def test_leases_of_a_silent_actor_go_to_another() -> None:
    desk = Desk()
    silent = Actor(desk, "silent").join(capacity=2)
    leases = silent.leases()
    other = Actor(desk, "other").join(capacity=2)
    desk.tick(DEAD_AFTER_S - 0.1, other)
    other.heard(Lease)
    assert len(desk.dispatcher.members()) == 2
    desk.tick(0.2)
    assert desk.dispatcher.members() == [(other.peer, "other", 0)]
    assert [event["actor"] for event in desk.events("actor_lost")] == ["silent"]
    assert desk.dispatcher.counts().expired == 2
    other.say(Credit(capacity=9))
    assert {lease.prompt_id for lease in leases} <= {lease.prompt_id for lease in other.leases()}


def test_actor_taken_for_dead_comes_back_and_its_late_groups_are_duplicates() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    leases = actor.leases()
    desk.tick(DEAD_AFTER_S + 1)
    actor.say(Credit(capacity=2))
    assert actor.heard(SayHello) == [SayHello()]
    actor.join(capacity=2, policy_version=-1)
    assert desk.joined == [actor.peer, actor.peer]
    assert actor.answer(leases[0].lease_id).outcome == "duplicate"
    assert actor.leases() == [], "it has not committed the weights of this membership"
    actor.commit(0)
    assert [lease.prompt_id for lease in actor.leases()] == [lease.prompt_id for lease in leases]


def test_leases_of_an_actor_that_leaves_go_on_at_once() -> None:
    desk = Desk()
    leaver = Actor(desk, "leaver").join(capacity=2)
    leases = leaver.leases()
    leaver.say(Goodbye(reason="SIGTERM"))
    other = Actor(desk, "other").join(capacity=2)
    assert [lease.prompt_id for lease in other.leases()] == [lease.prompt_id for lease in leases]
    assert [event["detail"] for event in desk.events("actor_left")] == ["SIGTERM"]


def test_lease_handed_back_goes_on_and_is_no_failure() -> None:
    desk = Desk(max_failed_leases=1, max_lease_attempts=1)
    leaver = Actor(desk, "leaver").join(capacity=1)
    (lease,) = leaver.leases()
    leaver.say(Credit(capacity=0))
    leaver.say(LeaseFailed(lease_id=lease.lease_id, reason="returned"))
    assert leaver.heard(Ack) == [Ack(lease_id=lease.lease_id, outcome="accepted")]
    (again,) = Actor(desk, "other").join(capacity=1).leases()
    assert again.prompt_id == lease.prompt_id
    assert desk.dispatcher.counts().expired == 1
    assert desk.batch() is None


def test_lease_that_could_not_be_sent_is_taken_back_and_the_actor_gets_none_until_it_is_heard() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    desk.tick()
    sent = [outgoing for outgoing in desk.dispatcher.take_outgoing() if isinstance(outgoing.message, Lease)]
    desk.dispatcher.unreachable(sent[0])
    assert desk.dispatcher.counts().expired == 1
    assert actor.leases() == []
    actor.say(Credit(capacity=2))
    (again,) = actor.leases()
    assert isinstance(sent[0].message, Lease)
    assert again.prompt_id == sent[0].message.prompt_id


def test_heartbeat_that_could_not_be_sent_takes_no_lease_back() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    actor.leases()
    desk.dispatcher.unreachable(Outgoing(actor.peer, LearnerHeartbeat(newest_lease_id=0)))
    desk.dispatcher.unreachable(Outgoing(b"nobody", SayHello()))
    assert desk.dispatcher.counts().in_flight == 2


# What both sides hold


def test_lease_that_never_reached_the_actor_goes_to_another() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    first, lost = actor.leases()
    actor.beat(first.lease_id)
    assert desk.dispatcher.counts().expired == 0, "it may be on its way still"
    (answer,) = actor.heard(LearnerHeartbeat)
    actor.beat(first.lease_id, seen=answer.newest_lease_id)
    assert desk.dispatcher.counts().expired == 1
    actor.credit(1)
    (again,) = Actor(desk, "other").join(capacity=1).leases()
    assert again.prompt_id == lost.prompt_id
    assert actor.answer(first.lease_id).outcome == "accepted"


def test_lease_granted_after_what_the_actor_has_seen_is_not_taken_back() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    (first,) = actor.leases()
    actor.beat(first.lease_id)
    (answer,) = actor.heard(LearnerHeartbeat)
    actor.credit(2)
    (second,) = actor.leases()
    actor.beat(first.lease_id, seen=answer.newest_lease_id)
    assert desk.dispatcher.counts().expired == 0
    assert actor.answer(second.lease_id).outcome == "accepted"


@pytest.mark.parametrize("says", ["heartbeat", "hello"])
def test_work_that_nobody_wants_is_cancelled(says: str) -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    held = [lease.lease_id for lease in actor.leases()]
    if says == "heartbeat":
        actor.beat(*held, 77, 78)
    else:
        actor.hello(lease_ids=(*held, 77, 78))
    assert actor.heard(Cancel) == [Cancel(lease_ids=(77, 78))]
    assert desk.dispatcher.counts().expired == 0


def test_hello_of_a_member_takes_back_what_it_does_not_have() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    first, lost = actor.leases()
    actor.hello(lease_ids=(first.lease_id,))
    assert desk.dispatcher.counts().expired == 1
    assert [lease.prompt_id for lease in actor.leases()] == [lost.prompt_id]


def test_lease_of_another_actor_is_not_taken_by_saying_that_one_holds_it() -> None:
    desk = Desk(groups_per_step=1, max_staleness=0)
    holder = Actor(desk, "holder").join(capacity=1)
    (lease,) = holder.leases()
    thief = Actor(desk, "thief").join(capacity=1, lease_ids=[lease.lease_id])
    assert thief.heard(Cancel) == [Cancel(lease_ids=(lease.lease_id,))]
    assert thief.answer(lease.lease_id).outcome == "unknown"
    assert holder.answer(lease.lease_id).outcome == "accepted"


# The learner itself stops, or is another one


def test_actors_are_not_taken_for_dead_when_the_learner_itself_was_stopped() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    leases = actor.leases()
    desk.jump(3600.0)
    assert len(desk.dispatcher.members()) == 1
    assert desk.dispatcher.counts().expired == 0
    desk.tick(DEAD_AFTER_S - 1)
    assert len(desk.dispatcher.members()) == 1
    assert [actor.answer(lease.lease_id).outcome for lease in leases] == ["accepted", "accepted"]
    desk.tick(DEAD_AFTER_S + 1)
    assert desk.dispatcher.members() == [], "its silence from now on is its own"


def test_lease_has_the_time_that_was_left_when_the_learner_was_stopped() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    actor.leases()
    desk.tick(LEASE_TIMEOUT_S - 10, actor)
    desk.jump(3600.0)
    desk.tick(9, actor)
    assert desk.dispatcher.counts().expired == 0
    desk.tick(2, actor)
    assert desk.dispatcher.counts().expired == 1


def test_actor_heard_on_waking_up_is_not_thought_alive_for_as_long_as_the_learner_slept() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    desk.tick()
    # The hub thread reads before it ticks.
    desk.now += 3600.0
    actor.say(Credit(capacity=1))
    desk.jump(0.0)
    assert desk.status().members[0].last_seen_s == 0.0
    desk.tick(DEAD_AFTER_S + 1)
    assert desk.dispatcher.members() == []


def restarted(desk: Desk, **options: Any) -> Desk:
    """The next learner process, with everything that the one of `desk` knew about leases."""
    state = desk.dispatcher.state()
    stream = PromptStream.from_state(state.stream, NUM_PROMPTS)
    return Desk(stream=stream, ledger=Ledger.from_state(state.ledger), **options)


def test_leases_of_the_learner_before_go_on_at_their_actors() -> None:
    before = Desk()
    actor = Actor(before, "a").join(capacity=2)
    first, second = actor.leases()
    actor.desk = desk = restarted(before)
    actor.join(capacity=2, lease_ids=[first.lease_id, second.lease_id])
    assert actor.heard(Cancel) == []
    assert actor.leases() == [], "its credit is used by what it holds"
    assert actor.answer(first.lease_id).outcome == "accepted"
    desk.tick(LEASE_TIMEOUT_S + 1, actor)
    assert desk.dispatcher.counts().expired == 1, "the time to answer begins anew"
    assert actor.answer(second.lease_id).outcome == "duplicate"


def test_lease_that_its_actor_does_not_have_after_the_learners_restart_goes_on_at_once() -> None:
    before = Desk()
    actor = Actor(before, "a").join(capacity=2)
    first, second = actor.leases()
    actor.desk = desk = restarted(before)
    actor.join(capacity=3, lease_ids=[second.lease_id])
    assert actor.leases()[0].prompt_id == first.prompt_id
    assert desk.dispatcher.counts().expired == 1


def test_leases_of_actors_that_do_not_come_back_after_the_learners_restart_go_to_others() -> None:
    before = Desk()
    leases = Actor(before, "gone").join(capacity=2).leases()
    desk = restarted(before)
    other = Actor(desk, "other").join(capacity=9)
    desk.tick(DEAD_AFTER_S - 1, other)
    assert {lease.prompt_id for lease in other.heard(Lease)}.isdisjoint(lease.prompt_id for lease in leases)
    desk.tick(2, other)
    assert desk.dispatcher.counts().expired == 2
    assert [lease.prompt_id for lease in other.heard(Lease)] == [lease.prompt_id for lease in leases]
    late = Actor(desk, "gone")
    late.hello(lease_ids=tuple(lease.lease_id for lease in leases))
    assert late.heard(Cancel) == [Cancel(lease_ids=tuple(lease.lease_id for lease in leases))]


def test_another_actor_cannot_claim_the_leases_of_the_learner_before() -> None:
    before = Desk()
    (lease,) = Actor(before, "holder").join(capacity=1).leases()
    desk = restarted(before)
    thief = Actor(desk, "thief").join(capacity=0, lease_ids=[lease.lease_id])
    assert thief.answer(lease.lease_id).outcome == "unknown"
    holder = Actor(desk, "holder").join(capacity=1, lease_ids=[lease.lease_id])
    assert holder.answer(lease.lease_id).outcome == "accepted"


def test_groups_under_weights_of_the_learner_before_are_not_from_the_future() -> None:
    desk = Desk(policy_version=2, newest_version=5)
    actor = Actor(desk, "a").join(capacity=2, policy_version=2)
    first, second = actor.leases()
    assert actor.answer(first.lease_id, policy_version=5).outcome == "accepted"
    assert actor.answer(second.lease_id, policy_version=6).outcome == "rejected"
    assert desk.dispatcher.state().newest_version == 5


# Weights that are not what they should be


def test_commit_of_weights_that_were_not_published_is_distrusted_and_counts_for_nothing() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    actor.commit(1)
    assert desk.dispatcher.members() == [(actor.peer, "a", 0)]
    assert [actor for _, actor, _ in desk.distrusted] == ["a"]
    assert "claims to have weights 1" in desk.distrusted[0][2]
    assert len(desk.events("actor_lied")) == 1
    assert [message.policy_version for _, message in desk.weights] == [0]
    assert desk.rows_of("commit")[-1]["policy_version"] == 0


def test_actor_with_wrong_weights_gets_no_lease_until_they_are_right() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    held = tuple(lease.lease_id for lease in actor.leases())
    desk.dispatcher.judge_canary("a", 0, "they differ")
    assert actor.heard(Cancel) == [Cancel(lease_ids=held)]
    assert desk.distrusted == [(actor.peer, "a", "they differ")]
    assert desk.dispatcher.members() == [(actor.peer, "a", -1)], "it needs weights"
    assert desk.status().members[0].state == "quarantined"
    assert actor.leases() == []
    other = Actor(desk, "other").join(capacity=2)
    assert len(other.leases()) == 2
    actor.commit(0)
    desk.dispatcher.judge_canary("a", 0, "they differ")
    actor.commit(0)
    assert actor.leases() == [], "it says that it has them: that is not enough"
    desk.dispatcher.judge_canary("a", 0, "")
    assert len(actor.leases()) == 2
    assert [event["actor"] for event in desk.events("actor_released")] == ["a"]


@pytest.mark.parametrize("drop", [True, False])
def test_groups_sampled_since_the_last_good_weights_are_dropped_or_flagged(drop: bool) -> None:
    desk = Desk(max_staleness=2, drop_quarantined=drop, groups_per_step=2)
    actor = Actor(desk, "a").join(capacity=4)
    honest = Actor(desk, "honest").join(capacity=1)
    desk.tick()
    leases, (other,) = actor.heard(Lease), honest.heard(Lease)
    desk.dispatcher.judge_canary("a", 0, "")
    desk.dispatcher._newest_version = 1
    actor.answer(leases[0].lease_id, policy_version=0)
    actor.answer(leases[1].lease_id, policy_version=1)
    honest.answer(other.lease_id, policy_version=1)
    desk.dispatcher.judge_canary("a", 1, "they differ")
    counts = desk.dispatcher.counts()
    assert counts.dropped == ({"quarantined": 1} if drop else {})
    assert [event["detail"] for event in desk.events("groups_doubtful")] == [
        f"{'dropped' if drop else 'kept (weights.on_canary_mismatch)'}: leases {leases[1].lease_id}"
    ]
    ready = [group.lease_id for group in desk.ledger.ready_groups()]
    doubtful = [] if drop else [leases[1].lease_id]
    assert sorted(ready) == sorted([leases[0].lease_id, *doubtful, other.lease_id])
    if drop:
        honest.credit(9)
        assert leases[1].prompt_id in {lease.prompt_id for lease in honest.leases()}


def test_actor_that_is_quarantined_while_its_group_is_trained_on_leaves_that_group_alone() -> None:
    desk = Desk(groups_per_step=1)
    actor = Actor(desk, "a").join(capacity=2)
    for lease in actor.leases():
        actor.answer(lease.lease_id)
    batch = desk.batch()
    assert batch is not None
    desk.dispatcher.judge_canary("a", 0, "wrong")
    desk.dispatcher.finish_batch(batch, 1)
    counts = desk.dispatcher.counts()
    assert (counts.trained, counts.dropped) == (1, {"quarantined": 1})


def test_judgement_about_an_actor_that_left_changes_nothing() -> None:
    desk = Desk()
    desk.dispatcher.judge_canary("gone", 0, "they differ")
    assert desk.rows == []
    assert desk.distrusted == []


# Keys


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


def test_actor_is_who_its_key_says() -> None:
    desk = Desk()
    fleet = Actor(desk, "gpu-7", sender=Sender("gpu-*", "actor"))
    fleet.hello()
    assert len(fleet.heard(Welcome)) == 1
    impostor = Actor(desk, "cpu-1", sender=Sender("gpu-*", "actor"))
    impostor.hello()
    assert "actor.name" in impostor.heard(Refused)[0].reason
    assert [name for _, name, _ in desk.dispatcher.members()] == ["gpu-7"]


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
    assert desk.dispatcher.members() == [(actor.peer, "a", 0)]
    assert desk.ledger.num_ready == 0
    assert {name for name in desk.status(OPERATOR).rejected if name.startswith("b: ")}


def test_chunk_request_at_the_hub_is_refused() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    actor.say(ChunkRequest(policy_version=0, index=0))
    assert "weights.pull_port" in actor.heard(Refused)[0].reason


# The log


class WillingLog(RolloutLog):
    """A real log that refuses when the test says so."""

    will_append = True
    has_room = True
    num_commits = 0

    @property
    def is_full(self) -> bool:
        return not self.has_room

    def append(self, event: LeaseEvent, *arrays: Any) -> Position:
        if not self.will_append:
            raise LogFullError("no space left on device")
        return super().append(event, *arrays)

    def commit(self) -> None:
        super().commit()
        self.num_commits += 1

    def events(self) -> list[LeaseEvent]:
        return [record.event for record in read_log(self._folder)]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[WillingLog]:
    log = WillingLog(tmp_path / "log", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 20, min_free_bytes=0)
    yield log
    log.close()


def test_everything_that_happens_to_a_lease_is_in_the_log_in_order(log: WillingLog) -> None:
    desk = Desk(log=log, groups_per_step=1, max_staleness=1)
    desk.dispatcher.begin()
    actor = Actor(desk, "a").join(capacity=2)
    first, second = actor.leases()
    actor.answer(first.lease_id)
    desk.train()
    actor.say(LeaseFailed(lease_id=second.lease_id, reason="returned"))
    prompt_ids = [lease.prompt_id for lease in (first, second)]
    assert log.events() == [
        Started(at=7.0, run_id="run", learner_incarnation=77, policy_version=0),
        *(
            Granted(at=7.0, lease_id=index, prompt_id=prompt_id, epoch=0, actor="a", policy_version=0, oldest_version=0)
            for index, prompt_id in enumerate(prompt_ids)
        ),
        Accepted(
            at=7.0,
            lease_id=first.lease_id,
            actor="a",
            completions=tuple(CompletionMeta(2, "stop", reward, (Segment(0, 0),)) for reward in (0.0, 1.0)),
            generate_s=0.1,
            policy_version=0,
        ),
        Trained(at=7.0, lease_ids=(first.lease_id,), policy_version=0, num_steps=1, selected_at=7.0, selected_after=4),
        Expired(at=7.0, lease_id=second.lease_id, reason="handed back by the actor"),
    ]


def test_group_is_in_the_log_when_its_acknowledgement_leaves(log: WillingLog) -> None:
    desk = Desk(log=log)
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    commits = log.num_commits
    actor.answer(lease.lease_id, ids=(8, 9))
    (record,) = [record for record in read_log(log._folder) if isinstance(record.event, Accepted)]
    assert token_ids(record.arrays[0]).tolist() == [8, 9, 8, 9]
    assert desk.ledger.oldest_position() == record.position
    desk.tick()
    assert log.num_commits == commits + 1, "on disk, if so configured, before the messages of this round are sent"


@pytest.mark.parametrize("how", ["append", "space"])
def test_full_log_no_lease_no_acknowledgement_no_expiry_then_all_goes_on(log: WillingLog, how: str) -> None:
    desk = Desk(log=log, groups_per_step=1, max_staleness=2)
    actor = Actor(desk, "a").join(capacity=2)
    first, second = actor.leases()
    log.will_append = False
    log.has_room = how == "append"
    desk.tick()
    actor.send_group(first.lease_id)
    actor.say(LeaseFailed(lease_id=second.lease_id, reason="reward_error"))
    assert actor.heard(Ack) == []
    assert desk.dispatcher.counts().in_flight == 2
    actor.credit(3)
    desk.tick(LEASE_TIMEOUT_S * 2, actor)
    assert actor.heard(Lease) == []
    assert actor.heard(Cancel) == []
    assert desk.batch() is None
    assert len(desk.events("log_full")) >= 1
    assert "disk is full" in desk.status().problems[0]
    log.will_append = log.has_room = True
    desk.tick(1.0, actor)
    assert len(desk.events("log_has_room")) >= 1
    assert desk.status().problems == ()
    assert len(actor.heard(Lease)) == 1
    # The actor keeps what is not acknowledged.
    assert actor.answer(first.lease_id).outcome == "accepted"
    actor.say(LeaseFailed(lease_id=second.lease_id, reason="reward_error"))
    assert len(actor.heard(Ack)) == 1
    assert len(desk.train()) == 1
    counts = desk.dispatcher.counts()
    assert (counts.trained, counts.dropped, counts.expired) == (1, {"reward_error": 1}, 0)


def test_what_cannot_wait_for_room_is_logged_later_in_its_order(log: WillingLog) -> None:
    desk = Desk(log=log, groups_per_step=1, max_staleness=2)
    desk.dispatcher.begin()
    leaver = Actor(desk, "leaver").join(capacity=1)
    (left,) = leaver.leases()
    actor = Actor(desk, "a").join(capacity=2)
    trained, failed = actor.leases()
    actor.answer(trained.lease_id)
    log.will_append = False
    leaver.say(Goodbye(reason="x"))
    desk.train()
    # Room comes between two ticks: the failure must not overtake what happened before it.
    log.will_append = True
    actor.say(LeaseFailed(lease_id=failed.lease_id, reason="reward_error"))
    assert actor.heard(Ack) == []
    assert [type(event) for event in log.events()][-1] is Accepted
    desk.tick()
    actor.say(LeaseFailed(lease_id=failed.lease_id, reason="reward_error"))
    assert len(actor.heard(Ack)) == 1
    ends = [event for event in log.events() if not isinstance(event, Started | Granted | Accepted)]
    assert [type(event).__name__ for event in ends] == ["Expired", "Trained", "Dropped"]
    assert desk.stream.state().returned[0].prompt_id != left.prompt_id, "which was leased again meanwhile"


def test_no_checkpoint_rests_on_what_the_log_has_not_taken(log: WillingLog) -> None:
    desk = Desk(log=log)
    actor = Actor(desk, "a").join(capacity=1)
    actor.leases()
    log.will_append = False
    actor.say(Goodbye(reason="x"))
    with pytest.raises(LogFullError):
        desk.dispatcher.state()
    log.will_append = True
    state = desk.dispatcher.state()
    assert state.log_end == log.end
    assert isinstance(log.events()[-1], Expired)


def test_learner_begins_although_the_disk_is_full(log: WillingLog) -> None:
    log.will_append = False
    desk = Desk(log=log)
    desk.dispatcher.begin()
    actor = Actor(desk, "a").join(capacity=1)
    assert actor.leases() == []
    log.will_append = True
    assert len(actor.leases()) == 1
    assert isinstance(log.events()[0], Started)


def test_log_is_cut_short_by_nothing_that_the_oldest_checkpoint_needs(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "log", fsync="off", segment_bytes=600, retain_bytes=600, min_free_bytes=0)
    desk = Desk(log=log, groups_per_step=1, max_staleness=9)
    actor = Actor(desk, "a").join(capacity=9)
    needed = log.end
    for lease in actor.leases():
        actor.answer(lease.lease_id)
    desk.dispatcher.prune_log(needed)
    assert desk.dispatcher.is_log_over()
    assert len(list(read_log(tmp_path / "log", needed))) == 18
    for _ in range(9):
        desk.train()
    desk.dispatcher.prune_log(needed_position(desk.ledger.state().open, log.end))
    assert not desk.dispatcher.is_log_over()
    assert log.num_bytes <= 1200
    log.close()


# Passes over the data


def test_at_the_end_of_a_pass_each_prompt_was_trained_or_is_listed_with_its_reason() -> None:
    desk = Desk(num_prompts=4, groups_per_step=1, max_staleness=9, max_lease_attempts=2, drop_zero_variance=True)
    actor = Actor(desk, "a").join(capacity=4)
    good, same, bad, silent = actor.leases()
    actor.answer(good.lease_id)
    desk.train()
    actor.answer(same.lease_id, rewards=(1.0, 1.0))
    actor.say(LeaseFailed(lease_id=bad.lease_id, reason="reward_error"))
    actor.say(LeaseFailed(lease_id=silent.lease_id, reason="returned"))
    actor.commit(1)
    # The others are of the next pass.
    bad_again, silent_again, *_ = actor.leases()
    actor.say(LeaseFailed(lease_id=bad_again.lease_id, reason="reward_error"))
    desk.tick()
    assert desk.rows_of("epoch") == [], "one prompt is still on its way"
    actor.heard(Ack)
    actor.answer(silent_again.lease_id)
    desk.train()
    desk.tick()
    (row,) = desk.rows_of("epoch")
    assert (row["epoch"], row["num_trained"]) == (0, 2)
    assert row["dropped"] == {"zero_variance": [same.prompt_id], "reward_error": [bad.prompt_id]}
    desk.tick()
    assert len(desk.rows_of("epoch")) == 1


# Status


def test_operator_sees_members_sums_buffer_epoch_and_what_the_run_waits_for() -> None:
    desk = Desk(groups_per_step=2, max_staleness=0, num_prompts=4, weight_problems=lambda: ["b is left out"])
    desk.dispatcher.doing("training step 1")
    actor = Actor(desk, "a").join(capacity=5)
    first, _ = actor.leases()
    actor.answer(first.lease_id)
    actor.beat(stats=ActorStats(num_generated_tokens=100))
    desk.tick(2.0)
    actor.beat(stats=ActorStats(num_generated_tokens=150))
    Actor(desk, "b").join(capacity=0, policy_version=-1)
    desk.tick(1.0)
    report = desk.status()
    assert (report.run_id, report.policy_version, report.num_steps, report.published_version) == ("run", 0, 50, 0)
    assert (report.doing, report.doing_s, report.uptime_s) == ("training step 1", 3.0, 3.0)
    assert report.waiting_for == "1 groups ready, 1 being generated; weights 0 not yet at: b"
    assert report.ledger == {"leased": 2, "trained": 0, "expired": 0, "in flight": 2}
    assert (report.num_ready, report.num_generating) == (1, 1)
    assert (report.epoch, report.epoch_position) == (0, 0.5)
    assert report.problems == ("b is left out",)
    a, b = report.members
    assert (a.name, a.state, a.num_leases, a.capacity, a.last_seen_s) == ("a", "working", 1, 5, 1.0)
    assert a.tokens_per_s == 25.0
    assert (b.name, b.state, b.policy_version) == ("b", "new", -1)


def test_stranger_may_ask_where_no_keys_are_in_use_and_does_not_become_a_member() -> None:
    desk = Desk()
    assert "offbeat actor" in desk.status().waiting_for
    assert desk.dispatcher.members() == []


def test_report_says_that_the_run_is_ending_and_which_actor_cannot_be_reached() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    desk.dispatcher.unreachable(Outgoing(actor.peer, Stop(reason="x")))
    desk.dispatcher.fail(RunFailedError("no disk"))
    report = desk.status()
    assert report.problems == ("the run is ending: no disk",)
    assert report.members[0].state == "unreachable"


# Groups


def test_accepted_groups_become_a_batch_in_lease_order() -> None:
    desk = Desk(groups_per_step=3)
    actor = Actor(desk, "a").join(capacity=3)
    leases = actor.leases()
    for lease in reversed(leases):
        assert desk.batch() is None
        assert actor.answer(lease.lease_id, ids=(3, 4, 5), logprobs=(-1, -2, -3), rewards=(0.25, 0.5)).outcome == "accepted"
    groups = desk.batch()
    assert groups is not None
    assert [group.lease_id for group in groups] == [lease.lease_id for lease in leases]
    group = groups[0]
    assert (group.actor, group.prompt_id) == ("a", leases[0].prompt_id)
    assert group.prompt_token_ids.tolist() == [leases[0].prompt_id]
    assert [rollout.token_ids.tolist() for rollout in group.rollouts] == [[3, 4, 5]] * 2
    assert [rollout.behavior_logprobs.tolist() for rollout in group.rollouts] == [[-1, -2, -3]] * 2
    assert [rollout.reward for rollout in group.rollouts] == [0.25, 0.5]


def test_group_sent_twice_is_acknowledged_twice_and_trained_once() -> None:
    desk = Desk(groups_per_step=1)
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    assert actor.answer(lease.lease_id).outcome == "accepted"
    assert actor.answer(lease.lease_id).outcome == "duplicate"
    assert len(desk.train()) == 1
    assert actor.answer(lease.lease_id).outcome == "duplicate"
    assert desk.batch() is None
    assert desk.dispatcher.counts().trained == 1


@pytest.mark.parametrize("lease_id", [-1, 1, 10**9])
def test_group_for_a_lease_that_was_never_granted_is_unknown(lease_id: int) -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    actor.leases()
    assert actor.answer(lease_id).outcome == "unknown"
    assert desk.dispatcher.counts().in_flight == 1


def test_answer_to_the_lease_of_another_actor_changes_nothing() -> None:
    desk = Desk(groups_per_step=1, max_staleness=0)
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
    desk = Desk(groups_per_step=1, max_staleness=0)
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
    desk = Desk(groups_per_step=1, max_staleness=0, max_lease_attempts=3)
    actor = Actor(desk, "a").join(capacity=1)
    order = _order()
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
    desk = Desk(groups_per_step=1, max_staleness=0, max_failed_leases=3)
    actor = Actor(desk, "a").join(capacity=1)
    for _ in range(2):
        actor.say(LeaseFailed(lease_id=actor.leases()[0].lease_id, reason="reward_error", detail="ZeroDivisionError"))
    assert desk.batch() is None
    actor.say(LeaseFailed(lease_id=actor.leases()[0].lease_id, reason="reward_error", detail="ZeroDivisionError"))
    with pytest.raises(RunFailedError, match=r"3 leases failed.*train\.max_failed_leases.*ZeroDivisionError.*task\.reward"):
        desk.batch()


def test_one_good_group_between_failures_lets_the_run_go_on() -> None:
    desk = Desk(groups_per_step=9, max_failed_leases=2)
    actor = Actor(desk, "a").join(capacity=1)
    for _ in range(4):
        actor.say(LeaseFailed(lease_id=actor.leases()[0].lease_id, reason="reward_error"))
        actor.heard(Ack)
        actor.answer(actor.leases()[0].lease_id)
    assert desk.batch() is None
    assert desk.dispatcher.counts().dropped == {"reward_error": 4}


def test_failure_reported_again_counts_once() -> None:
    desk = Desk(max_failed_leases=2)
    actor = Actor(desk, "a").join(capacity=1)
    failed = LeaseFailed(lease_id=actor.leases()[0].lease_id, reason="reward_error")
    for _ in range(3):
        actor.say(failed)
    assert [ack.lease_id for ack in actor.heard(Ack)] == [failed.lease_id] * 3
    assert desk.batch() is None
    assert len(desk.events("reward_error")) == 1
    assert desk.dispatcher.counts().dropped == {"reward_error": 1}


def test_rejected_groups_in_a_row_end_the_run() -> None:
    desk = Desk(max_failed_leases=3)
    actor = Actor(desk, "a").join(capacity=1)
    for _ in range(3):
        actor.answer(actor.leases()[0].lease_id, logprobs=(math.nan, -1.0))
    with pytest.raises(RunFailedError, match="impossible log-probs"):
        desk.batch()


def test_zero_variance_group_is_dropped_when_asked_and_another_prompt_leased() -> None:
    desk = Desk(groups_per_step=1, max_staleness=0, drop_zero_variance=True)
    actor = Actor(desk, "a").join(capacity=1)
    order = _order()
    (lease,) = actor.leases()
    assert lease.prompt_id == next(order)
    assert actor.answer(lease.lease_id, rewards=(1.0, 1.0)).outcome == "accepted"
    assert desk.batch() is None
    assert desk.dispatcher.counts().dropped == {"zero_variance": 1}
    (row,) = desk.rows_of("group")
    assert (row["outcome"], row["reason"]) == ("dropped", "zero_variance")
    (again,) = actor.leases()
    assert again.prompt_id == next(order)
    actor.answer(again.lease_id, rewards=(1.0, 0.0))
    assert len(desk.train()) == 1


def test_group_above_the_hard_bound_is_dropped_when_taken_and_its_prompt_leased_again() -> None:
    desk = Desk(groups_per_step=1, max_staleness=2, hard_max_staleness=1)
    actor = Actor(desk, "a").join(capacity=3)
    first, second, third = actor.leases()
    actor.answer(first.lease_id)
    desk.train()
    actor.answer(second.lease_id)
    desk.train()
    actor.answer(third.lease_id)
    assert desk.batch() is None
    assert desk.dispatcher.counts().dropped == {"stale": 1}
    actor.commit(2)
    leases = actor.leases()
    assert leases[0].prompt_id == third.prompt_id
    actor.answer(leases[0].lease_id, policy_version=2)
    assert [group.policy_lag(2) for group in desk.train()] == [0]


def test_generation_past_the_bound_is_cancelled_and_its_prompt_leased_again() -> None:
    desk = Desk(groups_per_step=1, staleness=StalenessSection(max_staleness=1, staleness_policy="abort"), num_steps=20)
    slow, fast = Actor(desk, "slow").join(capacity=1), Actor(desk, "fast").join(capacity=1)
    (stuck,) = slow.leases()
    for version in (1, 2):
        (lease,) = fast.leases()
        fast.answer(lease.lease_id, policy_version=version - 1)
        desk.train()
        fast.commit(version)
    slow.commit(2)
    # Begun under version 0, it would lag by 2 in the next step at the earliest.
    desk.tick()
    assert slow.heard(Cancel) == [Cancel(lease_ids=(stuck.lease_id,))]
    assert desk.dispatcher.counts().dropped == {"aborted": 1}
    granted = [*slow.heard(Lease), *fast.heard(Lease)]
    assert stuck.prompt_id in {lease.prompt_id for lease in granted}
    (event,) = desk.events("lease_aborted")
    assert event["after_s"] == pytest.approx(desk.now - 1000.0)
    # What it sends all the same is no longer wanted, and no mistake.
    assert slow.answer(stuck.lease_id).outcome == "duplicate"
    assert desk.batch() is None


def test_under_gate_generation_past_the_bound_goes_on_and_is_trained() -> None:
    desk = Desk(groups_per_step=1, max_staleness=1, num_steps=20)
    slow, fast = Actor(desk, "slow").join(capacity=1), Actor(desk, "fast").join(capacity=1)
    (stuck,) = slow.leases()
    for version in (1, 2):
        (lease,) = fast.leases()
        fast.answer(lease.lease_id, policy_version=version - 1)
        desk.train()
        fast.commit(version)
    desk.tick()
    assert not slow.heard(Cancel)
    slow.answer(stuck.lease_id)
    assert [group.policy_lag(2) for group in desk.train()] == [2]


@pytest.mark.parametrize(("selection", "first"), [("oldest_lease", 0), ("first_finished", 1)])
def test_next_batch_is_the_oldest_lease_or_what_finished_first(
    selection: Literal["oldest_lease", "first_finished"], first: int
) -> None:
    desk = Desk(groups_per_step=1, staleness=StalenessSection(max_staleness=4, selection=selection))
    actor = Actor(desk, "a").join(capacity=2)
    leases = actor.leases()
    for lease in reversed(leases):
        actor.answer(lease.lease_id)
    assert [group.lease_id for group in desk.train()] == [leases[first].lease_id]


def test_passing_over_long_groups_that_are_ready_raises_the_alarm_of_the_run() -> None:
    alarms: dict[str, int] = {}
    for selection in ("oldest_lease", "first_finished"):
        bounds = StalenessSection(max_staleness=3, selection=selection)
        desk = Desk(groups_per_step=4, staleness=bounds, num_steps=300, num_prompts=2000)
        actor = Actor(desk, "a").join(capacity=16)
        late: list[Lease] = []
        for version in range(250):
            leases = actor.leases()
            # Every fourth group is long, and comes in after the short ones of the next step; all wait for their turn then.
            for lease in [*(lease for lease in leases if lease.lease_id % 4), *late]:
                desk.now += 0.01
                num_tokens = 1 if lease.lease_id % 4 else MAX_NEW_TOKENS
                actor.answer(lease.lease_id, policy_version=version, ids=[1] * num_tokens, logprobs=[-1.0] * num_tokens)
            late = [lease for lease in leases if lease.lease_id % 4 == 0]
            desk.train()
            actor.commit(version + 1)
        alarms[selection] = sum(row["event"] == "bias_alarm" for row in desk.rows_of("event"))
    assert alarms["oldest_lease"] == 0
    assert alarms["first_finished"] > 0


def test_group_rows_say_at_which_step_of_the_batch_it_was_trained() -> None:
    desk = Desk(groups_per_step=2, steps_per_batch=2, max_staleness=2, policy_version=4)
    actor = Actor(desk, "a").join(capacity=4, policy_version=4)
    for lease in actor.leases():
        actor.answer(lease.lease_id, policy_version=3)
    groups = desk.batch()
    assert groups is not None
    desk.dispatcher.finish_batch(groups, 6)
    rows = desk.rows_of("group")
    assert [row["policy_version"] for row in rows] == [4, 4, 5, 5]
    assert [row["policy_lag"] for row in rows] == [1, 1, 2, 2]
    assert {row["outcome"] for row in rows} == {"trained"}
    assert desk.dispatcher.counts().in_flight == 0


def test_group_rows_of_several_epochs_have_the_lag_of_the_last_one() -> None:
    desk = Desk(groups_per_step=1, steps_per_batch=2, epochs_per_batch=3, max_staleness=5)
    actor = Actor(desk, "a").join(capacity=4)
    leases = actor.leases()
    assert len(leases) == 2
    for lease in leases:
        actor.answer(lease.lease_id)
    groups = desk.batch()
    assert groups is not None
    desk.dispatcher.finish_batch(groups, 6)
    assert [row["policy_lag"] for row in desk.rows_of("group")] == [4, 5]


def test_waiting_for_a_batch_ends_when_its_last_group_arrives() -> None:
    desk = Desk(groups_per_step=1)
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


# Evaluation


def test_evaluation_round_completes_beside_training() -> None:
    desk = Desk(eval_interval=2, num_eval_prompts=3, groups_per_step=1, max_staleness=0)
    actor = Actor(desk, "a").join(capacity=9)
    leases = actor.leases()
    held_out = [lease for lease in leases if lease.prompt.startswith("held-out")]
    training = [lease for lease in leases if lease.prompt.startswith("train")]
    assert [lease.prompt_id for lease in held_out] == [0, 1, 2]
    assert len(training) == 1
    assert {(lease.group_size, lease.sampling.temperature) for lease in held_out} == {(1, 0.0)}
    assert not desk.dispatcher.wait_evaluations(0.0)
    for reward, lease in zip([1.0, 0.0, 0.5], held_out, strict=True):
        assert actor.answer(lease.lease_id, rewards=(reward,)).outcome == "accepted"
    assert desk.dispatcher.wait_evaluations(0.0)
    (row,) = desk.rows_of("eval")
    assert (row["policy_version"], row["reward"], row["num_completions"], row["length"]) == (0, 0.5, 3, 2.0)
    assert actor.answer(held_out[0].lease_id, rewards=(1.0,)).outcome == "duplicate"
    # Evaluation is not in the account of training.
    assert desk.dispatcher.counts().leased == 1


def test_evaluation_with_a_lost_actor_a_rejected_group_and_a_failed_reward_completes() -> None:
    desk = Desk(eval_interval=1, num_eval_prompts=3, groups_per_step=1, max_staleness=0)
    lost = Actor(desk, "lost").join(capacity=1)
    assert [lease.prompt for lease in lost.leases()] == ["held-out 0"]
    lost.say(Goodbye(reason="x"))
    actor = Actor(desk, "a").join(capacity=9)
    leases = {lease.prompt: lease.lease_id for lease in actor.leases()}
    assert actor.answer(leases["held-out 1"], rewards=(math.nan,)).outcome == "rejected"
    actor.say(LeaseFailed(lease_id=leases["held-out 2"], reason="reward_error"))
    actor.heard(Ack)
    actor.answer(leases["held-out 0"], rewards=(1.0,))
    leases = {lease.prompt: lease.lease_id for lease in actor.leases()}
    assert {"held-out 1", "held-out 2"} <= leases.keys()
    actor.answer(leases["held-out 1"], rewards=(0.0,))
    actor.answer(leases["held-out 2"], rewards=(0.5,))
    assert desk.dispatcher.wait_evaluations(0.0)
    (row,) = desk.rows_of("eval")
    assert (row["num_completions"], row["reward"], row["num_failed"]) == (3, 0.5, 0)
    assert desk.dispatcher.counts().dropped == {}


def test_evaluation_lease_expires_and_its_prompt_is_evaluated_again() -> None:
    desk = Desk(eval_interval=1, num_eval_prompts=1, max_staleness=0)
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    desk.tick(LEASE_TIMEOUT_S + 1, actor)
    (again,) = actor.leases()
    assert (again.prompt, lease.prompt) == ("held-out 0", "held-out 0")
    assert actor.heard(Cancel) == [Cancel(lease_ids=(lease.lease_id,))]
    assert actor.answer(lease.lease_id, rewards=(1.0,)).outcome == "duplicate"
    actor.answer(again.lease_id, rewards=(1.0,))
    assert desk.dispatcher.wait_evaluations(0.0)


def test_evaluation_prompt_that_always_fails_does_not_hold_up_the_round() -> None:
    desk = Desk(eval_interval=1, num_eval_prompts=1, max_lease_attempts=2, max_failed_leases=100)
    actor = Actor(desk, "a").join(capacity=1)
    for _ in range(2):
        (lease,) = actor.leases()
        assert lease.prompt == "held-out 0"
        actor.say(LeaseFailed(lease_id=lease.lease_id, reason="reward_timeout"))
    assert desk.dispatcher.wait_evaluations(0.0)
    (row,) = desk.rows_of("eval")
    assert (row["num_completions"], row["num_failed"]) == (0, 1)
    assert math.isnan(row["reward"])


def test_evaluation_waits_for_weights_at_least_as_new() -> None:
    desk = Desk(eval_interval=1, num_eval_prompts=1, policy_version=5)
    actor = Actor(desk, "a").join(capacity=9, policy_version=4)
    assert all(lease.prompt.startswith("train") for lease in actor.leases())
    actor.commit(5)
    assert [lease.min_policy_version for lease in actor.leases() if lease.prompt == "held-out 0"] == [5]


def test_evaluations_fall_due_once_an_interval_even_when_its_multiples_are_not_published() -> None:
    desk = Desk(eval_interval=5, num_eval_prompts=1, policy_version=20, is_published=False)
    for version in (0, 2, 4, 6, 8, 10, 12, 13):
        desk.dispatcher.publish(version, last=version == 13)
    actor = Actor(desk, "a").join(capacity=1, policy_version=13)
    while not desk.dispatcher.wait_evaluations(0.0):
        actor.answer(actor.leases()[0].lease_id, rewards=(1.0,))
    assert [row["policy_version"] for row in desk.rows_of("eval")] == [0, 6, 10, 13]


def test_last_version_is_evaluated_once_although_it_falls_on_the_interval() -> None:
    desk = Desk(eval_interval=5, num_eval_prompts=1, policy_version=10, is_published=False)
    desk.dispatcher.publish(10, last=True)
    actor = Actor(desk, "a").join(capacity=1, policy_version=10)
    actor.answer(actor.leases()[0].lease_id, rewards=(1.0,))
    assert desk.dispatcher.wait_evaluations(0.0)


def test_no_evaluation_without_interval_or_without_prompts() -> None:
    for desk in (Desk(eval_interval=0), Desk(eval_interval=1, num_eval_prompts=0)):
        desk.dispatcher.publish(0, last=True)
        desk.tick()
        assert desk.dispatcher.wait_evaluations(0.0)


# Checkpoints


def test_state_holds_every_open_prompt_in_order() -> None:
    desk = Desk(groups_per_step=2, max_staleness=2)
    actor = Actor(desk, "a").join(capacity=6)
    leases = actor.leases()
    order = _order()
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
    assert state.stream.returned == (Turn(leases[2].prompt_id, 0),)
    assert state.stream.position == 6
    counts = state.ledger.counts
    assert (counts.trained, counts.in_flight) == (2, 3)
    assert counts.adds_up
    assert state.log_end is None


def test_waiting_for_names_what_keeps_the_batch() -> None:
    desk = Desk()
    assert "offbeat actor" in desk.dispatcher.waiting_for()
    actor = Actor(desk, "a").join(capacity=3, policy_version=-1)
    assert "weights 0 not yet at: a" in desk.dispatcher.waiting_for()
    actor.commit(0)
    leases = actor.leases()
    actor.answer(leases[0].lease_id)
    assert desk.dispatcher.waiting_for() == "1 groups ready, 2 being generated"
    assert desk.dispatcher.buffer_sizes() == (1, 2)


# Live tuning


def test_wider_bound_is_leased_by_at_once_and_a_narrower_one_holds_back() -> None:
    desk = Desk(max_staleness=0, groups_per_step=2)
    actor = Actor(desk, "a").join(capacity=10)
    assert len(actor.leases()) == 2
    report = desk.tune(staleness__max_staleness="2")
    assert [(change.before, change.after) for change in report.changed] == [("0", "2")]
    assert len(actor.leases()) == 4
    desk.tune(staleness__max_staleness="1")
    for lease_id in range(2):
        actor.answer(lease_id)
    desk.train()
    actor.commit(1)
    # Four are open, as many as a bound of 1 admits.
    assert actor.leases() == []


def test_bound_that_was_lowered_drops_what_waits_in_the_buffer() -> None:
    desk = Desk(staleness=StalenessSection(max_staleness=3, staleness_policy="drop"), groups_per_step=1)
    actor = Actor(desk, "a").join(capacity=2)
    first, second = (lease.lease_id for lease in actor.leases())
    actor.answer(first)
    desk.train()
    actor.answer(second)
    desk.tune(staleness__max_staleness="0")
    assert desk.batch() is None
    assert desk.dispatcher.counts().dropped == {"stale": 1}


def test_change_is_recorded_with_who_and_when_in_rows_log_and_checkpoint(log: WillingLog) -> None:
    desk = Desk(log=log, policy_version=5, max_staleness=4)
    desk.tune(OPERATOR, staleness__max_staleness="8", train__learning_rate="1e-3")
    settings = {"staleness.max_staleness": "8", "train.learning_rate": "0.001"}
    event = Tuned(at=7.0, settings=settings, who="me@host (key ops)", reason="", policy_version=5)
    assert log.events() == [event]
    assert desk.dispatcher.state().tuned == dict.fromkeys(settings, event)
    rows = desk.events("setting_changed")
    assert [(row["setting"], row["before"], row["after"]) for row in rows] == [
        ("staleness.max_staleness", "4", "8"),
        ("train.learning_rate", "1e-06", "0.001"),
    ]
    assert {(row["who"], row["policy_version"]) for row in rows} == {("me@host (key ops)", 5)}
    assert rows[0]["detail"] == "staleness.max_staleness = 8, was 4; by me@host (key ops)"
    assert desk.dispatcher.settings().train.learning_rate == 1e-3
    assert [(change.setting, change.after, change.who) for change in desk.status(OPERATOR).changed_settings] == [
        ("staleness.max_staleness", "8", "me@host (key ops)"),
        ("train.learning_rate", "0.001", "me@host (key ops)"),
    ]


def test_refused_change_changes_nothing_and_says_why(log: WillingLog) -> None:
    desk = Desk(log=log, max_staleness=4)
    before = desk.dispatcher.settings()
    report = desk.tune(train__learning_rate="1e-3", staleness__hard_max_staleness="3")
    assert (report.changed, report.policy_version) == ((), 0)
    assert report.error.startswith("staleness.hard_max_staleness = 3: groups are admitted that may lag by")
    assert "These can:" in desk.tune(train__num_steps="5").error
    assert (desk.dispatcher.settings(), log.events(), desk.events("setting_changed")) == (before, [], [])
    assert desk.tune(staleness__max_staleness="4") == LiveSettingsReport(policy_version=0)
    assert log.events() == []


def test_change_that_a_restart_could_not_know_of_is_refused(log: WillingLog) -> None:
    desk = Desk(log=log, max_staleness=4)
    log.will_append = False
    assert "no space left" in desk.tune(staleness__max_staleness="8").error
    assert desk.dispatcher.settings().staleness.max_staleness == 4
    log.will_append = True
    assert not desk.tune(staleness__max_staleness="8").error


def test_actors_key_cannot_change_settings() -> None:
    desk = Desk()
    actor = Actor(desk, "a", sender=Sender("a", "actor"))
    actor.join(capacity=2)
    actor.say(LiveSettingsRequest(settings={"staleness.max_staleness": "8"}, who="operator@host"))
    assert "role operator" in actor.heard(Refused)[0].reason
    assert desk.dispatcher.settings().staleness.max_staleness == 1


def test_concurrency_is_told_to_every_actor_also_to_one_that_comes_later() -> None:
    desk = Desk()
    first = Actor(desk, "a").join(capacity=2)
    desk.tune(staleness__max_staleness="3")
    assert first.heard(CreditLimit) == []
    desk.tune(actor__max_inflight_groups="5")
    assert first.heard(CreditLimit) == [CreditLimit(capacity=5)]
    late = Actor(desk, "b").join(capacity=2)
    assert late.heard(CreditLimit) == [CreditLimit(capacity=5)]
    # Back to the config's: an actor whose own config says another number is to know.
    desk.tune(actor__max_inflight_groups="16")
    assert Actor(desk, "c").join(capacity=2).heard(CreditLimit) == [CreditLimit(capacity=16)]


def test_restarted_learner_leases_by_the_bound_that_was_set() -> None:
    event = Tuned(at=0.0, settings={"staleness.max_staleness": "2"}, who="me", reason="", policy_version=0)
    desk = Desk(max_staleness=0, groups_per_step=2, tuned={"staleness.max_staleness": event})
    assert len(Actor(desk, "a").join(capacity=10).leases()) == 6
    assert desk.dispatcher.state().tuned == {"staleness.max_staleness": event}


def test_time_counts_as_held_back_while_an_actor_has_room_and_staleness_has_no_lease_for_it() -> None:
    desk = Desk(max_staleness=0, groups_per_step=2, num_steps=2)
    actor = Actor(desk, "a").join(capacity=2)
    assert len(actor.leases()) == 2
    desk.tick(1.0)
    # The actor is full: more leases would not help.
    assert desk.dispatcher.take_held_back_s() == 0.0
    actor.credit(3)
    desk.tick(1.0)
    desk.tick(2.5)
    assert desk.dispatcher.take_held_back_s() == 2.5
    assert desk.dispatcher.take_held_back_s() == 0.0
    for lease_id in range(2):
        actor.answer(lease_id)
    desk.tick()
    desk.dispatcher.take_held_back_s()
    desk.train()
    desk.tick()
    desk.dispatcher.take_held_back_s()
    # The actor has not the weights that a bound of 0 asks for.
    desk.tick(1.0)
    assert desk.dispatcher.take_held_back_s() == 1.0
    actor.commit(1)
    assert len(actor.leases()) == 2
    desk.dispatcher.take_held_back_s()
    desk.tick(1.0)
    # The run has no more leases than these.
    assert desk.dispatcher.take_held_back_s() == 0.0
