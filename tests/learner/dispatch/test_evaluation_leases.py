"""Leases of held-out prompts."""

import math
import threading

import pytest

from offbeat.common.records.rows import EvalRow, EvalSampleRow
from offbeat.learner.leases.evaluation import MAX_LOST_LEASES
from offbeat.learner.leases.prompts import MAX_LEASE_ATTEMPTS
from offbeat.protocols.messages import (
    Ack,
    Cancel,
    Goodbye,
    LeaseFailed,
)
from tests.learner.dispatch.dispatch_desk import (
    LEASE_TIMEOUT_S,
    Actor,
    Desk,
)


def test_evaluation_round_completes_beside_training() -> None:
    desk = Desk("evaluation.interval=2", "evaluation.num_prompts=3", "train.groups_per_step=1", "staleness.max_staleness=0")
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
    (row,) = desk.rows_of(EvalRow)
    assert (row.policy_version, row.reward, row.num_completions, row.length) == (0, 0.5, 3, 2.0)
    assert desk.evaluated == [{0: [1.0], 1: [0.0], 2: [0.5]}]
    assert actor.answer(held_out[0].lease_id, rewards=(1.0,)).outcome == "duplicate"
    # Evaluation is not in the account of training.
    assert desk.dispatcher.counts().leased == 1


def test_first_completion_of_a_held_out_prompt_is_kept_as_text_with_the_version_evaluated() -> None:
    desk = Desk("evaluation.interval=1", "evaluation.num_prompts=2", "evaluation.group_size=2", "evaluation.temperature=1.0")
    actor = Actor(desk, "a").join(capacity=9)
    held_out = [lease for lease in actor.leases() if lease.prompt.startswith("held-out")]
    for lease in held_out:
        actor.answer(lease.lease_id, rewards=(float(lease.prompt_id), 7.0))
    samples = desk.rows_of(EvalSampleRow)
    assert [(row.policy_version, row.prompt_id, row.reward) for row in samples] == [(0, 0, 0.0), (0, 1, 1.0)]
    assert [(row.num_tokens, row.completion) for row in samples] == [(2, "1 2")] * 2


def test_thread_that_waits_for_evaluations_is_woken_by_the_last_answer() -> None:
    desk = Desk("evaluation.interval=1", "evaluation.num_prompts=1")
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    finished: list[bool] = []
    trainer = threading.Thread(target=lambda: finished.append(desk.dispatcher.wait_evaluations(30.0)))
    trainer.start()
    actor.answer(lease.lease_id, rewards=(1.0,))
    trainer.join(5.0)
    assert not trainer.is_alive()
    assert finished == [True]


def test_answers_to_held_out_prompts_are_counted_and_failures_are_none() -> None:
    desk = Desk("evaluation.interval=1", "evaluation.num_prompts=2", "staleness.max_staleness=0")
    actor = Actor(desk, "a").join(capacity=2)
    first, second = actor.leases()
    actor.say(LeaseFailed(lease_id=first.lease_id, reason="reward_error"))
    assert desk.dispatcher.num_evaluation_answers() == 0
    actor.heard(Ack)
    actor.answer(second.lease_id, rewards=(1.0,))
    assert desk.dispatcher.num_evaluation_answers() == 1


def test_error_that_ends_the_wait_for_the_last_evaluation_is_raised() -> None:
    desk = Desk("evaluation.interval=1", "evaluation.num_prompts=1")
    desk.dispatcher.raise_if_failed()
    desk.dispatcher.fail(OSError("hub"))
    assert desk.dispatcher.wait_evaluations(0.0)
    with pytest.raises(OSError, match="hub"):
        desk.dispatcher.raise_if_failed()


def test_evaluation_with_a_lost_actor_a_rejected_group_and_a_failed_reward_completes() -> None:
    desk = Desk("evaluation.interval=1", "evaluation.num_prompts=3", "train.groups_per_step=1", "staleness.max_staleness=0")
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
    (row,) = desk.rows_of(EvalRow)
    assert (row.num_completions, row.reward, row.num_failed) == (3, 0.5, 0)
    assert desk.dispatcher.counts().dropped == {}


