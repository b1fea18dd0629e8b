"""The history of a run, folded from its metrics rows: series, counts, and the end of every group."""

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, assert_never

import msgspec

from offbeat.common.errors import SettingError
from offbeat.common.records import rows
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.lab.run_summary import ProcessTimes
from offbeat.learner.diagnostics.length_bias import EndedLease

_END_OF_TIME = 4.1e9
"""The year 2099, in seconds since the epoch. A later time is damage, which dates and plots could not show."""

_MOST_COMPLETIONS = 1e12
"""A larger number in one step is damage."""
_BUCKET = r"(\d{1,9}(?:-\d{1,9}|\+)?)"


class Interval(NamedTuple):
    """Tokens produced between two times, in seconds since the epoch."""

    start: float
    end: float
    num_tokens: float


class EndedGroup(NamedTuple):
    """The end of one generated group."""

    lease: EndedLease
    """The lease it was generated for."""
    policy_lag: int
    """Its lag when it was trained on, for the last time, or dropped."""
    policy_version: int
    """The learner's version at that moment."""
    lengths: "array[int]"
    """Tokens of each completion."""
    ended_at: float
    """Time at which it was trained on or dropped, in seconds since the epoch."""


class LagDrift(msgspec.Struct, frozen=True):
    """The training data at one bucket of policy lags, over the whole run. A field is None where no step recorded it."""

    bucket: str
    """Lowest and highest lag, in optimizer steps: `0`, `3-4`, `9+`."""
    count: int
    """Completions; one counts again in every epoch over its batch."""
    log_ratio_mean: float | None
    """Mean log sequence ratio between policy and anchor, before masking and clipping."""
    log_ratio_std: float | None
    """Standard deviation over all completions: the steps' mean variance plus the variance of their means."""
    ess: float | None
    """Effective sample size over sequences, per completion; mean over the steps, weighted by their completions."""
    clip_fraction: float | None
    """Share of completions that are clipped; under an objective that clips tokens, mean share of clipped tokens."""
    masked: float | None
    """Share of tokens that the off-policy correction masked; None also for a run without a correction."""
    reward: float | None
    """Mean reward, before any scaling or penalty."""
    length: float | None
    """Mean tokens of a completion."""


class TurnDrift(msgspec.Struct, frozen=True):
    """The trained tokens of one bucket of turns, over the steps of the run in which an episode had several."""

    bucket: str
    """First and last turn, counted from 1: `1`, `3-4`, `9+`."""
    num_tokens: int
    lag_mean: float | None
    """Mean lag of a token in optimizer steps, by the version that sampled it. None where no step recorded it, as below."""
    k3: float | None
    """Mean `pi/mu - 1 - log pi/mu` of the learner's policy and the engine's log-probs, in nats per token."""


