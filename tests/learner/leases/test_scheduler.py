"""The scheduler's decisions on hand-made leases, and its guarantees over whole runs in any order."""

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.learner.leases.evaluation import Evaluations, Round
from offbeat.learner.leases.groups import Group
from offbeat.learner.leases.ledger import Ledger
from offbeat.learner.leases.scheduler import LeaseTarget, RolloutScheduler
from offbeat.learner.leases.staleness import StalenessPolicy
from tests.learner.leases.event_makers import make_granted
from tests.learner.leases.scheduled_runs import SHAPES, InFlight, Shape, Shelf, make_group, make_policy, play


@dataclass
class Takers:
    """Actors with this many slots in all, and weights of one version; they note what they are offered."""

    books: Shelf
    num_slots: int
    policy_version: int = 0
    offered: list[str] = field(default_factory=list)
    leased: list[str] = field(default_factory=list)

    def lease_evaluation(self, round_: Round) -> bool:
        if not self._has_slot(f"evaluation {round_.policy_version}", round_.policy_version):
            return False
        round_.next_prompt(1000 + len(self.leased))
        return True

    def lease_training(self, min_policy_version: int) -> bool:
        if not self._has_slot(f"training {min_policy_version}", min_policy_version):
            return False
        self.books.in_flight.append(InFlight(self.books.num_open, min_policy_version))
        return True

    def _has_slot(self, offer: str, min_policy_version: int) -> bool:
        self.offered.append(offer)
        if len(self.leased) == self.num_slots or self.policy_version < min_policy_version:
            return False
        self.leased.append(offer)
        return True


def make_scheduler(
    policy: StalenessPolicy, books: Shelf, *, num_eval_prompts: int = 0, evaluated_at: int = 0
) -> RolloutScheduler[Group]:
    evaluations = Evaluations(interval=1, num_prompts=num_eval_prompts)
    evaluations.reach(evaluated_at)
    return RolloutScheduler(policy, evaluations, books)


def test_due_evaluation_is_leased_before_training() -> None:
    actors = Takers(books := Shelf(), num_slots=3)
    make_scheduler(make_policy(4), books, num_eval_prompts=2).grant(0, actors)
    assert actors.leased == ["evaluation 0", "evaluation 0", "training 0"]


def test_evaluation_that_no_actor_has_the_weights_for_does_not_hold_up_training() -> None:
    actors = Takers(books := Shelf(), num_slots=3, policy_version=4)
    make_scheduler(make_policy(4), books, num_eval_prompts=2, evaluated_at=5).grant(5, actors)
    assert actors.offered[0] == "evaluation 5"
    assert actors.leased == ["training 1", "training 1", "training 2"]


def test_each_lease_asks_for_the_weights_that_its_place_in_line_needs() -> None:
    actors = Takers(books := Shelf(in_flight=[InFlight(0, 3)]), num_slots=9, policy_version=5)
    make_scheduler(make_policy(1), books).grant(5, actors)
    # Two groups a step: places 0 and 1 are trained at version 5, 2 and 3 at 6.
    assert actors.leased == ["training 4", "training 5", "training 5"]


def test_nothing_more_is_offered_once_no_actor_takes_a_lease() -> None:
    actors = Takers(books := Shelf(), num_slots=9, policy_version=4)
    make_scheduler(make_policy(1), books).grant(5, actors)
    assert actors.offered == ["training 4", "training 4", "training 5"]
    assert actors.leased == ["training 4", "training 4"]


def test_groups_being_trained_on_and_ready_count_as_open() -> None:
    actors = Takers(books := Shelf(ready=[make_group(1, 0)], num_training=2), num_slots=9)
    make_scheduler(make_policy(1), books).grant(0, actors)
    assert len(actors.leased) == 1


@pytest.mark.parametrize(("num_open", "held_back"), [(4, True), (15, True), (16, False)])
def test_run_is_held_back_until_its_last_lease_is_open(num_open: int, held_back: bool) -> None:
    # 8 steps of two groups.
    books = Shelf(num_training=num_open)
    assert make_scheduler(make_policy(1, num_steps=8), books).is_held_back(0) == held_back


def test_aborted_leases_are_told_by_ascending_id() -> None:
    books = Shelf(in_flight=[InFlight(7, 2), InFlight(3, 2), InFlight(5, 3)])
    assert make_scheduler(make_policy(2, staleness_policy="abort"), books).abort(5) == [3, 7]


def test_groups_past_the_hard_bound_are_dropped_before_a_batch_is_selected() -> None:
    groups = [make_group(0, 0), make_group(1, 3), make_group(2, 1), make_group(3, 3), make_group(4, 0)]
    books = Shelf(ready=list(groups))
    dropped: list[int] = []

    def drop(group: Group) -> None:
        dropped.append(group.lease_id)
        books.ready.remove(group)

    selected = make_scheduler(make_policy(2, staleness_policy="drop"), books).select(4, drop)
    # The last one has its turn with the next batch.
    assert dropped == [0, 2]
    assert [group.lease_id for group in selected] == [1, 3]


