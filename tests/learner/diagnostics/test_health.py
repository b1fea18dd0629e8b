"""Each health rule holds where its condition does, says so once, and is cleared."""

import math
from typing import Any

import pytest

from offbeat.common.records.rows import EvalRow, EventRow, StepRow
from offbeat.learner.diagnostics.health import CLEAR_STEPS, HISTORY, RULES, Health, troubles

WELL: dict[str, Any] = {
    "reward/mean": 0.5,
    "reward/std": 0.3,
    "reward/zero_variance_groups": 1,
    "lag/counts": {"0": 3, "2": 1},
    "by_lag/0/count": 24,
    "by_lag/2/count": 8,
    "length/cut": 0.1,
    "entropy/mean": 0.8,
    "loss/policy": 0.01,
    "loss/grad_norm": 0.5,
    "ratio/log_mean": 0.0,
    "ratio/log_p05": -0.02,
    "ratio/log_p95": 0.02,
    "kl/behavior_policy_k3": 1e-4,
    "staleness/bound": 4,
    "time/step_s": 2.0,
    "time/wait_rollouts_s": 0.5,
    "time/held_back_s": 0.5,
}
"""The metrics of a step of four groups of eight completions, in which all is well."""


def evaluation(reward: float, pass_at: dict[str, float]) -> EvalRow:
    return EvalRow(policy_version=1, reward=reward, length=4.0, num_completions=8, num_failed=0, pass_at=pass_at)


class Run:
    """A run's steps, and the events of its health."""

    def __init__(self) -> None:
        self.health = Health()
        self.events: list[EventRow] = []
        self.version = 0

    def step(self, times: int = 1, **metrics: Any) -> None:
        for _ in range(times):
            self.version += 1
            given = WELL | {name.replace("__", "/"): value for name, value in metrics.items()}
            self.events += self.health.take(StepRow(policy_version=self.version, metrics=given))

    def told(self) -> list[tuple[str | None, str, int | None]]:
        return [(event.rule, event.event, event.policy_version) for event in self.events]


@pytest.mark.parametrize(
    ("rule", "least", "at", "below", "said"),
    [
        ("no_signal", 10, {"reward__std": 0.0, "reward__mean": 0.0}, {"reward__std": 1e-3}, "has the same reward, 0."),
        ("no_signal", 10, {"reward__zero_variance_groups": 4}, {"reward__zero_variance_groups": 3}, "within every group"),
        ("all_cut", 10, {"length__cut": 0.95}, {"length__cut": 0.94}, "95% of the completions were cut"),
        ("entropy_collapsed", 10, {"entropy__mean": 0.019}, {"entropy__mean": 0.02}, "collapsed to 0.019 nats"),
        ("not_finite", 1, {"loss__grad_norm": math.nan}, {"loss__grad_norm": 9.0}, "at step 1: loss/grad_norm"),
        ("not_finite", 1, {"ratio__log_mean": None}, {}, "at step 1: ratio/log_mean"),
        ("ratios_exploded", 3, {"ratio__log_p05": -1.01}, {"ratio__log_p05": -0.99}, "beyond 1"),
        ("ratios_exploded", 3, {"ratio__log_p95": 1.01}, {"ratio__log_p95": 0.99}, "beyond 1"),
        ("gradient_zero", 10, {"loss__grad_norm": 0.0}, {"loss__grad_norm": 1e-9}, "although rewards differ"),
        ("learner_idle", 20, {"time__wait_rollouts_s": 1.8}, {"time__wait_rollouts_s": 1.79}, "90% of the last 20 steps"),
        ("actors_idle", 20, {"time__held_back_s": 1.8}, {"time__held_back_s": 1.79}, "90% of the last 20 steps"),
    ],
)
def test_rule_holds_from_its_least_number_of_steps_and_its_threshold_on(
    rule: str, least: int, at: dict[str, Any], below: dict[str, Any], said: str
) -> None:
    run = Run()
    run.step(least - 1, **at)
    assert run.told() == []
    run.step(3, **at)
    assert run.told() == [(rule, "health", least)], "once"
    assert said in run.events[0].detail
    assert run.events[0].detail.endswith(next(one.hint for one in RULES if one.name == rule))
    well = Run()
    well.step(2 * least + 5, **below)
    assert rule not in troubles(well.events)


def test_rule_is_cleared_when_its_condition_has_not_held_for_a_while() -> None:
    run = Run()
    run.step(1, loss__policy=math.inf)
    run.step(CLEAR_STEPS - 1)
    run.step(1, loss__policy=math.inf)
    run.step(CLEAR_STEPS - 1)
    assert [event for _, event, _ in run.told()] == ["health"], "a few steps do not clear it, and it is not told again"
    run.step()
    assert run.told()[1:] == [("not_finite", "health_cleared", 2 * CLEAR_STEPS + 1)]
    assert troubles(run.events) == {}
    run.step(1, loss__policy=math.inf)
    assert list(troubles(run.events)) == ["not_finite"], "told again"


def test_most_groups_alike_is_little_signal_and_all_of_them_none() -> None:
    run = Run()
    for alike in ([4] * 5 + [2]) * 4:
        run.step(reward__zero_variance_groups=alike)
    # Of the last 20 steps' 80 groups, 3 times 2 are not alike: 92.5%.
    assert run.told() == [("groups_alike", "health", 20)]
    assert "92%" in run.events[0].detail