@dataclass
class ActorHistory:
    """One actor, over all its restarts under one name."""

    name: str
    policy_version: int | None = None
    """The version it reported last; None before it has weights."""
    num_groups_sent: int = 0
    num_generated_tokens: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Main-loop seconds by kind of work."""
    times: "array[float]" = field(default_factory=lambda: array("d"))
    """Times of its reports, in seconds since the epoch."""
    tokens: "array[float]" = field(default_factory=lambda: array("d"))
    """Tokens generated up to each of these times, added up over restarts."""
    _last: rows.ActorRow | None = None

    def take(self, row: rows.ActorRow) -> None:
        """Add one report, whose counters grow until the actor restarts and counts from zero."""
        before = self._last
        if before is not None and row.num_generated_tokens < before.num_generated_tokens:
            before = None
        self.num_generated_tokens += row.num_generated_tokens - (before.num_generated_tokens if before else 0)
        self.num_groups_sent += max(0, row.num_groups_sent - (before.num_groups_sent if before else 0))
        for work, seconds in row.seconds.items():
            self.seconds[work] += max(0, seconds - (before.seconds.get(work, 0) if before else 0))
        self.policy_version = row.policy_version
        self.times.append(row.time)
        self.tokens.append(self.num_generated_tokens)
        self._last = row

    @property
    def tokens_per_s(self) -> float | None:
        """Mean rate from the first report to the last; None with fewer than two reports."""
        if len(self.times) < 2 or self.times[-1] <= self.times[0]:
            return None
        return (self.tokens[-1] - self.tokens[0]) / (self.times[-1] - self.times[0])

    def intervals(self) -> Iterable[Interval]:
        """Yield the tokens generated between consecutive reports."""
        for index in range(1, len(self.times)):
            tokens = self.tokens[index] - self.tokens[index - 1]
            yield Interval(self.times[index - 1], self.times[index], tokens)


@dataclass
class RunHistory:
    """A run as its report shows it. All times are seconds since the epoch."""

    num_rows: int = 0
    first_time: float | None = None
    last_time: float | None = None
    steps: list[rows.StepRow] = field(default_factory=list)
    """One row for each optimizer step. A step repeated after a resume is listed once, as last done."""
    evaluations: dict[int, rows.EvalRow] = field(default_factory=dict)
    """Evaluations by policy version."""
    evaluation_samples: dict[tuple[int, int], rows.EvalSampleRow] = field(default_factory=dict)
    """Samples of evaluations by policy version and prompt."""
    publishes: list[rows.WeightsRow] = field(default_factory=list)
    commits: list[rows.CommitRow] = field(default_factory=list)
    canaries: list[rows.CanaryRow] = field(default_factory=list)
    events: list[rows.EventRow] = field(default_factory=list)
    actors: dict[str, ActorHistory] = field(default_factory=dict)
    groups: dict[int, EndedGroup] = field(default_factory=dict)
    """Groups by lease id. A group trained on again after a resume is listed once, and not while its step is undone."""
    earlier: set[int] = field(default_factory=set)
    """Groups that the processes before the newest trained on, until its first step tells which of them are undone."""
    samples: list[rows.SampleRow] = field(default_factory=list)
    """Completions as text, by rising policy version."""
    final: rows.FinalRow | None = None
    """The outcome; None while the run continues, and after the learner was killed."""
    times: ProcessTimes = field(default_factory=ProcessTimes)

    @property
    def ledger(self) -> rows.LedgerSums | None:
        """The learner's own count of the leases; None until the run has ended."""
        return self.final.ledger if self.final else None

    @property
    def held_out_rewards(self) -> dict[int, float]:
        """Mean reward of each evaluation that has one, by rising policy version."""
        return {version: row.reward for version, row in sorted(self.evaluations.items()) if row.reward is not None}

    @property
    def groups_by_lag(self) -> dict[int, int]:
        """Trained groups by policy lag, each at its last pass."""
        lags = Counter(group.policy_lag for group in self.groups.values() if group.lease.outcome == "trained")
        return dict(sorted(lags.items()))

    @property
    def drift_by_lag(self) -> list[LagDrift]:
        """The drift at each bucket of lags that occurred, by rising lag."""
        return [_drift(bucket, self.steps) for bucket in _buckets(f"by_lag/{_BUCKET}/count", self.steps)]

    @property
    def drift_by_turn(self) -> list[TurnDrift]:
        """The drift at each bucket of turns, by rising turns; none for a run without episodes of several turns."""
        return [_turn_drift(bucket, self.steps) for bucket in _buckets(f"by_turn/{_BUCKET}/tokens", self.steps)]

    @property
    def groups_by_drop_reason(self) -> dict[str, int]:
        """Generated groups that were dropped, by reason."""
        return dict(Counter(group.lease.reason for group in self.groups.values() if group.lease.outcome == "dropped"))

    @property
    def num_groups_trained(self) -> int:
        """Number of groups whose last outcome is `trained`."""
        return sum(group.lease.outcome == "trained" for group in self.groups.values())

    def lengths(self, *, trained_only: bool) -> list[int]:
        """Return the completion lengths, in tokens, of all generated groups or of those trained on."""
        groups = self.groups.values()
        return [n for group in groups if group.lease.outcome == "trained" or not trained_only for n in group.lengths]

    def learner_seconds(self) -> dict[str, float]:
        """Return the learner's seconds by kind of work; `other` is the time that no metric covers."""
        seconds = dict.fromkeys(("wait_rollouts", "train", "prepare", "snapshot", "publish_wait"), 0.0)
        total = 0.0
        for row in self.steps:
            total += row.number("time/step_s") or 0.0
            for name in seconds:
                seconds[name] += row.number(f"time/{name}_s") or 0.0
        return seconds | {"other": max(0.0, total - sum(seconds.values()))}

    def training_intervals(self) -> list[Interval]:
        """Return the tokens trained on in each step, which ends before the next one begins."""
        intervals: list[Interval] = []
        next_start = math.inf
        for row in reversed(self.steps):
            # The rows of a batch's steps are written together, at its end.
            end = min(row.time, next_start)
            next_start = end - (row.number("time/step_s") or 0.0)
            intervals.append(Interval(next_start, end, row.number("tokens/trained") or 0))
        return intervals[::-1]


