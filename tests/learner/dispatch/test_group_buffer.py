"""Finished groups on their way to the trainer."""

from collections import deque

from offbeat.common.records.rows import EventRow, GroupRow
from offbeat.protocols.messages import (
    Lease,
)
from tests.learner.dispatch.dispatch_desk import (
    MAX_NEW_TOKENS,
    Actor,
    Desk,
    make_recovered,
    prompts_in_order,
)


def test_accepted_groups_become_a_batch_in_lease_order() -> None:
    desk = Desk("train.groups_per_step=3")
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


def test_zero_variance_group_is_dropped_when_asked_and_another_prompt_leased() -> None:
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=0", "loss.zero_variance=drop")
    actor = Actor(desk, "a").join(capacity=1)
    order = prompts_in_order()
    (lease,) = actor.leases()
    assert lease.prompt_id == next(order)
    assert actor.answer(lease.lease_id, rewards=(1.0, 1.0)).outcome == "accepted"
    assert desk.batch() is None
    assert desk.dispatcher.counts().dropped == {"zero_variance": 1}
    (row,) = desk.rows_of(GroupRow)
    assert (row.outcome, row.reason) == ("dropped", "zero_variance")
    (again,) = actor.leases()
    assert again.prompt_id == next(order)
    actor.answer(again.lease_id, rewards=(1.0, 0.0))
    assert len(desk.train()) == 1


def test_zero_variance_group_that_a_killed_learner_had_accepted_and_not_dropped_yet_is_not_trained() -> None:
    # The state between the two records of the log: the group is accepted, as without the drop.
    killed = Desk("train.groups_per_step=1", "staleness.max_staleness=0")
    actor = Actor(killed, "a").join(capacity=1)
    actor.answer(actor.leases()[0].lease_id, rewards=(1.0, 1.0))
    recovered = make_recovered()._replace(ledger=killed.ledger, stream=killed.stream)
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=0", "loss.zero_variance=drop", recovered=recovered)
    desk.dispatcher.begin()
    assert desk.batch() is None
    assert desk.dispatcher.counts().dropped == {"zero_variance": 1}


def test_group_above_the_hard_bound_is_dropped_when_taken_and_its_prompt_leased_again() -> None:
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=2", "staleness.hard_max_staleness=1")
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


def test_next_batch_is_the_oldest_lease_whatever_finished_first() -> None:
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=4")
    actor = Actor(desk, "a").join(capacity=2)
    leases = actor.leases()
    for lease in reversed(leases):
        actor.answer(lease.lease_id)
    assert [group.lease_id for group in desk.train()] == [leases[0].lease_id]


def test_dropping_long_groups_that_are_late_raises_the_alarm_of_the_run() -> None:
    alarms: dict[str, int] = {}
    for staleness_policy in ("gate", "drop"):
        sizes = ("train.groups_per_step=4", "train.num_steps=300", "staleness.max_staleness=3")
        desk = Desk(f"staleness.staleness_policy={staleness_policy}", *sizes, num_prompts=2000)
        actor = Actor(desk, "a").join(capacity=16)
        late: deque[list[Lease]] = deque([] for _ in range(5))
        sampled: dict[int, int] = {}
        for version in range(250):
            leases = actor.leases()
            sampled |= {lease.lease_id: version for lease in leases}
            # Every eighth group is long, and comes in five steps later.
            late.append([lease for lease in leases if lease.lease_id % 8 == 0])
            for lease in [*late.popleft(), *(lease for lease in leases if lease.lease_id % 8)]:
                desk.now += 0.01
                num_tokens = 1 if lease.lease_id % 8 else MAX_NEW_TOKENS
                actor.answer(
                    lease.lease_id, policy_version=sampled[lease.lease_id], ids=[1] * num_tokens, logprobs=[-1.0] * num_tokens
                )
            desk.train()
            actor.commit(version + 1)
        alarms[staleness_policy] = sum(row.event == "bias_alarm" for row in desk.rows_of(EventRow))
    assert alarms["gate"] == 0
    assert alarms["drop"] > 0


def test_group_rows_say_at_which_step_of_the_batch_it_was_trained() -> None:
    desk = Desk("train.groups_per_step=2", "train.steps_per_batch=2", "staleness.max_staleness=2", policy_version=4)
    actor = Actor(desk, "a").join(capacity=4, policy_version=4)
    for lease in actor.leases():
        actor.answer(lease.lease_id, policy_version=3)
    groups = desk.batch()
    assert groups is not None
    desk.dispatcher.finish_batch(groups, 6)
    rows = desk.rows_of(GroupRow)
    assert [row.policy_version for row in rows] == [4, 4, 5, 5]
    assert [row.policy_lag for row in rows] == [1, 1, 2, 2]
    assert {row.outcome for row in rows} == {"trained"}
    assert desk.dispatcher.counts().in_flight == 0


def test_group_rows_of_several_epochs_have_the_lag_of_the_last_one() -> None:
    desk = Desk("train.groups_per_step=1", "train.steps_per_batch=2", "train.epochs_per_batch=3", "staleness.max_staleness=5")
    actor = Actor(desk, "a").join(capacity=4)
    leases = actor.leases()
    assert len(leases) == 2
    for lease in leases:
        actor.answer(lease.lease_id)
    groups = desk.batch()
    assert groups is not None
    desk.dispatcher.finish_batch(groups, 6)
    assert [row.policy_lag for row in desk.rows_of(GroupRow)] == [4, 5]
