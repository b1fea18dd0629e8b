"""Length bias: whether the leases that training left out, or made wait, differ from the others in length, duration or reward.

With a bound on what is admitted and no drops, all that is leased is trained on in the end, so that the composition of the whole
tells nothing. Two things bias training, and either raises the alarm:

- *dropped*: leases that ended without being trained on (dropped, or taken back from the actor) against the trained ones.
  Groups of equal rewards (`zero_variance`) are left out: they have no gradient, and are dropped for just that.
- *passed over*: groups that were ready when a batch with younger leases was selected without them, against the other trained
  ones. Selection by the oldest lease passes over nothing, whatever the completion times: the alarm is silent by construction.
  Selection of the first finished passes over what took long, as soon as more than a batch is ready. Where the learner always
  waits for the last group of a batch (slow actors, or a `max_staleness` of 0 or 1 with one step per batch) there is nothing to
  select from: both orders make the same batches, and there is no alarm under either.

A group that was not ready in its turn is not passed over, but late: long groups always are, where actors hold training back.
All of them are trained on, so this is no bias, but age that grows with length; `Lateness` tells it, without an alarm.

Both comparisons are Mann-Whitney U tests with the rank-biserial correlation as effect, on ranks among the `NUM_NEIGHBORS`
leases that ended about the same time: lengths that grow in the course of training are no sign of bias.
"""

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from offbeat.learner.leases.groups import Group

MAX_P = 1e-3
"""An alarm's p-value is below."""
MIN_EFFECT = 0.2
"""An alarm's rank-biserial correlation is at least this, either way: for a pair of leases drawn from the two sides, how much
likelier the one from the first side is the longer than the shorter."""
MIN_SHARE = 0.01
"""Fewer dropped leases, or fewer passed over, are no alarm, however long they are."""
NUM_NEIGHBORS = 250
"""Ranks are taken within blocks of about so many leases."""

MONITOR_WINDOW = 1000
"""The live alarm is about so many leases that ended last, and is told at most once for them."""
MONITOR_INTERVAL = 100
"""Leases between two tests of the live alarm."""
MONITOR_MAX_P = 1e-6
"""The live alarm's: it tests every `MONITOR_INTERVAL` leases, all the run long, and chance must not add up to an alarm."""

Quantity = Literal["length", "duration_s", "reward"]
QUANTITIES: tuple[Quantity, ...] = ("length", "duration_s", "reward")

LABELS: dict[Quantity, str] = {"length": "tokens", "duration_s": "seconds", "reward": "reward"}
"""How each is called in text."""
FORMATS: dict[Quantity, str] = {"length": ",.1f", "duration_s": ",.2f", "reward": ".3f"}
"""How its numbers are written."""

_NO_SIGNAL = "zero_variance"
_CAUSES = {
    "dropped": 'raise the bound or rollout.lease_timeout_s, or let staleness.staleness_policy = "gate" drop nothing',
    "passed over": 'staleness.selection = "oldest_lease" passes over nothing',
}
"""What to do, by what befell the leases."""


class EndedLease(NamedTuple):
    """One lease that is no longer in flight; nan for what is not known of it."""

    lease_id: int
    outcome: str
    """`trained`, `dropped` or `expired`."""
    reason: str = ""
    """Why it was not trained on."""
    length: float = math.nan
    """Mean tokens of its completions."""
    duration_s: float = math.nan
    """How long it was generated; without a group, how long until it was given up, which is less than it would have taken."""
    reward: float = math.nan
    """Mean over its completions, as the task gave it."""
    ready_at: float = math.nan
    """When its group was in the buffer, seconds since the epoch."""
    taken_at: float = math.nan
    """When its group left the buffer, selected with its batch or dropped."""


class Summary(msgspec.Struct, frozen=True):
    """One quantity over some leases."""

    mean: float
    median: float
    p95: float


class Part(msgspec.Struct, frozen=True):
    """The leases that ended in one way."""

    name: str
    count: int
    length: Summary | None
    """Tokens; None where no lease has it."""
    duration_s: Summary | None
    reward: Summary | None


class Comparison(msgspec.Struct, frozen=True):
    """One test: the leases that something befell against the others."""

    what: Literal["dropped", "passed over"]
    quantity: Quantity
    count: int
    """Leases that it befell, as far as the quantity is known."""
    num_others: int
    mean: float
    """Of those it befell; nan without any."""
    mean_of_others: float
    effect: float
    """Rank-biserial correlation, -1 to 1; above 0 where those it befell have more."""
    p_value: float
    """Two-sided."""

    @property
    def share(self) -> float:
        """Of all leases compared, those that it befell."""
        return self.count / max(1, self.count + self.num_others)

    def is_alarming(self, max_p: float = MAX_P) -> bool:
        """Whether it is significant, large, and about more than a few leases."""
        return self.p_value < max_p and abs(self.effect) >= MIN_EFFECT and self.share >= MIN_SHARE


