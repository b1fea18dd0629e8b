"""The simulation, against schedules computed by hand, against production's own objects, and against queueing laws."""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.common.settings.config import StalenessSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.lab.simulation.account import Totals
from offbeat.lab.simulation.actors import Slots, sampled_versions
from offbeat.lab.simulation.simulation import SimulatedBatch, Simulation
from offbeat.lab.simulation.timings import DRAWN_AT_ONCE, Fleet, Timings
from offbeat.learner.dispatch.roster import LeaseTurns, Member
from offbeat.learner.leases.evaluation import Evaluations
from offbeat.learner.leases.staleness import StalenessPolicy
from offbeat.protocols.message_parts import EngineInfo, ModelHashes
from offbeat.protocols.messages import Hello

NO_EVALUATION = (0, 1)


def make_timings(
    completions_s: Sequence[Sequence[float]],
    *,
    train_s: float = 2.0,
    sync_s: float = 0.0,
    crowding: float = 0.0,
    handoff_s: float = 0.0,
    swap_s: float = 0.0,
    check_s: float = 0.0,
    rest_s: float = 0.0,
    load: float = 1.0,
) -> Timings:
    return Timings(
        np.array(completions_s, dtype=np.float64),
        np.array([train_s]),
        np.array([sync_s]),
        crowding=crowding,
        handoff_s=handoff_s,
        swap_s=swap_s,
        check_s=check_s,
        rest_s=rest_s,
        load=load,
    )


def run(
    timings: Timings,
    fleet: Fleet,
    *,
    bounds: StalenessSection,
    groups_per_step: int,
    num_steps: int = 4,
    weights_interval: int = 1,
    evaluation: tuple[int, int] = NO_EVALUATION,
    policy: type[StalenessPolicy] = StalenessPolicy,
    steps_per_batch: int = 1,
    epochs_per_batch: int = 1,
    seed: int = 0,
) -> list[SimulatedBatch]:
    """`evaluation` is interval and number of prompts, each with one completion."""
    train = TrainSection(
        num_steps=num_steps,
        groups_per_step=groups_per_step,
        steps_per_batch=steps_per_batch,
        epochs_per_batch=epochs_per_batch,
    )
    interval, num_prompts = evaluation
    simulation = Simulation(
        policy(bounds, train),
        Evaluations(interval=interval, num_prompts=num_prompts),
        timings,
        fleet,
        evaluation_group_size=1,
        weights_interval=weights_interval,
        seed=seed,
    )
    return simulation.run(num_steps)


def bound(max_staleness: int, **others: object) -> StalenessSection:
    return StalenessSection(max_staleness=max_staleness, **{"target": "bound"} | others)  # pyright: ignore[reportArgumentType]


def ends(batches: Sequence[SimulatedBatch]) -> list[float]:
    return [round(batch.ended_at, 9) for batch in batches]


# Schedules computed by hand


def test_synchronous_step_is_sync_then_generation_then_training() -> None:
    timings = make_timings([[3.0]], train_s=2.0, sync_s=0.5)
    batches = run(timings, Fleet(2, 1), bounds=bound(0), groups_per_step=2, num_steps=3)
    # 0.5 for the first weights, 3 to generate, 2 to train; and again.
    assert ends(batches) == [5.5, 11.0, 16.5]
    assert [batch.lags for batch in batches] == [{0: 2}] * 3
    assert [batch.waited_s for batch in batches] == [3.5, 3.5, 3.5]


def test_totals_of_a_synchronous_run_count_each_second_once() -> None:
    timings = make_timings([[3.0]], train_s=2.0, sync_s=0.5)
    totals = run(timings, Fleet(2, 1), bounds=bound(0), groups_per_step=2, num_steps=2)[-1].totals
    # Twice: both actors wait 0.5 for weights, generate for 3, and wait 2 for leases while the learner trains. The weights of
    # the second step are not there yet when it ends.
    assert totals == Totals(
        leased=4,
        trained=4,
        dropped=0,
        aborted=0,
        in_flight=0,
        generated_s=2 * 2 * 3.0,
        wasted_s=0.0,
        wait_leases_s=2 * 2 * 2.0,
        wait_weights_s=2 * 2 * 0.5,
        slots_s=2 * 2 * 3.0,
        open_s=2 * 2 * 3.0,
    )