def read_run_history(run: Path, broken_lines: list[int] | None = None) -> RunHistory:
    """Return the history of the run in a folder. Raise `SettingError` where the folder has no rows.

    The numbers of lines that cannot be read are appended to `broken_lines`.
    """
    file = run / ROWS_FILE
    if not file.is_file():
        raise SettingError("RUN", str(run), f"it has no {ROWS_FILE}", "Name the folder of a run.")
    return fold_rows(read_rows(file, broken_lines))


def fold_rows(written: Iterable[rows.Row | rows.OtherRow]) -> RunHistory:
    """Return the history that a run's rows tell, in the order in which they were written.

    A row with an impossible time is left out. Of a damaged or unknown one only the time counts.
    """
    history = RunHistory()
    for row in written:
        if not 0 <= row.time < _END_OF_TIME:
            continue
        history.num_rows += 1
        # Not simply the first and the last row: threads write slightly out of order, and clocks are set.
        history.first_time = row.time if history.first_time is None else min(row.time, history.first_time)
        history.last_time = row.time if history.last_time is None else max(row.time, history.last_time)
        history.times.take(row)
        _take(history, row)
    return history


def sum_seconds(actors: Iterable[ActorHistory]) -> dict[str, float]:
    """Return the main-loop seconds of these actors together, by kind of work."""
    total: dict[str, float] = defaultdict(float)
    for actor in actors:
        for work, seconds in actor.seconds.items():
            total[work] += seconds
    return total


def rate_over_time(intervals: Iterable[Interval], edges: list[float]) -> list[float]:
    """Return tokens per second in each bin `[edges[i], edges[i + 1])` of equal width, spreading an interval's tokens evenly."""
    width = edges[1] - edges[0]
    tokens = [0.0] * (len(edges) - 1)
    for interval in intervals:
        duration = interval.end - interval.start
        if duration <= 0:
            continue
        first = max(0, int((interval.start - edges[0]) / width))
        last = min(len(tokens) - 1, int((interval.end - edges[0]) / width))
        for index in range(first, last + 1):
            overlap = min(interval.end, edges[index + 1]) - max(interval.start, edges[index])
            tokens[index] += interval.num_tokens * max(0.0, overlap) / duration
    return [count / width for count in tokens]


def _take(history: RunHistory, row: rows.Row | rows.OtherRow) -> None:
    match row:
        case rows.StepRow():
            for lease_id in history.earlier:
                if history.groups[lease_id].policy_version >= row.policy_version - 1:
                    del history.groups[lease_id]
            history.earlier.clear()
            # A run resumed from a checkpoint does the steps after it again, and evaluates their versions again.
            if history.steps and history.steps[-1].policy_version >= row.policy_version:
                for evaluated in [version for version in history.evaluations if version >= row.policy_version]:
                    del history.evaluations[evaluated]
                for sampled in [key for key in history.evaluation_samples if key[0] >= row.policy_version]:
                    del history.evaluation_samples[sampled]
            while history.steps and history.steps[-1].policy_version >= row.policy_version:
                history.steps.pop()
            while history.samples and history.samples[-1].policy_version >= row.policy_version:
                history.samples.pop()
            history.steps.append(row)
            history.final = None
        case rows.EvalRow():
            history.evaluations[row.policy_version] = row
        case rows.EvalSampleRow():
            history.evaluation_samples[row.policy_version, row.prompt_id] = row
        case rows.GroupRow():
            history.earlier.discard(row.lease_id)
            history.groups[row.lease_id] = _ended_group(row)
        case rows.SampleRow():
            history.samples.append(row)
        case rows.ActorRow():
            history.actors.setdefault(row.actor, ActorHistory(row.actor)).take(row)
        case rows.WeightsRow():
            history.publishes.append(row)
        case rows.CommitRow():
            history.commits.append(row)
        case rows.CanaryRow():
            history.canaries.append(row)
        case rows.EventRow():
            history.events.append(row)
            if row.event == "run_started":
                history.final = None
                history.earlier = {number for number, group in history.groups.items() if group.lease.outcome == "trained"}
        case rows.FinalRow():
            history.final = row
        case rows.EngineRow() | rows.EpochRow() | rows.PullRow() | rows.RoutingRow() | rows.OtherRow():
            pass
        case _:
            assert_never(row)


