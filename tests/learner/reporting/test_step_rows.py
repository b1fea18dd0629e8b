"""The rows of optimizer steps, and the automatic bound and number of actors that move by them."""

from typing import Any, cast

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import StepRow, row_fields
from offbeat.common.settings.config import Config, DataSection, ModelSection, ScaleSection, StalenessSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.learner.calibration.watch import CalibrationWatch
from offbeat.learner.curriculum import Curriculum
from offbeat.learner.diagnostics.sample_rows import SampleRows
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.dispatch.status import FleetUse
from offbeat.learner.leases import demand
from offbeat.learner.leases.auto_bound import AutoBound, BoundDecision
from offbeat.learner.leases.demand import Demand, Use
from offbeat.learner.leases.groups import Group, LagOf
from offbeat.learner.leases.log_reading import LogFullError
from offbeat.learner.reporting.step_rows import StepRows

FIRST = {"lag/max": 0.0, "ratio/first": 1e-3, "clip/fraction": 0.25, "kl/behavior_policy_k3": 2e-4}


FLEET = FleetUse(0.0, num_actors=3, num_new=1, slots=2.5, spare=0.25, waits=0.125, is_troubled=False)


class Aged:
    """A group sampled under one version."""

    def __init__(self, version: int) -> None:
        self._version = version

    def lag_of(self, measured: LagOf, policy_version: int) -> float:
        return policy_version - self._version


class FakeDispatcher:
    def __init__(self, train: TrainSection, max_staleness: int) -> None:
        self._config = Config(
            model=ModelSection(path="model"),
            data=DataSection(train_data="data.jsonl"),
            staleness=StalenessSection(max_staleness=max_staleness),
            train=train,
        )
        self.changes: list[tuple[dict[str, str], str, str]] = []
        self.refusal: Exception | None = None

    def settings(self) -> Config:
        return self._config

    def lease_limit(self) -> int:
        return 6

    def buffer_sizes(self) -> tuple[int, int]:
        return 5, 7

    def tune(self, settings: dict[str, str], who: str, reason: str) -> None:
        if self.refusal:
            raise self.refusal
        self.changes.append((settings, who, reason))


class FakeBound:
    """An automatic bound that moves at the second step it observes."""

    def __init__(self) -> None:
        self.seen: list[StepRow] = []

    def observe(self, step: StepRow, bounds: StalenessSection) -> BoundDecision | None:
        self.seen.append(step)
        return BoundDecision(6, "too stale") if len(self.seen) == 2 else None


class FakeDemand:
    """An automatic number of actors with one decision for all batches."""

    actor_hours = 2.5

    def __init__(self) -> None:
        self.seen: list[tuple[Use, int]] = []
        self.decision: demand.DemandDecision | None = None

    def observe(self, use: Use, wanted: int, scale: ScaleSection) -> demand.DemandDecision | None:
        self.seen.append((use, wanted))
        return self.decision