def test_idle_actors_wait_for_leases_where_the_bound_admits_too_few_for_all() -> None:
    # One group a step for three actors: two never have a lease, and no newer weights would give them one.
    batches = run(make_timings([[3.0]], train_s=2.0, sync_s=0.5), Fleet(3, 1), bounds=bound(0), groups_per_step=1, num_steps=1)
    assert (batches[0].totals.wait_leases_s, batches[0].totals.wait_weights_s) == (2 * 3.0 + 3 * 2.0, 3 * 0.5)


def test_one_step_of_staleness_lets_generation_and_training_overlap() -> None:
    batches = run(make_timings([[3.0]], train_s=2.0), Fleet(2, 1), bounds=bound(1), groups_per_step=2, num_steps=4)
    # Groups end at 3, 6, 9, 12; those begun at 3 are of version 0 still (trained at 1), those begun at 6 of version 1 (at 2).
    assert ends(batches) == [5.0, 8.0, 11.0, 14.0]
    assert [batch.lags for batch in batches] == [{0: 2}, {1: 2}, {1: 2}, {1: 2}]
    assert [batch.waited_s for batch in batches] == [3.0, 1.0, 1.0, 1.0]


def test_group_is_as_old_as_the_weights_that_had_arrived_when_it_began() -> None:
    timings = make_timings([[3.0]], train_s=2.0, sync_s=1.5)
    batches = run(timings, Fleet(2, 1), bounds=bound(4), groups_per_step=2, num_steps=3)
    # Begun at 1.5, 4.5, 7.5. Version 1 is made at 6.5 and arrives at 8: the third batch is of version 0, and trained at 2.
    assert [batch.lags for batch in batches] == [{0: 2}, {1: 2}, {2: 2}]


def test_groups_on_one_actor_slow_one_another_by_the_crowding() -> None:
    shares = run(make_timings([[3.0]], crowding=1.0), Fleet(1, 4), bounds=bound(0), groups_per_step=4, num_steps=1)
    assert ends(shares) == [4 * 3 + 2]
    quarter = run(make_timings([[3.0]], crowding=0.25), Fleet(1, 4), bounds=bound(0), groups_per_step=4, num_steps=1)
    assert ends(quarter) == [1.75 * 3 + 2]


def test_engine_that_works_on_groups_in_turn_needs_the_sum_of_their_times() -> None:
    timings = make_timings([[1.0], [4.0]], crowding=1.0)
    batches = run(timings, Fleet(1, 5), bounds=bound(0), groups_per_step=5, num_steps=6)
    before = SimulatedBatch(0, 0.0, 0.0, {}, 0, Totals())
    for earlier, later in zip([before, *batches], batches, strict=False):
        generated_s = later.totals.generated_s - earlier.totals.generated_s
        assert later.ended_at - earlier.ended_at == pytest.approx(generated_s + 2)


def test_busy_processes_share_the_cores() -> None:
    # Two actors on one core: half as fast; the learner trains alone.
    one = run(make_timings([[3.0]]), Fleet(2, 1, cores=1), bounds=bound(0), groups_per_step=2, num_steps=1)
    assert ends(one) == [6 + 2]
    # A process that takes one core and a half.
    heavy = run(make_timings([[3.0]], load=1.5), Fleet(2, 1, cores=1), bounds=bound(0), groups_per_step=2, num_steps=1)
    assert ends(heavy) == [9 + 3]


def test_learner_slows_the_actors_down_while_it_trains() -> None:
    batches = run(make_timings([[3.0]], train_s=2.0), Fleet(1, 1, cores=1), bounds=bound(1), groups_per_step=1, num_steps=2)
    # From 3 on both are busy: 2 of training take until 7, by when 2 of the next group's 3 are done.
    assert ends(batches) == [7.0, 10.0]


def test_actor_that_swaps_weights_takes_its_share_of_the_cores_though_it_has_no_group() -> None:
    timings = make_timings([[3.0]], train_s=2.0, sync_s=1.5, swap_s=1.0)
    batches = run(timings, Fleet(1, 1, cores=1), bounds=bound(1), groups_per_step=1, num_steps=2)
    # Swapped from 1.5 to 2.5, generated until 5.5, trained beside the second group until 9.5. That ends at 10.5, and is trained
    # alone until 11, when version 1 arrives: its swap takes until 13, for training has half of the core. 0.5 are left.
    assert ends(batches) == [9.5, 13.5]


