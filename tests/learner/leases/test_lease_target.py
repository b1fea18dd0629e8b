"""The lease target: as few leases as keep the learner from waiting, within the bound."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.common.settings.checks import least_staleness
from offbeat.common.settings.config import Config, StalenessSection, WeightsSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.lab.simulation.simulation import Fleet, SimulatedBatch, Simulation, Timings
from offbeat.learner.leases.evaluation import Evaluations, Round
from offbeat.learner.leases.scheduler import LONGEST_WINDOW, WINDOW, LeaseTarget, RolloutScheduler
from offbeat.learner.leases.staleness import StalenessPolicy
from tests.learner.leases.scheduled_runs import Shelf, make_group, make_policy

pytestmark = pytest.mark.slow  # simulates runs

STEP_S = 10.0


class Learner:
    """A learner that asks for batches of 4 groups, with a bound that admits 5 batches."""

    def __init__(self, max_staleness: int = 4) -> None:
        policy = StalenessPolicy(StalenessSection(max_staleness=max_staleness), TrainSection(groups_per_step=4, num_steps=1000))
        self.policy = policy
        self.target = LeaseTarget(policy, 1)
        self.now = 0.0
        self.batch(num_ready=4)

    def batch(self, *, num_ready: int, waited_s: float = 0.0) -> int:
        """Ask for a batch with so many groups ready, get it so much later, and train; return the limit."""
        self.target.ask(num_ready, self.now)
        self.target.ask(num_ready + 1, self.now + waited_s / 2)
        self.now += waited_s
        self.target.take(self.now)
        self.now += STEP_S
        return self.target.limit


def test_a_run_begins_with_one_batch_beside_the_one_in_training() -> None:
    assert Learner().target.limit == 8
    assert Learner(max_staleness=0).target.limit == 4, "the bound admits no more"


def test_first_batch_is_waited_for_in_every_run_and_changes_nothing() -> None:
    learner = Learner()
    target = LeaseTarget(learner.policy, 1)
    target.ask(0, 0.0)
    target.take(1000.0)
    assert target.limit == 8


def test_groups_that_were_missing_are_added_up_to_the_bound() -> None:
    learner = Learner()
    assert learner.batch(num_ready=1, waited_s=5.0) == 11
    assert [learner.batch(num_ready=0, waited_s=5.0) for _ in range(4)] == [15, 19, 20, 20]


def test_a_wait_of_less_than_a_hundredth_of_the_time_is_none() -> None:
    learner = Learner()
    assert learner.batch(num_ready=3, waited_s=0.09) == 8
    assert learner.batch(num_ready=3, waited_s=0.2) == 9


def test_groups_that_are_always_to_spare_are_taken_away_and_never_below_two_batches() -> None:
    learner = Learner()
    for _ in range(3):
        learner.batch(num_ready=0, waited_s=5.0)
    assert learner.target.limit == 20
    assert [learner.batch(num_ready=9 if index else 7) for index in range(WINDOW)][-1] == 17
    assert [learner.batch(num_ready=30) for _ in range(WINDOW)][-1] == 8


def test_taking_too_much_away_doubles_the_time_until_the_next_try() -> None:
    learner = Learner()
    learner.batch(num_ready=0, waited_s=5.0)
    for tries in range(6):
        window = min(WINDOW * 2**tries, LONGEST_WINDOW)
        assert [learner.batch(num_ready=5) for _ in range(window - 1)] == [12] * (window - 1)
        assert learner.batch(num_ready=5) == 11
        assert learner.batch(num_ready=3, waited_s=1.0) == 12


def test_narrower_bound_holds_at_once() -> None:
    learner = Learner()
    for _ in range(3):
        learner.batch(num_ready=0, waited_s=5.0)
    learner.policy.bounds = StalenessSection(max_staleness=1)
    assert learner.target.limit == 8


def test_leases_need_weights_as_new_as_the_limit_allows() -> None:
    learner = Learner()
    # Place 0 of the line is trained at version 10, place 4 at 11.
    assert [learner.target.min_policy_version(10, place) for place in (0, 4)] == [9, 10]
    learner.batch(num_ready=3, waited_s=5.0)
    assert [learner.target.min_policy_version(10, place) for place in (0, 4, 8)] == [8, 9, 10]
    assert learner.policy.min_policy_version(10, 4) == 7, "the bound alone"


@dataclass
class Actors:
    """Actors without a limit on their leases, which answer at once and have the newest published weights."""

    books: Shelf
    sent: int = 0

    def lease_evaluation(self, round_: Round) -> bool:
        raise AssertionError("there are no evaluations")

    def lease_training(self, min_policy_version: int) -> bool:
        if self.sent < min_policy_version:
            return False
        self.books.ready.append(make_group(self.books.num_open, self.sent))
        return True


def sizes_at_batches(
    bound: int, steps_per_batch: int, epochs_per_batch: int, weights_interval: int, num_batches: int = 12
) -> list[int]:
    """Return the number of open leases at each batch of 2 groups a step, until one is not complete."""
    num_steps = num_batches * steps_per_batch * epochs_per_batch
    policy, actors = make_policy(bound, steps_per_batch, epochs_per_batch, num_steps=num_steps), Actors(Shelf())
    evaluations, target = Evaluations(interval=0, num_prompts=0), LeaseTarget(policy, weights_interval)
    scheduler = RolloutScheduler(policy, evaluations, actors.books, target)
    sizes: list[int] = []
    for version in range(0, num_steps, policy.batch_steps):
        if version // weights_interval > (version - policy.batch_steps) // weights_interval:
            actors.sent = version
        scheduler.grant(version, actors)
        selected = scheduler.select(version, actors.books.ready.remove)
        if not selected:
            break
        sizes.append(actors.books.num_open)
        scheduler.ask(float(version))
        scheduler.take(float(version))
        del actors.books.ready[: len(selected)]
    return sizes


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 6))
def test_run_ends_under_every_bound_that_the_settings_allow(
    steps_per_batch: int, epochs_per_batch: int, weights_interval: int, above_least: int
) -> None:
    train = TrainSection(steps_per_batch=steps_per_batch, epochs_per_batch=epochs_per_batch)
    least = least_staleness(Config(train=train, weights=WeightsSection(interval=weights_interval)))
    assert len(sizes_at_batches(least + above_least, steps_per_batch, epochs_per_batch, weights_interval)) == 12


def test_a_batch_is_generated_beside_the_one_in_training_whatever_the_steps_of_a_batch() -> None:
    # Two batches at each but the last, whose successor would be trained after the end of the run.
    assert sizes_at_batches(12, 1, 1, weights_interval=1, num_batches=4) == [4, 4, 4, 2]
    assert sizes_at_batches(12, 2, 1, weights_interval=1, num_batches=4) == [8, 8, 8, 4]
    assert sizes_at_batches(12, 1, 2, weights_interval=1, num_batches=4) == [4, 4, 4, 2]
    assert sizes_at_batches(12, 1, 1, weights_interval=4, num_batches=4) == [4, 4, 4, 2]


def simulate(target: str, *, train_s: float, max_staleness: int, sigma: float = 0.5) -> list[SimulatedBatch]:
    """32 groups at once that take 1 s each, in batches of 8."""
    completions_s = np.random.default_rng(0).lognormal(0.0, sigma, (400, 8))
    timings = Timings(completions_s / completions_s.max(1).mean(), np.array([train_s]), np.array([0.02]))
    train = TrainSection(num_steps=200, groups_per_step=8)
    bounds = StalenessSection(max_staleness=max_staleness, target=target)  # pyright: ignore[reportArgumentType]
    evaluations = Evaluations(interval=0, num_prompts=0)
    policy, fleet = StalenessPolicy(bounds, train), Fleet(4, 8)
    simulation = Simulation(policy, evaluations, timings, fleet, evaluation_group_size=1, weights_interval=1, seed=0)
    return simulation.run(200)[40 : -max_staleness - 1]


def step_s(batches: list[SimulatedBatch]) -> float:
    return (batches[-1].ended_at - batches[0].ended_at) / (len(batches) - 1)


def mean_lag(batches: list[SimulatedBatch]) -> float:
    lags = [(lag, number) for batch in batches for lag, number in batch.lags.items()]
    return sum(lag * number for lag, number in lags) / sum(number for _, number in lags)


@pytest.mark.parametrize("train_s", [0.1, 0.25, 0.3, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("max_staleness", [1, 4, 8])
def test_throughput_is_that_of_the_bound_within_two_percent(train_s: float, max_staleness: int) -> None:
    of_bound = simulate("bound", train_s=train_s, max_staleness=max_staleness)
    of_target = simulate("auto", train_s=train_s, max_staleness=max_staleness)
    assert step_s(of_target) == pytest.approx(step_s(of_bound), rel=0.02)
    assert mean_lag(of_target) <= mean_lag(of_bound) + 0.01


def test_groups_are_a_step_old_where_generation_outpaces_training() -> None:
    assert mean_lag(simulate("bound", train_s=3.0, max_staleness=8)) == pytest.approx(8.0, abs=0.1)
    assert mean_lag(simulate("auto", train_s=3.0, max_staleness=8)) == pytest.approx(1.0, abs=0.1)
