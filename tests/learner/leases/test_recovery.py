"""Whatever happens to a run, in any order, deaths of the learner included: a restart loses nothing and does nothing twice."""

import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from offbeat.common.rows import EpochRow
from offbeat.common.settings import SettingError
from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained, Tuned
from offbeat.learner.leases.ledger import UNSEEN_LEASES, needed_position
from offbeat.learner.leases.prompts import PromptStream, Turn
from offbeat.learner.leases.recovery import DispatcherState, Recovered, RecoveryError, recover
from offbeat.learner.leases.rollout_log import HEADER_BYTES, LogFullError, Position, RolloutLog, read_log, read_record
from offbeat.protocols.messages import (
    Ack,
    ActorHeartbeat,
    ActorMessage,
    ActorStats,
    Cancel,
    CompletionMeta,
    Credit,
    Goodbye,
    GroupDone,
    LearnerHeartbeat,
    LearnerMessage,
    Lease,
    LeaseFailed,
    Refused,
    SayHello,
    Segment,
    WeightsCommitted,
    Welcome,
)
from tests.learner.dispatch.dispatch_desk import (
    DEAD_AFTER_S,
    LEASE_TIMEOUT_S,
    VOCABULARY_SIZE,
    Actor,
    Desk,
    make_hello,
    make_prompts,
)

NUM_PROMPTS = 7
PROMPTS = make_prompts(NUM_PROMPTS, "train")
NUM_STEPS = 8
GROUPS_PER_STEP = 2
HARD_MAX_STALENESS = 2
ACTORS = st.integers(0, 2)
PICK = st.integers(0, 99)


class TapedLog(RolloutLog):
    """A real log that remembers what it was given, and refuses when the test says that the disk is full."""

    tape: list[tuple[Position, LeaseEvent]]
    is_disk_full: bool
    failures: list[bool]

    @property
    def is_full(self) -> bool:
        return self.is_disk_full

    def append(self, event: LeaseEvent, *arrays: Any) -> Position:
        if self.is_disk_full or (self.failures and self.failures.pop()):
            raise LogFullError("no space left")
        position = super().append(event, *arrays)
        self.tape.append((position, event))
        return position


def open_log(folder: Path, tape: list[tuple[Position, LeaseEvent]], after: Position | None = None) -> TapedLog:
    log = TapedLog(folder, fsync="off", segment_bytes=1500, retain_bytes=3000, min_free_bytes=0, after=after)
    log.tape, log.is_disk_full, log.failures = tape, False, []
    return log


