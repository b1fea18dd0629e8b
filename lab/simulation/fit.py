"""Distributions of times for `lab.simulation.simulation`, fitted to recorded runs: their metrics and their rollout logs.

The run's processes shared cores while times were measured, and its groups shared engines. The fit estimates the times that
each would have had alone, which hold for other numbers of actors and other bounds. One run cannot show how many cores a busy
process takes, or, if its actors were always full, how much each group slows the others: two unlike runs can (one of them
synchronous).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.common.errors import SettingError
from offbeat.common.records.run_folder import LOG
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.lab.history import RunHistory, fold_rows
from offbeat.lab.lease_history import LeaseHistories, LeaseHistory
from offbeat.lab.simulation.timings import Timings
from offbeat.learner.leases.events import LeaseEvent, Started
from offbeat.learner.leases.log_reading import read_log

Floats = NDArray[np.float64]

WARM_UP = 0.1
"""Share of a run's batches that is left out: compilation, caches, an empty buffer."""
MARGIN_S = 1e5
"""Seconds before and after a run in which nothing is busy."""
MIN_BATCHES = 5
MIN_GROUPS = 50
LOADS = [1 + 0.05 * step for step in range(21)]
"""Numbers of cores per busy process that the fit tries."""


class Fit(NamedTuple):
    """Timings fitted to runs."""

    timings: Timings
    tokens_per_group: float
    num_groups: int
    """Groups behind the timings."""
    num_steps: int
    turns_per_episode: float | None = None
    """Mean turns of the model in an episode; None without an environment."""


class Stall(NamedTuple):
    """New weights at an actor, in seconds since the epoch."""

    arrived_at: float
    committed_at: float
    checked_at: float
    """Time at which the actor sampled again."""


class LearnerBatch(NamedTuple):
    """One selection in the learner, in seconds since the epoch."""

    policy_version: int
    """Policy version after the batch."""
    num_steps: int
    selected_at: float
    trained_at: float
    rested_at: float
    """Time at which the learner looked for the next batch."""


@dataclass
class RunTimes:
    """The times of a run."""

    leases: list[LeaseHistory] = field(default_factory=list)
    """Leases that have ended, in the order of their ends."""
    batches: list[LearnerBatch] = field(default_factory=list)
    stalls: dict[str, list[Stall]] = field(default_factory=dict)
    """Spans in which new weights kept an actor from sampling, by actor."""
    arrivals: dict[int, list[float]] = field(default_factory=dict)
    """Times at which the actors began to swap a policy version in, by version."""
    evaluations: list[tuple[float, float]] = field(default_factory=list)
    """Spans in which evaluation leases, which the log does not have, were among the others."""

    @property
    def steady_batches(self) -> list[LearnerBatch]:
        """Batches after the warm-up."""
        return self.batches[int(WARM_UP * len(self.batches)) :]

    @property
    def steady_since(self) -> float:
        """Time at which the warm-up ended."""
        return self.steady_batches[0].selected_at if self.batches else 0.0

    @property
    def steady_groups(self) -> list[LeaseHistory]:
        """Groups that were leased after the warm-up and had no evaluation leases beside them."""
        return [
            lease
            for lease in self.leases
            if lease.accepted is not None
            and lease.granted_at >= self.steady_since
            and not any(begin < ended_at(lease) and lease.granted_at < end for begin, end in self.evaluations)
        ]


def ended_at(lease: LeaseHistory) -> float:
    """Return the time at which the learner had the group, or gave it up."""
    end = lease.accepted or lease.over
    assert end is not None
    return end.at


def answered_at(lease: LeaseHistory) -> float:
    """Return the time at which the group was complete if it began with the grant; the time after it counts as hand-off."""
    generate_s = math.inf if lease.accepted is None else lease.accepted.generate_s
    return min(ended_at(lease), lease.granted_at + generate_s)


def generated_at(lease: LeaseHistory) -> float:
    """Return the time of the last token if the group waited for its environment afterwards, as in the simulation."""
    waited_s = lease.environment_s
    return max(lease.granted_at, answered_at(lease) - waited_s) if waited_s else answered_at(lease)


