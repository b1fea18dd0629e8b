"""`offbeat simulate`: predicts a config's throughput and staleness for numbers of actors and bounds, without compute."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from rich.console import Group
from rich.text import Text

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import EventRow
from offbeat.common.records.run_folder import read_run_config
from offbeat.common.records.writer import ROWS_FILE, read_rows_of
from offbeat.common.settings.checks import check
from offbeat.common.settings.config import Config, eval_sets
from offbeat.lab.simulation.account import Move, Scaling
from offbeat.lab.simulation.fit import fit
from offbeat.lab.simulation.simulation import ASSUMPTIONS, OF_EPISODES, SimulatedBatch, Simulation
from offbeat.lab.simulation.timings import Fleet, Timings
from offbeat.lab.terminal import print_result, table
from offbeat.learner.leases.evaluation import Evaluations
from offbeat.learner.leases.staleness import StalenessPolicy

WARM_UP = 0.1
"""Share of a simulated run's first batches that is left out; at least those that the bound lets be generated ahead."""
NUM_DRAWN = 1 << 14
"""Groups in a given distribution."""


class Source(NamedTuple):
    """The times of a simulation, and where they come from."""

    timings: Timings
    tokens_per_group: float | None
    cores: int | None
    text: str


class Prediction(msgspec.Struct, frozen=True):
    """The steady part of a simulated run; shares are of time, or of groups."""

    num_actors: int
    max_staleness: int
    num_steps: int
    """Optimizer steps behind the figures."""
    simulated_s: float
    """Simulated seconds of those steps."""
    groups_per_s: float
    """Groups trained on per second."""
    tokens_per_s: float | None
    """Tokens trained on per second; None when the times do not say how long completions are."""
    steps_per_h: float
    learner_waits: float
    """Share of its time that the learner waits for rollouts."""
    actors_wait_leases: float
    """Share of the actors' time without a lease, while the bound admits none, or too few for all actors."""
    actors_wait_weights: float
    """Share of the actors' time without a lease, while the next lease waits for newer weights."""
    slots_used: float
    """Share of the actors' slots that hold a lease."""
    mean_lag: float
    """Mean policy lag of the oldest token, in optimizer steps."""
    law_lag: float
    """Mean lag by Little's law: groups begun and not yet trained on, over the groups of a step."""
    p99_lag: int
    max_lag: int
    lags: dict[int, int]
    """Groups by policy lag."""
    over_bound: float
    """Share of the groups trained on whose lag, measured by `staleness.lag_of`, exceeds `max_staleness`."""
    dropped: float
    """Share of the leases that ended: generated, and too old when their turn came."""
    aborted: float
    """Share of the leases that ended: cancelled while they were generated."""
    wasted: float
    """Share of generation that went into groups never trained on."""


def simulate(
    config: Config, source: Source, *, actors: Sequence[int], staleness: Sequence[int], seconds: float, seed: int
) -> list[Prediction]:
    """Simulate every number of actors with every bound, for at most `seconds` of simulated time.

    Raises `SettingError` for a bound that the config cannot have, and for times that bring too few steps for figures.
    """
    predictions = []
    for max_staleness in staleness:
        bounded = replace(config, staleness=replace(config.staleness, max_staleness=max_staleness))
        check(bounded)
        for num_actors in actors:
            batches = simulate_batches(bounded, source, num_actors=num_actors, seconds=seconds, seed=seed)
            steady = steady_batches(batches, bounded)
            if len(steady) < 2:
                problem = f"{len(batches)} batches of {num_actors} actors are too few"
                raise SettingError("--minutes", seconds / 60, problem, "Simulate longer, or more train.num_steps.")
            predictions.append(predict(steady, bounded, num_actors=num_actors, tokens_per_group=source.tokens_per_group))
    return predictions


def simulate_batches(
    config: Config, source: Source, *, num_actors: int, seconds: float, seed: int, scaling: Scaling | None = None
) -> list[SimulatedBatch]:
    """Simulate one run of the config from its beginning; `scaling` moves the number of actors."""
    evaluation = config.evaluation
    simulation = Simulation(
        StalenessPolicy(config.staleness, config.train),
        Evaluations(
            interval=evaluation.interval if config.data.eval_data else 0,
            num_prompts=evaluation.num_prompts * max(1, len(eval_sets(config.data))),
        ),
        source.timings,
        Fleet(num_actors, config.actor.max_inflight_groups, source.cores),
        evaluation_group_size=evaluation.group_size,
        weights_interval=config.weights.interval,
        seed=seed,
        scaling=scaling,
    )
    return simulation.run(config.train.num_steps, seconds)


def steady_batches(batches: Sequence[SimulatedBatch], config: Config) -> Sequence[SimulatedBatch]:
    """Return the batches without the beginning, and without the end, where nothing is leased any more."""
    num_ahead = config.staleness.max_staleness + 1
    end = len(batches)
    if batches and batches[-1].policy_version >= config.train.num_steps:
        end -= num_ahead
    return batches[max(int(WARM_UP * len(batches)), num_ahead) : end]