class Lateness(msgspec.Struct, frozen=True):
    """How far training went in another order than leasing, for whatever reason.

    A group's displacement is the number of batches between the one it was trained in and the one its place among the trained
    leases falls in. The correlations are Spearman's; 0 where nothing is displaced.
    """

    share: float
    """Of the trained groups, those with a displacement above 0."""
    mean_batches: float
    """Mean displacement of these."""
    length_correlation: float
    """Of displacement and length."""
    duration_correlation: float


class BiasReport(msgspec.Struct, frozen=True):
    """See the module's docstring."""

    parts: tuple[Part, ...]
    """`generated` (all that have a group), `trained`, then `dropped: REASON` and `expired: REASON`."""
    comparisons: tuple[Comparison, ...]
    lateness: Lateness | None
    """None where it is not known which groups were trained together."""
    alarms: tuple[str, ...]
    """One sentence for each way in which training is biased."""


def ended_group(group: Group, *, outcome: str, reason: str, taken_at: float) -> EndedLease:
    """A lease with a group; `taken_at` in seconds since the epoch."""
    return EndedLease(
        group.lease_id,
        outcome,
        reason,
        float(np.mean([len(rollout.token_ids) for rollout in group.rollouts])),
        group.generate_s,
        float(np.mean([rollout.reward for rollout in group.rollouts])),
        group.ready_at,
        taken_at,
    )


def bias_report(ended: Sequence[EndedLease]) -> BiasReport:
    """Compare the leases of a run, given in the order in which they ended."""
    comparisons = _compare(ended)
    return BiasReport(tuple(_parts(ended)), tuple(comparisons), _lateness(ended), tuple(_alarms(comparisons, MAX_P)))


class BiasMonitor:
    """The alarm of a running job, over the last `MONITOR_WINDOW` leases; any thread may feed it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._window: deque[EndedLease] = deque(maxlen=MONITOR_WINDOW)
        self._until_test = MONITOR_INTERVAL

    def take(self, lease: EndedLease) -> str | None:
        """Add a lease that has ended; the alarm's text when it is raised now."""
        with self._lock:
            self._window.append(lease)
            self._until_test -= 1
            if self._until_test:
                return None
            alarms = _alarms(_compare(self._window), MONITOR_MAX_P)
            # After an alarm the next one is about other leases.
            self._until_test = MONITOR_WINDOW if alarms else MONITOR_INTERVAL
            return f"of the last {len(self._window)} leases, {'; '.join(alarms)}" if alarms else None


# Parts


def _parts(ended: Iterable[EndedLease]) -> Iterable[Part]:
    by_name: dict[str, list[EndedLease]] = {"generated": [], "trained": []}
    for lease in ended:
        if not math.isnan(lease.length):
            by_name["generated"].append(lease)
        name = "trained" if lease.outcome == "trained" else f"{lease.outcome}: {lease.reason or 'no reason'}"
        by_name.setdefault(name, []).append(lease)
    for name, leases in by_name.items():
        yield Part(name, len(leases), *(_summary(_values(leases, quantity)) for quantity in QUANTITIES))


def _summary(values: NDArray[np.float64]) -> Summary | None:
    known = values[np.isfinite(values)]
    if len(known) == 0:
        return None
    median, p95 = np.quantile(known, (0.5, 0.95))
    return Summary(float(known.mean()), float(median), float(p95))


def _values(leases: Iterable[EndedLease], quantity: Quantity) -> NDArray[np.float64]:
    match quantity:
        case "length":
            return np.array([lease.length for lease in leases], dtype=np.float64)
        case "duration_s":
            return np.array([lease.duration_s for lease in leases], dtype=np.float64)
        case "reward":
            return np.array([lease.reward for lease in leases], dtype=np.float64)


# Comparisons


def _compare(ended: Iterable[EndedLease]) -> list[Comparison]:
    with_signal = [lease for lease in ended if lease.reason != _NO_SIGNAL]
    is_dropped = np.array([lease.outcome != "trained" for lease in with_signal], dtype=np.bool_)
    batched = [lease for lease in with_signal if lease.outcome == "trained" and math.isfinite(lease.taken_at)]
    is_passed_over = num_batches_passed(batched) > 0
    return [_comparison("dropped", quantity, with_signal, is_dropped) for quantity in QUANTITIES] + [
        _comparison("passed over", quantity, batched, is_passed_over) for quantity in QUANTITIES
    ]