def test_evaluation_lease_expires_and_its_prompt_is_evaluated_again() -> None:
    desk = Desk("evaluation.interval=1", "evaluation.num_prompts=1", "staleness.max_staleness=0")
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    desk.tick(LEASE_TIMEOUT_S + 1, actor)
    (again,) = actor.leases()
    assert (again.prompt, lease.prompt) == ("held-out 0", "held-out 0")
    assert actor.heard(Cancel) == [Cancel(lease_ids=(lease.lease_id,))]
    assert actor.answer(lease.lease_id, rewards=(1.0,)).outcome == "duplicate"
    actor.answer(again.lease_id, rewards=(1.0,))
    assert desk.dispatcher.wait_evaluations(0.0)


def test_held_out_prompt_that_ends_each_of_its_actors_does_not_hold_up_its_round_forever() -> None:
    desk = Desk("evaluation.interval=1", "evaluation.num_prompts=1")
    for _ in range(MAX_LOST_LEASES):
        assert not desk.dispatcher.wait_evaluations(0.0)
        victim = Actor(desk, "victim").join(capacity=1)
        assert [lease.prompt for lease in victim.leases()] == ["held-out 0"]
        victim.say(Goodbye(reason="out of memory"))
    assert desk.dispatcher.wait_evaluations(0.0)
    (row,) = desk.rows_of(EvalRow)
    assert (row.num_completions, row.num_failed) == (0, 1)
    assert all(lease.prompt.startswith("train") for lease in Actor(desk, "a").join(capacity=1).leases())


def test_evaluation_leases_lost_with_their_actors_use_up_no_attempt() -> None:
    desk = Desk("evaluation.interval=1", "evaluation.num_prompts=1")
    for _ in range(MAX_LEASE_ATTEMPTS):
        lost = Actor(desk, "lost").join(capacity=1)
        assert [lease.prompt for lease in lost.leases()] == ["held-out 0"]
        lost.say(Goodbye(reason="SIGTERM"))
    actor = Actor(desk, "a").join(capacity=1)
    actor.answer(actor.leases()[0].lease_id, rewards=(1.0,))
    (row,) = desk.rows_of(EvalRow)
    assert (row.num_completions, row.num_failed) == (1, 0)


def test_evaluation_prompt_that_is_always_late_does_not_hold_up_the_round() -> None:
    desk = Desk("evaluation.interval=1", "evaluation.num_prompts=1")
    actor = Actor(desk, "a").join(capacity=1)
    for _ in range(MAX_LEASE_ATTEMPTS):
        assert [lease.prompt for lease in actor.leases()] == ["held-out 0"]
        desk.tick(LEASE_TIMEOUT_S + 1, actor)
    (row,) = desk.rows_of(EvalRow)
    assert (row.num_completions, row.num_failed) == (0, 1)


def test_evaluation_prompt_that_always_fails_does_not_hold_up_the_round() -> None:
    desk = Desk("evaluation.interval=1", "evaluation.num_prompts=1", "run.max_failed_leases=100")
    actor = Actor(desk, "a").join(capacity=1)
    for _ in range(MAX_LEASE_ATTEMPTS):
        (lease,) = actor.leases()
        assert lease.prompt == "held-out 0"
        actor.say(LeaseFailed(lease_id=lease.lease_id, reason="reward_timeout"))
    assert desk.dispatcher.wait_evaluations(0.0)
    (row,) = desk.rows_of(EvalRow)
    assert (row.num_completions, row.num_failed) == (0, 1)
    assert row.reward is not None and math.isnan(row.reward)


def test_good_evaluation_group_ends_a_row_of_failed_leases() -> None:
    settings = ("evaluation.interval=1", "evaluation.num_prompts=20", "run.max_failed_leases=2", "staleness.max_staleness=0")
    desk = Desk(*settings, num_eval_prompts=20)
    actor = Actor(desk, "a").join(capacity=1)
    for _ in range(5):
        actor.say(LeaseFailed(lease_id=actor.leases()[0].lease_id, reason="reward_timeout"))
        actor.heard(Ack)
        (lease,) = actor.leases()
        assert lease.prompt.startswith("held-out")
        assert actor.answer(lease.lease_id, rewards=(1.0,)).outcome == "accepted"
    desk.dispatcher.raise_if_failed()


