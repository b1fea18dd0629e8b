"""The alarm is silent while every lease is trained on, at any length, and sounds when long ones are left out."""

import heapq
import itertools
import math
import random
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pytest

from offbeat.common.settings.config import StalenessSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.learner.diagnostics.length_bias import (
    MONITOR_INTERVAL,
    MONITOR_WINDOW,
    BiasMonitor,
    BiasTest,
    EndedLease,
    bias_report,
    ended_group,
)
from offbeat.learner.leases.groups import Group, LagOf, Rollout
from offbeat.learner.leases.staleness import StalenessPolicy
from offbeat.protocols.payload import Segment, Turn

pytestmark = pytest.mark.slow


class Simulated(NamedTuple):
    """A group of a simulated run; ordered by its lease."""

    lease_id: int
    oldest_version: int
    duration_s: float

    def lag_of(self, measured: LagOf, policy_version: int) -> float:
        return max(0, policy_version - self.oldest_version)


def simulate(bounds: StalenessSection, *, load: float, seed: int, num_slots: int = 0, num_steps: int = 60) -> list[EndedLease]:
    """Simulate a run under the production policy: 8 groups a step, lognormal durations with sigma 1, no time for weights.

    `load`: time of a step over the time in which the actors generate its groups; above 1 the learner is the slower side.
    `num_slots`: leases that the actors work on at a time; 0 for as many as are ever admitted.
    """
    draw = random.Random(seed)
    policy = StalenessPolicy(bounds, TrainSection(groups_per_step=8, num_steps=num_steps))
    num_slots = num_slots or policy.admit(0, 0)
    step_s = load * 8 * math.exp(0.5) / num_slots
    now, version, num_leased, num_open, done_at = 0.0, 0, 0, 0, math.inf
    generating: list[tuple[float, Simulated]] = []
    ready: list[Simulated] = []
    batch: list[Simulated] = []
    ended: list[EndedLease] = []

    def end(groups: Iterable[Simulated], outcome: str, taken_at: float) -> None:
        for group in groups:
            length = 100 * group.duration_s * draw.lognormvariate(0, 0.3)
            reason = "" if outcome == "trained" else "stale"
            ended.append(EndedLease(group.lease_id, outcome, reason, length, group.duration_s, draw.random(), taken_at))

    selected_at = 0.0
    while version < num_steps:
        while len(generating) < num_slots and policy.admit(version, num_open):
            duration_s = draw.lognormvariate(0, 1)
            heapq.heappush(generating, (now + duration_s, Simulated(num_leased, version, duration_s)))
            num_leased, num_open = num_leased + 1, num_open + 1
        if not batch:
            evicted = policy.evict(sorted(ready), version)
            end(evicted, "dropped", now)
            ready = [group for group in ready if group not in evicted]
            num_open -= len(evicted)
            batch = policy.select(sorted(ready))
            if batch:
                ready = [group for group in ready if group not in batch]
                selected_at, done_at = now, now + step_s
                continue
            if evicted:
                continue
        if generating and generating[0][0] <= done_at:
            now, group = heapq.heappop(generating)
            ready.append(group)
        else:
            end(batch, "trained", selected_at)
            num_open, version, now, done_at = num_open - len(batch), version + 1, done_at, math.inf
            batch = []
    return ended


def comparison_of(ended: list[EndedLease], quantity: str) -> BiasTest:
    return next(comparison for comparison in bias_report(ended).comparisons if comparison.quantity == quantity)


