"""Leases become groups, against a real hub with a fake engine; each answer is kept until it is acknowledged."""

import numpy as np
import pytest

from offbeat.actor.engines.engine import Completion
from offbeat.actor.judges.client import handed_to_processes
from offbeat.actor.leases_at_work import as_group
from offbeat.actor.rewards.functions import Reward
from offbeat.actor.sampling import RewardedGroup
from offbeat.common.settings.config import Config, JudgeSection
from offbeat.protocols.messages import Ack, ActorHeartbeat, Cancel, Credit, GroupDone, Hello, LeaseFailed, SayHello
from offbeat.protocols.payload import Segment, decode_experts
from offbeat.protocols.wire import logprobs, token_ids
from tests.actor.actor_harness import CANARY, Learner, actor_of, eventually

pytestmark = pytest.mark.slow


def test_lease_becomes_a_group_in_the_order_of_its_completions(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        learner.lease(3, group_size=3)
        done, arrays = learner.wait_packet(GroupDone)
        assert done.lease_id == 3
        assert token_ids(arrays[0]).tolist() == [3, 0, 3, 1, 3, 2]
        assert logprobs(arrays[1]).tolist() == [-3, 0, -3, -1, -3, -2]
        assert [completion.reward for completion in done.completions] == [3, 4, 5]
        assert {completion.num_tokens for completion in done.completions} == {2}
        assert {completion.segments for completion in done.completions} == {(Segment(0, 0),)}
        assert [completion.reward_parts for completion in done.completions] == [{"length": 1.0}] * 3
        samples = actor.rewards.submitted
        assert [sample.token_ids.tolist() for sample in samples] == [[3, 0], [3, 1], [3, 2]]
        assert {(sample.prompt, sample.row["answer"], sample.finish_reason) for sample in samples} == {("1+1=", "2", "stop")}
        assert not any(sample.is_evaluation for sample in samples)
        learner.send(Ack(lease_id=3, outcome="accepted"))
        assert learner.wait_until_held().stats.num_running_completions == 0


def test_heartbeats_count_each_group_once_although_it_is_sent_again(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.3):
        learner.welcome()
        learner.lease(3)
        for _ in range(3):
            assert learner.wait(GroupDone).lease_id == 3
        learner.send(SayHello())
        learner.welcome()
        assert learner.wait(GroupDone).lease_id == 3
        learner.lease(4, prompt="bad")
        assert learner.wait(LeaseFailed).lease_id == 4
        learner.unread.clear()
        assert learner.wait(ActorHeartbeat).stats.num_groups_sent == 1


def test_unacknowledged_group_is_sent_again_and_an_acknowledged_one_is_not(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.5):
        learner.welcome()
        learner.lease(1)
        first = learner.wait_packet(GroupDone)
        learner.lease(2)
        assert learner.wait(GroupDone).lease_id == 2
        learner.send(Ack(lease_id=2, outcome="accepted"))
        again = learner.wait_packet(GroupDone)
        assert again[0] == first[0]
        assert [bytes(array) for array in again[1]] == [bytes(array) for array in first[1]]
        learner.send(Ack(lease_id=1, outcome="duplicate"))
        learner.forget()
        assert learner.hears_no(GroupDone, 0.8)


def test_unacknowledged_groups_are_sent_again_when_the_hub_is_back(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=60.0) as actor:
        learner.welcome()
        learner.lease(1)
        learner.wait(GroupDone)
        actor.engine.is_held = True
        learner.lease(2)
        eventually(lambda: actor.engine.num_unfinished == 2, learner)
        learner.restart()
        learner.wait(ActorHeartbeat)
        learner.send(SayHello())
        learner.welcome()
        assert learner.wait(GroupDone).lease_id == 1
        # The same learner process: what is being generated goes on.
        actor.engine.is_held = False
        assert learner.wait(GroupDone).lease_id == 2


def test_work_goes_on_when_another_learner_process_of_the_run_takes_over(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=60.0) as actor:
        learner.welcome()
        learner.lease(1)
        first = learner.wait_packet(GroupDone)
        actor.engine.is_held = True
        learner.lease(2)
        learner.lease(3, min_policy_version=9)
        learner.wait_until_held(1, 2, 3)
        assert actor.engine.num_unfinished == 2
        learner.restart()
        learner.incarnation = 2
        learner.wait(ActorHeartbeat)
        learner.send(SayHello())
        hello = learner.wait(Hello)
        assert hello.run_id == "r"
        assert sorted(hello.lease_ids) == [1, 2, 3]
        learner.send(learner.make_welcome(), CANARY)
        again = learner.wait_packet(GroupDone)
        assert again[0] == first[0]
        assert [bytes(array) for array in again[1]] == [bytes(array) for array in first[1]]
        actor.engine.is_held = False
        assert learner.wait(GroupDone).lease_id == 2
        actor.engine.policy_version = 9
        assert learner.wait(GroupDone).lease_id == 3
        assert actor.engine.aborted == []


def test_group_larger_than_the_learner_takes_is_given_back_instead_of_sent(learner: Learner) -> None:
    learner.max_message_bytes = 40
    with actor_of(learner):
        learner.welcome()
        learner.lease(1, group_size=6)
        failed = learner.wait(LeaseFailed)
        assert (failed.lease_id, failed.reason) == (1, "too_large")
        assert "hub.max_message_mb" in failed.detail
        learner.lease(2, group_size=5)
        assert learner.wait(GroupDone).lease_id == 2


def test_lease_waits_for_the_weights_that_it_asks_for(learner: Learner) -> None:
    with actor_of(learner, policy_version=2) as actor:
        learner.welcome()
        learner.lease(1, min_policy_version=3)
        learner.lease(2, min_policy_version=2)
        assert learner.wait(GroupDone).lease_id == 2
        assert learner.hears_no(GroupDone)
        actor.engine.policy_version = 3
        done = learner.wait(GroupDone)
        assert done.lease_id == 1
        assert {completion.segments for completion in done.completions} == {(Segment(3, 0),)}


def test_failed_reward_gives_the_lease_back_with_its_reason(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.5):
        learner.welcome()
        learner.lease(1, prompt="bad")
        failed = LeaseFailed(lease_id=1, reason="reward_error", detail="no such row")
        assert learner.wait(LeaseFailed) == failed
        assert learner.wait(LeaseFailed) == failed, "sent again until it is acknowledged"
        learner.send(Ack(lease_id=1, outcome="accepted"))
        learner.forget()
        assert learner.hears_no(LeaseFailed, 0.8)


def test_heartbeat_says_which_leases_wait_for_a_reward_that_cannot_be_had(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        actor.rewards.is_held = True
        learner.lease(4)
        trouble = learner.wait_heartbeat(lambda heartbeat: heartbeat.reward_trouble is not None).reward_trouble
        assert trouble is not None
        assert (trouble.problem, trouble.lease_ids) == ("the judge is down", (4,))
        assert trouble.waiting_s >= 7.0
        actor.rewards.is_held = False
        assert learner.wait(GroupDone).lease_id == 4
        learner.wait_heartbeat(lambda heartbeat: heartbeat.reward_trouble is None)


def test_heartbeat_tells_the_use_of_the_judge(learner: Learner) -> None:
    with handed_to_processes(Config(judge=JudgeSection(url="http://h/v1", model="m"))), actor_of(learner):
        learner.welcome()
        assert learner.wait_heartbeat(lambda heartbeat: bool(heartbeat.stats.judge)).stats.judge["requests"] == 0


def test_actor_whose_rewards_fail_takes_one_lease_at_a_time_until_they_succeed(learner: Learner) -> None:
    with actor_of(learner) as actor:
        capacity = learner.welcome().capacity
        actor.rewards.is_failing = True
        assert learner.wait(Credit) == Credit(capacity=1)
        actor.rewards.is_failing = False
        assert learner.wait(Credit) == Credit(capacity=capacity)


def test_actor_whose_leases_expire_takes_fewer_until_groups_are_finished(learner: Learner) -> None:
    with actor_of(learner, max_inflight_groups=4) as actor:
        assert learner.welcome() == Credit(capacity=4)
        actor.engine.is_held = True
        for lease_id in range(1, 5):
            learner.lease(lease_id, timeout_s=1e-3)
        eventually(lambda: actor.engine.num_unfinished == 8, learner)
        for lease_id, credit in ((1, 3), (2, 2), (3, 1)):
            learner.send(Cancel(lease_ids=(lease_id,)))
            assert learner.wait(Credit) == Credit(capacity=credit)
        actor.engine.is_held = False
        learner.lease(5)
        assert learner.wait(Credit) == Credit(capacity=2), "the groups of leases 4 and 5 bring one back"


def test_leases_that_are_cancelled_early_say_nothing_about_the_actor(learner: Learner) -> None:
    with actor_of(learner, max_inflight_groups=4) as actor:
        learner.welcome()
        actor.engine.is_held = True
        learner.lease(1)
        eventually(lambda: actor.engine.num_unfinished > 0, learner)
        learner.send(Cancel(lease_ids=(1,)))
        eventually(lambda: actor.engine.num_unfinished == 0, learner)
        assert learner.hears_no(Credit, 0.1)


def test_cancelled_answer_is_not_sent_again(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.5):
        learner.welcome()
        learner.lease(1)
        learner.wait(GroupDone)
        learner.send(Cancel(lease_ids=(1,)))
        learner.wait_until_held()
        learner.forget()
        assert learner.hears_no(GroupDone, 0.8)


def test_cancelled_leases_are_aborted_wherever_they_are(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        actor.rewards.is_held = True
        learner.lease(1)
        eventually(lambda: actor.rewards.num_pending == 1, learner)
        actor.engine.is_held = True
        learner.lease(2)
        learner.lease(3, min_policy_version=9)
        learner.wait_until_held(1, 2, 3)
        assert actor.engine.num_unfinished == 2
        learner.send(Cancel(lease_ids=(1, 2, 3, 4)))
        learner.wait_until_held()
        assert sorted(actor.engine.aborted) == ["2/0", "2/1"]
        assert sorted(actor.rewards.cancelled) == [1, 2]
        actor.rewards.is_held = actor.engine.is_held = False
        learner.lease(5)
        assert learner.wait(GroupDone).lease_id == 5
        assert learner.hears_no(GroupDone)


def test_a_group_has_the_experts_of_its_prompt_once() -> None:
    def completion(num_tokens: int, first: int) -> Completion:
        experts = np.arange(first, first + 2 + num_tokens - 1)[:, None, None] + np.array([[[0, 100], [50, 150]]])
        ids, logprobs = np.ones(num_tokens, np.int32), np.zeros(num_tokens, np.float32)
        return Completion("1/0", ids, logprobs, "stop", (Segment(0, 0),), experts=experts)

    played = RewardedGroup(1, (completion(3, 0), completion(1, 20), completion(2, 40)), (Reward(0.0),) * 3, 0.0)
    done, arrays = as_group(played)
    assert done.experts is not None
    assert done.experts.num_prompt_tokens == 2
    experts = decode_experts(arrays[2].data, done.experts.shape(done.completions))
    # Two tokens of the prompt, then those of the first and of the third completion but their last.
    assert experts[:, 0, 0].tolist() == [0, 1, 2, 3, 42]
    assert experts[0].tolist() == [[0, 100], [50, 150]]
    without = played.completions[0]._replace(experts=None)
    done, arrays = as_group(played._replace(completions=(*played.completions[1:], without)))
    assert done.experts is None
    assert len(arrays) == 2