def _ended_group(row: rows.GroupRow) -> EndedGroup:
    rewards = [reward for reward in row.rewards if reward is not None]
    lease = EndedLease(
        lease_id=row.lease_id,
        outcome=row.outcome,
        reason=row.reason,
        length=sum(row.lengths) / len(row.lengths) if row.lengths else math.nan,
        duration_s=row.generate_s,
        reward=sum(rewards) / len(rewards) if rewards else math.nan,
        taken_at=row.taken_at,
        num_turns=sum(row.num_turns) / len(row.num_turns) if row.num_turns else math.nan,
        environment_s=sum(row.environment_s) / len(row.environment_s) if row.environment_s else math.nan,
    )
    return EndedGroup(lease, row.policy_lag, row.policy_version, array("i", row.lengths), row.time)


def _buckets(metric: str, steps: Iterable[rows.StepRow]) -> list[str]:
    """Return the buckets of a metric, rising; `metric` is a pattern of its names, whose group is the bucket."""
    names = {name for row in steps for name in row.metrics}
    buckets = [match[1] for name in names if (match := re.fullmatch(metric, name))]
    return sorted(buckets, key=lambda bucket: int(re.split("[-+]", bucket)[0]))


_Weighted = tuple[float, float]
"""A number of one step, and its weight in the mean."""


def _drift(bucket: str, steps: Iterable[rows.StepRow]) -> LagDrift:
    prefix = f"by_lag/{bucket}/"
    counts = [(row, row.number(f"{prefix}count") or 0) for row in steps]
    told = [(row, count) for row, count in counts if 0 < count < _MOST_COMPLETIONS]

    def weighted(name: str, *, per_token: bool = False) -> list[_Weighted]:
        values: list[_Weighted] = []
        for row, count in told:
            value = row.number(prefix + name)
            length = row.number(f"{prefix}length_mean") if per_token else 1.0
            if value is not None and length is not None:
                values.append((value, count * length))
        return values

    means = weighted("ratio_log_mean")
    mean = _mean(means)
    within = _mean([(std * std, weight) for std, weight in weighted("ratio_log_std")])
    between = _mean([((value - mean) * (value - mean), weight) for value, weight in means]) if mean is not None else None
    return LagDrift(
        bucket,
        count=int(sum(count for _, count in told)),
        log_ratio_mean=mean,
        log_ratio_std=None if within is None or between is None else math.sqrt(within + between),
        ess=_mean(weighted("ess_sequence")),
        clip_fraction=_mean(weighted("clip_fraction")),
        masked=_mean(weighted("correction_masked", per_token=True)),
        reward=_mean(weighted("reward_mean")),
        length=_mean(weighted("length_mean")),
    )


def _turn_drift(bucket: str, steps: Iterable[rows.StepRow]) -> TurnDrift:
    prefix = f"by_turn/{bucket}/"
    counts = [(row, row.number(f"{prefix}tokens") or 0) for row in steps]

    def mean(name: str) -> float | None:
        return _mean([(value, tokens) for row, tokens in counts if (value := row.number(prefix + name)) is not None])

    num_tokens = int(sum(tokens for _, tokens in counts))
    return TurnDrift(bucket, num_tokens, mean("lag_mean"), mean("kl_behavior_policy_k3"))


def _mean(values: Sequence[_Weighted]) -> float | None:
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else None
