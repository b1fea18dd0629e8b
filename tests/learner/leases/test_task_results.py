"""The results of tasks are those of the groups that were trained on or had no signal, also behind a restart."""

from pathlib import Path

import pytest

from offbeat.learner.leases.events import Dropped
from offbeat.learner.leases.groups import RECENT_GROUPS, GroupRewards, Tally, TaskResults, add_group, task_results
from offbeat.learner.leases.ledger import Ledger
from offbeat.learner.leases.log_reading import read_log
from offbeat.learner.leases.recovery import recover
from tests.learner.dispatch.dispatch_desk import Actor, Desk, WillingLog, make_prompts
from tests.learner.leases.event_makers import make_accepted, make_granted

NUM_PROMPTS = {"sums": 2, "sorting": 2}
NONE = TaskResults(num_prompts=2, share=1.0)


def make_desk(log: WillingLog | None = None) -> Desk:
    settings = ("train.groups_per_step=1", "staleness.max_staleness=9", "loss.zero_variance=drop")
    return Desk(*settings, num_prompts=4, tasks=tuple(NUM_PROMPTS), log=log)


def test_groups_count_when_they_are_trained_on_or_have_no_signal_and_not_before() -> None:
    desk = make_desk()
    actor = Actor(desk, "a").join(capacity=4)
    assert desk.dispatcher.task_results(NUM_PROMPTS) == {"sums": NONE, "sorting": NONE}
    leases: dict[str, list[int]] = {"sums": [], "sorting": []}
    for lease in actor.leases():
        leases["sorting" if lease.prompt_id % 2 else "sums"].append(lease.lease_id)
    actor.answer(leases["sums"][0], rewards=(0.0, 1.0))
    assert desk.dispatcher.task_results(NUM_PROMPTS)["sums"].num_groups == 0
    desk.train()
    actor.answer(leases["sorting"][0], rewards=(0.25, 0.25))
    results = desk.dispatcher.task_results(NUM_PROMPTS)
    assert results == {
        "sums": TaskResults(2, 1.0, 1, (GroupRewards(0.5, 0.0, 1.0),)),
        "sorting": TaskResults(2, 1.0, 1, (GroupRewards(0.25, 0.25, 0.25),)),
    }
    assert (results["sums"].reward, results["sums"].without_signal) == (0.5, 0.0)
    assert (results["sorting"].reward, results["sorting"].without_signal) == (0.25, 1.0)
    assert (NONE.reward, NONE.without_signal) == (None, None)


@pytest.mark.parametrize(("reason", "num_counted"), [("stale", 0), ("quarantined", 0), ("zero_variance", 1)])
def test_dropped_group_counts_for_its_task_only_when_it_had_no_signal(reason: str, num_counted: int) -> None:
    desk = make_desk()
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    actor.answer(lease.lease_id, rewards=(7.0, 8.0))
    (group,) = desk.train()
    ledger = Ledger()
    lease_id = ledger.next_lease_id()
    ledger.apply(make_granted(lease_id))
    accepted = make_accepted(lease_id)
    ledger.apply(accepted, group._replace(lease_id=lease_id))
    ledger.apply(Dropped(at=0.0, lease_id=lease_id, reason=reason, is_final=False))
    assert [tally.num_groups for tally in ledger.tasks.values()] == [1] * num_counted


def test_only_the_newest_groups_are_kept() -> None:
    tally = Tally(num_groups=5, recent=[GroupRewards(float(index), 0.0, 9.0) for index in range(RECENT_GROUPS)])
    desk = make_desk()
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    actor.answer(lease.lease_id, rewards=(7.0, 8.0))
    (group,) = desk.train()
    tallies = {group.task: tally}
    add_group(tallies, group)
    assert tallies[group.task].num_groups == 6
    assert [one.mean for one in tally.recent] == [*map(float, range(1, RECENT_GROUPS)), 7.5]
    add_group(tallies, group._replace(task=""))
    assert list(tallies) == [group.task]


def test_results_show_the_shares_in_force() -> None:
    results = task_results({"sums": 3, "sorting": 4}, {"sums": 0.25}, {"sums": Tally(1, [GroupRewards(1.0, 1.0, 1.0)])})
    assert [(one.num_prompts, one.share, one.num_groups) for one in results.values()] == [(3, 0.25, 1), (4, 1.0, 0)]


@pytest.mark.parametrize("is_saved", [True, False])
def test_restart_has_the_results_of_its_checkpoint_and_of_groups_dropped_since(tmp_path: Path, *, is_saved: bool) -> None:
    """Groups trained on since the checkpoint are trained on again, and count then."""
    log = WillingLog(tmp_path / "log")
    desk = make_desk(log)
    actor = Actor(desk, "a").join(capacity=4)
    first, second, third, _ = (lease.lease_id for lease in actor.leases())
    if is_saved:
        actor.answer(first)
        desk.train()
    state = desk.dispatcher.state() if is_saved else None
    kept = {task: one.num_groups for task, one in desk.dispatcher.task_results(NUM_PROMPTS).items()}
    actor.answer(second, rewards=(0.0, 0.0))
    actor.answer(third)
    dropped = desk.dispatcher.task_results(NUM_PROMPTS)
    desk.train()
    log.close()
    position = state.log_end if state else None
    recovered = recover(state, read_log(log.folder, position), lambda _: None, make_prompts(4, "train", tuple(NUM_PROMPTS)), 0)
    assert task_results(NUM_PROMPTS, {}, recovered.ledger.tasks) == dropped
    assert sum(one.num_groups for one in dropped.values()) == sum(kept.values()) + 1
    if state is not None:
        assert sum(tally.num_groups for tally in state.ledger.tasks.values()) == sum(kept.values()), "a state does not change"
