"""The cost and the gain of `staleness.target = "auto"`, simulated over speeds, bounds and spreads of length, or in real runs.

    python -m tests.benchmarks.lease_target                                          # half a minute
    python -m tests.benchmarks.lease_target live ROUNDS [CONFIG] [SETTING=VALUE ...] # the quick start: a minute a round

Each row pairs a run whose leases fill the bound with one that follows the target: seconds per step and mean lag of both.
Real runs take turns, a pair in each round, whose first is now the one and now the other. They count after their first fifth.
"""

import sys
from collections.abc import Sequence
from statistics import mean
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

from offbeat.common.records.rows import StepRow
from offbeat.common.settings.config import StalenessSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.lab.simulation.simulation import Fleet, SimulatedBatch, Simulation, Timings
from offbeat.learner.leases.evaluation import Evaluations
from offbeat.learner.leases.staleness import StalenessPolicy
from tests.benchmarks.measuring import print_table, run_offbeat, spread

NUM_STEPS = 300
GROUPS_PER_STEP = 8
SEEDS = (0, 1)
TIMEOUT_S = 1800.0
"""Longest time of one real run."""


class Outcome(NamedTuple):
    """A simulated run after its first fifth."""

    step_s: float
    lag: float
    """Mean over the groups that were trained on, in optimizer steps."""


def main() -> None:
    """Measure what the command line asks for."""
    match sys.argv[1:]:
        case []:
            simulate_grid()
        case ["live", rounds, *arguments] if rounds.isdecimal() and int(rounds) > 1:
            run_live(int(rounds), arguments)
        case _:
            sys.exit(__doc__)


def run_live(num_rounds: int, arguments: Sequence[str]) -> None:
    """Print seconds per step and mean lag of real runs with these arguments of `offbeat train`, under both targets."""
    outcomes: dict[Literal["bound", "auto"], list[Outcome]] = {"bound": [], "auto": []}
    for seed in range(num_rounds):
        pair = list(outcomes.items())
        for target, of_target in pair if seed % 2 else reversed(pair):
            settings = (f"staleness.target={target}", f"run.seed={seed}")
            run = run_offbeat(*arguments, *settings, timeout_s=TIMEOUT_S)
            of_target.append(_live_outcome(run.of_kind(StepRow)))
            print(f"seed {seed}, {target}: {of_target[-1]}", flush=True)
    ratios = [young.step_s / full.step_s for full, young in zip(outcomes["bound"], outcomes["auto"], strict=True)]
    print_table(
        f"staleness.target: median (min–max) of {num_rounds} rounds",
        ("target", "s/step", "mean lag"),
        [
            [target, spread([one.step_s for one in of_target]), spread([one.lag for one in of_target])]
            for target, of_target in outcomes.items()
        ],
    )
    print(f"seconds per step, target over bound, by round: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    logs = np.log(ratios)
    middle, half = logs.mean(), stats.t.ppf(0.975, num_rounds - 1) * stats.sem(logs)
    low, mid, high = np.exp([middle - half, middle, middle + half])
    print(f"geometric mean {mid:.3f}, 95% interval {low:.3f} to {high:.3f}")


def _live_outcome(steps: Sequence[StepRow]) -> Outcome:
    steady = steps[len(steps) // 5 :]
    step_s = (steady[-1].time - steady[0].time) / (len(steady) - 1)
    return Outcome(step_s, mean(row.number("lag/mean") or 0.0 for row in steady))


def simulate_grid() -> None:
    """Print a row for each point of the grid, then the worst ratio."""
    print("crowding  sigma  train_s  bound |  bound: s/step    lag |  target: s/step   lag | ratio")
    ratios: list[float] = []
    for crowding in (0.0, 0.3, 1.0):
        for sigma in (0.3, 1.0):
            for train_s in (0.1, 0.25, 0.5, 1.0, 2.0, 4.0):
                for max_staleness in (2, 4, 8):
                    timings = make_timings(crowding, sigma, train_s)
                    full, young = simulate(timings, max_staleness, "bound"), simulate(timings, max_staleness, "auto")
                    ratios.append(young.step_s / full.step_s)
                    point = f"{crowding:8.1f} {sigma:6.1f} {train_s:8.2f} {max_staleness:6}"
                    of_bound, of_target = (f"{outcome.step_s:14.3f} {outcome.lag:6.2f}" for outcome in (full, young))
                    print(f"{point} | {of_bound} | {of_target} | {ratios[-1]:.3f}")
    print(f"{len(ratios)} points; seconds per step, target over bound: {min(ratios):.3f} to {max(ratios):.3f}")


def make_timings(crowding: float, sigma: float, train_s: float) -> Timings:
    """Return groups of eight lognormal completions that take one second alone, and steps of `train_s` that vary by a fifth."""
    generator = np.random.default_rng(0)
    completions_s = np.exp(generator.normal(0.0, sigma, (400, 8)))
    return Timings(
        completions_s / completions_s.max(1).mean(),
        generator.gamma(25.0, train_s / 25.0, 200),
        np.array([0.02]),
        crowding=crowding,
    )


def simulate(timings: Timings, max_staleness: int, target: Literal["bound", "auto"]) -> Outcome:
    """Return the mean outcome over the seeds, with four actors of eight slots."""
    outcomes = [_outcome(_run(timings, max_staleness, target, seed)) for seed in SEEDS]
    return Outcome(*(sum(column) / len(SEEDS) for column in zip(*outcomes, strict=True)))


def _run(timings: Timings, max_staleness: int, target: Literal["bound", "auto"], seed: int) -> Sequence[SimulatedBatch]:
    train = TrainSection(num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)
    policy = StalenessPolicy(StalenessSection(max_staleness=max_staleness, target=target), train)
    evaluations = Evaluations(interval=0, num_prompts=0)
    fleet = Fleet(4, 8)
    simulation = Simulation(policy, evaluations, timings, fleet, evaluation_group_size=1, weights_interval=1, seed=seed)
    return simulation.run(NUM_STEPS)[NUM_STEPS // 5 : -max_staleness - 1]


def _outcome(batches: Sequence[SimulatedBatch]) -> Outcome:
    lags = [(lag, number) for batch in batches for lag, number in batch.lags.items()]
    step_s = (batches[-1].ended_at - batches[0].ended_at) / (len(batches) - 1)
    return Outcome(step_s, sum(lag * number for lag, number in lags) / sum(number for _, number in lags))


if __name__ == "__main__":
    main()
