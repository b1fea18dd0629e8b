"""A restart loses nothing and repeats nothing, whatever happens before it and in whatever order."""

import tempfile
from collections import Counter, deque
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from offbeat.common.records.rows import EpochRow
from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained, Weighed
from offbeat.learner.leases.journal import DispatcherState
from offbeat.learner.leases.ledger import UNSEEN_LEASES, needed_position
from offbeat.learner.leases.log_reading import HEADER_BYTES, LogFullError, Position, read_log, read_record
from offbeat.learner.leases.prompt_stream import PromptStream, PromptTurn
from offbeat.learner.leases.recovery import Recovered, recover
from offbeat.protocols.messages import Ack, ActorHeartbeat, ActorStats, Goodbye, GroupDone, LearnerMessage, Lease, LeaseFailed
from offbeat.protocols.payload import CompletionMeta, Segment
from tests.learner.dispatch.dispatch_desk import (
    DEAD_AFTER_S,
    LEASE_TIMEOUT_S,
    VOCABULARY_SIZE,
    Actor,
    Desk,
    make_prompts,
)
from tests.learner.leases.taped_log import NUM_PROMPTS, Remote, open_log

pytestmark = pytest.mark.slow

NUM_STEPS = 8
GROUPS_PER_STEP = 2
MOST_PROMPTS = 11
"""Fewer than are trained on, so that the first epoch ends."""
HARD_MAX_STALENESS = 2
TASKS = ("a", "b", "c")
ACTORS = st.integers(0, 2)
PICK = st.integers(0, 99)
SHARES = st.permutations([1.0, 0.5, 0.0]).map(lambda shares: dict(zip(TASKS, shares, strict=True)))


class Saved(NamedTuple):
    """A checkpoint."""

    policy_version: int
    state: bytes


