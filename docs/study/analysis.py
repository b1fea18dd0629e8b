"""The statistics of the study: every method at every lag, against the default in pairs of one seed, and signs of collapse.

A published claim is held to the rows: its sentence says "confirmed" only where every interval is on the claim's side of 0.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from docs.study.trials import BASELINE, DEFAULT, LEAST_WIDTH, Point, StudyRow
from offbeat.lab.sweep import estimates

TARGET = 0.9
"""Held-out reward whose first evaluation is the time that a run took."""
FALL = 0.2
"""Loss of held-out reward between a run's best evaluation and its end that counts as collapse."""
EARLY = 1 / 3
"""Share of a run's steps in which signs of a later collapse are looked for."""


class Condition(NamedTuple):
    """The conditions under which the methods of a table are compared: all else differs by method and seed."""

    task: str
    noise: float
    lag: int


@dataclass(frozen=True)
class MethodResult:
    """The runs of one method under one condition."""

    method: str
    num_seeds: int
    reward: estimates.Estimate
    """Held-out reward of the last weights."""
    area: float
    """Mean of the held-out reward over the run's steps, mean over seeds: 1 for a run that was always right."""
    steps_to_target: float | None
    """Median over seeds of the steps to `TARGET`; None where half of the runs or more never reached it."""
    num_stopped: int
    """Runs that diverged or were stopped as hopeless."""
    against_baseline: estimates.AgainstBaseline | None
    """Final reward minus the baseline's of the same seed; None for the baseline, and where it has no run of any such seed."""


class Sign(NamedTuple):
    """The power of a number, known before a collapse, to tell the runs that collapse from those that do not."""

    name: str
    num_collapsed: int
    num_others: int
    share: float | None
    """Chance that it is worse in a run that collapses than in one of the same condition that does not, ties as half: 0.5 tells
    nothing, 1 all. None without such a pair."""


def conditions(rows: Sequence[StudyRow]) -> list[Condition]:
    """Return the conditions of the rows, ordered by task, noise and lag."""
    return sorted({Condition(row.task, row.noise, row.lag) for row in rows})


def baseline_of(rows: Sequence[StudyRow], task: str) -> str:
    """Return the method that the others are compared with on a task."""
    return BASELINE if any((row.task, row.method) == (task, BASELINE) for row in rows) else DEFAULT


def compare_methods(rows: Sequence[StudyRow], condition: Condition) -> list[MethodResult]:
    """Return the result of each method under a condition, in the order in which they appear."""
    by_method: dict[str, list[StudyRow]] = {}
    for row in rows:
        if Condition(row.task, row.noise, row.lag) == condition:
            by_method.setdefault(row.method, []).append(row)
    rewards = {method: {row.seed: row.final_reward for row in of_method} for method, of_method in by_method.items()}
    compared = estimates.compare_with_baseline(rewards, baseline_of(rows, condition.task), least_width=LEAST_WIDTH)
    return [_result(method, of_method, compared.get(method)) for method, of_method in by_method.items()]


def area(row: StudyRow) -> float:
    """Return the mean of the held-out reward over the steps planned, straight between evaluations.

    A run that was stopped keeps its final reward to the end.
    """
    num_planned = planned_steps(row)
    known = [(point.step, point.held_out) for point in row.points]
    if known[-1][0] < num_planned:
        known += [(row.num_steps, row.final_reward)] if row.num_steps > known[-1][0] else []
        known.append((num_planned, row.final_reward))
    pieces = itertools.pairwise(known)
    # `sum` rounds differently from Python 3.12 on.
    return math.fsum((end - start) * (first + second) / 2 for (start, first), (end, second) in pieces) / num_planned


def planned_steps(row: StudyRow) -> int:
    """Return `train.num_steps` of the run."""
    return next(int(one.partition("=")[2]) for one in row.settings if one.startswith("train.num_steps="))


def steps_to(row: StudyRow) -> int | None:
    """Return the step of the first evaluation at `TARGET` or above; None where none was."""
    return next((point.step for point in row.points if point.held_out >= TARGET), None)


def has_collapsed(row: StudyRow) -> bool:
    """Return True for a run whose final reward is `FALL` or more below its best evaluation."""
    return max(point.held_out for point in row.points) - row.final_reward >= FALL


def signs_of_collapse(rows: Sequence[StudyRow]) -> list[Sign]:
    """Return how well ESS, gradient norm and others foretell a collapse.

    Each is taken over the first `EARLY` of a run's steps; runs whose best evaluation is within them are left out, because
    their fall may have begun. Runs are compared with those of the same condition only: a larger lag has a smaller ESS.
    """
    of_runs: dict[str, Callable[[Point], float | None]] = {
        "smallest sequence ESS": lambda point: _negative(point.ess_sequence),
        "smallest token ESS": lambda point: _negative(point.ess_token),
        "largest gradient norm": lambda point: point.grad_norm,
        "largest KL of mu from pi": lambda point: point.kl,
        "smallest entropy": lambda point: _negative(point.entropy),
        "largest clip fraction": lambda point: point.clip_fraction,
    }
    return [_sign(name, rows, badness) for name, badness in of_runs.items()]


