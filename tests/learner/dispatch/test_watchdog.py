"""A late batch: its reason is named within a minute, and no wait is without an end."""

from collections.abc import Callable

import pytest

from offbeat.learner.dispatch.roster import OFTEN_LOST, OFTEN_LOST_S
from offbeat.learner.dispatch.run_state import RunFailedError
from offbeat.learner.dispatch.send_queue import Outgoing
from offbeat.learner.dispatch.watchdog import CAUSES, LATE_S
from offbeat.protocols.messages import ActorHeartbeat, ActorStats, Goodbye, Lease, LeaseFailed, RewardTrouble, Stop
from tests.learner.dispatch.dispatch_desk import LEASE_TIMEOUT_S, TICK_S, Actor, Desk


def wait(desk: Desk, seconds: float, *alive: Actor) -> None:
    """Let the training loop wait, in vain, while these actors are heard; it looks for a batch at each tick."""
    for _ in range(int(seconds / TICK_S)):
        desk.tick(TICK_S, *alive)
        assert desk.batch() is None


def told(desk: Desk) -> list[str | None]:
    return [event.rule for event in desk.events("health")]


# The reasons


def full_disk(desk: Desk) -> list[Actor]:
    actor = Actor(desk, "a").join(capacity=2)
    desk.lease_desk.look_for_room = lambda now: None
    desk.lease_desk.is_log_full = True
    return [actor]


def nobody(desk: Desk) -> list[Actor]:
    Actor(desk, "a").join(capacity=2).say(Goodbye(reason="x"))
    return []


def lost_again_and_again(desk: Desk) -> list[Actor]:
    for _ in range(OFTEN_LOST):
        Actor(desk, "a").join(capacity=2)
        desk.tick(desk.settings.config.hub.dead_after_s + 1.0)
    return [Actor(desk, "a").join(capacity=2)]


def quarantine(desk: Desk) -> list[Actor]:
    actor = Actor(desk, "a").join(capacity=2)
    desk.dispatcher.judge_canary("a", 0, "wrong")
    return [actor]


def failing_rewards(desk: Desk) -> list[Actor]:
    actor = Actor(desk, "a").join(capacity=3)
    for lease in actor.leases():
        actor.say(LeaseFailed(lease_id=lease.lease_id, reason="reward_error", detail="judge is down"))
    return [actor]


def judge_that_is_down(desk: Desk) -> list[Actor]:
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    held = (lease.lease_id,)
    trouble = RewardTrouble(waiting_s=34.0, problem="503", lease_ids=held)
    actor.say(ActorHeartbeat(policy_version=0, stats=ActorStats(), lease_ids=held, seen_lease_id=0, reward_trouble=trouble))
    return [actor]


def working(desk: Desk) -> list[Actor]:
    actor = Actor(desk, "a").join(capacity=3)
    first, *_ = actor.leases()
    actor.answer(first.lease_id)
    return [actor]


def evaluating(desk: Desk) -> list[Actor]:
    return [Actor(desk, "a").join(capacity=1)]


def cut_off(desk: Desk) -> list[Actor]:
    actor = Actor(desk, "a").join(capacity=2)
    desk.dispatcher.unreachable(Outgoing(actor.peer, Stop(reason="x")))
    return []


def without_weights(desk: Desk) -> list[Actor]:
    desk.weight_problems.append("a did not enter")
    return [Actor(desk, "a").join(capacity=2, policy_version=None)]


def without_credit(desk: Desk) -> list[Actor]:
    return [Actor(desk, "a").join(capacity=0)]


def each_with_another_trouble(desk: Desk) -> list[Actor]:
    return [*without_weights(desk), Actor(desk, "b").join(capacity=0)]


@pytest.mark.parametrize(
    ("trouble", "settings", "name", "said"),
    [
        (full_disk, (), "disk_full", "disk is full"),
        (lost_again_and_again, (), "actors_lost", f"lost {OFTEN_LOST} times within 10 minutes for silence"),
        (nobody, (), "no_actor", "start one with `offbeat actor`"),
        (quarantine, (), "all_quarantined", "a: wrong"),
        (failing_rewards, (), "rewards_failing", "reward_error: judge is down"),
        (
            judge_that_is_down,
            (),
            "rewards_failing",
            "a: rewards are failing for 34 s, 1 groups wait",
        ),
        (working, (), "generating", "3 being generated, the oldest for 50 s at a"),
        (evaluating, ("evaluation.interval=1",), "evaluation_first", "1 held-out prompts"),
        (cut_off, ("hub.dead_after_s=1000",), "unreachable", "cannot be reached: a"),
        (without_weights, (), "no_weights", "without weights: a; a did not enter"),
        (without_credit, (), "no_credit", "without credit: a"),
        (each_with_another_trouble, (), "unable", "without weights: a; without credit: b"),
    ],
)
def test_reason_of_a_late_batch_is_named_once_within_a_minute_with_the_end_of_the_wait(
    trouble: Callable[[Desk], list[Actor]], settings: tuple[str, ...], name: str, said: str
) -> None:
    desk = Desk(*settings)
    alive = trouble(desk)
    wait(desk, LATE_S - TICK_S, *alive)
    assert told(desk) == []
    wait(desk, 2 * TICK_S, *alive)
    assert told(desk) == [name]
    (event,) = desk.events("health")
    assert event.detail.startswith("no batch for 45 s: ")
    assert said in event.detail
    assert CAUSES[name].hint in event.detail
    end = "waits forever (run.no_actor_timeout_s = 0)" if name == "no_actor" else "ends after 600 s of it (run.no_group"
    assert end in event.detail
    assert said.partition("; a did not")[0] in desk.status().waiting_for
    wait(desk, 30.0, *alive)
    assert told(desk) == [name], "once"