def test_new_weights_stop_an_actor_and_do_not_end_its_groups() -> None:
    timings = make_timings([[10.0]], train_s=4.0, sync_s=0.5, swap_s=1.0, check_s=2.0)
    batches = run(timings, Fleet(1, 1), bounds=bound(3), groups_per_step=1, num_steps=2)
    # Version 0 arrives at 0.5, is committed at 1.5, and from 3.5 on the first group is generated: trained from 13.5 to 17.5.
    # The second, begun at 13.5, is held up by version 1 from 18 to 21.
    assert ends(batches) == [17.5, 10 + 13.5 + 3 + 4]
    assert batches[1].lags == {1: 1}


def test_group_that_is_handed_over_keeps_its_slot() -> None:
    timings = make_timings([[3.0]], train_s=0.5, handoff_s=1.0)
    batches = run(timings, Fleet(1, 1), bounds=bound(1), groups_per_step=1, num_steps=3)
    assert ends(batches) == [4.5, 8.5, 12.5]


def test_group_that_waits_for_its_environment_holds_its_slot_and_nothing_of_the_engine() -> None:
    timings = make_timings([[1.0]], train_s=2.0, handoff_s=0.5, crowding=1.0)._replace(environment_s=np.array([4.0]))
    synchronous = run(timings, Fleet(1, 4), bounds=bound(0), groups_per_step=4, num_steps=2)
    # The engine works on four groups in turn for 4 seconds; they wait for 4 and are handed over together.
    assert ends(synchronous) == [10.5, 21.0]
    alone = run(timings, Fleet(1, 1), bounds=bound(4), groups_per_step=1, num_steps=3)
    assert ends(alone) == [7.5, 13.0, 18.5], "a single slot is free again 5.5 seconds after it was taken"


def test_groups_arrive_as_their_environments_end() -> None:
    timings = make_timings([[1.0], [1.0]], train_s=0.25)._replace(environment_s=np.array([0.0, 6.0]))
    batches = run(timings, Fleet(1, 2), bounds=bound(20), groups_per_step=1, num_steps=40)
    # One slot may wait for 6 seconds while the other brings a group each second.
    assert min(later - earlier for earlier, later in itertools.pairwise(ends(batches))) < 1.0
    assert batches[-1].totals.generated_s >= 40.0


def test_learner_rests_between_a_step_and_the_next_selection() -> None:
    timings = make_timings([[1.0]], train_s=2.0, rest_s=3.0)
    batches = run(timings, Fleet(1, 4), bounds=bound(4), groups_per_step=1, num_steps=3)
    assert ends(batches) == [3.0, 8.0, 13.0]


def test_weights_are_sent_at_their_interval() -> None:
    timings = make_timings([[1.0]], train_s=0.9)
    batches = run(timings, Fleet(1, 1), bounds=bound(8), groups_per_step=1, num_steps=8, weights_interval=4)
    # Begun at 0, 1, 2, ... and selected one second after; version 4 is there from 4.9 on.
    assert [lag for batch in batches for lag in batch.lags] == [0, 1, 2, 3, 4, 1, 2, 3]


def test_transfer_that_takes_longer_than_a_step_skips_versions() -> None:
    timings = make_timings([[1.0]], train_s=0.9, sync_s=2.5)
    batches = run(timings, Fleet(1, 1), bounds=bound(20), groups_per_step=1, num_steps=8)
    # Version 1, made at 4.4, arrives at 6.9; versions 2 and 3 are made meanwhile, and only 3 is sent, until 9.4.
    assert [lag for batch in batches for lag in batch.lags] == [0, 1, 2, 3, 4, 4, 5, 4]


def test_evaluation_takes_slots_before_training_does() -> None:
    timings = make_timings([[3.0, 1.0]], train_s=1.0)
    without = run(timings, Fleet(1, 1), bounds=bound(0), groups_per_step=1, num_steps=2)
    assert ends(without) == [4.0, 8.0]
    # At versions 0 and 1 two prompts of one completion, the first of each group: 3 seconds each.
    evaluated = run(timings, Fleet(1, 1), bounds=bound(0), groups_per_step=1, num_steps=2, evaluation=(1, 2))
    assert ends(evaluated) == [10.0, 20.0]
    assert evaluated[-1].totals.leased == 2


def test_several_steps_on_one_selection_age_its_groups() -> None:
    timings = make_timings([[1.0]], train_s=1.0)
    batches = run(timings, Fleet(1, 4), bounds=bound(1), groups_per_step=2, num_steps=4, steps_per_batch=2)
    assert [batch.policy_version for batch in batches] == [2, 4]
    assert batches[0].lags == {0: 2, 1: 2}
    assert batches[0].ended_at == 3.0