class RecoveryMachine(RuleBasedStateMachine):
    """Three actors and a learner that dies; the model is the tape of its log, cut where the file was."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "log"
        self.tape: list[tuple[Position, LeaseEvent]] = []
        self.turn_of: dict[int, PromptTurn] = {}
        """The turn of every lease that any learner granted, even if the log lost it."""
        self.granted_at: dict[int, Position] = {}
        self.checkpoints: list[Saved] = []
        self.num_prompts = NUM_PROMPTS
        self.synced = Position(0, 0)
        self._start(None)
        self.incarnations = 3
        self.actors = [Remote(self.desk, f"actor-{index}", index) for index in range(3)]
        for actor in self.actors:
            actor.send_hello()
        self.all_talk()

    # Events outside the learner

    @rule()
    def all_talk(self) -> None:
        """Deliver all messages on their way, and the leases that follow from them."""
        for _ in range(2):
            for index in range(3):
                self.arrive(index, 99)
            self.hub_round(can_send=True, seconds=0.0)
            for index in range(3):
                self.read(index, 99)

    @rule(index=ACTORS, count=st.integers(1, 9))
    def arrive(self, index: int, count: int) -> None:
        actor = self.actors[index]
        for _ in range(min(count, len(actor.sent))):
            message, arrays = actor.sent.popleft()
            actor.say(message, *arrays)

    @rule(index=ACTORS, count=st.integers(1, 9))
    def read(self, index: int, count: int) -> None:
        actor = self.actors[index]
        for _ in range(min(count, len(actor.inbox))):
            actor.read()

    @rule(can_send=st.sampled_from([True, True, True, False]), seconds=st.sampled_from([0.0, 0.0, 0.1, DEAD_AFTER_S / 2]))
    def hub_round(self, can_send: bool, seconds: float) -> None:
        """Let time pass, and send the dispatcher's messages."""
        self.desk.tick(seconds)
        self._note_grants()
        for outgoing in self.desk.dispatcher.take_outgoing():
            if not can_send:
                self.desk.dispatcher.unreachable(outgoing)
                continue
            self._check_ack(outgoing.message)
            for actor in self.actors:
                if actor.peer == outgoing.peer:
                    actor.inbox.append(outgoing.message)

    @rule(count=st.integers(1, 3))
    def all_is_well_for_a_while(self, count: int) -> None:
        for _ in range(count):
            self.all_talk()
            for index in range(3):
                self.answer(index, 0, 99, (0.0, 1.0))
                self.commit(index)
            self.all_talk()
            self.train()

    @rule(seconds=st.sampled_from([DEAD_AFTER_S + 1, LEASE_TIMEOUT_S + 1]), is_heard=st.booleans())
    def wait_long(self, seconds: float, is_heard: bool) -> None:
        alive = [actor for actor in self.actors if is_heard]
        for actor in alive:
            actor.capacity = 4
        self.desk.tick(seconds, *alive)

    @rule(index=ACTORS, count=st.integers(1, 9), direction=st.sampled_from(["to", "from"]))
    def connection_breaks(self, index: int, count: int, direction: str) -> None:
        queue: deque[Any] = self.actors[index].sent if direction == "to" else self.actors[index].inbox
        for _ in range(min(count, len(queue))):
            queue.popleft()

    @rule(failures=st.lists(st.booleans(), max_size=6), is_full=st.booleans())
    def disk_fills_up(self, failures: list[bool], is_full: bool) -> None:
        self.log.failures, self.log.is_disk_full = failures, is_full

    @rule()
    def disk_has_room(self) -> None:
        self.log.failures, self.log.is_disk_full = [], False

    # What actors do

    @rule(index=ACTORS)
    def say_hello(self, index: int) -> None:
        self.actors[index].send_hello()

    @rule(index=ACTORS)
    def beat(self, index: int) -> None:
        actor = self.actors[index]
        actor.send(
            ActorHeartbeat(policy_version=actor.version, stats=ActorStats(), lease_ids=actor.held, seen_lease_id=actor.seen)
        )

    @rule(index=ACTORS)
    def commit(self, index: int) -> None:
        self.actors[index].commit_newest()

    @rule(
        index=ACTORS, pick=PICK, count=st.integers(1, 4), rewards=st.sampled_from([(0.0, 1.0), (0.0, 1.0), (1.0, 1.0), (1.0,)])
    )
    def answer(self, index: int, pick: int, count: int, rewards: tuple[float, ...]) -> None:
        actor = self.actors[index]
        for _ in range(min(count, len(actor.jobs))):
            self._answer(actor, list(actor.jobs)[pick % len(actor.jobs)], rewards)

    @rule(index=ACTORS, pick=PICK)
    def send_again(self, index: int, pick: int) -> None:
        actor = self.actors[index]
        if actor.outbox:
            message, arrays = list(actor.outbox.values())[pick % len(actor.outbox)]
            actor.send(message, *arrays)

    @rule(index=ACTORS, pick=PICK, reason=st.sampled_from(["returned", "reward_error"]))
    def give_up(self, index: int, pick: int, reason: str) -> None:
        actor = self.actors[index]
        if actor.jobs:
            lease_id = list(actor.jobs)[pick % len(actor.jobs)]
            del actor.jobs[lease_id]
            actor.outbox[lease_id] = (LeaseFailed(lease_id=lease_id, reason=reason), ())
            actor.send(actor.outbox[lease_id][0])

    @rule(index=ACTORS, says_goodbye=st.booleans(), disk_hiccups=st.booleans())
    def actor_dies(self, index: int, says_goodbye: bool, disk_hiccups: bool) -> None:
        before = self.actors[index]
        if says_goodbye:
            self.log.failures = [disk_hiccups]
            before.say(Goodbye(reason="x"))
        self.incarnations += 1
        self.actors[index] = Remote(self.desk, before.name, self.incarnations)
        self.actors[index].send_hello()

    # Events in the learner

    @rule()
    def train(self) -> None:
        before = [group.lease_id for group in self.desk.ledger.ready_groups()]
        groups = self.desk.batch()
        if groups is None:
            return
        dropped = {event.lease_id for event in self._history() if isinstance(event, Dropped)}
        oldest = [lease_id for lease_id in sorted(before) if lease_id not in dropped]
        assert [group.lease_id for group in groups] == oldest[: len(groups)]
        for group in groups:
            turn = self.turn_of[group.lease_id]
            assert group.prompt_id == turn.prompt_id
            assert group.prompt_token_ids.tolist() == [turn.prompt_id]
            assert [rollout.token_ids.tolist() for rollout in group.rollouts] == [_token_ids(group.lease_id)] * 2
            assert group.policy_lag(self.version) <= HARD_MAX_STALENESS
        self.version += 1
        self.desk.dispatcher.finish_batch(groups, self.version)
        self.desk.dispatcher.publish(self.version)

    @rule(shares=st.one_of(SHARES, st.just({})))
    def weigh(self, shares: dict[str, float]) -> None:
        self.desk.dispatcher.weigh(shares)

    @rule()
    def save_checkpoint(self) -> None:
        try:
            state = self.desk.dispatcher.state()
        except LogFullError:
            return
        saved = Saved(self.version, msgspec.msgpack.encode(state))
        self.checkpoints = [*self.checkpoints, saved][-2:]
        assert state.log_end is not None
        self.synced = state.log_end
        oldest = msgspec.msgpack.decode(self.checkpoints[0].state, type=DispatcherState)
        assert oldest.log_end is not None
        self.desk.dispatcher.prune_log(needed_position(oldest.ledger.open, oldest.log_end))

    @rule(
        tail=st.sampled_from(["whole", "cut", "whole", "cut", "garbage"]),
        count=st.integers(1, 700),
        num_added=st.sampled_from([0, 0, 1, 2]),
    )
    def learner_dies(self, tail: str, count: int, num_added: int) -> None:
        """End the learner, do that to the log's tail, and start a learner with more prompts."""
        ledger, stream = self.desk.ledger, self.desk.stream
        self.num_prompts = min(self.num_prompts + num_added, MOST_PROMPTS)
        is_all_logged = not self.desk.journal.waiting
        trained = self._trained_since(self.checkpoints[-1].policy_version if self.checkpoints else 0)
        self.log.close()
        if tail == "cut":
            self._cut(count)
        if tail == "garbage":
            for path in sorted(self.path.glob("*.log"))[-1:]:
                path.write_bytes(path.read_bytes() + bytes(range(256)) * 2)
        recovered = self._start(self.checkpoints[-1] if self.checkpoints else None)
        for actor in self.actors:
            actor.desk = self.desk
        if tail != "cut" and is_all_logged:
            # All that the dead process knew, but for the training since the checkpoint, which is to be done again.
            before, after = ledger.counts(), recovered.ledger.counts()
            if recovered.stream.num_prompts != stream.num_prompts:
                stream.grow(self.num_prompts)
            assert recovered.stream.state() == stream.state()
            assert trained or recovered.ledger.tasks == ledger.tasks
            assert after.leased == before.leased
            assert after.dropped == before.dropped
            assert after.expired == before.expired
            assert after.trained == before.trained - len(trained)
            ready = {group.lease_id for group in ledger.ready_groups()} | set(trained)
            assert [group.lease_id for group in recovered.ledger.ready_groups()] == sorted(ready)

    # What must be true

    @invariant()
    def all_is_true(self) -> None:
        self._note_grants()
        self.the_sums_agree_with_the_history()
        self.every_prompt_served_is_somewhere_exactly_once()
        self.no_lease_is_trained_twice()
        self.no_finished_group_is_lost_or_generated_again()
        self.prompts_are_granted_in_the_order_of_the_seed()
        self.a_pass_that_ended_is_told_in_full()

    def the_sums_agree_with_the_history(self) -> None:
        counts = self.desk.dispatcher.counts()
        history = self._history()
        assert counts.adds_up
        assert counts.leased == _number_of(Granted, history)
        assert counts.expired == _number_of(Expired, history)
        assert counts.dropped == Counter(event.reason for event in history if isinstance(event, Dropped))
        assert counts.trained == len(self._trained())

    def every_prompt_served_is_somewhere_exactly_once(self) -> None:
        stream = self.desk.stream.state()
        served, replayed = self._replay()
        assert replayed.position == stream.position
        found = [self.turn_of[lease_id] for lease_id in self._open()]
        found += [*stream.returned, *map(self.turn_of.__getitem__, self._trained()), *self._given_up()]
        assert sorted(found) == sorted(served)

    def no_lease_is_trained_twice(self) -> None:
        trained = self._trained()
        assert len(set(trained)) == len(trained)

    def no_finished_group_is_lost_or_generated_again(self) -> None:
        ready = {group.lease_id for group in self.desk.ledger.ready_groups()}
        trained = set(self._trained())
        dropped = {event.lease_id for event in self._history() if isinstance(event, Dropped)}
        accepted: set[int] = set()
        for event in self._history():
            match event:
                case Accepted():
                    accepted.add(event.lease_id)
                case Expired():
                    assert event.lease_id not in accepted
        assert all((lease_id in ready) + (lease_id in trained) + (lease_id in dropped) == 1 for lease_id in accepted)

    def prompts_are_granted_in_the_order_of_the_seed(self) -> None:
        granted = [PromptTurn(event.prompt_id, event.epoch) for event in self._history() if isinstance(event, Granted)]
        assert list(dict.fromkeys(granted)) == self._replay()[0]

    def a_pass_that_ended_is_told_in_full(self) -> None:
        trained = Counter(self.turn_of[lease_id].epoch for lease_id in self._trained())
        given_up = self._given_up()
        for row in self.desk.rows_of(EpochRow):
            listed = sorted(prompt_id for prompt_ids in row.dropped.values() for prompt_id in prompt_ids)
            assert listed == sorted(turn.prompt_id for turn in given_up if turn.epoch == row.epoch)
            assert row.num_trained == trained[row.epoch]
            assert row.num_trained + len(listed) + row.num_left_out == self.desk.stream.size_of(row.epoch)

    def teardown(self) -> None:
        """Finish the run with one good actor."""
        if not hasattr(self, "desk"):
            return
        self.disk_has_room()
        for actor in self.actors:
            actor.say(Goodbye(reason="x"))
        savior = Actor(self.desk, "savior").join(capacity=99, policy_version=self.version)
        self.desk.tick(DEAD_AFTER_S + 1, savior)
        for _ in range(200):
            if self.version >= NUM_STEPS:
                break
            self._note_grants()
            for lease in savior.heard(Lease):
                ids = _token_ids(lease.lease_id)
                savior.answer(lease.lease_id, policy_version=self.version, ids=ids, logprobs=(-1.0,) * len(ids))
            self.train()
            savior.commit(self.version)
            self.desk.tick(0.0)
        assert self.version == NUM_STEPS
        assert self.desk.dispatcher.counts().trained == NUM_STEPS * GROUPS_PER_STEP
        self.all_is_true()
        assert 0 in {row.epoch for row in self.desk.rows_of(EpochRow)} | {
            0 for saved in self.checkpoints[-1:] if 0 not in _decode(saved).ledger.epochs
        }
        self.log.close()
        self.folder.cleanup()

    # Details

    def _replay(self) -> tuple[list[PromptTurn], PromptStream]:
        """Return the turns that were due at the first lease of each, in order, and their stream, which gave none back."""
        state = replace(self.desk.stream.state(), position=0, returned=(), shares={})
        stream = PromptStream.from_state(state, [prompt.task for prompt in make_prompts(MOST_PROMPTS, "train", TASKS)])
        granted: set[PromptTurn] = set()
        due: list[PromptTurn] = []
        for event in self._history():
            match event:
                case Weighed():
                    stream.weigh(event.shares)
                case Granted() if (turn := PromptTurn(event.prompt_id, event.epoch)) not in granted:
                    granted.add(turn)
                    due.append(stream.next())
        return due, stream

    def _start(self, saved: Saved | None) -> Recovered:
        """Start a learner process, up to its first message."""
        state = _decode(saved) if saved else None
        log_end = state.log_end if state else Position(0, 0)
        self.log = open_log(self.path, self.tape, after=log_end)
        recovered = recover(
            state,
            read_log(self.path, log_end),
            lambda position: read_record(self.path, position),
            make_prompts(self.num_prompts, "train", TASKS),
            seed=0,
        )
        self.version = saved.policy_version if saved else 0
        self.desk = Desk(
            f"train.num_steps={NUM_STEPS}",
            f"train.groups_per_step={GROUPS_PER_STEP}",
            f"run.max_failed_leases={10**9}",
            "staleness.max_staleness=2",
            f"staleness.hard_max_staleness={HARD_MAX_STALENESS}",
            "loss.zero_variance=drop",
            policy_version=self.version,
            num_prompts=self.num_prompts,
            recovered=recovered,
            log=self.log,
            tasks=TASKS,
        )
        self.desk.dispatcher.begin()
        self.synced = self.log.end
        return recovered

    def _cut(self, count: int) -> None:
        """Cut the log's last file as a power failure does: `count` bytes, but none that were synced."""
        paths = sorted(self.path.glob("*.log"))
        if not paths:
            return
        number = int(paths[-1].stem)
        floor = self.synced.offset if self.synced.segment == number else HEADER_BYTES
        size = max(floor, paths[-1].stat().st_size - count)
        if self.synced.segment <= number:
            with paths[-1].open("r+b") as file:
                file.truncate(size)
        whole = {record.position for record in read_log(self.path, Position(number, HEADER_BYTES))}
        self.tape = [(place, event) for place, event in self.tape if place.segment < number or place in whole]

    def _answer(self, actor: Remote, lease_id: int, rewards: tuple[float, ...]) -> None:
        del actor.jobs[lease_id]
        ids = _token_ids(lease_id)
        completions = tuple(
            CompletionMeta(len(ids), "stop", reward, (Segment(max(0, actor.version), 0),)) for reward in rewards
        )
        done = GroupDone(lease_id=lease_id, completions=completions, generate_s=0.0)
        arrays = (np.array(ids * len(rewards), np.int32), np.full(len(ids) * len(rewards), -1.0, np.float32))
        actor.outbox[lease_id] = (done, arrays)
        actor.send(done, *arrays)

    def _check_ack(self, message: LearnerMessage) -> None:
        """Check that the log holds the group of an ack."""
        if not (isinstance(message, Ack) and message.outcome == "accepted"):
            return
        answers = [actor.outbox[message.lease_id][0] for actor in self.actors if message.lease_id in actor.outbox]
        if answers and isinstance(answers[0], GroupDone):
            assert any(isinstance(event, Accepted) and event.lease_id == message.lease_id for _, event in self.tape)

    def _note_grants(self) -> None:
        for position, event in self.tape:
            if isinstance(event, Granted):
                assert self.granted_at.setdefault(event.lease_id, position) == position, "the id of another lease"
                self.turn_of[event.lease_id] = PromptTurn(event.prompt_id, event.epoch)

    def _history(self) -> list[LeaseEvent]:
        return [*(event for _, event in self.tape), *self.desk.journal.waiting]

    def _open(self) -> list[int]:
        return [saved.lease_id for saved in self.desk.ledger.state().open]

    def _trained(self) -> list[int]:
        """Return the leases that the current weights were trained on, in order."""
        kept: list[Trained] = []
        for event in self._history():
            match event:
                case Started():
                    kept = [trained for trained in kept if trained.policy_version < event.policy_version]
                case Trained():
                    kept.append(event)
        return [lease_id for trained in kept for lease_id in trained.lease_ids]

    def _trained_since(self, policy_version: int) -> list[int]:
        return self._trained()[policy_version * GROUPS_PER_STEP :]

    def _given_up(self) -> list[PromptTurn]:
        return [self.turn_of[event.lease_id] for event in self._history() if isinstance(event, Dropped) and event.is_final]


def _decode(saved: Saved) -> DispatcherState:
    return msgspec.msgpack.decode(saved.state, type=DispatcherState)


def _token_ids(lease_id: int) -> list[int]:
    """Return the token ids of this lease's completions, which no other lease of the test has."""
    return [lease_id // UNSEEN_LEASES % VOCABULARY_SIZE, *divmod(lease_id % UNSEEN_LEASES, VOCABULARY_SIZE)]


def _number_of(kind: type, events: list[LeaseEvent]) -> int:
    return sum(isinstance(event, kind) for event in events)


TestRecovery = RecoveryMachine.TestCase
TestRecovery.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