def predict(
    batches: Sequence[SimulatedBatch], config: Config, *, num_actors: int, tokens_per_group: float | None
) -> Prediction:
    """Return the figures of these batches, at least two; the first only says when the others began."""
    first, last = batches[0], batches[-1]
    before, after = first.totals, last.totals
    lags = sum((Counter(batch.lags) for batch in batches[1:]), Counter())
    by_lag = sorted(lags.items())
    num_trained = lags.total()
    num_dropped, num_aborted = after.dropped - before.dropped, after.aborted - before.aborted
    num_ended = num_trained + num_dropped + num_aborted
    seconds = last.ended_at - first.ended_at
    num_steps = last.policy_version - first.policy_version
    generated_s = after.generated_s - before.generated_s
    cumulative = np.cumsum([count for _, count in by_lag])
    return Prediction(
        num_actors=num_actors,
        max_staleness=config.staleness.max_staleness,
        num_steps=num_steps,
        simulated_s=seconds,
        groups_per_s=num_trained / seconds,
        tokens_per_s=None if tokens_per_group is None else num_trained * tokens_per_group / seconds,
        steps_per_h=3600 * num_steps / seconds,
        learner_waits=sum(batch.waited_s for batch in batches[1:]) / seconds,
        actors_wait_leases=(after.wait_leases_s - before.wait_leases_s) / (seconds * num_actors),
        actors_wait_weights=(after.wait_weights_s - before.wait_weights_s) / (seconds * num_actors),
        slots_used=(after.slots_s - before.slots_s) / (seconds * num_actors * config.actor.max_inflight_groups),
        mean_lag=sum(lag * count for lag, count in by_lag) / num_trained,
        law_lag=(after.open_s - before.open_s) / seconds / config.train.groups_per_step,
        p99_lag=by_lag[int(np.searchsorted(cumulative, 0.99 * num_trained))][0],
        max_lag=by_lag[-1][0],
        lags=dict(by_lag),
        over_bound=sum(batch.num_over_bound for batch in batches[1:]) / num_trained,
        dropped=num_dropped / num_ended,
        aborted=num_aborted / num_ended,
        wasted=(after.wasted_s - before.wasted_s) / generated_s if generated_s else 0.0,
    )


# Times


def given_times(
    config: Config, completion_s: float | None, *, sigma: float, train_s: float | None, sync_s: float, cores: int | None
) -> Source:
    """Return lognormal completions, and steps and transfers of equal times; cores are shared only if `cores` says so.

    `completion_s` is the mean duration of a completion's generation, `sigma` the standard deviation of its logarithm. Raises
    `SettingError` without a time of completions, or of steps.
    """
    for option, seconds in (("--completion-s", completion_s), ("--train-s", train_s)):
        if seconds is None or seconds <= 0:
            cure = "Give --completion-s and --train-s in seconds, or --fit RUN to take the times from a run."
            raise SettingError(option, seconds, "a simulation needs times above 0", cure)
    assert completion_s is not None and train_s is not None
    shape = (NUM_DRAWN, config.rollout.group_size)
    # Independent of the seed, which decides which of them are drawn when.
    drawn = np.random.default_rng(0).lognormal(-(sigma**2) / 2, sigma, shape)
    timings = Timings(completion_s * drawn, np.array([train_s]), np.array([sync_s]))
    text = f"given: completions lognormal, mean {completion_s:g} s, sigma {sigma:g}"
    return Source(timings, None, cores or None, text)


def fitted_times(config: Config, runs: Sequence[Path], cores: int | None) -> Source:
    """Return the times of these runs. `cores`: of the machine they shared; None: this one's, if their engines ran on CPUs."""
    for run in runs:
        fitted = read_run_config(run)
        for name, ours, theirs in (
            ("rollout.group_size", config.rollout.group_size, fitted.rollout.group_size),
            ("train.groups_per_step", config.train.groups_per_step, fitted.train.groups_per_step),
        ):
            if ours != theirs:
                raise SettingError(
                    name, ours, f"{run} had {theirs}, and its times are for that", "Fit a run that has the same."
                )
    if cores is None:
        cores = os.cpu_count() if any(map(_is_on_cpu, runs)) else 0
    found = fit(runs, cores or None)
    names = ", ".join(map(str, runs))
    text = f"fitted to {found.num_groups} groups and {found.num_steps} steps of {names}"
    if found.turns_per_episode is not None:
        tokens = found.tokens_per_group / (config.rollout.group_size * found.turns_per_episode)
        text += f", {found.turns_per_episode:.3g} turns of {tokens:.3g} tokens an episode"
    return Source(found.timings, found.tokens_per_group, cores or None, text)


def _is_on_cpu(run: Path) -> bool:
    """Return whether an actor of this run joined with an engine on a CPU."""
    events = read_rows_of(run / ROWS_FILE, EventRow)
    return any(event.event == "actor_joined" and "on cpu" in event.detail for event in events)


# Output


