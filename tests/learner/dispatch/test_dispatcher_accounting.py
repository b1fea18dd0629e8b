"""Every prompt is accounted for and the run can be finished, whatever actors do and in whatever order."""

from collections import Counter

import msgspec
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offbeat.learner.dispatch.quarantine import MAX_MISMATCHES
from offbeat.learner.leases.journal import DispatcherState
from offbeat.learner.leases.prompt_stream import PromptStream, PromptTurn
from offbeat.protocols.messages import Goodbye, GroupDone, Lease, LeaseFailed
from offbeat.protocols.payload import CompletionMeta, Segment
from tests.learner.dispatch.dispatch_desk import DEAD_AFTER_S, LEASE_TIMEOUT_S, NUM_PROMPTS, Actor, Desk

ACTORS = st.integers(0, 2)
ANY_LEASE = st.integers(0, 10**6)
NUM_STEPS = 6


class DispatcherMachine(RuleBasedStateMachine):
    """Three actors that send right and wrong messages at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(
            f"train.num_steps={NUM_STEPS}",
            f"run.max_failed_leases={10**9}",
            "staleness.max_staleness=2",
            "staleness.hard_max_staleness=2",
            "evaluation.interval=2",
        )
        self.actors = [Actor(self.desk, f"actor-{index}", incarnation=1) for index in range(3)]
        self.leases: list[int] = []
        self.version = 0
        self.trained: Counter[PromptTurn] = Counter()

    @rule(index=ACTORS, capacity=st.integers(0, 6))
    def join(self, index: int, capacity: int) -> None:
        self.actors[index].join(capacity=capacity, policy_version=self.version)

    @rule(index=ACTORS)
    def restart(self, index: int) -> None:
        before = self.actors[index]
        self.actors[index] = Actor(self.desk, before.name, incarnation=before.incarnation + 1)
        self.actors[index].hello()

    @rule(index=ACTORS)
    def leave(self, index: int) -> None:
        self.actors[index].say(Goodbye(reason="x"))

    @rule(index=ACTORS, number=ANY_LEASE, num_completions=st.integers(1, 3), flaw=st.sampled_from([0.0, 0.0, 0.0, np.nan, 1.0]))
    def answer(self, index: int, number: int, num_completions: int, flaw: float) -> None:
        version = min(self.version, 1)
        completions = (CompletionMeta(1, "stop", 1.0, (Segment(version, 0),)),) * num_completions
        done = GroupDone(lease_id=self._lease_id(number), completions=completions, generate_s=0.0)
        self.actors[index].say(
            done, np.zeros(num_completions, np.int32), np.full(num_completions, flaw or -1.0, dtype=np.float32)
        )

    @rule(index=ACTORS, number=ANY_LEASE, reason=st.sampled_from(["returned", "reward_error"]))
    def fail(self, index: int, number: int, reason: str) -> None:
        self.actors[index].say(LeaseFailed(lease_id=self._lease_id(number), reason=reason))

    @rule(seconds=st.sampled_from([0.0, 0.1, DEAD_AFTER_S / 2, DEAD_AFTER_S + 1, LEASE_TIMEOUT_S + 1]), can_send=st.booleans())
    def tick(self, seconds: float, can_send: bool) -> None:
        self.desk.tick(seconds)
        self._send(can_send=can_send)

    @rule(seconds=st.sampled_from([DEAD_AFTER_S, 3600.0]))
    def learner_is_stopped(self, seconds: float) -> None:
        self.desk.jump(seconds)
        self._send(can_send=True)

    @rule(index=ACTORS, is_wrong=st.booleans())
    def judge_canary(self, index: int, is_wrong: bool) -> None:
        member = self.desk.roster.named(self.actors[index].name)
        # One more would end the run.
        is_last = member is not None and len(member.mismatches) == MAX_MISMATCHES - 1
        flaw = "wrong" if is_wrong and not is_last else None
        self.desk.dispatcher.judge_canary(self.actors[index].name, self.version, flaw)

    @rule(index=ACTORS, numbers=st.lists(ANY_LEASE, max_size=5), seen=ANY_LEASE, says_hello=st.booleans())
    def say_what_it_holds(self, index: int, numbers: list[int], seen: int, says_hello: bool) -> None:
        held = tuple(self._lease_id(number) for number in numbers)
        if says_hello:
            self.actors[index].hello(lease_ids=held)
        else:
            self.actors[index].beat(*held, seen=self._lease_id(seen))

    @rule(seconds=st.sampled_from([DEAD_AFTER_S - 1, LEASE_TIMEOUT_S + 1]))
    def wait_with_actors_that_are_heard(self, seconds: float) -> None:
        for actor in self.actors:
            actor.capacity = 4
        self.desk.tick(seconds, *self.actors)
        self._send(can_send=True)

    @rule(index=ACTORS)
    def answer_all_that_is_held(self, index: int) -> None:
        actor = self.actors[index]
        member = self.desk.roster.find(actor.peer)
        for lease_id in sorted(member.lease_ids if member is not None else ()):
            completions = (CompletionMeta(1, "stop", 1.0, (Segment(self.version, 0),)),) * 2
            actor.say(
                GroupDone(lease_id=lease_id, completions=completions, generate_s=0.0),
                np.zeros(2, np.int32),
                np.full(2, -1.0, np.float32),
            )

    @rule()
    def train(self) -> None:
        self._train()

    @precondition(lambda self: self.version)
    @rule(index=ACTORS)
    def commit(self, index: int) -> None:
        self.actors[index].commit(self.version)

    @invariant()
    def the_sums_agree(self) -> None:
        counts = self.desk.dispatcher.counts()
        assert counts.adds_up
        assert counts.trained == self.trained.total()

    @invariant()
    def every_prompt_served_is_somewhere_exactly_once(self) -> None:
        state = self.desk.dispatcher.state()
        order = PromptStream(NUM_PROMPTS, seed=0)
        served = Counter(order.next() for _ in range(state.stream.position))
        opened = Counter(PromptTurn(saved.prompt_id, saved.epoch) for saved in state.ledger.open)
        # All within the first pass.
        given_up = Counter(PromptTurn(int(event.detail.split()[1]), 0) for event in self.desk.events("prompt_dropped"))
        assert opened + Counter(state.stream.returned) + self.trained + given_up == served

    @invariant()
    def nobody_holds_what_is_not_open(self) -> None:
        held = sorted(lease_id for member in self.desk.roster for lease_id in member.lease_ids)
        generating = [lease.lease_id for lease in self.desk.ledger.generating()]
        evaluated = [lease_id for lease_id in self.leases if self.desk.evaluations.holds(lease_id)]
        assert held == sorted({*generating, *evaluated}) == sorted(self.desk.lease_desk.deadlines)

    @invariant()
    def state_survives_a_checkpoint(self) -> None:
        state = self.desk.dispatcher.state()
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=DispatcherState) == state

    def teardown(self) -> None:
        """Finish the run, evaluations included, with one good actor."""
        savior = Actor(self.desk, "savior", incarnation=1).join(capacity=99, policy_version=self.version)
        for actor in self.actors:
            actor.say(Goodbye(reason="x"))
        self.desk.dispatcher.take_outgoing()
        for _ in range(500):
            if self.version == NUM_STEPS and self.desk.dispatcher.wait_evaluations(0.0):
                break
            for lease in savior.leases():
                rewards = (1.0, 0.0)[: lease.group_size]
                assert savior.answer(lease.lease_id, rewards=rewards, policy_version=self.version).outcome == "accepted"
            self._train()
            savior.commit(self.version)
        assert self.version == NUM_STEPS
        assert self.desk.dispatcher.wait_evaluations(0.0)
        assert self.desk.dispatcher.counts().trained == NUM_STEPS * 2
        self.every_prompt_served_is_somewhere_exactly_once()
        self.nobody_holds_what_is_not_open()

    def _lease_id(self, number: int) -> int:
        """Return the id of a granted lease, more often of a recent one, or an id that was never granted."""
        recent = self.leases[-(number % 8 or 1000) :]
        return recent[number % len(recent)] if recent else number

    def _send(self, *, can_send: bool) -> None:
        for outgoing in self.desk.dispatcher.take_outgoing():
            if isinstance(outgoing.message, Lease):
                self.leases.append(outgoing.message.lease_id)
            if not can_send:
                self.desk.dispatcher.unreachable(outgoing)

    def _train(self) -> None:
        groups = self.desk.batch()
        if groups is None:
            return
        for group in groups:
            assert group.policy_lag(self.version) <= 2
            self.trained[PromptTurn(group.prompt_id, self.desk.ledger.find(group.lease_id).epoch)] += 1
        self.version += 1
        self.desk.dispatcher.finish_batch(groups, self.version)
        self.desk.dispatcher.publish(self.version, last=self.version == NUM_STEPS)


TestDispatcherAccounting = DispatcherMachine.TestCase
TestDispatcherAccounting.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
