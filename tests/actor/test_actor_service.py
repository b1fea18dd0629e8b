"""The actor's loop against a real hub: credit, and the loop's end."""

import time
from typing import Literal

import pytest

from offbeat.protocols.messages import Ack, Credit, CreditLimit, FilesScored, Goodbye, GroupDone, LeaseFailed, SayHello, Stop
from tests.actor.actor_harness import CANARY, LEAVE_WITHIN_S, Learner, actor_of, eventually


def test_concurrency_that_the_learner_asks_for_is_its_credit_from_then_on(learner: Learner) -> None:
    with actor_of(learner, max_inflight_groups=7):
        assert learner.welcome() == Credit(capacity=7)
        learner.send(CreditLimit(capacity=3))
        assert learner.wait(Credit) == Credit(capacity=3)
        learner.send(SayHello())
        assert learner.welcome() == Credit(capacity=3)


def test_actor_that_leaves_takes_no_more_work_whatever_the_concurrency(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        actor.engine.is_held = True
        learner.lease(1)
        eventually(lambda: actor.engine.num_unfinished > 0, learner)
        actor.terminate()
        assert learner.wait(Credit) == Credit(capacity=0)
        learner.send(CreditLimit(capacity=9))
        assert learner.hears_no(Credit, 0.1)
        learner.send(learner.make_welcome(), CANARY)
        assert learner.wait(Credit) == Credit(capacity=0)


def test_leaving_actor_finishes_what_it_began_and_gives_back_what_it_did_not(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        actor.engine.is_held = True
        learner.lease(1)
        learner.lease(2, min_policy_version=9)
        learner.wait_until_held(1, 2)
        eventually(lambda: actor.engine.num_unfinished > 0, learner)
        actor.terminate()
        assert learner.wait(Credit).capacity == 0
        assert learner.wait(LeaseFailed) == LeaseFailed(lease_id=2, reason="returned")
        # The learner granted this lease before it heard of the credit of 0.
        learner.lease(3)
        assert learner.wait(LeaseFailed) == LeaseFailed(lease_id=3, reason="returned")
        assert learner.hears_no(Goodbye, 0.1)
        actor.engine.is_held = False
        assert learner.wait(GroupDone).lease_id == 1
        assert learner.hears_no(Goodbye, 0.1)
        for lease_id in (1, 2, 3):
            learner.send(Ack(lease_id=lease_id, outcome="accepted"))
        assert learner.wait(Goodbye).reason.startswith("SIGTERM")
        assert learner.hears_no(LeaseFailed, 0.0)
        assert actor.engine.aborted == []


class Turns:
    """The engine's turns on a GPU, which the test gives and takes."""

    is_awake = True

    def look(self) -> bool:
        return self.is_awake


def test_actor_steps_no_engine_that_sleeps_and_stays_in_touch(learner: Learner) -> None:
    turns = Turns()
    with actor_of(learner, gpu=turns.look) as actor:
        learner.welcome()
        learner.lease(1)
        assert learner.wait(GroupDone).lease_id == 1
        learner.send(Ack(lease_id=1, outcome="accepted"))
        turns.is_awake = False
        learner.wait_heartbeat(lambda heartbeat: heartbeat.stats.seconds["wait_gpu"] > 0)
        learner.lease(2)
        learner.wait_until_held(2)
        assert actor.engine.num_unfinished == 0
        assert learner.hears_no(GroupDone, 0.1)
        turns.is_awake = True
        assert learner.wait(GroupDone).lease_id == 2
        learner.send(Ack(lease_id=2, outcome="accepted"))


def test_actor_that_is_welcomed_while_its_engine_sleeps_scores_its_files_when_it_wakes(learner: Learner) -> None:
    turns = Turns()
    turns.is_awake = False
    with actor_of(learner, policy_version=None, gpu=turns.look):
        learner.welcome()
        assert learner.hears_no(FilesScored, 0.1)
        turns.is_awake = True
        learner.wait(FilesScored)


@pytest.mark.parametrize("leave", ["finish", "return"])
def test_leaving_actor_gives_back_what_it_cannot_finish_in_time(learner: Learner, leave: Literal["finish", "return"]) -> None:
    with actor_of(learner, leave=leave, dead_after_s=10 * LEAVE_WITHIN_S) as actor:
        learner.welcome()
        learner.lease(1)
        learner.wait(GroupDone)
        actor.engine.is_held = True
        learner.lease(2)
        learner.lease(3, min_policy_version=9)
        learner.wait_until_held(1, 2, 3)
        eventually(lambda: actor.engine.num_unfinished > 0, learner)
        actor.terminate()
        if leave == "finish":
            assert learner.wait(LeaseFailed).lease_id == 3
            assert learner.hears_no(LeaseFailed, 0.1)
            actor.skipped_s = LEAVE_WITHIN_S
        returned = {learner.wait(LeaseFailed).lease_id for _ in range(1 if leave == "finish" else 2)}
        assert returned == ({2} if leave == "finish" else {2, 3})
        learner.lease(4)
        assert learner.wait(LeaseFailed) == LeaseFailed(lease_id=4, reason="returned")
        assert learner.hears_no(Goodbye, 0.1)
        for lease_id in (1, 2, 3, 4):
            learner.send(Ack(lease_id=lease_id, outcome="accepted"))
        assert learner.wait(Goodbye).reason.startswith("SIGTERM")
        assert actor.wait().startswith("SIGTERM")
        assert actor.engine.num_unfinished == 0


def test_actor_that_leaves_stays_alive_to_the_learner_until_it_says_goodbye(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=10 * LEAVE_WITHIN_S) as actor:
        learner.welcome()
        actor.engine.is_held = True
        learner.lease(1)
        learner.wait_until_held(1)
        eventually(lambda: actor.engine.num_unfinished > 0, learner)
        actor.terminate()
        assert learner.wait(Credit).capacity == 0
        assert learner.wait_until_held(1).policy_version == 0
        actor.skipped_s = LEAVE_WITHIN_S
        assert learner.wait(LeaseFailed).lease_id == 1
        learner.wait_until_held(1)


def test_sigterm_without_a_learner_ends_at_once(learner: Learner) -> None:
    with actor_of(learner) as actor:
        actor.terminate()
        started = time.monotonic()
        actor.wait()
        assert time.monotonic() - started < 3


def test_leaving_actor_does_not_wait_for_a_learner_that_it_has_lost(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        actor.engine.is_held = True
        learner.lease(1)
        learner.wait_until_held(1)
        eventually(lambda: actor.engine.num_unfinished > 0, learner)
        actor.terminate()
        assert learner.wait(Credit).capacity == 0
        learner.send(SayHello())
        assert actor.wait().startswith("SIGTERM")


def test_sigterm_does_not_wait_for_ever_for_acknowledgements(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.5) as actor:
        learner.welcome()
        learner.lease(1)
        learner.wait(GroupDone)
        actor.terminate()
        assert actor.wait().startswith("SIGTERM")


def test_stop_ends_the_actor_with_the_learners_reason(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        learner.send(Stop(reason="finished"))
        assert actor.wait() == "the learner ended the run: finished"
        learner.wait(Goodbye)
