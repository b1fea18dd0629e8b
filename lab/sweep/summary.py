"""The summary of a sweep: its runs, values and comparisons, as they stand in `sweep.json`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import load
from offbeat.lab.sweep.estimates import (
    AgainstBaseline,
    Comparison,
    Curve,
    Estimate,
    compare_ratio,
    compare_with_baseline,
    estimate,
    first_reach,
    trailing_mean,
)
from offbeat.lab.sweep.measures import NUM_FINAL_STEPS, RunCurves, RunMeasures, measure, numbers_of, reward_curves
from offbeat.lab.sweep.plan import CONFIG_FILE, ENDED, Plan, State, Values, find_baselines, read_run, state_of
from offbeat.lab.sweep.recommendation import Recommendation, ValueResult, recommend

_OF_WHOLE_RUNS = ("train_s", "num_steps", "num_groups")
"""Numbers of a run that one that was stopped early does not have."""


@dataclass(frozen=True)
class Reach:
    """The point of a run at which the mean reward of `NUM_FINAL_STEPS` steps reached a target; None: it never did."""

    seconds: float | None
    """Seconds on the run's clock."""
    groups: float | None
    """Groups trained on by then."""


@dataclass(frozen=True)
class SweepRun:
    """One run."""

    name: str
    """The run's folder below the sweep's."""
    label: str
    """Label of the run's value."""
    seed: int
    state: State
    measures: RunMeasures
    to_margin: Reach
    """The point at which it reached the reference's final reward minus the margin."""
    to_reference: Reach
    """The point at which it reached the reference's final reward."""


@dataclass(frozen=True)
class Value:
    """One value of the sweep, with estimates over its runs that have ended."""

    label: str
    settings: dict[str, str]
    num_planned: int
    num_finished: int
    """Runs that have ended: finished, or stopped as hopeless."""
    num_hopeless: int
    estimates: dict[str, Estimate]
    """Estimates of the runs' `numbers_of`, by name, without names that no run has."""
    seconds_to_margin: Estimate | None
    """Seconds until the mean reward was within the margin; None unless every seed came there."""
    groups_to_margin: Estimate | None
    time_ratio: Comparison | None
    """Ratio of `seconds_to_margin` to the reference's, by geometric means; None for the reference itself, and unless every seed
    of both came there."""
    num_to_margin: int
    """Seeds that came within the margin."""
    seconds_to_reference: Estimate | None
    """Seconds to the reference's reward, over the seeds that reached it. This favors a value of which not all did."""
    num_to_reference: int


@dataclass(frozen=True)
class Difference:
    """The difference of one value from its baseline, in pairs of one seed."""

    label: str
    baseline: str
    """Label of the value that it is compared with."""
    final_reward: AgainstBaseline | None
    """Difference of the final rewards; None without a seed that both have."""
    held_out_reward: AgainstBaseline | None
    train_s: Comparison | None
    """Ratio to the baseline's, by geometric means over the finished runs of each."""


@dataclass(frozen=True)
class Summary:
    """The content of `sweep.json`."""

    settings: dict[str, list[str]]
    seeds: list[int]
    reference: str
    """Label of the value that the others are compared with."""
    reference_reward: float | None
    """Mean of the reference's final rewards; None while it has no finished run."""
    margin: float
    """Loss of final reward that does not matter to the user."""
    recommendation: Recommendation
    values: list[Value]
    differences: list[Difference]
    """The differences from the baselines. P-values are corrected for all values of one baseline."""
    runs: list[SweepRun]


Curves = dict[str, list[RunCurves]]
"""Curves of the runs of each value that have ended, by label."""


def gather(folder: Path, plan: Plan, margin: float, chosen: Mapping[str, str]) -> tuple[Summary, Curves, Config]:
    """Read all runs; return their summary, their curves, and the settings of the first one.

    Runs that have not ended are listed, and count in no estimate. `chosen` has the settings that make a value a baseline
    (`find_baselines`); empty: the reference is the only one.
    """
    labels = [_label(plan, values) for values in plan.combinations]
    configs = [load(folder / trial.name / CONFIG_FILE) for trial in plan.trials]
    by_values = dict(zip((trial.values for trial in plan.trials), configs, strict=True))
    # The value with the smallest bound; the first where staleness is not varied.
    first = min(plan.combinations, key=lambda values: by_values[values].staleness.max_staleness)
    reference = _label(plan, first)
    runs: list[SweepRun] = []
    curves: dict[str, RunCurves] = {}
    for trial, config in zip(plan.trials, configs, strict=True):
        history = read_run(folder / trial.name)
        label, state, never = _label(plan, trial.values), state_of(folder / trial.name, history), Reach(None, None)
        curves[trial.name] = reward_curves(history, config.train)
        runs.append(SweepRun(trial.name, label, trial.seed, state, measure(history, config.train), never, never))
    goal = estimate(_numbers(_ended(runs, reference), lambda run: run.measures.final_reward))
    if goal is not None:
        runs = [
            replace(run, to_margin=_reach(of_run, goal.mean - margin), to_reference=_reach(of_run, goal.mean))
            for run, of_run in zip(runs, curves.values(), strict=True)
        ]
    results = {label: _result(label, _ended(runs, label)) for label in labels}
    summary = Summary(
        settings=plan.settings,
        seeds=plan.seeds,
        reference=reference,
        reference_reward=goal.mean if goal else None,
        margin=margin,
        recommendation=recommend(list(results.values()), reference, margin),
        values=[
            _value(plan, values, _ended(runs, label), results[label], results[reference])
            for values, label in zip(plan.combinations, labels, strict=True)
        ],
        differences=_differences(plan, find_baselines(plan, chosen or dict(zip(plan.settings, first, strict=True))), runs),
        runs=runs,
    )
    return summary, {label: [curves[run.name] for run in _ended(runs, label)] for label in labels}, configs[0]


