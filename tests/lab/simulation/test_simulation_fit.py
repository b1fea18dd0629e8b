"""Times fitted to recorded runs are those that each process would have had alone."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import ActorRow, CommitRow, EvalRow, StepRow
from offbeat.lab.history import fold_rows
from offbeat.lab.lease_history import LeaseHistory
from offbeat.lab.simulation.fit import (
    BusyTime,
    LearnerBatch,
    RunTimes,
    Stall,
    alone,
    answered_at,
    ended_at,
    fit,
    fit_times,
    generated_at,
    read_times,
)
from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained
from offbeat.protocols.payload import CompletionMeta, Segment, Turn
from tests.learner.leases.event_makers import make_accepted, make_granted, make_trained


def granted(lease_id: int, at: float, actor: str = "a") -> Granted:
    return make_granted(lease_id, at=at, actor=actor)


def accepted(lease_id: int, at: float, lengths: Sequence[int], generate_s: float) -> Accepted:
    completions = tuple(CompletionMeta(length, "stop", 0.0, (Segment(0, 0),)) for length in lengths)
    return make_accepted(lease_id, at=at, completions=completions, generate_s=generate_s)


def with_episodes(event: Accepted | None, episodes: Sequence[tuple[float, int]]) -> Accepted:
    """The group of an environment: seconds of waiting and recorded turns of each episode."""
    assert event is not None
    completions = tuple(
        msgspec.structs.replace(completion, environment_s=environment_s, turns=(Turn(0, 1),) * num_turns)
        for completion, (environment_s, num_turns) in zip(event.completions, episodes, strict=True)
    )
    return msgspec.structs.replace(event, completions=completions)


def group(actor: str, granted_at: float, ended_at: float, generate_s: float, lengths: Sequence[int]) -> LeaseHistory:
    return LeaseHistory(0, granted(0, granted_at, actor), accepted(0, ended_at, lengths, generate_s))


def trained(policy_version: int, at: float, num_steps: int = 1) -> Trained:
    return make_trained(0, at=at, policy_version=policy_version, num_steps=num_steps, selected_at=at)


STARTED = Started(at=0.0, run_id="", learner_incarnation=0, policy_version=0)


# Reading


def actor_row(time: float, seconds: dict[str, float]) -> ActorRow:
    return ActorRow(
        time=time,
        actor="a",
        policy_version=0,
        num_generated_tokens=0,
        num_groups_sent=0,
        num_running_completions=0,
        seconds=seconds,
    )


def test_recording_has_what_the_log_and_the_rows_say() -> None:
    events: list[LeaseEvent] = [
        STARTED,
        granted(0, 10.0),
        granted(1, 11.0),
        granted(2, 12.0),
        accepted(0, 15.0, (3, 7), generate_s=4.0),
        Expired(at=16.0, lease_id=1, reason=""),
        Dropped(at=17.0, lease_id=0, reason="stale", is_final=False),
        trained(0, 20.0, num_steps=2),
    ]
    rows = [
        actor_row(9.0, {"commit_weights": 0.0}),
        actor_row(19.0, {"commit_weights": 0.75}),
        StepRow(time=20.5, policy_version=1, metrics={"time/step_s": 3.0, "time/wait_rollouts_s": 1.0}),
        StepRow(time=20.5, policy_version=2, metrics={"time/step_s": 3.0, "time/wait_rollouts_s": 1.0}),
        CommitRow(time=21.0, actor="a", policy_version=2, stall_s=0.5),
        EvalRow(time=30.0, policy_version=2, reward=0.5, length=1.0, num_completions=1, num_failed=0),
    ]
    run_times = read_times(fold_rows(rows), events)
    group, expired = run_times.leases
    assert (group.actor, group.granted_at, group.lengths) == ("a", 10.0, (3, 7))
    assert (answered_at(group), ended_at(group)) == (14.0, 15.0)
    assert (expired.actor, expired.granted_at, expired.lengths) == ("a", 11.0, ())
    assert answered_at(expired) == ended_at(expired) == 16.0
    # Both steps took 2 seconds besides the wait; the row of the second is the batch's.
    assert run_times.batches == [LearnerBatch(2, 2, 20.5 - 4.0, 20.0, 20.5)]
    assert run_times.stalls == {"a": [Stall(20.5, 21.0, 21.25)]}
    assert run_times.arrivals == {2: [20.5]}
    assert run_times.evaluations == [(20.5, 30.0)]


def test_episodes_of_a_group_have_turns_and_the_longest_wait() -> None:
    played = with_episodes(accepted(0, 15.0, (3, 7), generate_s=4.0), ((1.0, 0), (2.5, 2)))
    (group,) = read_times(fold_rows([]), [STARTED, granted(0, 10.0), played]).leases
    assert (group.num_turns, group.environment_s) == (3, 2.5)
    assert (generated_at(group), answered_at(group)) == (11.5, 14.0)


def test_only_the_last_learner_process_is_read() -> None:
    events: list[LeaseEvent] = [
        STARTED,
        granted(0, 1.0),
        granted(1, 1.0),
        accepted(0, 2.0, (1,), 1.0),
        trained(0, 3.0),
        Started(at=8.0, run_id="r", learner_incarnation=2, policy_version=0),
        accepted(1, 9.0, (1,), 1.0),
        granted(5, 9.0),
        accepted(5, 11.0, (4,), 1.5),
    ]
    rows = [
        StepRow(time=3.5, policy_version=1, metrics={"time/step_s": 1.0, "time/wait_rollouts_s": 0.0}),
        CommitRow(time=4.0, actor="a", policy_version=1, stall_s=0.5),
        CommitRow(time=12.0, actor="a", policy_version=1, stall_s=0.5),
        EvalRow(time=13.0, policy_version=1, reward=0.5, length=1.0, num_completions=1, num_failed=0),
    ]
    run_times = read_times(fold_rows(rows), events)
    assert (run_times.arrivals, run_times.evaluations) == ({1: [11.5]}, [(11.5, 13.0)])
    assert [(lease.lease_id, lease.granted_at, lease.lengths) for lease in run_times.leases] == [(5, 9.0, (4,))]
    assert run_times.batches == []


def test_warm_up_and_company_of_evaluation_are_left_out() -> None:
    batches = [LearnerBatch(version, 1, 10.0 * version, 10.0 * version + 5, 10.0 * version + 6) for version in range(1, 21)]
    groups = [group("a", float(at), at + 4.0, 4.0, (1,)) for at in (5, 29, 31, 50, 60)]
    run_times = RunTimes(groups, batches, evaluations=[(52.0, 53.0)])
    # A tenth of the batches is two; the third began at 30.
    assert run_times.steady_since == 30.0
    assert [steady.granted_at for steady in run_times.steady_groups] == [31.0, 60.0]


# Work


def test_work_goes_slowly_while_more_processes_are_busy_than_there_are_cores() -> None:
    # Actor a generates from 0 to 10, b from 4 to 8; the learner is busy from 6 to 12.
    run_times = RunTimes(
        [group("b", 4.0, 8.0, 4.0, (1,)), group("a", 0.0, 10.0, 10.0, (1,))],
        [LearnerBatch(1, 1, 6.0, 11.0, 12.0)],
    )
    spans = [(0.0, 4.0), (4.0, 6.0), (6.0, 8.0), (8.0, 10.0), (10.0, 12.0)]
    on_two = BusyTime(run_times, 1.0, 2).during(spans).tolist()
    assert on_two == pytest.approx([4.0, 2.0, 2 * 2 / 3, 2.0, 2.0])
    heavy = BusyTime(run_times, 1.5, 2).during(spans).tolist()
    assert heavy == pytest.approx([4.0, 2 * 2 / 3, 2 * 2 / 4.5, 2 * 2 / 3, 2.0])
    assert BusyTime(run_times, 1.5, None).during(spans).tolist() == pytest.approx([4.0, 2.0, 2.0, 2.0, 2.0])


def test_actor_that_swaps_weights_is_busy_though_it_generates_nothing() -> None:
    run_times = RunTimes(
        [group("a", 0.0, 4.0, 4.0, (1,))], [LearnerBatch(1, 1, 6.0, 11.0, 12.0)], stalls={"a": [Stall(8.0, 9.0, 10.0)]}
    )
    assert BusyTime(run_times, 1.0, 1).during([(6.0, 8.0), (8.0, 10.0), (10.0, 12.0)]).tolist() == pytest.approx(
        [2.0, 1.0, 2.0]
    )


# Fitting


def test_time_alone_and_crowding_are_told_apart() -> None:
    generator = np.random.default_rng(0)
    longest = generator.integers(10, 100, 2000).astype(float)
    running = generator.uniform(1, 16, 2000)
    generated_s = (0.5 + 0.02 * longest) * (1 + 0.1 * (running - 1))
    assert alone(generated_s, longest, running) == pytest.approx((0.5, 0.02, 0.1), rel=0.1)


@pytest.mark.parametrize(("slope", "crowding"), [(-0.5, 0.0), (10.0, 1.0)])
def test_crowding_is_between_none_and_taking_turns(slope: float, crowding: float) -> None:
    running = np.linspace(9, 10, 100)
    generated_s = 10 + slope * (running - 9.5)
    start, token, found = alone(generated_s, np.full(100, 5.0), running)
    assert found == pytest.approx(crowding)
    assert (start + token * 5) * (1 + found * 8.5) == pytest.approx(10.0, rel=0.01)


def recorded(*, num_actors: int, overlaps: bool, train_s: float, slots: int = 1, alone_s: float = 4.0) -> RunTimes:
    """A run of 20 batches, each generated in 10 seconds and trained in `train_s`: at the same time, or after it."""
    run_times = RunTimes()
    for version in range(1, 21):
        begin = 100.0 * version
        trained_from = begin if overlaps else begin + 10.0
        batch = LearnerBatch(version, 1, trained_from, trained_from + train_s, trained_from + train_s + 0.5)
        run_times.batches.append(batch)
        for actor in range(num_actors):
            for _ in range(slots):
                run_times.leases.append(group(f"actor-{actor}", begin, begin + alone_s + 1, alone_s, (2, 4)))
        run_times.arrivals[version] = [batch.trained_at + 3.0]
    return run_times


def test_timings_are_those_of_the_run() -> None:
    found = fit_times([recorded(num_actors=3, overlaps=False, train_s=6.0)], cores=None)
    timings = found.timings
    # No crowd, and lengths that do not vary: a second per token of the longest completion.
    assert np.unique(timings.completions_s, axis=0) == pytest.approx(np.array([[2.0, 4.0]]))
    assert timings.crowding == 0.0
    assert timings.handoff_s == pytest.approx(1.0)
    assert np.unique(timings.train_s) == pytest.approx([6.0])
    assert np.unique(timings.sync_s) == pytest.approx([3.0])
    assert timings.rest_s == pytest.approx(0.5)
    assert timings.swap_s == timings.check_s == 0.0
    assert (found.tokens_per_group, found.num_groups, found.num_steps) == (6.0, 3 * 17, 18)


def test_wait_for_the_environment_is_told_from_generation_and_hand_off() -> None:
    run_times = recorded(num_actors=3, overlaps=False, train_s=6.0, alone_s=7.0)
    for lease in run_times.leases:
        lease.accepted = with_episodes(lease.accepted, ((3.0, 2), (1.0, 3)))
    found = fit_times([run_times], cores=None)
    assert np.unique(found.timings.completions_s, axis=0) == pytest.approx(np.array([[2.0, 4.0]]))
    assert found.timings.environment_s == pytest.approx(np.full(51, 3.0))
    assert found.timings.handoff_s == pytest.approx(1.0)
    assert found.turns_per_episode == 2.5
    without = fit_times([recorded(num_actors=3, overlaps=False, train_s=6.0)], cores=None)
    assert (without.timings.environment_s, without.turns_per_episode) == (None, None)


def test_two_runs_tell_how_many_cores_a_busy_process_takes() -> None:
    alone_run = recorded(num_actors=2, overlaps=False, train_s=2.0, alone_s=9.0)
    # Beside two busy actors on two cores, at 1.5 each: 2.25 times slower.
    crowded = recorded(num_actors=2, overlaps=True, train_s=4.5, alone_s=9.0)
    found = fit_times([alone_run, crowded], cores=2).timings
    assert found.load == pytest.approx(1.5)
    assert found.train_s == pytest.approx(np.full(36, 2.0))
    assert fit_times([crowded], cores=2).timings.load == 1.0


def test_pauses_for_new_weights_are_no_generation() -> None:
    run_times = recorded(num_actors=1, overlaps=False, train_s=2.0, slots=3, alone_s=8.0)
    for version in range(1, 21):
        run_times.stalls.setdefault("actor-0", []).append(
            Stall(100.0 * version + 1, 100.0 * version + 2, 100.0 * version + 2.5)
        )
    timings = fit_times([run_times], cores=None).timings
    assert timings.completions_s.max(axis=1) == pytest.approx(np.full(51, 6.5))
    assert (timings.swap_s, timings.check_s) == pytest.approx((1.0, 0.5))


def test_company_is_counted_where_it_slows_generation_down() -> None:
    run_times = recorded(num_actors=1, overlaps=False, train_s=2.0, alone_s=4.0)
    # A second actor with three groups at once: twice as slow, and stopped for 2 of 10 seconds.
    crowded = recorded(num_actors=1, overlaps=False, train_s=2.0, slots=3, alone_s=10.0)
    run_times.leases += [group("actor-1", lease.granted_at, ended_at(lease), 10.0, (2, 4)) for lease in crowded.leases]
    run_times.stalls["actor-1"] = [
        Stall(100.0 * version + 1, 100.0 * version + 3, 100.0 * version + 3) for version in range(1, 21)
    ]
    timings = fit_times([run_times], cores=None).timings
    assert timings.crowding == pytest.approx(0.5)
    assert timings.completions_s.max(axis=1) == pytest.approx(np.full(4 * 17, 4.0))


def test_transfer_that_waits_for_the_one_before_counts_from_its_end() -> None:
    run_times = recorded(num_actors=3, overlaps=False, train_s=2.0)
    # Every version arrives 70 seconds after its step; the next transfer begins then, and takes 30 for the next 100 seconds.
    run_times.arrivals = {version: [100.0 * version + 12 + 70] for version in range(1, 21)}
    found = fit_times([run_times], cores=None).timings.sync_s
    assert found == pytest.approx(np.full(18, 70.0))
    run_times.arrivals = {version: [100.0 * version + 12 + 130] for version in range(1, 21)}
    assert fit_times([run_times], cores=None).timings.sync_s == pytest.approx(np.full(18, 100.0))


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="rollout log"):
        fit([tmp_path], None)


def test_run_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(SettingError, match="0 batches and 0 groups"):
        fit([tmp_path], None)