def in_turn(num_groups: int, seed: int = 0) -> list[EndedLease]:
    """Return groups that were all trained in their turn, 8 to a batch."""
    lengths = np.random.default_rng(seed).lognormal(5, 1, num_groups)
    return [
        EndedLease(index, "trained", "", float(length), float(length) / 50, 0.5, taken_at=index // 8)
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("num_slots", [0, 12])
@pytest.mark.parametrize("load", [0.5, 1.0, 2.0, 4.0])
def test_alarm_is_silent_under_the_gate(max_staleness: int, load: float, num_slots: int):
    for seed in range(3):
        ended = simulate(StalenessSection(max_staleness=max_staleness), load=load, seed=seed, num_slots=num_slots)
        monitor = BiasMonitor()
        assert bias_report(ended).alarm is None
        assert [alarm for lease in ended if (alarm := monitor.take(lease))] == []


def test_long_groups_are_late_where_actors_hold_training_back():
    slow_actors = bias_report(simulate(StalenessSection(max_staleness=4), load=0.5, seed=0)).lateness
    slow_learner = bias_report(simulate(StalenessSection(max_staleness=4), load=4.0, seed=0)).lateness
    assert slow_actors is not None
    assert slow_learner is not None
    assert slow_actors.share > 0.2
    assert slow_actors.duration_correlation > 0.7
    assert slow_learner.share < slow_actors.share / 2


def test_alarm_is_raised_when_late_groups_are_dropped():
    for seed in range(3):
        ended = simulate(StalenessSection(max_staleness=2, staleness_policy="drop"), load=1.0, seed=seed)
        alarm = bias_report(ended).alarm
        assert alarm is not None
        assert "were dropped" in alarm
        assert comparison_of(ended, "duration_s").effect > 0.5
        monitor = BiasMonitor()
        assert any(monitor.take(lease) for lease in ended)


def test_parts_are_summed_up_by_outcome():
    ended = [
        EndedLease(0, "trained", "", 10.0, 1.0, 0.0),
        EndedLease(1, "trained", "", 20.0, 3.0, 1.0),
        EndedLease(2, "dropped", "stale", 90.0, 8.0, 1.0),
        EndedLease(3, "expired", "actor_lost", duration_s=30.0),
        EndedLease(4, "dropped", "aborted"),
    ]
    parts = {part.name: part for part in bias_report(ended).parts}
    assert {name: part.count for name, part in parts.items()} == {
        "generated": 3,
        "trained": 2,
        "dropped: stale": 1,
        "expired: actor_lost": 1,
        "dropped: aborted": 1,
    }
    generated, trained = parts["generated"].length, parts["trained"].duration_s
    assert generated is not None
    assert trained is not None
    assert (generated.mean, generated.median, generated.p95) == (40.0, 20.0, pytest.approx(83.0))
    assert (trained.mean, trained.median, trained.p95) == (2.0, 2.0, pytest.approx(2.9))
    assert parts["expired: actor_lost"].length is None
    assert parts["dropped: aborted"].duration_s is None


def test_effect_and_p_of_a_separation_are_those_worked_by_hand():
    trained = [EndedLease(i, "trained", "", float(i)) for i in range(3)]
    dropped = [EndedLease(3 + i, "dropped", "stale", 10.0 + i) for i in range(3)]
    comparison = comparison_of([*trained, *dropped], "length")
    # U = 9 of 9 pairs; mean 4.5, variance 3 * 3 * 7 / 12; a continuity correction of one half.
    z = (9 - 4.5 - 0.5) / math.sqrt(3 * 3 * 7 / 12)
    assert comparison.effect == 1.0
    assert comparison.p_value == pytest.approx(math.erfc(z / math.sqrt(2)))
    assert (comparison.mean, comparison.mean_of_others, comparison.share) == (11.0, 1.0, 0.5)
    assert comparison_of([*dropped, *trained], "reward").p_value == 1.0, "of nothing known nothing follows"


def test_alarm_needs_significance_size_and_more_than_a_few():
    sure = BiasTest("length", 100, 900, 2.0, 1.0, 0.5, 1e-9)
    assert sure.is_alarming()
    assert not BiasTest("length", 100, 900, 2.0, 1.0, 0.5, 1e-2).is_alarming()
    assert not BiasTest("length", 100, 900, 2.0, 1.0, 0.1, 1e-9).is_alarming()
    assert not BiasTest("length", 5, 995, 2.0, 1.0, 0.9, 1e-9).is_alarming()
    assert not BiasTest("length", 19, 900, 2.0, 1.0, 0.9, 1e-9).is_alarming()
    assert BiasTest("length", 100, 900, 1.0, 2.0, -0.5, 1e-9).is_alarming(), "dropping what is short is bias too"


def test_single_group_of_another_length_among_a_few_drops_raises_no_alarm() -> None:
    equal = [EndedLease(number, "trained", length=6.0, duration_s=1.0, reward=0.5) for number in range(120)]
    dropped = [lease._replace(outcome="dropped", reason="stale") for lease in equal[:4]]
    assert bias_report([*equal, *dropped[:3], dropped[3]._replace(length=5.75)]).alarm is None


def test_random_drops_raise_no_alarm_even_where_lengths_grow_and_drops_come_late():
    num_alarms = 0
    for seed in range(40):
        draw = np.random.default_rng(seed)
        ended = in_turn(1000, seed)
        for index in np.flatnonzero(draw.random(1000) < 0.15):
            if index > 600:
                ended[index] = ended[index]._replace(outcome="dropped", reason="stale")
        grown = [lease._replace(length=lease.length * math.exp(2 * lease.lease_id / 1000)) for lease in ended]
        num_alarms += bias_report(grown).alarm is not None
    assert num_alarms <= 1


def test_groups_without_signal_are_no_bias():
    ended = in_turn(1000)
    threshold = np.quantile([lease.length for lease in ended], 0.8)
    by_length = [lease._replace(outcome="dropped") if lease.length > threshold else lease for lease in ended]
    assert bias_report([lease._replace(reason="stale") for lease in by_length]).alarm
    assert bias_report([lease._replace(reason="zero_variance") for lease in by_length]).alarm is None


def test_unfinished_leases_count_with_the_time_they_had():
    given_up = [EndedLease(1000 + i, "expired", "no group within 60 s", duration_s=60.0) for i in range(30)]
    ended = [lease for pair in zip(in_turn(1000)[::33], given_up, strict=False) for lease in pair] + in_turn(1000)[1:]
    report = bias_report(ended)
    assert report.alarm is not None
    assert "seconds" in report.alarm and "tokens" not in report.alarm


def test_groups_trained_in_their_turn_are_not_late():
    lateness = bias_report(in_turn(64)).lateness
    assert lateness is not None
    assert (lateness.share, lateness.mean_batches, lateness.length_correlation) == (0.0, 0.0, 0.0)


def test_lateness_is_in_batches_and_correlates_with_what_made_it():
    # Lease 0 is trained in the third batch of two, and is the longest.
    taken_at = {1: 0, 2: 0, 3: 1, 4: 1, 0: 2, 5: 2}
    ended = [EndedLease(i, "trained", "", 100.0 if i == 0 else i, 1.0, 0.5, at) for i, at in taken_at.items()]
    lateness = bias_report(ended).lateness
    assert lateness is not None
    assert lateness.share == pytest.approx(1 / 6)
    assert lateness.mean_batches == 2.0
    # Turns 0 0 1 1 2 2 of leases 0..5: displacements 2 0 -1 0 -1 0, ranks 6 4 1.5 4 1.5 4; ranks of lengths 6 1 2 3 4 5.
    expected = np.corrcoef([6, 4, 1.5, 4, 1.5, 4], [6, 1, 2, 3, 4, 5])[0, 1]
    assert lateness.length_correlation == pytest.approx(expected)
    assert lateness.duration_correlation == 0.0, "all took equally long"


def test_nothing_known_gives_an_empty_report():
    report = bias_report([])
    assert [(part.name, part.count) for part in report.parts] == [("generated", 0), ("trained", 0)]
    assert report.alarm is None
    assert report.lateness is None
    assert bias_report([EndedLease(0, "trained", "", 1.0)]).lateness is None, "when it was selected is not known"


def test_monitor_tells_an_alarm_once_for_a_window():
    monitor = BiasMonitor()
    alarms: list[int] = []
    for index, lease in enumerate(in_turn(3 * MONITOR_WINDOW)):
        long = lease.length > 300
        told = monitor.take(lease._replace(outcome="dropped", reason="stale") if long else lease)
        if told:
            alarms.append(index)
            assert "were dropped" in told
    first = alarms[0]
    assert first <= 2 * MONITOR_INTERVAL
    assert alarms == [first, first + MONITOR_WINDOW, first + 2 * MONITOR_WINDOW]


def test_monitor_forgets_what_is_older_than_its_window():
    monitor = BiasMonitor()
    for lease in in_turn(MONITOR_WINDOW):
        monitor.take(lease._replace(outcome="dropped", reason="stale") if lease.length > 300 else lease)
    later = [monitor.take(lease) for lease in in_turn(3 * MONITOR_WINDOW, seed=1)]
    assert not any(later[MONITOR_WINDOW:])


def test_group_of_the_learner_becomes_an_ended_lease():
    def rollout(length: int, reward: float) -> Rollout:
        ids = np.zeros(length, dtype=np.int32)
        return Rollout(ids, ids.astype(np.float32), reward, "stop", (Segment(0, 0),))

    group = Group(7, 0, np.zeros(3, dtype=np.int32), (rollout(4, 1.0), rollout(8, 0.0)), "actor", 2.5)
    ended = ended_group(group, outcome="dropped", reason="stale", taken_at=3.0)
    assert ended == EndedLease(7, "dropped", "stale", 6.0, 2.5, 0.5, 3.0)


def test_turns_and_time_of_the_environment_are_compared_where_there_are_episodes() -> None:
    trained = in_turn(300)
    quantities = {comparison.quantity for comparison in bias_report(trained).comparisons}
    assert quantities == {"length", "duration_s", "reward"}
    episodes = [lease._replace(num_turns=3.0, environment_s=1.0 + lease.lease_id % 7) for lease in trained]
    # Dropped ones differ from the trained in nothing but their turns and their tools' time.
    dropped = [
        lease._replace(lease_id=1000 + lease.lease_id, outcome="dropped", reason="stale", num_turns=9.0, environment_s=60.0)
        for lease in episodes[::5]
    ]
    ended = [lease for pair in itertools.zip_longest(episodes, dropped) for lease in pair if lease is not None]
    alarm = bias_report(ended).alarm
    assert alarm is not None
    assert "mean turns 9.0 against 3.0" in alarm
    assert "environment's seconds 60.00 against" in alarm
    assert "tokens" not in alarm


def test_turns_of_a_group_are_the_mean_over_its_episodes() -> None:
    def rollout(num_turns: int, seconds: float) -> Rollout:
        ids = np.zeros(4, dtype=np.int32)
        turns = tuple(Turn(1, 1) for _ in range(num_turns)) if num_turns > 1 else ()
        return Rollout(ids, ids.astype(np.float32), 0.0, "stop", (Segment(0, 0),), turns=turns, environment_s=seconds)

    def ended(*rollouts: Rollout) -> EndedLease:
        group = Group(1, 0, np.zeros(2, dtype=np.int32), rollouts, "a", 5.0)
        return ended_group(group, outcome="trained", reason="", taken_at=1.0)

    lease = ended(rollout(1, 2.0), rollout(4, 4.0))
    assert (lease.num_turns, lease.environment_s) == (2.5, 3.0)
    assert math.isnan(ended(rollout(1, 0.0)).num_turns), "no environment"