class FakeCurriculum:
    """A curriculum whose shares change with each batch that it sees."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def shares(self) -> dict[str, float]:
        return {"sums": 1.0, "sorting": len(self.seen) / 4}

    def observe(self, policy_version: int) -> None:
        self.seen.append(policy_version)


class NoSamples:
    def record(self, groups: list[Group], policy_version: int) -> None:
        pass


class FakeCalibrationWatch:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def check_first_step(self, step: StepRow) -> None:
        self.seen.append(step.policy_version)


class Bench:
    def __init__(self, max_staleness: int = 1, **train: int) -> None:
        section = TrainSection(**train)  # pyright: ignore[reportArgumentType]
        self.dispatcher, self.bound = FakeDispatcher(section, max_staleness), FakeBound()
        self.demand, self.curriculum = FakeDemand(), FakeCurriculum()
        self.calibration_watch = FakeCalibrationWatch()
        self.rows: list[dict[str, Any]] = []
        self.step_rows = StepRows(
            cast(Dispatcher, self.dispatcher),
            cast(AutoBound, self.bound),
            cast(Demand, self.demand),
            cast(Curriculum, self.curriculum),
            cast(SampleRows, NoSamples()),
            cast(CalibrationWatch, self.calibration_watch),
            lambda row: self.rows.append(row_fields(row)),
        )

    def record(self, steps: list[dict[str, Any]], versions: list[int], first_version: int, **seconds: float) -> None:
        groups = cast(list[Group], [Aged(version) for version in versions])
        times = {"time/step_s": 10.0, "time/wait_rollouts_s": 4.0, **seconds}
        self.step_rows.record(steps, groups, first_version, times, FLEET)


def test_each_step_has_an_equal_share_of_the_batchs_times() -> None:
    bench = Bench(groups_per_step=1, steps_per_batch=4)
    bench.record([{"loss/policy": index} for index in range(4)], [10] * 4, 10, wait=2.0, train=8.0)
    assert [row["policy_version"] for row in bench.rows] == [11, 12, 13, 14]
    assert [row["loss/policy"] for row in bench.rows] == [0, 1, 2, 3]
    for row in bench.rows:
        assert (row["kind"], row["wait"], row["train"]) == ("step", 0.5, 2.0)
        assert (row["staleness/bound"], row["staleness/lease_limit"]) == (1, 6)
        assert (row["buffer/ready"], row["buffer/in_flight"]) == (5, 7)


def test_groups_over_the_bound_are_counted_at_the_step_that_trains_on_them() -> None:
    # Two passes over two steps of two groups each; the groups' versions are theirs at sampling.
    bench = Bench(groups_per_step=2, steps_per_batch=2, epochs_per_batch=2)
    bench.record([{}] * 4, [10, 9, 10, 8], 10)
    # Lags: step 10: 0, 1; step 11: 1, 3; step 12: 2, 3; step 13: 3, 5. The bound is 1.
    assert [row["staleness/over_bound"] for row in bench.rows] == [0, 1, 2, 2]


def test_automatic_bound_sees_every_step_and_its_decision_becomes_the_setting() -> None:
    bench = Bench(groups_per_step=1, steps_per_batch=3)
    bench.record([{"n": 0}, {"n": 1}, {"n": 2}], [1] * 3, 1)
    assert [step.metrics["n"] for step in bench.bound.seen] == [0, 1, 2]
    assert bench.dispatcher.changes == [({"staleness.max_staleness": "6"}, "auto", "too stale")]


@pytest.mark.parametrize("refusal", [SettingError("staleness.max_staleness", 6, "no", "Do not."), LogFullError("full")])
def test_refused_move_of_the_bound_does_not_end_the_run(refusal: Exception) -> None:
    bench = Bench(groups_per_step=1, steps_per_batch=2)
    bench.dispatcher.refusal = refusal
    bench.record([{}, {}], [1] * 2, 1)
    assert len(bench.rows) == 2


def test_ratio_of_the_runs_first_step_is_logged_and_compared_with_the_noise_floor_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(groups_per_step=1)
    with caplog.at_level("INFO", logger="offbeat.learner.reporting.step_rows"):
        bench.record([FIRST], [0], 0)
        bench.record([FIRST], [1], 1)
    assert bench.calibration_watch.seen == [1]
    (message,) = caplog.messages
    assert message.startswith(
        "Sanity check at the first step (lag up to 0): engine and learner log-probs differ by a mean ratio "
    )
    assert "1.0e-03, 25.0% clipped" in message


def test_completions_that_a_step_left_out_become_an_event_with_their_leases_and_reasons() -> None:
    bench = Bench(groups_per_step=1, steps_per_batch=2)
    broken = {"broken/not_finite": 1, "broken/ratio": 2, "broken/leases": {"17": 2, "21": 1}}
    bench.record([{"broken/not_finite": 0, "broken/ratio": 0}, broken], [1] * 2, 1)
    first, second, event = bench.rows
    assert (first["kind"], second["kind"], event["event"]) == ("step", "step", "completions_left_out")
    assert event["policy_version"] == second["policy_version"] == 3
    assert "optimizer step 3 left out 3 completions of the leases 17, 21" in event["detail"]
    assert "1 not finite, 2 with a token" in event["detail"]


def test_number_of_actors_is_weighed_once_a_batch_by_the_use_of_the_actors() -> None:
    bench = Bench(max_staleness=3, groups_per_step=2, num_steps=20)
    bench.record([{}], [1, 1], 1)
    ((use, wanted),) = bench.demand.seen
    # The bound of 3 admits 8 leases; 2.5 slots are an actor's.
    assert use == Use(10.0, 4.0, num_actors=3, num_new=1, spare=0.25, waits=0.125, enough=4, is_troubled=False)
    assert wanted == 1
    assert (bench.rows[0]["actors/number"], bench.rows[0]["actors/spare"], bench.rows[0]["actors/hours"]) == (3, 0.25, 2.5)
    # Of the last steps, whose leases are few, nothing follows.
    bench.record([{}], [1, 1], 15)
    assert bench.demand.seen[-1][0].is_troubled


def test_decision_on_actors_becomes_the_setting_and_advice_an_event() -> None:
    bench = Bench(groups_per_step=1, steps_per_batch=2)
    bench.demand.decision = demand.DemandDecision(4, "starved")
    bench.record([{}, {}], [1] * 2, 1)
    assert bench.dispatcher.changes[-1] == ({"scale.actors": "4"}, "auto", "starved")
    bench.demand.decision = demand.DemandDecision(None, "widen")
    bench.record([{}, {}], [1] * 2, 3)
    assert len([change for change in bench.dispatcher.changes if "scale.actors" in change[0]]) == 1
    assert (bench.rows[-1]["event"], bench.rows[-1]["detail"]) == ("scale_advice", "widen")


def test_steps_have_the_shares_of_tasks_and_the_curriculum_sees_each_batch_once() -> None:
    bench = Bench(groups_per_step=1, steps_per_batch=2)
    bench.record([{}, {}], [1] * 2, 1)
    bench.record([{}, {}], [3] * 2, 3)
    assert [(row["curriculum/sums"], row["curriculum/sorting"]) for row in bench.rows] == [(1, 0), (1, 0), (1, 0.25), (1, 0.25)]
    assert bench.curriculum.seen == [3, 5]