def fit(runs: Sequence[Path], cores: int | None) -> Fit:
    """Fit timings to the runs in these folders. `cores`: shared by all processes of a run; None: each had its own.

    Raises `SettingError` for a folder without a run that kept a rollout log, for a run that is too short, and for runs whose
    groups differ in size.
    """
    all_times = []
    for run in runs:
        rows_file, log = run / ROWS_FILE, run / LOG
        if not rows_file.exists() or not log.is_dir():
            problem = f"it has no {ROWS_FILE}, or no rollout log"
            raise SettingError("--fit", str(run), problem, "Name the folder of a run that had log.enabled = true.")
        run_times = read_times(fold_rows(read_rows(rows_file)), (record.event for record in read_log(log)))
        num_batches, num_groups = len(run_times.steady_batches), len(run_times.steady_groups)
        if num_batches < MIN_BATCHES or num_groups < MIN_GROUPS:
            problem = f"after its first tenth it has {num_batches} batches and {num_groups} groups"
            raise SettingError("--fit", str(run), problem, f"Name a longer run: {MIN_BATCHES} and {MIN_GROUPS} are needed.")
        all_times.append(run_times)
    sizes = sorted({len(group.lengths) for run_times in all_times for group in run_times.steady_groups})
    if len(sizes) > 1:
        runs_text = ", ".join(map(str, runs))
        raise SettingError("--fit", runs_text, f"their groups have {sizes} completions", "Fit runs of one rollout.group_size.")
    return fit_times(all_times, cores)


def read_times(history: RunHistory, events: Iterable[LeaseEvent]) -> RunTimes:
    """Read the times of the run's last learner process: a restart may have undone the steps of those before."""
    leases, started_at = LeaseHistories(), 0.0
    for event in events:
        if isinstance(event, Started):
            leases, started_at = LeaseHistories(), event.at
        leases.take(event)
    ended = (lease for lease in leases.by_lease.values() if lease.granted and (lease.accepted or lease.over))
    run_times = RunTimes(sorted(ended, key=ended_at))
    trained = {batch.policy_version + batch.num_steps: batch for batch in leases.batches}
    for row in history.steps:
        version = row.policy_version
        if version in trained:
            event = trained[version]
            busy_s = (row.number("time/step_s") or 0.0) - (row.number("time/wait_rollouts_s") or 0.0)
            selected_at = row.time - busy_s * event.num_steps
            run_times.batches.append(LearnerBatch(version, event.num_steps, selected_at, event.at, row.time))
    num_commits = Counter(row.actor for row in history.commits)
    for row in history.commits:
        # The processes before may have sent the same versions.
        if row.time < started_at:
            continue
        name, committed_at = row.actor, row.time
        arrived_at = committed_at - row.stall_s
        run_times.arrivals.setdefault(row.policy_version, []).append(arrived_at)
        # The actor measures swap and check together, and only their sum over all versions is known.
        stall_s = history.actors[name].seconds["commit_weights"] / num_commits[name] if name in history.actors else 0.0
        stall = Stall(arrived_at, committed_at, max(committed_at, arrived_at + stall_s))
        run_times.stalls.setdefault(name, []).append(stall)
    for version, row in history.evaluations.items():
        if version in run_times.arrivals:
            run_times.evaluations.append((min(run_times.arrivals[version]), row.time))
    return run_times


def fit_times(all_times: Sequence[RunTimes], cores: int | None) -> Fit:
    """Fit timings to the times of these runs."""
    load = _load(all_times, cores) if len(all_times) > 1 else 1.0
    parts = [_measure(run_times, BusyTime(run_times, load, cores)) for run_times in all_times]
    every = _Parts(*(np.concatenate(of_runs) for of_runs in zip(*parts, strict=True)))
    start_s, token_s, crowding = alone(every.generated_s, every.lengths.max(axis=1), every.mean_running)
    return Fit(
        Timings(
            completions_s=start_s + token_s * every.lengths,
            train_s=every.train_s,
            sync_s=every.sync_s,
            crowding=crowding,
            handoff_s=float(every.handoff_s.mean()),
            swap_s=float(every.swap_s.mean()),
            check_s=float(every.check_s.mean()),
            rest_s=float(every.rest_s.mean()),
            load=load,
            environment_s=every.environment_s if every.environment_s.any() else None,
        ),
        tokens_per_group=float(every.lengths.sum(axis=1).mean()),
        num_groups=len(every.lengths),
        num_steps=sum(batch.num_steps for run_times in all_times for batch in run_times.steady_batches),
        turns_per_episode=float(every.num_turns.mean() / every.lengths.shape[1]) if every.num_turns.any() else None,
    )