@pytest.mark.parametrize(("pass_at", "reward"), [({}, 1.0), ({"1": 1.0, "8": 1.0}, 7.5)])
def test_equal_rewards_of_a_solved_task_are_called_perhaps_solved(pass_at: dict[str, float], reward: float) -> None:
    run = Run()
    run.health.note_evaluation(evaluation(0.5, {}))
    run.health.note_evaluation(evaluation(reward, pass_at))
    run.step(20, reward__zero_variance_groups=4, reward__mean=1.0, reward__std=0.0)
    assert [rule for rule, _, _ in run.told()] == ["no_signal"]
    assert run.events[0].detail.endswith(" The task may be solved (held-out 1.000). If not, use harder prompts.")


def test_equal_rewards_of_a_task_that_is_not_solved_are_trouble() -> None:
    run = Run()
    run.health.note_evaluation(evaluation(1.0, {"1": 0.5}))
    run.step(20, reward__zero_variance_groups=4)
    assert "solved" not in run.events[0].detail


def test_groups_of_one_completion_are_not_called_alike() -> None:
    run = Run()
    run.step(40, **{"by_lag/0/count": 3, "by_lag/2/count": 1, "reward__zero_variance_groups": 4})
    assert run.told() == []


def test_gradient_a_hundred_times_larger_than_usual_has_exploded() -> None:
    run = Run()
    run.step(10, loss__grad_norm=0.5)
    run.step(2, loss__grad_norm=51.0)
    run.step(1, loss__grad_norm=0.5)
    assert run.told() == [], "two in a row are a spike"
    run.step(3, loss__grad_norm=51.0)
    assert [rule for rule, *_ in run.told()] == ["gradient_exploded"]
    assert "its norm is 51, and was 0.5" in run.events[0].detail


def test_reward_that_falls_below_half_of_its_best_is_told_unless_noise_explains_it() -> None:
    run = Run()
    for index in range(40):
        run.step(reward__mean=0.8 + 0.05 * (-1) ** index)
    run.step(12, reward__mean=0.1)
    # 8 steps of 0.8 and 12 of 0.1 have the mean 0.38: below 0.4, by 0.42; one standard error is 0.077.
    assert [rule for rule, *_ in run.told()] == ["reward_halved"]
    assert "0.38 over the last 20 steps, 0.8 at its best" in run.events[0].detail
    noisy = Run()
    for index in range(80):
        # Means of 0.5 and 0.2, but with a standard deviation of about 0.5: 2 standard errors.
        noisy.step(reward__mean=(0.5 if index < 40 else 0.2) + 0.5 * (-1) ** index)
    assert noisy.told() == []


def test_negative_rewards_fall_by_half_of_their_range() -> None:
    run = Run()
    run.step(20, reward__mean=-1.0)
    run.step(40, reward__mean=-0.5)
    run.step(10, reward__mean=-1.0)
    assert run.told() == [], "the mean is -0.75: half-way from -1 to -0.5"
    run.step(1, reward__mean=-1.0)
    assert run.told() == [("reward_halved", "health", 71)]


def test_synchronous_run_waits_by_design() -> None:
    run = Run()
    run.step(40, time__wait_rollouts_s=2.0, time__held_back_s=2.0, staleness__bound=0)
    assert run.told() == []


def test_run_in_which_all_is_well_tells_nothing_and_rows_of_old_versions_are_read() -> None:
    run = Run()
    run.step(HISTORY + 20)
    assert run.told() == []
    health = Health()
    assert [health.take(StepRow(policy_version=index, metrics={"reward/mean": 1.0})) for index in range(60)] == [[]] * 60


def test_restarted_run_begins_without_the_troubles_of_the_process_before() -> None:
    trouble = EventRow(event="health", detail="x", rule="all_cut")
    assert troubles([trouble, EventRow(event="run_started", detail="")]) == {}
    assert troubles([EventRow(event="run_started", detail=""), trouble]) == {"all_cut": "x"}


def test_learner_that_waits_is_not_called_the_bottleneck() -> None:
    run = Run()
    run.step(20, time__wait_rollouts_s=1.9, time__held_back_s=1.9)
    assert [rule for rule, _, _ in run.told()] == ["learner_idle"]


def test_bound_that_is_too_small_for_the_groups_says_which_would_do() -> None:
    starved = {"time__wait_rollouts_s": 1.0, "time__held_back_s": 0.65}
    run = Run()
    # Steps of one second beside one of waiting: eight batches must be under way.
    run.step(19, group__seconds_mean=7.5, **starved)
    assert run.told() == []
    run.step(1, group__seconds_mean=7.5, **starved)
    assert run.told() == [("bound_starves", "health", 20)]
    assert "groups take 7.5 s, steps 1 s" in run.events[0].detail
    assert "A bound of 8 would be enough. Raise staleness.max_staleness" in run.events[0].detail


@pytest.mark.parametrize(
    "metrics",
    [
        {"group__seconds_mean": 4.0},
        {"group__seconds_mean": 7.5, "time__held_back_s": 0.5},
        {"group__seconds_mean": 7.5, "time__wait_rollouts_s": 0.5},
        {"group__seconds_mean": 7.5, "staleness__bound": 0},
        {},
    ],
    ids=["groups are quick", "nothing is held back", "the learner is busy", "synchronous", "rows of older programs"],
)
def test_bound_that_does_is_not_blamed(metrics: dict[str, Any]) -> None:
    run = Run()
    run.step(30, **({"time__wait_rollouts_s": 1.0, "time__held_back_s": 0.65} | metrics))
    assert run.told() == []