def test_group_is_over_the_bound_by_the_lag_that_it_is_counted_with() -> None:
    completions_s = np.random.default_rng(0).lognormal(0.0, 1.0, (400, 1)).tolist()
    batches = run(
        make_timings(completions_s, train_s=0.1),
        Fleet(3, 32),
        bounds=bound(8),
        groups_per_step=8,
        num_steps=120,
        steps_per_batch=2,
        epochs_per_batch=2,
    )
    over = [sum(number for lag, number in batch.lags.items() if lag > 8) for batch in batches]
    assert [batch.num_over_bound for batch in batches] == over
    assert sum(over) > 0


def seed_that_draws(*drawn: int) -> int:
    """A seed whose first groups are these rows of two."""

    def first(seed: int) -> list[int]:
        return np.random.default_rng(seed).spawn(3)[0].integers(2, size=DRAWN_AT_ONCE)[: len(drawn)].tolist()

    return next(seed for seed in range(10_000) if first(seed) == list(drawn))


def test_aborted_group_frees_its_slot_and_counts_as_far_as_it_came() -> None:
    batches = run(
        make_timings([[1.0], [100.0]], train_s=0.5),
        Fleet(1, 2),
        bounds=bound(1, staleness_policy="abort"),
        groups_per_step=1,
        num_steps=4,
        seed=seed_that_draws(1, 0, 0, 0, 0, 0),
    )
    # The first lease takes 100 s; the others, one at a time beside it, are trained at 1.5 and 3. Version 2 aborts it there, and
    # from then on two are generated at once.
    assert ends(batches) == [1.5, 3.0, 4.5, 5.0]
    assert [batch.totals.aborted for batch in batches] == [0, 1, 1, 1]
    assert (batches[1].totals.generated_s, batches[1].totals.wasted_s) == (1 + 1 + 3, 3)


def test_groups_are_offered_in_the_order_of_their_leases() -> None:
    selected: list[int] = []

    class Noting(StalenessPolicy):
        def select(self, ready: Sequence) -> list:
            groups = super().select(ready)
            selected.extend(group.lease_id for group in groups)
            return groups

    # While the first is trained until 11, the third is finished at 1, and the second at 5.
    timings = make_timings([[1.0], [5.0]], train_s=10.0)
    seed = seed_that_draws(0, 1, 0, 0)
    run(timings, Fleet(1, 3), bounds=bound(4), groups_per_step=1, num_steps=3, policy=Noting, seed=seed)
    assert selected == [0, 1, 2]


@pytest.mark.parametrize("seed", [1, 4, 8])
def test_groups_that_end_within_rounding_of_one_another_all_end(seed: int) -> None:
    # With these seeds there are groups that differ in progress and, by rounding, not in time.
    completions_s = [[0.0692], [0.0807], [0.0922]]
    timings = make_timings(completions_s, train_s=0.155, sync_s=0.06, crowding=1 / 3, swap_s=0.02, check_s=0.01)
    batches = run(timings, Fleet(3, 16, cores=2), bounds=bound(4), groups_per_step=32, num_steps=100, seed=seed)
    assert batches[-1].policy_version == 100


# The policy is production's


class OneAtATime(StalenessPolicy):
    """Admits a single open lease."""

    def admit(self, policy_version: int, num_open: int) -> int:
        return min(1 - num_open, super().admit(policy_version, num_open)) if num_open < 1 else 0


def test_policy_object_decides_what_is_leased() -> None:
    batches = run(make_timings([[3.0]]), Fleet(2, 4), bounds=bound(4), groups_per_step=1, num_steps=3, policy=OneAtATime)
    assert ends(batches) == [5.0, 10.0, 15.0]


class FirstIsDropped(StalenessPolicy):
    """Drops the group of lease 0, whatever its age."""

    def evict(self, ready: Sequence, policy_version: int) -> list:
        return [group for group in ready if group.lease_id == 0]


def test_policy_object_decides_what_is_dropped() -> None:
    batches = run(make_timings([[3.0]]), Fleet(1, 1), bounds=bound(4), groups_per_step=1, num_steps=2, policy=FirstIsDropped)
    assert ends(batches) == [8.0, 11.0]
    assert batches[0].totals.dropped == 1
    assert batches[0].totals.wasted_s == 3.0