def alone(generated_s: Floats, longest: Floats, mean_running: Floats) -> tuple[float, float, float]:
    """Fit `start`, `token` and `crowding` of `generated = (start + token * longest) * (1 + crowding * (running - 1))`.

    All are in seconds, fitted by least squares over groups whose longest completion has `longest` tokens and whose actor had
    `mean_running` groups on average. The residue (engine steps, other processes) hits the groups of a moment alike, so it is
    averaged: drawn for each group anew, it would make the longest group of every batch too long.
    """
    slope = np.polyfit(mean_running, generated_s, 1)[0] if np.ptp(mean_running) > 1e-6 else 0.0
    # By chance the slope may say that company helps, or that it costs more than taking turns would.
    slope = min(max(0.0, slope), generated_s.mean() / mean_running.mean())
    crowding = slope / (generated_s.mean() - slope * (mean_running.mean() - 1))
    uncrowded = generated_s / (1 + crowding * (mean_running - 1))
    token, start = np.polyfit(longest, uncrowded, 1) if np.ptp(longest) > 0 else (0.0, 0.0)
    if token <= 0 or start < 0:
        token, start = uncrowded.mean() / longest.mean(), 0.0
    return float(start), float(token), float(crowding)


class Track(NamedTuple):
    """One actor over time: its state from each of these times to the next."""

    times: Floats
    num_running: NDArray[np.int64]
    """Groups being generated."""
    is_sampling: NDArray[np.bool_]
    """False while new weights keep the actor from sampling."""


class BusyTime:
    """A run's time as work: while busy processes outnumber the cores, work passes more slowly than time."""

    def __init__(self, run_times: RunTimes, load: float, cores: int | None) -> None:
        self.tracks = _tracks(run_times)
        times = [np.array([(batch.selected_at, batch.rested_at) for batch in run_times.batches]).ravel()]
        changes = [np.tile([1, -1], len(run_times.batches))]
        for track in self.tracks.values():
            times.append(track.times)
            is_busy = (track.num_running > 0) | ~track.is_sampling
            changes.append(np.diff(is_busy, prepend=0))
        order = np.argsort(np.concatenate(times), kind="stable")
        known = np.concatenate(times)[order]
        # Nothing was busy before or afterwards.
        self._times = np.concatenate([known[:1] - MARGIN_S, known, known[-1:] + MARGIN_S])
        num_busy = np.concatenate([[0], np.concatenate(changes)[order].cumsum(), [0]])
        share = np.ones(len(num_busy)) if cores is None else 1 / np.maximum(1.0, load * num_busy / cores)
        self._work = _integral(share, self._times)

    def until(self, times: Sequence[float] | Floats) -> Floats:
        """Return the work that a process could have done by each of these times."""
        return np.interp(times, self._times, self._work)

    def during(self, spans: Sequence[tuple[float, float]]) -> Floats:
        """Return the work that a process could have done in each of these spans."""
        begins, ends = np.array(spans, dtype=np.float64).reshape(-1, 2).T
        return self.until(ends) - self.until(begins)


class _Parts(NamedTuple):
    """Measurements of one run, as work."""

    lengths: Floats
    """`[num_groups, group_size]`."""
    generated_s: Floats
    """`[num_groups]`: work of the actor meanwhile, commits left out."""
    mean_running: Floats
    """`[num_groups]`: mean number of groups on the actor meanwhile."""
    environment_s: Floats
    """`[num_groups]`: wait for the environment."""
    num_turns: Floats
    """`[num_groups]`: turns of all episodes; 0 without an environment."""
    handoff_s: Floats
    train_s: Floats
    """Work of one optimizer step, by batch."""
    rest_s: Floats
    sync_s: Floats
    swap_s: Floats
    check_s: Floats


