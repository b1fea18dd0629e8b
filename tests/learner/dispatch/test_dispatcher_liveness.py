"""After any fault of the actors a batch comes, or the run ends, or a report names the reason of the wait and its deadline."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offbeat.learner.dispatch.run_state import RunFailedError
from offbeat.learner.dispatch.send_queue import Outgoing
from offbeat.learner.dispatch.watchdog import CAUSES
from offbeat.protocols.messages import Goodbye, Lease, LeaseFailed, Stop
from tests.learner.dispatch.dispatch_desk import LEASE_TIMEOUT_S, TICK_S, Actor, Desk

NUM_ACTORS = 3
NO_ACTOR_S = 100.0
LOOKS = int(2 * (6 * LEASE_TIMEOUT_S + NO_ACTOR_S) / TICK_S)
"""Looks after which every wait must have ended."""


class Habits:
    """The behavior of one actor from now on."""

    def __init__(self) -> None:
        self.is_heard = False
        self.answers = False
        self.fails = False
        self.takes_weights = False
        self.has_right_weights = True


class Liveness(RuleBasedStateMachine):
    """Three actors that join, fall silent, are excluded, quarantined, cut off, die and come back, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(
            f"run.no_actor_timeout_s={NO_ACTOR_S}",
            "train.num_steps=1000",
            "staleness.max_staleness=1",
            "staleness.staleness_policy=drop",
            "evaluation.interval=3",
        )
        self.actors = [Actor(self.desk, f"actor-{index}") for index in range(NUM_ACTORS)]
        self.habits = [Habits() for _ in range(NUM_ACTORS)]
        self.failure: RunFailedError | None = None
        self.num_batches = 0

    @rule(index=st.integers(0, NUM_ACTORS - 1), capacity=st.integers(0, 4), has_weights=st.booleans())
    def join(self, index: int, capacity: int, has_weights: bool) -> None:
        self.actors[index].join(capacity=capacity, policy_version=self.desk.versions.current if has_weights else None)
        self.habits[index].is_heard = True

    @rule(
        index=st.integers(0, NUM_ACTORS - 1),
        is_heard=st.booleans(),
        answers=st.booleans(),
        fails=st.booleans(),
        takes_weights=st.booleans(),
        has_right_weights=st.booleans(),
    )
    def change(
        self, index: int, is_heard: bool, answers: bool, fails: bool, takes_weights: bool, has_right_weights: bool
    ) -> None:
        habits = self.habits[index]
        habits.is_heard, habits.answers, habits.fails = is_heard, answers, fails
        habits.takes_weights, habits.has_right_weights = takes_weights, has_right_weights

    @rule(index=st.integers(0, NUM_ACTORS - 1))
    def restart(self, index: int) -> None:
        before = self.actors[index]
        self.actors[index] = Actor(self.desk, before.name, incarnation=before.incarnation + 1).join(capacity=before.capacity)

    @rule(index=st.integers(0, NUM_ACTORS - 1))
    def leave(self, index: int) -> None:
        self.actors[index].say(Goodbye(reason="x"))
        self.habits[index].is_heard = False

    @rule(index=st.integers(0, NUM_ACTORS - 1))
    def cut_off(self, index: int) -> None:
        self.desk.dispatcher.unreachable(Outgoing(self.actors[index].peer, Stop(reason="x")))
        self.habits[index].is_heard = False

    @precondition(lambda self: self.failure is None)
    @rule(looks=st.integers(1, 30))
    def wait(self, looks: int) -> None:
        for _ in range(looks):
            self._look()

    @invariant()
    def reason_of_a_wait_is_always_known(self) -> None:
        late = self.desk.watchdog.cause()
        assert late.name in CAUSES
        assert late.detail

    def teardown(self) -> None:
        """Let the actors go on as they are: within a bounded time there is a batch, or the run has failed with a reason."""
        before = self.num_batches
        names: list[str] = []
        for _ in range(LOOKS):
            if self.failure is not None or self.num_batches > before:
                break
            self._look()
            names.append(self.desk.watchdog.cause().name)
        assert self.failure is not None or self.num_batches > before, f"neither a batch nor an end: {names[-3:]}"
        # Leases are granted in the tick that follows what makes room for them.
        assert "granting, granting, granting" not in ", ".join(names)
        if self.failure is not None:
            assert str(self.failure)
        elif len(names) * TICK_S > 3 * 60:
            assert self.desk.events("health"), f"nobody was told of {names}"

    def _look(self) -> None:
        """Let one tick pass, with what the actors do in it; then look for a batch."""
        for actor, habits in zip(self.actors, self.habits, strict=True):
            if habits.is_heard:
                self._act(actor, habits)
        self.desk.tick(TICK_S)
        if self.failure is not None:
            return
        try:
            groups = self.desk.batch()
        except RunFailedError as error:
            self.failure = error
            return
        if groups is not None:
            version = self.desk.versions.current + 1
            self.desk.dispatcher.finish_batch(groups, version)
            self.desk.dispatcher.publish(version)
            self.num_batches += 1

    def _act(self, actor: Actor, habits: Habits) -> None:
        member = self.desk.roster.find(actor.peer)
        actor.credit(actor.capacity)
        if member is None:
            actor.hello()
            return
        version = self.desk.versions.current
        if habits.takes_weights and member.policy_version != version:
            actor.commit(version)
            self.desk.dispatcher.judge_canary(actor.name, version, None if habits.has_right_weights else "wrong")
        actor.heard(Lease)
        for lease_id in sorted(member.lease_ids):
            if habits.fails:
                actor.say(LeaseFailed(lease_id=lease_id, reason="reward_error"))
            elif habits.answers:
                rewards = (1.0,) if self.desk.evaluations.holds(lease_id) else (0.0, 1.0)
                actor.send_group(lease_id, rewards=rewards, policy_version=version)


TestLiveness = Liveness.TestCase
TestLiveness.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