def _result(method: str, rows: Sequence[StudyRow], compared: estimates.AgainstBaseline | None) -> MethodResult:
    reward = estimates.estimate([row.final_reward for row in rows], estimates.PAIRED_CONFIDENCE)
    assert reward is not None, "a method has a row"
    reached = sorted(float("inf") if (steps := steps_to(row)) is None else steps for row in rows)
    median = statistics.median_high(reached)
    return MethodResult(
        method=method,
        num_seeds=len(rows),
        reward=reward,
        area=statistics.fmean(map(area, rows)),
        steps_to_target=None if median == float("inf") else median,
        num_stopped=sum(row.outcome != "finished" for row in rows),
        against_baseline=compared,
    )


def _sign(name: str, rows: Sequence[StudyRow], badness: Callable[[Point], float | None]) -> Sign:
    found: dict[Condition, tuple[list[float], list[float]]] = {}
    for row in rows:
        end = EARLY * planned_steps(row)
        best = max(row.points, key=lambda point: point.held_out)
        early = [value for point in row.points if point.step <= end and (value := badness(point)) is not None]
        if best.step > end and early:
            collapsed, others = found.setdefault(Condition(row.task, row.noise, row.lag), ([], []))
            (collapsed if has_collapsed(row) else others).append(max(early))
    num_pairs = sum(len(collapsed) * len(others) for collapsed, others in found.values())
    worse = sum(
        (bad > good) + 0.5 * (bad == good) for collapsed, others in found.values() for bad in collapsed for good in others
    )
    return Sign(
        name,
        sum(len(collapsed) for collapsed, _ in found.values()),
        sum(len(others) for _, others in found.values()),
        worse / num_pairs if num_pairs else None,
    )


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


class Side(NamedTuple):
    """The runs of one method on one task at one lag, without noise."""

    task: str
    method: str
    lag: int


class Contrast(NamedTuple):
    """A difference of final rewards that a claim says is above 0, by seed: `first` minus `second`, minus the same of `less`."""

    first: Side
    second: Side
    less: tuple[Side, Side] | None = None

    def __str__(self) -> str:
        task, method, lag = self.first
        where = f"`{task}`, lag {lag}" if self.less is None else f"`{task}` less `{self.less[0].task}`, lag {lag}"
        other = self.second.method if self.second.method != method else f"itself at lag {self.second.lag}"
        return f"{where}: `{method}` minus {other if other.startswith('itself') else f'`{other}`'}"


class TestedContrast(NamedTuple):
    """One difference as measured."""

    difference: Contrast
    compared: estimates.Comparison
    """The paired comparison. It has no interval if fewer than two seeds are in both, or all differences are equal."""
    adjusted_p: float | None
    """After Holm's correction for the claim's differences that have a p-value; None for the others."""

    @property
    def sign(self) -> int:
        """1 where the whole interval is above 0, -1 where it is below, and 0 where it holds 0 or there is none."""
        low, high = self.compared.low, self.compared.high
        if low is None or high is None or self.adjusted_p is None or self.adjusted_p >= estimates.SIGNIFICANT:
            return 0
        return (low > 0) - (high < 0)


def _over(method: str, other: str, *places: tuple[str, int]) -> tuple[Contrast, ...]:
    return tuple(Contrast(Side(task, method, lag), Side(task, other, lag)) for task, lag in places)


def _lead_grows(method: str, other: str, task: str, *, lag: int, more_than_at: int) -> tuple[Contrast, ...]:
    late, early = ((Side(task, method, at), Side(task, other, at)) for at in (lag, more_than_at))
    return (Contrast(*late, early),)


_LATE = tuple((task, lag) for task in ("reversal", "reversal_moe", "progression") for lag in (16, 64))