class Remote(Actor):
    """An actor behind a connection that delays and loses messages, but keeps their order; it outlives learners."""

    def __init__(self, desk: Desk, name: str, incarnation: int) -> None:
        super().__init__(desk, name, incarnation=incarnation)
        self.jobs: dict[int, Lease] = {}
        self.outbox: dict[int, tuple[ActorMessage, tuple[np.ndarray, ...]]] = {}
        self.seen = -1
        self.version = -1
        self.sent: deque[tuple[ActorMessage, tuple[np.ndarray, ...]]] = deque()
        """On their way to the learner."""
        self.inbox: deque[LearnerMessage] = deque()
        """On their way from it."""

    @property
    def held(self) -> tuple[int, ...]:
        return (*self.jobs, *self.outbox)

    def send(self, message: ActorMessage, *arrays: np.ndarray) -> None:
        self.sent.append((message, arrays))

    def send_hello(self) -> None:
        self.send(make_hello(self.name, self.incarnation, lease_ids=self.held))

    def commit_newest(self) -> None:
        assert self.desk.versions.published is not None
        self.version = self.desk.versions.published
        self.send(WeightsCommitted(policy_version=self.version, stall_s=0.0))

    def read(self) -> None:
        match message := self.inbox.popleft():
            case Welcome():
                self.seen = -1
                self.send(Credit(capacity=4))
                self.commit_newest()
                for parcel in self.outbox.values():
                    self.send(parcel[0], *parcel[1])
            case SayHello():
                self.send_hello()
            case Lease():
                self.jobs[message.lease_id] = message
            case Ack():
                self.outbox.pop(message.lease_id, None)
            case Cancel():
                for lease_id in message.lease_ids:
                    self.jobs.pop(lease_id, None)
                    self.outbox.pop(lease_id, None)
            case LearnerHeartbeat():
                self.seen = message.newest_lease_id
            case Refused():
                raise AssertionError(message.reason)


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
        self.turn_of: dict[int, Turn] = {}
        """Of every lease that any learner granted, cut off or not."""
        self.granted_at: dict[int, Position] = {}
        self.checkpoints: list[Saved] = []
        self.synced = Position(0, 0)
        self._start(None)
        self.incarnations = 3
        self.actors = [Remote(self.desk, f"actor-{index}", index) for index in range(3)]
        for actor in self.actors:
            actor.send_hello()
        self.all_talk()

    # What the world does

    @rule()
    def all_talk(self) -> None:
        """Whatever is on its way arrives, and leases come of it."""
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
        """Time passes; what the dispatcher wants sent is on its way."""
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

    # What the learner does

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

    @rule(tail=st.sampled_from(["whole", "cut", "whole", "cut", "garbage"]), count=st.integers(1, 700))
    def learner_dies(self, tail: str, count: int) -> None:
        ledger, stream = self.desk.ledger, self.desk.stream
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
            assert recovered.stream.state() == stream.state()
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
        in_order = PromptStream(NUM_PROMPTS, seed=0)
        served = [in_order.next() for _ in range(stream.position)]
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
        stream = PromptStream(NUM_PROMPTS, seed=0)
        granted = [Turn(event.prompt_id, event.epoch) for event in self._history() if isinstance(event, Granted)]
        first_times = list(dict.fromkeys(granted))
        assert first_times == [stream.next() for _ in first_times]

    def a_pass_that_ended_is_told_in_full(self) -> None:
        trained = Counter(self.turn_of[lease_id].epoch for lease_id in self._trained())
        given_up = self._given_up()
        for row in self.desk.rows_of(EpochRow):
            listed = sorted(prompt_id for prompt_ids in row.dropped.values() for prompt_id in prompt_ids)
            assert listed == sorted(turn.prompt_id for turn in given_up if turn.epoch == row.epoch)
            assert row.num_trained == trained[row.epoch]
            assert row.num_trained + len(listed) == NUM_PROMPTS

    def teardown(self) -> None:
        """One good actor finishes the run, whatever came before."""
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

    def _start(self, saved: Saved | None) -> Recovered:
        """A learner process from its start to its first message."""
        state = _decode(saved) if saved else None
        log_end = state.log_end if state else Position(0, 0)
        self.log = open_log(self.path, self.tape, after=log_end)
        recovered = recover(
            state, read_log(self.path, log_end), lambda position: read_record(self.path, position), PROMPTS, seed=0
        )
        self.version = saved.policy_version if saved else 0
        self.desk = Desk(
            f"train.num_steps={NUM_STEPS}",
            f"train.groups_per_step={GROUPS_PER_STEP}",
            f"train.max_failed_leases={10**9}",
            "staleness.max_staleness=2",
            f"staleness.hard_max_staleness={HARD_MAX_STALENESS}",
            "loss.zero_variance=drop",
            policy_version=self.version,
            num_prompts=NUM_PROMPTS,
            recovered=recovered,
            log=self.log,
        )
        self.desk.dispatcher.begin()
        self.synced = self.log.end
        return recovered

    def _cut(self, count: int) -> None:
        """What a power failure does to the last file: less of it than what was never synced stays."""
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
        """It says that the learner has it: then the log has it."""
        if not (isinstance(message, Ack) and message.outcome == "accepted"):
            return
        answers = [actor.outbox[message.lease_id][0] for actor in self.actors if message.lease_id in actor.outbox]
        if answers and isinstance(answers[0], GroupDone):
            assert any(isinstance(event, Accepted) and event.lease_id == message.lease_id for _, event in self.tape)

    def _note_grants(self) -> None:
        for position, event in self.tape:
            if isinstance(event, Granted):
                assert self.granted_at.setdefault(event.lease_id, position) == position, "the id of another lease"
                self.turn_of[event.lease_id] = Turn(event.prompt_id, event.epoch)

    def _history(self) -> list[LeaseEvent]:
        return [*(event for _, event in self.tape), *self.desk.journal.waiting]

    def _open(self) -> list[int]:
        return [saved.lease_id for saved in self.desk.ledger.state().open]

    def _trained(self) -> list[int]:
        """Leases in the history that the weights have behind them."""
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

    def _given_up(self) -> list[Turn]:
        return [self.turn_of[event.lease_id] for event in self._history() if isinstance(event, Dropped) and event.is_final]


def _decode(saved: Saved) -> DispatcherState:
    return msgspec.msgpack.decode(saved.state, type=DispatcherState)