def test_group_that_is_dropped_makes_room_for_a_lease_at_once() -> None:
    # The bound admits one group at a time: with the first dropped at 3 nothing else would ever happen.
    batches = run(make_timings([[3.0]]), Fleet(1, 1), bounds=bound(0), groups_per_step=1, num_steps=1, policy=FirstIsDropped)
    assert ends(batches) == [8.0]


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 5), st.integers(1, 4))
def test_slots_are_taken_as_the_dispatcher_takes_them(returns: list[int], num_actors: int, num_slots: int) -> None:
    slots = Slots(num_actors, num_slots)
    members: list[Member] = []
    engine = EngineInfo("none", "0", "float32", "cpu", 1, ModelHashes("", "", ""))
    for index in range(num_actors):
        name = str(index)
        hello = Hello(actor=name, incarnation=0, engine=engine, temperature=1.0, reward="", software="")
        members.append(Member(peer=name.encode(), hello=hello, last_heard=0.0, capacity=num_slots, policy_version=0))
    held: list[int] = []
    for turn, returned in enumerate(returns):
        if returned < 3 and held:
            actor = held.pop(returned % len(held))
            slots.give_back(actor)
            next(member for member in members if member.name == str(actor)).lease_ids.pop()
            continue
        member = LeaseTurns(members).take(0)
        actor = slots.take()
        assert actor == (None if member is None else int(member.name))
        if member is not None and actor is not None:
            member.lease_ids.add(turn)
            member.newest_lease_id = turn
            held.append(actor)


# Whatever the times are


def random_timings(seed: int) -> Timings:
    generator = np.random.default_rng(seed)
    completions_s = generator.lognormal(0, generator.uniform(0, 1.5), (200, 3))
    train_s, sync_s = generator.uniform(0, 2, 5), generator.uniform(0, 2, 5)
    pauses = generator.uniform(0, 0.2, 4) * generator.integers(0, 2, 4)
    crowding = float(generator.choice([0.0, 0.1, 1.0]))
    return Timings(completions_s, train_s, sync_s, crowding, *pauses.tolist(), load=1.3)


BOUNDS = st.builds(
    StalenessSection,
    max_staleness=st.integers(0, 4),
    staleness_policy=st.sampled_from(["gate", "drop", "abort"]),
    hard_max_staleness=st.none() | st.integers(4, 6),
    lag_of=st.sampled_from(["oldest_token", "token_mean", "last_segment"]),
)


@settings(deadline=None, max_examples=60)
@given(BOUNDS, st.integers(0, 1000), st.integers(1, 3), st.integers(1, 4), st.sampled_from([None, 2]))
def test_every_lease_is_accounted_for_and_none_above_the_hard_bound_is_trained(
    bounds: StalenessSection, seed: int, num_actors: int, num_slots: int, cores: int | None
) -> None:
    fleet = Fleet(num_actors, num_slots, cores)
    evaluation = (5, 3) if seed % 2 else NO_EVALUATION
    batches = run(random_timings(seed), fleet, bounds=bounds, groups_per_step=3, num_steps=20, seed=seed, evaluation=evaluation)
    assert [batch.policy_version for batch in batches] == list(range(1, 21))
    hard = bounds.hard_max_staleness if bounds.staleness_policy == "gate" else bounds.max_staleness
    for batch in batches:
        totals = batch.totals
        assert totals.leased == totals.trained + totals.dropped + totals.aborted + totals.in_flight
        assert totals.trained == 3 * batch.policy_version
        assert sum(batch.lags.values()) == 3
        assert min(batch.lags) >= 0
        if hard is not None and bounds.lag_of == "oldest_token":
            assert max(batch.lags) <= hard
        assert bounds.staleness_policy == "gate" or batch.num_over_bound == 0
    totals = batches[-1].totals
    assert 0 <= totals.wasted_s <= totals.generated_s * (1 + 1e-9)
    last = batches[-1].ended_at
    assert totals.slots_s <= num_actors * num_slots * last * (1 + 1e-9)
    assert totals.wait_leases_s + totals.wait_weights_s <= num_actors * last * (1 + 1e-9)
    if bounds.staleness_policy == "gate" and hard is None:
        assert not totals.dropped and not totals.aborted and not totals.wasted_s


def test_one_seed_gives_one_result() -> None:
    def play(seed: int) -> list[SimulatedBatch]:
        return run(random_timings(1), Fleet(2, 2), bounds=bound(2), groups_per_step=2, num_steps=20, seed=seed)

    assert play(0) == play(0)
    assert ends(play(0)) != ends(play(1))


