"""The status report, and the line that says what a run waits for."""

from offbeat.learner.dispatch.run_state import RunFailedError
from offbeat.learner.dispatch.send_queue import Outgoing
from offbeat.protocols.messages import (
    ActorStats,
    Stop,
)
from tests.learner.dispatch.dispatch_desk import (
    Actor,
    Desk,
)


def test_operator_sees_members_sums_buffer_epoch_and_what_the_run_waits_for() -> None:
    desk = Desk("train.groups_per_step=2", "staleness.max_staleness=0", num_prompts=4)
    desk.weight_problems.append("b is left out")
    desk.dispatcher.doing("training step 1")
    actor = Actor(desk, "a").join(capacity=5)
    first, _ = actor.leases()
    actor.answer(first.lease_id)
    actor.beat(stats=ActorStats(num_generated_tokens=100))
    desk.tick(2.0)
    actor.beat(stats=ActorStats(num_generated_tokens=150))
    Actor(desk, "b").join(capacity=0, policy_version=None)
    desk.tick(1.0)
    report = desk.status()
    assert (report.run_id, report.policy_version, report.num_steps, report.published_version) == ("run", 0, 50, 0)
    assert (report.doing, report.doing_s, report.uptime_s) == ("training step 1", 3.0, 3.0)
    assert report.waiting_for == "1 of 2 groups ready; 1 being generated, the oldest for 3 s at a"
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


def test_waiting_for_names_what_keeps_the_batch() -> None:
    desk = Desk()
    assert "offbeat actor" in (desk.dispatcher.waiting_for() or "")
    actor = Actor(desk, "a").join(capacity=3, policy_version=None)
    assert desk.dispatcher.waiting_for() == "0 of 2 groups ready; without weights: a"
    actor.commit(0)
    leases = actor.leases()
    actor.answer(leases[0].lease_id)
    assert desk.dispatcher.waiting_for() == "1 of 2 groups ready; 2 being generated, the oldest for 0 s at a"
    assert desk.dispatcher.buffer_sizes() == (1, 2)


def test_report_names_nothing_to_wait_for_while_a_batch_is_ready() -> None:
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=1")
    actor = Actor(desk, "a").join(capacity=2)
    first, _ = actor.leases()
    assert desk.status().waiting_for == "0 of 1 groups ready; 2 being generated, the oldest for 0 s at a"
    actor.answer(first.lease_id)
    assert desk.status().waiting_for == ""