def print_predictions(predictions: Iterable[Prediction], source: Source, config: Config, *, as_json: bool) -> None:
    """Print the predictions with their times and assumptions, as a table or as JSON."""
    predictions, times, assumed = list(predictions), times_text(source), assumptions(source)
    bounds = config.staleness
    can_drop = bounds.staleness_policy != "gate" or bounds.hard_max_staleness is not None
    title = f"{config.train.groups_per_step} groups a step, {config.actor.max_inflight_groups} in flight per actor"
    title += f", policy {bounds.staleness_policy}"
    columns = ["actors", "max_\nstaleness", "groups/s", *(["tokens/s"] if source.tokens_per_group is not None else [])]
    columns += ["steps/h", "learner\nwaits", "wait for\nleases", "wait for\nweights", "slots\nused"]
    columns += ["mean\nlag", "L/B", "p99", "max", "over\nbound", *(["dropped", "aborted", "wasted"] if can_drop else [])]
    rows: list[tuple[str, ...]] = []
    for one in predictions:
        tokens = [] if one.tokens_per_s is None else [f"{one.tokens_per_s:,.0f}"]
        lost = [f"{share:.1%}" for share in (one.dropped, one.aborted, one.wasted)] if can_drop else []
        speeds = (str(one.num_actors), str(one.max_staleness), f"{one.groups_per_s:,.4g}", *tokens, f"{one.steps_per_h:,.0f}")
        waits = (one.learner_waits, one.actors_wait_leases, one.actors_wait_weights, one.slots_used)
        lags = (f"{one.mean_lag:.2f}", f"{one.law_lag:.2f}", str(one.p99_lag), str(one.max_lag), f"{one.over_bound:.1%}")
        rows.append((*speeds, *map("{:.0%}".format, waits), *lags, *lost))
    lines = (times, *(f"assumed: {assumption}" for assumption in assumed))
    shown = Group(table(columns, rows, texts=(), title=title), *map(Text, lines))
    print_result({"times": times, "assumptions": assumed, "predictions": predictions}, shown, as_json=as_json)


def assumptions(source: Source) -> tuple[str, ...]:
    """Return what the simulation assumes, in words."""
    return ASSUMPTIONS if source.timings.environment_s is None else (*ASSUMPTIONS, OF_EPISODES)


def times_text(source: Source) -> str:
    """Return the times in words."""
    timings = source.timings
    shared = (
        "no cores are shared" if source.cores is None else f"{source.cores} cores shared, {timings.load:.2f} per busy process"
    )
    waits_s = timings.environment_s
    waits = "" if waits_s is None else f" and {waits_s.mean():.3g} s of its environment"
    return (
        f"times {source.text}; a group alone takes {timings.completions_s.max(axis=1).mean():.3g} s{waits}, crowding "
        f"{timings.crowding:.2g}, a step {timings.train_s.mean():.3g} s, weights {timings.sync_s.mean():.2g} s, swap and check "
        f"{timings.swap_s + timings.check_s:.2g} s, hand-off {timings.handoff_s:.2g} s; {shared}"
    )


class ScaledRun(msgspec.Struct, frozen=True):
    """A simulated run whose number of actors moved."""

    num_actors: int
    """Actors that it began with."""
    moves: tuple[Move, ...]
    """All decisions of the policy, advice included."""
    num_steps: int
    simulated_s: float
    learner_waits: float
    """Share of its time that the learner waited for rollouts, in the second half of the steps."""


def simulate_scaled(config: Config, source: Source, *, num_actors: int, start_s: float, seconds: float, seed: int) -> ScaledRun:
    """Simulate one run under `scale.auto`; raise `SettingError` for times that bring too few steps."""
    scale = replace(config.scale, auto=True)
    scaling = Scaling(scale, num_actors, config.actor.max_inflight_groups, start_s=start_s)
    batches = simulate_batches(config, source, num_actors=num_actors, seconds=seconds, seed=seed, scaling=scaling)
    late = batches[len(batches) // 2 :]
    if len(late) < 2:
        problem = f"{len(batches)} batches are too few"
        raise SettingError("--minutes", seconds / 60, problem, "Simulate longer, or more train.num_steps.")
    waited_s = sum(batch.waited_s for batch in late[1:])
    return ScaledRun(
        num_actors=num_actors,
        moves=tuple(scaling.moves),
        num_steps=batches[-1].policy_version,
        simulated_s=batches[-1].ended_at,
        learner_waits=waited_s / (late[-1].ended_at - late[0].ended_at),
    )


def print_scaled(run: ScaledRun, source: Source, *, as_json: bool) -> None:
    """Print the run's moves and its end, as a table or as JSON."""
    times = times_text(source)
    rows = [("0", "0.0", str(run.num_actors), "begin")]
    rows += [(str(move.policy_version), f"{move.seconds / 60:.1f}", str(move.wanted), move.reason) for move in run.moves]
    moves = table(("step", "minutes", "actors", "why"), rows, texts=("why",))
    end = f"{run.num_steps} steps in {run.simulated_s / 60:.1f} minutes; in their second half the learner waits"
    shown = Group(moves, Text(f"{end} {run.learner_waits:.0%} of its time"), Text(times))
    print_result({"times": times, "run": run}, shown, as_json=as_json)
