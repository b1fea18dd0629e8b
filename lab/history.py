"""A run's metrics rows folded into what its report shows: series, counts, and what became of every group."""

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

Row = Mapping[str, Any]

_END_OF_TIME = 4.1e9
"""The year 2099: a larger time is damage, which dates and plots could not show."""

_MOST_COMPLETIONS = 1e12
"""More in one step is damage, too."""
_LAG_COUNT = re.compile(r"by_lag/(\d{1,9}(?:-\d{1,9}|\+)?)/count")


class Interval(NamedTuple):
    """Tokens that were produced between two times (seconds since the epoch)."""

    start: float
    end: float
    num_tokens: float


class GroupFate(NamedTuple):
    """What became of one generated group."""

    outcome: str
    """`trained` or `dropped`."""
    reason: str
    """Why it was dropped; empty for a trained group."""
    lengths: "array[int]"
    """Tokens of each completion."""
    ended_at: float
    """When it was trained on or dropped; as the other times, seconds since the epoch."""
    reward: float = math.nan
    """Mean over its completions; nan, here and below, where the row does not tell."""
    generate_s: float = math.nan
    ready_at: float = math.nan
    """When it was in the learner's buffer."""
    taken_at: float = math.nan
    """When it left the buffer: selected with its batch, or dropped."""


class LagDrift(msgspec.Struct, frozen=True):
    """What was trained on at one bucket of policy lags, over the whole run; None for what no step has recorded."""

    bucket: str
    """Lowest and highest lag, in optimizer steps: `0`, `3-4`, `9+`."""
    count: int
    """Completions; where a batch is passed over more than once, each time."""
    log_ratio_mean: float | None
    """Of the log sequence ratio between policy and anchor, before anything is masked or clipped."""
    log_ratio_std: float | None
    """Of all completions: the steps' mean variance and the variance of their means together."""
    ess: float | None
    """Sequence effective sample size per completion: mean over the steps by their counts, each over its own completions."""
    clip_fraction: float | None
    """Share of completions; under an objective that clips tokens, their mean share of clipped tokens."""
    masked: float | None
    """Share of tokens that the off-policy correction masked; None, too, without one."""
    reward: float | None
    """Mean, as the task gave it."""
    length: float | None
    """Mean tokens."""


class Ledger(msgspec.Struct, frozen=True):
    """Leases by how they ended."""

    leased: int
    trained: int
    dropped: dict[str, int]
    """By reason."""
    expired: int
    in_flight: int

    @property
    def num_accounted(self) -> int:
        """The right side of `leased = trained + dropped + expired + in flight`."""
        return self.trained + sum(self.dropped.values()) + self.expired + self.in_flight


@dataclass
class ActorHistory:
    """One actor, over all its restarts under the same name."""

    name: str
    policy_version: int = -1
    """The newest one it reported."""
    num_groups_sent: int = 0
    num_generated_tokens: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    """Main-loop seconds by what they went to."""
    times: "array[float]" = field(default_factory=lambda: array("d"))
    """When it reported, seconds since the epoch."""
    tokens: "array[float]" = field(default_factory=lambda: array("d"))
    """`num_generated_tokens` at those times, restarts added up."""
    _last: Row = field(default_factory=dict)

    def take(self, row: Row) -> None:
        """Add one report; its counters only grow until the actor is started again."""
        restarted = (number(row, "num_generated_tokens") or 0) < (number(self._last, "num_generated_tokens") or 0)
        before = {} if restarted else self._last
        self.num_generated_tokens += _increase(before, row, "num_generated_tokens")
        self.num_groups_sent += _increase(before, row, "num_groups_sent")
        for work in _mapping(row, "seconds"):
            self.seconds[work] += _increase(_mapping(before, "seconds"), _mapping(row, "seconds"), work)
        self.policy_version = int(number(row, "policy_version") or 0)
        self.times.append(row["time"])
        self.tokens.append(self.num_generated_tokens)
        self._last = row

    @property
    def tokens_per_s(self) -> float | None:
        """Mean over the time from the first report to the last; None for less than two reports."""
        if len(self.times) < 2 or self.times[-1] <= self.times[0]:
            return None
        return (self.tokens[-1] - self.tokens[0]) / (self.times[-1] - self.times[0])

    def intervals(self) -> Iterable[Interval]:
        """The tokens generated between each two reports."""
        for index in range(1, len(self.times)):
            tokens = self.tokens[index] - self.tokens[index - 1]
            yield Interval(self.times[index - 1], self.times[index], tokens)