@pytest.mark.parametrize("settings", [["staleness.max_staleness=0"], ["staleness.max_staleness=4", "staleness.target=auto"]])
def test_weights_that_are_too_old_for_the_bound_or_the_target_are_named(settings: list[str]) -> None:
    desk = Desk(*settings, "train.groups_per_step=1")
    actor = Actor(desk, "a").join(capacity=2)
    for lease in actor.leases():
        actor.answer(lease.lease_id)
        desk.train()
    wait(desk, 2 * LATE_S, actor)
    assert told(desk) == ["weights_behind"]
    assert desk.status().waiting_for == f"0 of 1 groups ready; weights {desk.versions.current} not yet at: a"


def test_groups_that_are_all_dropped_as_alike_are_named() -> None:
    desk = Desk("loss.zero_variance=drop")
    actor = Actor(desk, "a").join(capacity=2)
    for _ in range(12):
        wait(desk, TICK_S, actor)
        for lease in actor.leases():
            actor.answer(lease.lease_id, rewards=(1.0, 1.0))
    assert "groups_dropped" in told(desk)
    assert "zero_variance" in desk.status().waiting_for


# Usual waits


def test_batch_that_comes_as_late_as_those_before_is_not_late_and_clears_what_was_told() -> None:
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=0")
    actor = Actor(desk, "a").join(capacity=1)
    for version in range(3):
        wait(desk, 85.0, actor)
        (lease,) = actor.heard(Lease)
        actor.answer(lease.lease_id, policy_version=version)
        desk.train()
        actor.commit(version + 1)
    assert told(desk) == ["generating"], "the first wait was unusual"
    (cleared,) = desk.events("health_cleared")
    assert (cleared.rule, cleared.detail) == ("generating", "a batch came after 80 s")


# The end of a wait


def test_actor_that_never_answers_ends_the_run_with_the_reason() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=2)
    wait(desk, 6 * LEASE_TIMEOUT_S, actor)
    with pytest.raises(RunFailedError, match=r"no group for 60\d s \(run.no_group_timeout_s = 600\): .* being generated"):
        wait(desk, 3 * TICK_S, actor)


def test_each_group_starts_the_wait_anew_and_zero_means_forever() -> None:
    desk = Desk("train.groups_per_step=3", "run.no_group_timeout_s=50")
    actor = Actor(desk, "a").join(capacity=3)
    first, second, _ = actor.leases()
    wait(desk, 40.0, actor)
    actor.answer(first.lease_id)
    wait(desk, 40.0, actor)
    actor.answer(second.lease_id)
    wait(desk, 40.0, actor)
    with pytest.raises(RunFailedError, match="no_group_timeout_s = 50"):
        wait(desk, 30.0, actor)
    patient = Desk("run.no_group_timeout_s=0")
    wait(patient, 20 * LEASE_TIMEOUT_S, Actor(patient, "a").join(capacity=2))


def test_run_without_actors_fails_when_the_time_for_one_is_over_and_each_actor_gives_it_the_whole_time() -> None:
    desk = Desk("run.no_actor_timeout_s=20")
    wait(desk, 20.0)
    actor = Actor(desk, "a").join(capacity=1)
    wait(desk, TICK_S, actor)
    actor.say(Goodbye(reason="x"))
    wait(desk, 20.0)
    with pytest.raises(RunFailedError, match=r"no actor for 25 s \(run.no_actor_timeout_s = 20\): .*start one with"):
        wait(desk, 3 * TICK_S)


def test_time_in_which_the_learner_was_stopped_is_not_waited() -> None:
    desk = Desk("run.no_actor_timeout_s=20")
    wait(desk, TICK_S)
    desk.jump(10_000.0)
    assert desk.batch() is None
    wait(desk, TICK_S)
    assert desk.batch() is None


def test_losses_of_long_ago_are_no_reason_any_more() -> None:
    desk = Desk()
    actor, *_ = lost_again_and_again(desk)
    assert desk.watchdog.cause().name == "actors_lost"
    desk.tick(OFTEN_LOST_S, actor)
    assert desk.watchdog.cause().name == "generating"


def test_actor_that_leaves_is_not_lost() -> None:
    desk = Desk()
    for _ in range(OFTEN_LOST):
        Actor(desk, "a").join(capacity=2).say(Goodbye(reason="x"))
        desk.tick(desk.settings.config.hub.dead_after_s + 1.0)
    assert desk.watchdog.cause().name == "no_actor"