CLAIMS: Mapping[str, Sequence[Contrast]] = {
    "Sequence ratios tolerate a high lag better than token ratios do (GSPO)": _over("gspo", "grpo", *_LATE),
    "The same of weights without a clip": _over("reinforce + sequence_tis", "reinforce + token_tis", *_LATE),
    "Tapering by the whole completion (TOPR) tolerates a high lag better than `gspo`": _over("topr", "gspo", *_LATE),
    "`topr` is better than `vespo` at a high lag": _over("topr", "vespo", *_LATE),
    "A mixture of experts needs sequence ratios more than a dense model does (GSPO, section 5.3)": [
        Contrast(
            Side("reversal_moe", "gspo", lag),
            Side("reversal_moe", "grpo", lag),
            (Side("reversal", "gspo", lag), Side("reversal", "grpo", lag)),
        )
        for lag in (16, 64)
    ],
    "A range of 0.3 / length is better than 0.05 on completions of 54 tokens": (
        _over("gspo", "gspo + band 0.05", *(("progression", lag) for lag in (1, 4, 16, 64)))
    ),
    "A range of 0.3 / length is better than one of 0.8 / length on completions of 54 tokens": (
        _over("gspo", "gspo + band 0.015", *(("progression", lag) for lag in (1, 4, 16)))
    ),
    "A range of 0.3 / length is better than 0.005 on completions of 6 tokens": (
        _over("gspo", "gspo + band 0.005", *(("reversal", lag) for lag in (1, 4, 16, 64)))
    ),
    "Token clips lose reward from lag 4 on (AReaL, table 3)": [
        Contrast(Side(task, "grpo", 0), Side(task, "grpo", lag))
        for task in ("reversal", "reversal_moe", "progression")
        for lag in (4, 16, 64)
    ],
    "On long completions weights are better than masks (reports of practitioners)": (
        _over("reinforce + sequence_tis", "reinforce + sequence_mask", ("progression", 16), ("progression", 64))
        + _over("reinforce + token_tis", "reinforce + icepop", ("progression", 16), ("progression", 64))
    ),
    "The sampler's routing improves GSPO (against GSPO, section 5.3)": (
        _over("gspo + engine routing", "gspo", *(("reversal_moe", lag) for lag in (0, 1, 4, 16, 64)))
    ),
    "An adapter of SmolLM2 learns more with a range by each completion's length than with GSPO's own (predicted)": (
        _over(DEFAULT, "gspo + paper's band", ("sums_adapter", 4))
    ),
    "A lag of 4 costs that adapter reward": [
        Contrast(Side("sums_adapter", name, 0), Side("sums_adapter", name, 4)) for name in (DEFAULT, "cispo")
    ],
    "At a lag of 4 that adapter learns more with a range of 0.05 than with one by each completion's length (predicted)": (
        _over("gspo + band 0.05", DEFAULT, ("sums_adapter", 4))
    ),
    "At a lag of 1 that adapter learns more with a range of 0.05": _over("gspo + band 0.05", DEFAULT, ("sums_adapter", 1)),
    "From a lag of 1 to one of 4 the default loses reward on that adapter": [
        Contrast(Side("sums_adapter", DEFAULT, 1), Side("sums_adapter", DEFAULT, 4))
    ],
    "At a lag of 4 an adapter that writes sentences learns more with a range of 0.02 than with the default (predicted)": (
        _over("gspo + band 0.02", DEFAULT, ("sentences_adapter", 4))
    ),
    "At a lag of 4 the adapter of `sums_adapter` learns more without any correction than with PPO's clip (predicted)": (
        _over("reinforce", "grpo", ("sums_adapter", 4))
    ),
    "At a lag of 4 that adapter learns more by `cispo` than by `grpo`": _over("cispo", "grpo", ("sums_adapter", 4)),
    "The lead of `cispo` over `grpo` there is larger than at a lag of 1 (predicted)": (
        _lead_grows("cispo", "grpo", "sums_adapter", lag=4, more_than_at=1)
    ),
    "At a lag of 4 `vespo` leads the default there (predicted)": _over("vespo", DEFAULT, ("sums_adapter", 4)),
    "The lead of `cispo` over the default on that adapter is larger at a lag of 4 than at 0 (predicted)": (
        _lead_grows("cispo", DEFAULT, "sums_adapter", lag=4, more_than_at=0)
    ),
}
"""Claims with the differences that each is about."""


def compare_claim(differences: Sequence[Contrast], rows: Sequence[StudyRow]) -> list[TestedContrast]:
    """Return the differences of a claim that have a seed on every side."""
    found = [(one, compared) for one in differences if (compared := _compare(one, rows)) is not None]
    tested = [compared.p_value for _, compared in found if compared.p_value is not None]
    adjusted = iter(estimates.holm(tested))
    return [TestedContrast(*one, None if one[1].p_value is None else next(adjusted)) for one in found]


def claim_verdict(findings: Sequence[TestedContrast]) -> str:
    """Return the sentence that the intervals allow."""
    signs = [finding.sign for finding in findings]
    above, below, num = signs.count(1), signs.count(-1), len(signs)
    if not num:
        return "no runs"
    if above == num:
        return "confirmed"
    if below == num:
        return "contradicted: the opposite holds"
    if not above and not below:
        return f"these runs cannot tell: none of {num} differences is distinguishable from 0"
    parts = [f"{count} of {num} {text}" for count, text in ((above, "for it"), (below, "against it")) if count]
    return f"not as a rule: {', '.join(parts)}, {num - above - below} not distinguishable from 0"


def _compare(difference: Contrast, rows: Sequence[StudyRow]) -> estimates.Comparison | None:
    first, second = _rewards(difference.first, rows), _rewards(difference.second, rows)
    if difference.less is not None:
        more, less = (_rewards(side, rows) for side in difference.less)
        seeds = first.keys() & second.keys() & more.keys() & less.keys()
        first = {seed: first[seed] - second[seed] for seed in seeds}
        second = {seed: more[seed] - less[seed] for seed in seeds}
    compared = estimates.compare_pairs(second, first)
    return None if compared is None else compared.wider_than(LEAST_WIDTH)


def _rewards(side: Side, rows: Sequence[StudyRow]) -> dict[int, float]:
    return {row.seed: row.final_reward for row in rows if Side(row.task, row.method, row.lag) == side and not row.noise}