def _token_ids(lease_id: int) -> list[int]:
    """What the completions of this lease are: no other lease of the test has them."""
    return [lease_id // UNSEEN_LEASES % VOCABULARY_SIZE, *divmod(lease_id % UNSEEN_LEASES, VOCABULARY_SIZE)]


def _number_of(kind: type, events: list[LeaseEvent]) -> int:
    return sum(isinstance(event, kind) for event in events)


TestRecovery = RecoveryMachine.TestCase
TestRecovery.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


# Hand-made logs


class Tale:
    """A log written by hand, record after record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = RolloutLog(folder, fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 20, min_free_bytes=0)
        self.stream = PromptStream(NUM_PROMPTS, seed=0)
        self.positions: dict[int, Position] = {}

    def start(self, policy_version: int = 0, run_id: str = "run") -> None:
        self.log.append(Started(at=0.0, run_id=run_id, learner_incarnation=1, policy_version=policy_version))

    def grant(self, lease_id: int, turn: Turn | None = None) -> Turn:
        turn = turn or self.stream.next()
        prompt_id, epoch = turn
        self.log.append(
            Granted(at=0.0, lease_id=lease_id, prompt_id=prompt_id, epoch=epoch, actor="a", policy_version=0, oldest_version=0)
        )
        return turn

    def accept(self, lease_id: int, ids: tuple[int, ...] = (1, 2)) -> None:
        completions = (CompletionMeta(len(ids), "stop", 0.5, (Segment(0, 0),)),)
        accepted = Accepted(at=0.0, lease_id=lease_id, actor="a", completions=completions, generate_s=1.5, policy_version=0)
        self.positions[lease_id] = self.log.append(accepted, np.array(ids, np.int32), np.full(len(ids), -1.0, np.float32))

    def train(self, *lease_ids: int, policy_version: int = 0, num_steps: int = 1) -> None:
        self.log.append(
            Trained(
                at=0.0,
                lease_ids=lease_ids,
                policy_version=policy_version,
                num_steps=num_steps,
                selected_at=0.0,
                selected_after=0,
            )
        )

    def expire(self, lease_id: int) -> None:
        self.log.append(Expired(at=0.0, lease_id=lease_id, reason="late"))

    def drop(self, lease_id: int, *, is_final: bool) -> None:
        self.log.append(Dropped(at=0.0, lease_id=lease_id, reason="stale", is_final=is_final))

    def tune(self, setting: str, value: str) -> Tuned:
        event = Tuned(at=0.0, settings={setting: value}, who="me", reason="", policy_version=0)
        self.log.append(event)
        return event

    def recover(self, state: DispatcherState | None = None) -> Recovered:
        start = state.log_end if state else None
        return recover(
            state, read_log(self.folder, start), lambda position: read_record(self.folder, position), PROMPTS, seed=0
        )

    def checkpoint(self) -> DispatcherState:
        """Of a learner that knows all of this."""
        recovered = self.recover()
        return DispatcherState(
            recovered.stream.state(), recovered.ledger.state(), self.log.end, recovered.newest_version, recovered.tuned
        )


@pytest.fixture
def tale(tmp_path: Path) -> Iterator[Tale]:
    tale = Tale(tmp_path / "log")
    yield tale
    tale.log.close()


def test_run_that_never_began_begins(tale: Tale) -> None:
    recovered = tale.recover()
    assert (recovered.run_id, recovered.num_records, recovered.newest_version) == ("", 0, 0)
    assert recovered.stream.next() == PromptStream(NUM_PROMPTS, seed=0).next()
    assert recovered.ledger.num_open == 0


def test_without_a_checkpoint_all_that_was_trained_is_in_the_buffer_again(tale: Tale) -> None:
    tale.start()
    turns = [tale.grant(lease_id) for lease_id in (10, 11, 12, 13, 14)]
    for lease_id in (11, 10, 12):
        tale.accept(lease_id, ids=(lease_id, 3))
    tale.train(10, 11, policy_version=0, num_steps=2)
    tale.expire(13)
    recovered = tale.recover()
    assert (recovered.run_id, recovered.num_records, recovered.newest_version) == ("run", 11, 2)
    groups = recovered.ledger.ready_groups()
    assert [group.lease_id for group in groups] == [10, 11, 12]
    assert [group.prompt_id for group in groups] == [turn.prompt_id for turn in turns[:3]]
    assert [group.prompt_token_ids.tolist() for group in groups] == [[turn.prompt_id] for turn in turns[:3]]
    assert [group.rollouts[0].token_ids.tolist() for group in groups] == [[10, 3], [11, 3], [12, 3]]
    assert [group.rollouts[0].behavior_logprobs.tolist() for group in groups] == [[-1.0, -1.0]] * 3
    assert (groups[0].actor, groups[0].generate_s, groups[0].rollouts[0].reward) == ("a", 1.5, 0.5)
    assert [lease.lease_id for lease in recovered.ledger.generating()] == [14]
    counts = recovered.ledger.counts()
    assert (counts.leased, counts.trained, counts.expired, counts.in_flight) == (5, 0, 1, 4)
    assert [recovered.stream.next() for _ in range(2)] == [turns[3], tale.stream.next()]
    assert recovered.ledger.epochs[0].num_trained == 0


def test_records_before_the_checkpoint_are_not_applied_again(tale: Tale) -> None:
    tale.start()
    for lease_id in (1, 2):
        tale.grant(lease_id)
    tale.accept(1)
    state = tale.checkpoint()
    tale.accept(2)
    tale.grant(3)
    recovered = tale.recover(state)
    assert recovered.num_records == 2
    assert [group.lease_id for group in recovered.ledger.ready_groups()] == [1, 2]
    assert recovered.ledger.counts().leased == 3
    assert recovered.ledger.oldest_position() == tale.positions[1]


def test_group_of_a_checkpoint_that_the_log_lost_is_as_if_it_was_being_generated(
    tale: Tale, caplog: pytest.LogCaptureFixture
) -> None:
    tale.start()
    for lease_id in (1, 2):
        tale.grant(lease_id)
        tale.accept(lease_id)
    state = tale.checkpoint()
    records = list(read_log(tale.folder, state.log_end))
    recovered = recover(
        state,
        records,
        lambda position: None if position == tale.positions[1] else read_record(tale.folder, position),
        PROMPTS,
        seed=0,
    )
    assert [group.lease_id for group in recovered.ledger.ready_groups()] == [2]
    assert [lease.lease_id for lease in recovered.ledger.generating()] == [1]
    assert "1 finished groups were lost" in caplog.text
    # Its actor was told that the group is safe, and has forgotten it: the prompt is leased to whoever is there.
    desk = Desk(num_prompts=NUM_PROMPTS, recovered=recovered)
    (lost,) = (lease for lease in state.ledger.open if lease.lease_id == 1)
    leases = Actor(desk, "a").join(capacity=1).leases()
    assert [lease.prompt_id for lease in leases] == [lost.prompt_id]
    assert desk.dispatcher.counts().adds_up


def test_group_that_the_log_lost_does_not_keep_what_happened_later_from_being_applied(tale: Tale) -> None:
    tale.start()
    for lease_id in (1, 2):
        tale.grant(lease_id)
        tale.accept(lease_id)
    state = tale.checkpoint()
    tale.train(1)
    tale.start(policy_version=0)
    turn = tale.grant(3)
    tale.drop(1, is_final=False)
    recovered = recover(state, read_log(tale.folder, state.log_end), lambda position: None, PROMPTS, seed=0)
    assert recovered.ledger.status(1) == "ended"
    assert recovered.ledger.find(3).prompt_id == turn.prompt_id
    assert recovered.ledger.counts().adds_up


def test_log_at_another_place_than_the_checkpoint_says_gives_no_other_leases_group(tale: Tale) -> None:
    tale.start()
    for lease_id in (1, 2):
        tale.grant(lease_id)
        tale.accept(lease_id, ids=(lease_id,))
    state = tale.checkpoint()
    swapped = read_record(tale.folder, tale.positions[2])
    recovered = recover(state, (), lambda position: swapped, PROMPTS, seed=0)
    assert [group.lease_id for group in recovered.ledger.ready_groups()] == [2]


def test_lease_ids_jump_at_every_start_that_the_log_tells_of(tale: Tale) -> None:
    tale.start()
    tale.grant(5)
    tale.start()
    tale.start()
    recovered = tale.recover()
    # The processes may have leased out ids that no record tells of: for evaluation, or in a tail that was cut off.
    assert recovered.ledger.next_lease_id() >= 5 + 1 + 3 * UNSEEN_LEASES
    assert [lease.lease_id for lease in recovered.ledger.generating()] == [5]


def test_groups_trained_by_several_learners_that_died_are_trained_once_more(tale: Tale) -> None:
    tale.start(policy_version=0)
    for lease_id in (1, 2):
        tale.grant(lease_id)
        tale.accept(lease_id)
    state = tale.checkpoint()
    tale.train(1, policy_version=4)
    tale.start(policy_version=4, run_id="run")
    tale.train(1, policy_version=4)
    tale.train(2, policy_version=5, num_steps=3)
    tale.start(policy_version=4)
    recovered = tale.recover(state)
    assert [group.lease_id for group in recovered.ledger.ready_groups()] == [1, 2]
    assert recovered.ledger.counts().trained == 0
    assert recovered.newest_version == 8, "groups sampled under the weights of a dead learner are not from the future"
    assert recovered.run_id == "run"


def test_prompts_given_back_are_served_in_the_order_in_which_they_were(tale: Tale) -> None:
    tale.start()
    turns = {lease_id: tale.grant(lease_id) for lease_id in (1, 2, 3, 4)}
    tale.drop(4, is_final=True)
    tale.expire(3)
    tale.drop(1, is_final=False)
    recovered = tale.recover()
    assert [recovered.stream.next() for _ in range(2)] == [turns[3], turns[1]]
    assert recovered.ledger.epochs[0].dropped == {"stale": [turns[4].prompt_id]}


def answer_nobody(tale: Tale) -> None:
    tale.accept(9)


def answer_twice(tale: Tale) -> None:
    for _ in range(2):
        tale.accept(1)


def expire_an_answered_lease(tale: Tale) -> None:
    tale.accept(1)
    tale.expire(1)


def end_a_lease_twice(tale: Tale) -> None:
    for _ in range(2):
        tale.drop(1, is_final=True)


def grant_out_of_turn(tale: Tale) -> None:
    tale.stream.next()
    tale.grant(2)


def grant_an_open_lease(tale: Tale) -> None:
    tale.grant(1)


@pytest.mark.parametrize(
    "contradict",
    [answer_nobody, answer_twice, expire_an_answered_lease, end_a_lease_twice, grant_out_of_turn, grant_an_open_lease],
)
def test_log_that_contradicts_the_checkpoint_is_not_followed(tale: Tale, contradict: Any) -> None:
    tale.start()
    tale.grant(1)
    state = tale.checkpoint()
    contradict(tale)
    with pytest.raises(RecoveryError, match=r"does not continue the checkpoint: record Position\(segment=1, offset="):
        tale.recover(state)


def test_checkpoint_without_a_log_takes_up_what_actors_still_hold() -> None:
    before = Desk(num_prompts=NUM_PROMPTS)
    actor = Actor(before, "a").join(capacity=3)
    finished, *working = actor.leases()
    actor.answer(finished.lease_id)
    state = before.dispatcher.state()
    recovered = recover(state, (), lambda position: None, PROMPTS, seed=0)
    desk = Desk(num_prompts=NUM_PROMPTS, recovered=recovered)
    held = [lease.lease_id for lease in working]
    actor.desk = desk
    actor.join(capacity=4, lease_ids=held)
    assert [actor.answer(lease_id).outcome for lease_id in held] == ["accepted", "accepted"]
    assert [lease.prompt_id for lease in actor.leases()][:1] == [finished.prompt_id]


def test_ledger_of_a_checkpoint_with_other_prompts_is_refused() -> None:
    state = Desk(num_prompts=NUM_PROMPTS).dispatcher.state()
    with pytest.raises(SettingError, match=r"task\.train_data"):
        recover(state, (), lambda position: None, PROMPTS[:-1], seed=0)


def test_settings_that_were_changed_are_known_from_log_and_checkpoint(tale: Tale) -> None:
    tale.start()
    tale.tune("staleness.max_staleness", "6")
    tale.grant(0)
    newest = tale.tune("staleness.max_staleness", "8")
    rate = tale.tune("train.learning_rate", "0.001")
    assert tale.recover().tuned == {"staleness.max_staleness": newest, "train.learning_rate": rate}
    state = tale.checkpoint()
    # Of the checkpoint alone: the log may have been shortened.
    assert tale.recover(state).tuned == {"staleness.max_staleness": newest, "train.learning_rate": rate}
    later = tale.tune("staleness.max_staleness", "2")
    assert tale.recover(state).tuned == {"staleness.max_staleness": later, "train.learning_rate": rate}


def test_checkpoint_of_a_learner_before_live_tuning_is_read(tale: Tale) -> None:
    tale.start()
    body = msgspec.to_builtins(tale.checkpoint())
    del body["tuned"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=DispatcherState).tuned == {}