def _measure(run_times: RunTimes, work: BusyTime) -> _Parts:
    groups, batches = run_times.steady_groups, run_times.steady_batches
    num_steps = np.array([batch.num_steps for batch in batches])
    stalls = [stall for stalls in run_times.stalls.values() for stall in stalls if stall.arrived_at >= run_times.steady_since]
    generated_s, crowd = np.zeros(len(groups)), np.zeros(len(groups))
    for actor, track in work.tracks.items():
        mine = [index for index, group in enumerate(groups) if group.actor == actor]
        spans = np.array([(groups[index].granted_at, generated_at(groups[index])) for index in mine]).reshape(-1, 2)
        clock = work.until(track.times)
        for of_all, rate in ((generated_s, track.is_sampling), (crowd, track.is_sampling * track.num_running)):
            until = np.interp(spans, track.times, _integral(rate, clock))
            of_all[mine] = until[:, 1] - until[:, 0]
    # A group that seems to have been generated within a stall has no measurable time.
    is_told = generated_s > 0
    return _Parts(
        lengths=np.array([group.lengths for group in groups], dtype=np.float64)[is_told],
        generated_s=generated_s[is_told],
        mean_running=crowd[is_told] / generated_s[is_told],
        environment_s=work.during([(generated_at(group), answered_at(group)) for group in groups])[is_told],
        num_turns=np.array([group.num_turns for group in groups], dtype=np.float64)[is_told],
        handoff_s=work.during([(answered_at(group), ended_at(group)) for group in groups]),
        train_s=work.during([(batch.selected_at, batch.trained_at) for batch in batches]) / num_steps,
        rest_s=work.during([(batch.trained_at, batch.rested_at) for batch in batches]),
        sync_s=_sync_s(run_times, work),
        swap_s=work.during([(stall.arrived_at, stall.committed_at) for stall in stalls]) if stalls else np.zeros(1),
        check_s=work.during([(stall.committed_at, stall.checked_at) for stall in stalls]) if stalls else np.zeros(1),
    )


def _sync_s(run_times: RunTimes, work: BusyTime) -> Floats:
    """Return the transfer of every version, from the end of its step or of the transfer before it, until the actors have it."""
    sync_s = []
    before = 0.0
    for batch in run_times.batches:
        arrivals = run_times.arrivals.get(batch.policy_version)
        if not arrivals:
            continue
        trained, arrived = float(work.until([batch.trained_at])[0]), float(work.until(arrivals).mean())
        if batch.selected_at >= run_times.steady_since:
            sync_s.append(max(0.0, arrived - max(trained, before)))
        before = arrived
    return np.array(sync_s or [0.0])


def _load(all_times: Sequence[RunTimes], cores: int | None) -> float:
    """Return the cores that a busy process takes: those under which steps vary least in work, whatever else is busy."""
    if cores is None:
        return 1.0

    def unevenness(load: float) -> float:
        steps = np.concatenate([_measure(run_times, BusyTime(run_times, load, cores)).train_s for run_times in all_times])
        return float(steps.std() / steps.mean())

    return min(LOADS, key=unevenness)


def _tracks(run_times: RunTimes) -> Mapping[str, Track]:
    changes: dict[str, list[tuple[float, int, int]]] = {}
    for lease in run_times.leases:
        changes.setdefault(lease.actor, []).extend([(lease.granted_at, 1, 0), (generated_at(lease), -1, 0)])
    for actor, stalls in run_times.stalls.items():
        for stall in stalls:
            changes.setdefault(actor, []).extend([(stall.arrived_at, 0, 1), (stall.checked_at, 0, -1)])
    tracks = {}
    for actor, of_actor in changes.items():
        times, running, stalled = np.array(sorted(of_actor)).T
        tracks[actor] = Track(times, running.cumsum().astype(np.int64), stalled.cumsum() == 0)
    return tracks


def _integral(values: NDArray, over: Floats) -> Floats:
    """Return the integral up to each of `over` of a function that is `values[i]` from `over[i]` to `over[i + 1]`."""
    return np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(over))])