@dataclass
class RunHistory:
    """Everything the report shows; all times are seconds since the epoch."""

    num_rows: int = 0
    first_time: float | None = None
    last_time: float | None = None
    steps: list[Row] = field(default_factory=list)
    """One row for each optimizer step; steps repeated after a resume are in it once, as last done."""
    evaluations: dict[int, Row] = field(default_factory=dict)
    """By policy version."""
    publishes: list[Row] = field(default_factory=list)
    commits: list[Row] = field(default_factory=list)
    canaries: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    actors: dict[str, ActorHistory] = field(default_factory=dict)
    groups: dict[int, GroupFate] = field(default_factory=dict)
    """By lease id; a group trained on again after a resume is in it once."""
    final: Row | None = None
    """None while the run goes on, and for a run that was killed."""

    @property
    def ledger(self) -> Ledger | None:
        """The learner's own books, which only a run that came to its end has written."""
        books = _mapping(self.final, "ledger") if self.final else {}
        if not books:
            return None
        counts = {name: int(number(books, name) or 0) for name in ("leased", "trained", "expired", "in_flight")}
        return Ledger(dropped=_counts(books, "dropped"), **counts)

    @property
    def wall_s(self) -> float:
        """Duration of the run, so far if it has not ended."""
        told = number(self.final, "wall_s") if self.final else None
        if told is not None:
            return told
        return 0.0 if self.first_time is None or self.last_time is None else self.last_time - self.first_time

    @property
    def groups_by_lag(self) -> dict[int, int]:
        """Trained groups by policy lag."""
        counts: Counter[int] = Counter()
        for row in self.steps:
            for lag, count in _counts(row, "lag/counts").items():
                counts[int(lag)] += count
        return dict(sorted(counts.items()))

    @property
    def drift_by_lag(self) -> list[LagDrift]:
        """The drift ledger: one line for each bucket of lags that occurred, by rising lag."""
        names = {name for row in self.steps for name in row if name.startswith("by_lag/")}
        buckets = [match[1] for name in names if (match := _LAG_COUNT.fullmatch(name))]
        return [_drift(bucket, self.steps) for bucket in sorted(buckets, key=lambda bucket: int(re.split("[-+]", bucket)[0]))]

    @property
    def groups_by_drop_reason(self) -> dict[str, int]:
        """Dropped groups by reason, as far as they were generated."""
        return dict(Counter(group.reason for group in self.groups.values() if group.outcome == "dropped"))

    @property
    def num_groups_trained(self) -> int:
        """Groups whose last outcome is `trained`."""
        return sum(group.outcome == "trained" for group in self.groups.values())

    def lengths(self, *, trained_only: bool) -> list[int]:
        """Completion lengths of all generated groups, or of those trained on."""
        groups = self.groups.values()
        return [n for group in groups if group.outcome == "trained" or not trained_only for n in group.lengths]

    def learner_seconds(self) -> dict[str, float]:
        """The learner's seconds by what they went to; `other` is what no row accounts for."""
        seconds = dict.fromkeys(("wait_rollouts", "train", "proximal", "snapshot", "publish_wait"), 0.0)
        total = 0.0
        for row in self.steps:
            total += number(row, "time/step_s") or 0.0
            for name in seconds:
                seconds[name] += number(row, f"time/{name}_s") or 0.0
        return seconds | {"other": max(0.0, total - sum(seconds.values()))}

    def training_intervals(self) -> list[Interval]:
        """The tokens trained on in each step."""
        return [
            Interval(row["time"] - (number(row, "time/step_s") or 0.0), row["time"], number(row, "tokens/trained") or 0)
            for row in self.steps
        ]


def fold_rows(rows: Iterable[Row]) -> RunHistory:
    """Read a run's rows, in the order they were written.

    A row that lacks what its kind needs (another version wrote it, or it is damaged) is left out.
    """
    history = RunHistory()
    for row in rows:
        written = number(row, "time")
        if written is None or not 0 <= written < _END_OF_TIME:
            continue
        history.num_rows += 1
        # Not simply the first and the last row: threads write slightly out of order, and clocks are set.
        history.first_time = written if history.first_time is None else min(written, history.first_time)
        history.last_time = written if history.last_time is None else max(written, history.last_time)
        _take(history, row)
    return history