def test_time_limit_ends_the_run() -> None:
    policy = StalenessPolicy(bound(0), TrainSection(num_steps=100, groups_per_step=2))
    evaluations = Evaluations(interval=0, num_prompts=1)
    timings = make_timings([[3.0]], train_s=2.0)
    simulation = Simulation(policy, evaluations, timings, Fleet(2, 1), evaluation_group_size=1, weights_interval=1, seed=0)
    assert ends(simulation.run(100, seconds=12.0)) == [5.0, 10.0]


# Ages


def test_version_is_averaged_over_tokens_and_the_first_end_decides_the_last_segment() -> None:
    commits = [(0.0, 3), (10.0, 4), (12.0, 6)]
    # From 8 on: 2 seconds of version 3, 2 of version 4, then version 6.
    assert sampled_versions(commits, 8.0, [1.0, 5.0]) == (pytest.approx((3 + 2 * 3 + 2 * 4 + 1 * 6) / 6), 3)
    assert sampled_versions(commits, 8.0, [3.0, 5.0]) == (pytest.approx((2 * 3 + 4 + 2 * 3 + 2 * 4 + 6) / 8), 4)
    assert sampled_versions(commits, 12.0, [3.0]) == (6.0, 6)


def test_lag_of_token_mean_counts_fewer_over_the_bound_than_of_the_oldest_token() -> None:
    def over(lag_of: str) -> int:
        timings = make_timings([[1.0], [30.0]], train_s=2.0)
        batches = run(timings, Fleet(4, 4), bounds=bound(2, lag_of=lag_of), groups_per_step=4, num_steps=60)
        return sum(batch.num_over_bound for batch in batches)

    assert over("oldest_token") > over("token_mean") > over("last_segment") == 0


# Laws


def steady(batches: list[SimulatedBatch], max_staleness: int) -> tuple[float, float, float, float]:
    """Seconds of a step, share of time that the learner waits, mean lag, and dropped among those that ended."""
    first, last = batches[len(batches) // 4], batches[-2 - max_staleness]
    span = batches[len(batches) // 4 + 1 : -1 - max_staleness]
    seconds = last.ended_at - first.ended_at
    lags = sum((Counter(batch.lags) for batch in span), Counter())
    dropped = last.totals.dropped - first.totals.dropped
    mean_lag = sum(lag * count for lag, count in lags.items()) / lags.total()
    waits = sum(batch.waited_s for batch in span) / seconds
    return seconds / len(span), waits, mean_lag, dropped / (dropped + lags.total())


@pytest.mark.parametrize(
    ("policy", "max_staleness", "step_s", "waits", "mean_lag", "dropped"),
    [
        ("gate", 4, 1.55, 0.0, 4.0, 0.0),
        ("gate", 1, 3.1, 0.5, 1.0, 0.0),
        ("drop", 2, 2.1, 0.26, 1.33, 0.149),
    ],
)
def test_policies_do_what_an_independent_simulation_of_them_did(
    policy: str, max_staleness: int, step_s: float, waits: float, mean_lag: float, dropped: float
) -> None:
    # 128 groups of 8 completions in flight, 32 a step, training of 1.55 s: the learner is the bottleneck.
    completions_s = np.random.default_rng(5).lognormal(-0.5, 1.0, (1 << 14, 8))
    timings = Timings(completions_s, np.array([1.55]), np.array([0.0]))
    bounds = bound(max_staleness, staleness_policy=policy)
    batches = run(timings, Fleet(1, 128), bounds=bounds, groups_per_step=32, num_steps=300)
    found = steady(batches, max_staleness)
    assert found == pytest.approx((step_s, waits, mean_lag, dropped), rel=0.05, abs=0.025)


def test_mean_lag_is_that_of_littles_law_where_actors_are_the_bottleneck() -> None:
    completions_s = np.random.default_rng(5).lognormal(-0.5, 1.0, (1 << 14, 8))
    # Training takes half of the time between steps: the law's phase.
    timings = Timings(completions_s, np.array([0.5 * completions_s.max(axis=1).mean() * 32 / 64]), np.array([0.0]))
    batches = run(timings, Fleet(4, 16), bounds=bound(50), groups_per_step=32, num_steps=400)
    _, _, mean_lag, _ = steady(batches, 50)
    first, last = batches[100].totals, batches[-52].totals
    law = (last.open_s - first.open_s) / (batches[-52].ended_at - batches[100].ended_at) / 32
    assert law == pytest.approx(64 / 32 + 0.5, rel=0.03)
    assert mean_lag == pytest.approx(law, rel=0.05)
