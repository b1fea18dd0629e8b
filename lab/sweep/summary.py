"""The summary of a sweep: its runs, values and comparisons, as they stand in `sweep.json`."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offbeat.common.config import Config
from offbeat.common.settings import load
from offbeat.lab.sweep.estimates import (
    Comparison,
    Curve,
    Estimate,
    compare,
    compare_ratio,
    estimate,
    first_reach,
    seeds_needed,
    trailing_mean,
)
from offbeat.lab.sweep.measures import NUM_FINAL_STEPS, RunCurves, RunMeasures, measure, numbers_of, reward_curves
from offbeat.lab.sweep.plan import CONFIG_FILE, Plan, State, read_run, state_of
from offbeat.lab.sweep.recommendation import Recommendation, ValueResult, recommend

STALENESS = "staleness.max_staleness"


@dataclass(frozen=True)
class Reach:
    """The point of a run at which the mean reward of `NUM_FINAL_STEPS` steps reached a target; None: it never did."""

    seconds: float | None
    """Seconds on the run's clock."""
    groups: float | None
    """Groups trained on by then."""


@dataclass(frozen=True)
class Run:
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
    """One value of the sweep, with estimates over its finished runs."""

    label: str
    settings: dict[str, str]
    num_planned: int
    num_finished: int
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
class Pair:
    """The comparison of two values."""

    first: str
    second: str
    final_reward: Comparison
    """The second minus the first."""
    held_out_reward: Comparison | None
    train_s: Comparison | None
    """Ratio of the second to the first, by geometric means."""
    seeds_needed: int | None
    """Seeds of each that detect a difference of the margin in final reward; None with fewer than two seeds, or for too many."""


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
    pairs: list[Pair]
    runs: list[Run]


@dataclass(frozen=True)
class Gathered:
    """The content of a sweep's folder."""

    summary: Summary
    curves: dict[str, list[RunCurves]]
    """Curves of the finished runs of each value, by label."""
    config: Config
    """The settings of the first run."""


def gather(folder: Path, plan: Plan, margin: float) -> Gathered:
    """Read all runs and summarize them. Unfinished runs are listed, and count in no estimate."""
    labels = [_label(plan, values) for values in plan.combinations]
    configs = [load(folder / cell.name / CONFIG_FILE) for cell in plan.cells]
    by_values = dict(zip((cell.values for cell in plan.cells), configs, strict=True))
    reference = labels[_reference(plan, [by_values[values] for values in plan.combinations])]
    runs: list[Run] = []
    curves: dict[str, list[RunCurves]] = {label: [] for label in labels}
    curves_of: dict[str, RunCurves] = {}
    for cell, config in zip(plan.cells, configs, strict=True):
        history = read_run(folder / cell.name)
        label, state, never = _label(plan, cell.values), state_of(history), Reach(None, None)
        curves_of[cell.name] = reward_curves(history, config.train)
        if state == "finished":
            curves[label].append(curves_of[cell.name])
        runs.append(Run(cell.name, label, cell.seed, state, measure(history, config.train), never, never))
    goal = estimate(_numbers(_finished(runs, reference), lambda run: run.measures.final_reward))
    if goal is not None:
        runs = [
            replace(
                run,
                to_margin=_reach(curves_of[run.name], goal.mean - margin),
                to_reference=_reach(curves_of[run.name], goal.mean),
            )
            for run in runs
        ]
    results = {label: _result(label, _finished(runs, label)) for label in labels}
    summary = Summary(
        settings=plan.settings,
        seeds=plan.seeds,
        reference=reference,
        reference_reward=goal.mean if goal else None,
        margin=margin,
        recommendation=recommend(list(results.values()), reference, margin),
        values=[
            _value(plan, values, _finished(runs, label), results[label], results[reference])
            for values, label in zip(plan.combinations, labels, strict=True)
        ],
        pairs=[
            pair
            for first, second in itertools.combinations(labels, 2)
            if (pair := _pair(first, second, _finished(runs, first), _finished(runs, second), margin)) is not None
        ],
        runs=runs,
    )
    return Gathered(summary, curves, configs[0])


def _label(plan: Plan, values: Sequence[str]) -> str:
    """Return the name of a value on the page: the value alone where only one setting is varied."""
    if len(plan.settings) == 1:
        return values[0]
    return ", ".join(f"{key}={value}" for key, value in zip(plan.keys, values, strict=True))


def _reference(plan: Plan, configs: Sequence[Config]) -> int:
    """Return the index of the first value with the smallest `max_staleness`; 0 where staleness is not varied."""
    if STALENESS not in plan.settings:
        return 0
    return min(range(len(configs)), key=lambda index: configs[index].staleness.max_staleness)


def _finished(runs: Sequence[Run], label: str) -> list[Run]:
    return [run for run in runs if run.label == label and run.state == "finished"]


def _numbers(runs: Sequence[Run], number_of: Callable[[Run], float | None]) -> list[float]:
    return [number for run in runs if (number := number_of(run)) is not None]


def _reach(curves: RunCurves, target: float) -> Reach:
    def reach(curve: Curve) -> float | None:
        return first_reach(trailing_mean(curve, NUM_FINAL_STEPS), target)

    # 0 seconds mean that the time is unknown.
    return Reach(reach(curves.by_seconds) or None, reach(curves.by_groups))


def _result(label: str, runs: Sequence[Run]) -> ValueResult:
    told = [run for run in runs if run.measures.final_reward is not None]
    return ValueResult(label, _numbers(told, lambda run: run.measures.final_reward), [run.to_margin.seconds for run in told])


def _value(plan: Plan, values: Sequence[str], runs: Sequence[Run], result: ValueResult, base: ValueResult) -> Value:
    told = [numbers_of(run.measures) for run in runs]
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
        estimates={name: number for name, number in every.items() if number is not None},
        seconds_to_margin=estimate(result.every_time_s),
        groups_to_margin=estimate(groups) if result.every_time_s else None,
        time_ratio=None if result is base else compare_ratio(base.every_time_s, result.every_time_s),
        num_to_margin=len(to_margin),
        seconds_to_reference=estimate(to_reference),
        num_to_reference=len(to_reference),
    )


def _pair(first: str, second: str, first_runs: Sequence[Run], second_runs: Sequence[Run], margin: float) -> Pair | None:
    def of_both(number_of: Callable[[Run], float | None]) -> tuple[list[float], list[float]]:
        return _numbers(first_runs, number_of), _numbers(second_runs, number_of)

    rewards = of_both(lambda run: run.measures.final_reward)
    final_reward = compare(*rewards)
    if final_reward is None:
        return None
    spreads = [told.std for told in map(estimate, rewards) if told is not None and told.std is not None]
    return Pair(
        first,
        second,
        final_reward=final_reward,
        held_out_reward=compare(*of_both(lambda run: run.measures.held_out_reward)),
        train_s=compare_ratio(*of_both(lambda run: run.measures.train_s or None)),
        seeds_needed=seeds_needed(spreads[0], spreads[1], margin) if len(spreads) == 2 else None,
    )