def num_batches_passed(trained: Sequence[EndedLease]) -> NDArray[np.int64]:
    """How many batches with a younger lease each group was ready for before it was selected: 0 for all by the oldest lease.

    `trained` have `taken_at`, which is the same within a batch; without `ready_at` a group counts as never passed over.
    """
    lease_ids = np.array([lease.lease_id for lease in trained], dtype=np.int64)
    selected_at, batch_of = np.unique([lease.taken_at for lease in trained], return_inverse=True)
    youngest = np.full(len(selected_at), -1)
    np.maximum.at(youngest, batch_of, lease_ids)
    first_ready_for = np.searchsorted(selected_at, [lease.ready_at for lease in trained])
    passed = [
        np.count_nonzero(youngest[first:last] > lease_id)
        for first, last, lease_id in zip(first_ready_for, batch_of, lease_ids, strict=True)
    ]
    return np.array(passed, dtype=np.int64)


def _comparison(
    what: Literal["dropped", "passed over"], quantity: Quantity, leases: Sequence[EndedLease], befell: NDArray[np.bool_]
) -> Comparison:
    values = _values(leases, quantity)
    known = np.isfinite(values)
    values, befell = values[known], befell[known]
    count, num_others = int(befell.sum()), int((~befell).sum())
    if not count or not num_others:
        return Comparison(what, quantity, count, num_others, _mean(values[befell]), _mean(values[~befell]), 0.0, 1.0)
    ranks = _local_ranks(values)
    effect, p_value = 0.0, 1.0
    # Of equal values alone the test's variance is 0.
    if np.ptp(ranks) > 0:
        test = stats.mannwhitneyu(ranks[befell], ranks[~befell], method="asymptotic")
        effect, p_value = 2 * float(test.statistic) / (count * num_others) - 1, float(test.pvalue)
    return Comparison(what, quantity, count, num_others, _mean(values[befell]), _mean(values[~befell]), effect, p_value)


def _local_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rank of each value within its block, as a share of the block, ties at their mean."""
    num_blocks = max(1, len(values) // NUM_NEIGHBORS)
    return np.concatenate([(stats.rankdata(block) - 0.5) / len(block) for block in np.array_split(values, num_blocks)])


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _alarms(comparisons: Iterable[Comparison], max_p: float) -> list[str]:
    """A sentence for each way of bias that some quantity shows."""
    alarming = [comparison for comparison in comparisons if comparison.is_alarming(max_p)]
    sentences: list[str] = []
    for what, cause in _CAUSES.items():
        shown = [comparison for comparison in alarming if comparison.what == what]
        if shown:
            differences = ", ".join(
                f"{LABELS[c.quantity]} {c.mean:{FORMATS[c.quantity]}} against {c.mean_of_others:{FORMATS[c.quantity]}} "
                f"(effect {c.effect:+.2f}, p = {c.p_value:.0e})"
                for c in shown
            )
            sentences.append(f"{shown[0].share:.1%} were {what}, and differ from the others: mean {differences}; {cause}")
    return sentences


# Lateness


def _lateness(ended: Iterable[EndedLease]) -> Lateness | None:
    trained = [lease for lease in ended if lease.outcome == "trained" and math.isfinite(lease.taken_at)]
    if not trained:
        return None
    _, batch_of, sizes = np.unique([lease.taken_at for lease in trained], return_inverse=True, return_counts=True)
    place = np.argsort(np.argsort([lease.lease_id for lease in trained]))
    turn = np.searchsorted(np.cumsum(sizes), place, side="right")
    displacement = batch_of - turn
    late = displacement > 0
    return Lateness(
        float(late.mean()),
        float(displacement[late].mean()) if late.any() else 0.0,
        _rank_correlation(displacement, _values(trained, "length")),
        _rank_correlation(displacement, _values(trained, "duration_s")),
    )


def _rank_correlation(displacement: NDArray[np.int64], values: NDArray[np.float64]) -> float:
    known = np.isfinite(values)
    displacement, values = displacement[known], values[known]
    if len(values) < 2 or np.ptp(displacement) == 0 or np.ptp(values) == 0:
        return 0.0
    return float(np.corrcoef(stats.rankdata(displacement), stats.rankdata(values))[0, 1])