def number(row: Row, name: str) -> float | None:
    """The finite number of this name, or None."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def rate_over_time(intervals: Iterable[Interval], edges: list[float]) -> list[float]:
    """Tokens per second in each bin `[edges[i], edges[i + 1])` of equal width; an interval's tokens spread evenly over it."""
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


def _take(history: RunHistory, row: Row) -> None:
    has_version = number(row, "policy_version") is not None
    match row.get("kind"):
        case "step" if has_version:
            # A run resumed from a checkpoint does the steps after it again.
            while history.steps and history.steps[-1]["policy_version"] >= row["policy_version"]:
                history.steps.pop()
            history.steps.append(row)
            history.final = None
        case "eval" if has_version:
            history.evaluations[row["policy_version"]] = row
        case "group" if isinstance(row.get("lease_id"), int):
            history.groups[row["lease_id"]] = _fate(row)
        case "actor" if row.get("actor"):
            name = str(row["actor"])
            history.actors.setdefault(name, ActorHistory(name)).take(row)
        case "weights" if has_version:
            history.publishes.append(row)
        case "commit" if has_version and row.get("actor"):
            history.commits.append(row)
        case "canary" if has_version and row.get("actor"):
            history.canaries.append(row)
        case "event":
            history.events.append(row)
        case "final":
            history.final = row


def _fate(row: Row) -> GroupFate:
    lengths = row.get("lengths")
    whole = [length for length in lengths if isinstance(length, int)] if isinstance(lengths, list) else []
    rewards = row.get("rewards")
    known = [reward for reward in rewards if isinstance(reward, int | float)] if isinstance(rewards, list) else []
    return GroupFate(
        outcome=str(row.get("outcome")),
        reason=str(row.get("reason") or ""),
        lengths=array("i", whole),
        ended_at=row["time"],
        reward=sum(known) / len(known) if known else math.nan,
        generate_s=_or_nan(number(row, "generate_s")),
        ready_at=_or_nan(number(row, "ready_at")),
        taken_at=_or_nan(number(row, "taken_at")),
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


class _Weighted(NamedTuple):
    """A number of one step, and what it weighs."""

    value: float
    weight: float


def _drift(bucket: str, steps: Iterable[Row]) -> LagDrift:
    prefix = f"by_lag/{bucket}/"
    counts = [(row, number(row, f"{prefix}count") or 0) for row in steps]
    rows = [(row, count) for row, count in counts if 0 < count < _MOST_COMPLETIONS]

    def weighted(name: str, *, per_token: bool = False) -> list[_Weighted]:
        values: list[_Weighted] = []
        for row, count in rows:
            value = number(row, prefix + name)
            length = number(row, f"{prefix}length_mean") if per_token else 1.0
            if value is not None and length is not None:
                values.append(_Weighted(value, count * length))
        return values

    means = weighted("ratio_log_mean")
    mean = _mean(means)
    within = _mean([_Weighted(std * std, weight) for std, weight in weighted("ratio_log_std")])
    between = (
        _mean([_Weighted((value - mean) * (value - mean), weight) for value, weight in means]) if mean is not None else None
    )
    return LagDrift(
        bucket,
        count=int(sum(count for _, count in rows)),
        log_ratio_mean=mean,
        log_ratio_std=None if within is None or between is None else math.sqrt(within + between),
        ess=_mean(weighted("ess_sequence")),
        clip_fraction=_mean(weighted("clip_fraction")),
        masked=_mean(weighted("correction_masked", per_token=True)),
        reward=_mean(weighted("reward_mean")),
        length=_mean(weighted("length_mean")),
    )


def _mean(values: Sequence[_Weighted]) -> float | None:
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else None


def _increase(before: Row, after: Row, name: str) -> Any:
    return max(0, (number(after, name) or 0) - (number(before, name) or 0))


def _mapping(row: Row, name: str) -> Row:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def _counts(row: Row, name: str) -> dict[str, int]:
    counts = _mapping(row, name)
    return {key: int(count) for key in counts if (count := number(counts, key)) is not None}