def test_dropped_groups_leave_no_batch_and_make_room_for_leases() -> None:
    books = Shelf(ready=[make_group(0, 0), make_group(1, 4)])
    actors = Takers(books, num_slots=9, policy_version=4)
    scheduler = make_scheduler(make_policy(0, staleness_policy="drop"), books)
    scheduler.grant(4, actors)
    assert actors.leased == []
    assert scheduler.select(4, books.ready.remove) == []
    scheduler.grant(4, actors)
    assert actors.leased == ["training 4"]


def test_nothing_is_dropped_before_a_batch_is_complete() -> None:
    books = Shelf(ready=[make_group(0, 0)])
    scheduler = make_scheduler(make_policy(0, staleness_policy="drop"), books)
    assert scheduler.select(7, books.ready.remove) == []
    scheduler.evict(7, books.ready.remove)
    assert len(books.ready) == 1


def test_ledger_keeps_the_books_of_the_live_run() -> None:
    ledger = Ledger()
    ledger.apply(make_granted(3))
    policy = make_policy(2, groups_per_step=1, staleness_policy="abort")
    scheduler: RolloutScheduler[Group] = RolloutScheduler(policy, Evaluations(interval=0, num_prompts=0), ledger)
    assert scheduler.abort(3) == [3]
    ledger.restore(group := make_group(3, 0), None)
    assert scheduler.abort(3) == []
    assert scheduler.select(2, lambda group: None) == [group]


# Over whole runs


@settings(deadline=None)
@given(SHAPES, st.data())
def test_groups_that_finish_in_order_never_exceed_max_staleness(shape: Shape, data: st.DataObject) -> None:
    assert max(play(shape, data, in_order=True).lags) <= shape.max_staleness


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_max_staleness_0_trains_at_lag_0_exactly_whatever_the_order(
    groups_per_step: int, num_steps: int, data: st.DataObject
) -> None:
    run = play(Shape(0, 1, 1, groups_per_step, num_steps), data, in_order=False)
    assert run.lags == {0: num_steps * groups_per_step}


@settings(deadline=None)
@given(SHAPES, st.data())
def test_every_run_ends_whatever_the_order(shape: Shape, data: st.DataObject) -> None:
    run = play(shape, data, in_order=False)
    assert run.num_trained == shape.num_groups
    assert run.num_trained == run.next_lease_id


@settings(deadline=None)
@given(SHAPES, st.integers(0, 2), st.data())
def test_hard_bound_is_never_exceeded_and_the_run_ends(shape: Shape, slack: int, data: st.DataObject) -> None:
    # Below `batch_steps - 1` the last step of a batch could never be trained.
    hard = shape.batch_steps - 1 + slack
    run = play(shape, data, in_order=False, hard=hard)
    assert max(run.lags) <= hard
    assert run.num_trained + run.num_dropped == run.next_lease_id


@settings(deadline=None)
@given(SHAPES, st.sampled_from(["drop", "abort"]), st.data())
def test_drop_and_abort_never_train_beyond_max_staleness_and_the_run_ends(
    shape: Shape, staleness_policy: Literal["drop", "abort"], data: st.DataObject
) -> None:
    run = play(shape, data, in_order=False, staleness_policy=staleness_policy)
    assert max(run.lags) <= shape.max_staleness
    assert run.num_trained + run.num_dropped + run.num_aborted == run.next_lease_id
    assert staleness_policy == "abort" or not run.num_aborted


def test_target_ends_a_round_of_grants_before_the_bound_and_asks_for_newer_weights() -> None:
    policy, books = make_policy(4), Shelf()
    target = LeaseTarget(policy, 1)
    evaluations = Evaluations(interval=0, num_prompts=0)
    scheduler = RolloutScheduler[Group](policy, evaluations, books, target)
    actors = Takers(books, num_slots=100, policy_version=3)
    scheduler.grant(3, actors)
    size = policy.batch_groups
    assert actors.leased == ["training 2"] * size + ["training 3"] * size
    assert not scheduler.is_held_back(3), "the bound admits more"


def test_target_as_wide_as_the_bound_leaves_staleness_to_hold_actors_back() -> None:
    policy, books = make_policy(1), Shelf()
    evaluations = Evaluations(interval=0, num_prompts=0)
    scheduler = RolloutScheduler[Group](policy, evaluations, books, LeaseTarget(policy, 1))
    scheduler.grant(0, Takers(books, num_slots=100))
    assert books.num_open == policy.most_open == 2 * policy.batch_groups
    assert scheduler.is_held_back(0)