def test_evaluation_waits_for_weights_at_least_as_new() -> None:
    desk = Desk("evaluation.interval=1", "evaluation.num_prompts=1", policy_version=5)
    actor = Actor(desk, "a").join(capacity=9, policy_version=4)
    assert all(lease.prompt.startswith("train") for lease in actor.leases())
    actor.commit(5)
    assert [lease.min_policy_version for lease in actor.leases() if lease.prompt == "held-out 0"] == [5]


def test_evaluations_fall_due_once_an_interval_even_when_its_multiples_are_not_published() -> None:
    desk = Desk("evaluation.interval=5", "evaluation.num_prompts=1", policy_version=20, is_published=False)
    for version in (0, 2, 4, 6, 8, 10, 12, 13):
        desk.dispatcher.publish(version, last=version == 13)
    actor = Actor(desk, "a").join(capacity=1, policy_version=13)
    while not desk.dispatcher.wait_evaluations(0.0):
        actor.answer(actor.leases()[0].lease_id, rewards=(1.0,))
    assert [row.policy_version for row in desk.rows_of(EvalRow)] == [0, 6, 10, 13]


@pytest.mark.parametrize(("evaluated", "versions"), [(0, [13, 20]), (10, [20])], ids=["unfinished", "finished"])
def test_evaluation_that_a_pause_interrupted_is_made_after_the_resume_and_a_finished_one_is_not(
    evaluated: int, versions: list[int]
) -> None:
    settings = ("evaluation.interval=10", "evaluation.num_prompts=1")
    desk = Desk(*settings, policy_version=13, evaluated=evaluated, is_published=False)
    for version in (13, 16, 20, 22):
        desk.dispatcher.publish(version)
    actor = Actor(desk, "a").join(capacity=1, policy_version=22)
    while not desk.dispatcher.wait_evaluations(0.0):
        actor.answer(actor.leases()[0].lease_id, rewards=(1.0,))
    assert [row.policy_version for row in desk.rows_of(EvalRow)] == versions


@pytest.mark.parametrize(("evaluated", "is_due"), [(10, True), (12, False)], ids=["unfinished", "finished"])
def test_last_version_is_evaluated_after_a_resume_unless_it_was(evaluated: int, is_due: bool) -> None:
    settings = ("evaluation.interval=10", "evaluation.num_prompts=1", "train.num_steps=12")
    desk = Desk(*settings, policy_version=12, evaluated=evaluated, is_published=False)
    desk.dispatcher.publish(12, last=True)
    assert desk.dispatcher.wait_evaluations(0.0) is not is_due


def test_last_version_is_evaluated_once_although_it_falls_on_the_interval() -> None:
    desk = Desk("evaluation.interval=5", "evaluation.num_prompts=1", policy_version=10, is_published=False)
    desk.dispatcher.publish(10, last=True)
    actor = Actor(desk, "a").join(capacity=1, policy_version=10)
    actor.answer(actor.leases()[0].lease_id, rewards=(1.0,))
    assert desk.dispatcher.wait_evaluations(0.0)


def test_no_evaluation_without_interval_or_without_prompts() -> None:
    for desk in (Desk("evaluation.interval=0"), Desk("evaluation.interval=1", num_eval_prompts=0)):
        desk.dispatcher.publish(0, last=True)
        desk.tick()
        assert desk.dispatcher.wait_evaluations(0.0)


def test_actor_with_weights_too_old_for_evaluation_still_gets_training_leases() -> None:
    desk = Desk("evaluation.interval=1", "evaluation.num_prompts=1", "staleness.max_staleness=2", policy_version=5)
    old = Actor(desk, "old").join(capacity=4, policy_version=4)
    Actor(desk, "new").join(capacity=1, policy_version=5)
    assert [lease.prompt.split()[0] for lease in old.leases()] == ["train"] * 4