def _label(plan: Plan, values: Sequence[str]) -> str:
    """Return the name of a value on the page: the value alone where only one setting is varied."""
    if len(plan.settings) == 1:
        return values[0]
    return ", ".join(f"{key}={value}" for key, value in zip(plan.keys, values, strict=True))


def _ended(runs: Sequence[SweepRun], label: str) -> list[SweepRun]:
    return [run for run in runs if run.label == label and run.state in ENDED]


def _numbers(runs: Sequence[SweepRun], number_of: Callable[[SweepRun], float | None]) -> list[float]:
    return [number for run in runs if (number := number_of(run)) is not None]


def _reach(curves: RunCurves, target: float) -> Reach:
    def reach(curve: Curve) -> float | None:
        return first_reach(trailing_mean(curve, NUM_FINAL_STEPS), target)

    # 0 seconds mean that the time is unknown.
    return Reach(reach(curves.by_seconds) or None, reach(curves.by_groups))


def _result(label: str, runs: Sequence[SweepRun]) -> ValueResult:
    told = [run for run in runs if run.measures.final_reward is not None]
    return ValueResult(label, _numbers(told, lambda run: run.measures.final_reward), [run.to_margin.seconds for run in told])


def _value(plan: Plan, values: Sequence[str], runs: Sequence[SweepRun], result: ValueResult, base: ValueResult) -> Value:
    told = [_numbers_of(run) for run in runs]
    names = dict.fromkeys(name for numbers in told for name in numbers)
    every = {name: estimate([numbers[name] for numbers in told if name in numbers]) for name in names}
    to_margin = _numbers(runs, lambda run: run.to_margin.seconds)
    groups = _numbers(runs, lambda run: run.to_margin.groups)
    to_reference = _numbers(runs, lambda run: run.to_reference.seconds)
    return Value(
        label=result.label,
        settings=dict(zip(plan.settings, values, strict=True)),
        num_planned=len(plan.seeds),
        num_finished=len(runs),
        num_hopeless=sum(run.state == "hopeless" for run in runs),
        estimates={name: number for name, number in every.items() if number is not None},
        seconds_to_margin=estimate(result.every_time_s),
        groups_to_margin=estimate(groups) if result.every_time_s else None,
        time_ratio=None if result is base else compare_ratio(base.every_time_s, result.every_time_s),
        num_to_margin=len(to_margin),
        seconds_to_reference=estimate(to_reference),
        num_to_reference=len(to_reference),
    )


def _numbers_of(run: SweepRun) -> dict[str, float]:
    left_out = _OF_WHOLE_RUNS if run.state == "hopeless" else ()
    return {name: number for name, number in numbers_of(run.measures).items() if name not in left_out}


def _differences(plan: Plan, baselines: Mapping[Values, Values], runs: Sequence[SweepRun]) -> list[Difference]:
    """Return the difference of each value from its baseline, the values of one baseline together."""
    found: list[Difference] = []
    for baseline in dict.fromkeys(baselines.values()):
        own = [_label(plan, values) for values in plan.combinations if baselines[values] == baseline]
        label = _label(plan, baseline)
        ended = {one: _ended(runs, one) for one in own}
        rewards = compare_with_baseline(_by_seed(ended, lambda run: run.measures.final_reward), label)
        held_out = compare_with_baseline(_by_seed(ended, lambda run: run.measures.held_out_reward), label)
        seconds = {
            one: _numbers(ended[one], lambda run: run.measures.train_s or None if run.state == "finished" else None)
            for one in own
        }
        found += [
            Difference(one, label, rewards.get(one), held_out.get(one), compare_ratio(seconds[label], seconds[one]))
            for one in own
            if one != label
        ]
    return found


def _by_seed(
    ended: Mapping[str, Sequence[SweepRun]], number_of: Callable[[SweepRun], float | None]
) -> dict[str, dict[int, float]]:
    return {
        label: {run.seed: number for run in runs if (number := number_of(run)) is not None} for label, runs in ended.items()
    }
