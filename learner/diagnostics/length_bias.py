"""Length bias: tests if the leases that training left out differ in length, duration or reward.

Groups are trained on in the order of their leases, so short completions never get ahead of long ones. Where leases are only
bounded at admission and never dropped, every lease is trained on in the end, and training has no bias. What remains are leases
that ended without being trained on (dropped, or taken back from the actor): they are tested against the trained ones, and a
difference raises an alarm. Groups of equal rewards (`zero_variance`) are left out: they have no gradient, and are dropped for
that reason alone.

A group that was not ready in its turn is late: where actors hold training back, long groups always are. They are all trained
on, so lateness is not bias, but staleness that grows with length. `Lateness` reports it without an alarm.

The test is a Mann-Whitney U test with the rank-biserial correlation as effect, on ranks among the `NUM_NEIGHBORS` leases that
ended about the same time: lengths that grow in the course of training are no sign of bias.
"""

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.learner.leases.groups import Group


class MannWhitney(NamedTuple):
    """The result of a Mann-Whitney U test of two samples."""

    effect: float
    """Rank-biserial correlation `2 U / (n m) - 1`, -1 to 1; above 0 where the first sample tends to be larger."""
    p_value: float
    """Two-sided; from the normal approximation, corrected for ties and continuity."""


def average_ranks(values: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return the rank of each value, from 1; equal values share the mean of their ranks."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[group]


def mann_whitney(first: NDArray[np.float64], second: NDArray[np.float64]) -> MannWhitney:
    """Test if one sample tends to be larger than the other. Both have values, which are not all equal.

    `U` counts the pairs whose larger value is from `first`, ties as one half. Without a difference it has the mean `n m / 2`
    and the variance `n m / 12 (n + m + 1 - sum_k (t_k^3 - t_k) / ((n + m)(n + m - 1)))` for ties of sizes `t_k`.
    """
    n, m = len(first), len(second)
    pooled = np.concatenate([first, second])
    u = float(average_ranks(pooled)[:n].sum()) - n * (n + 1) / 2
    sizes = np.unique(pooled, return_counts=True)[1].astype(np.float64)
    tie_term = float((sizes**3 - sizes).sum()) / ((n + m) * (n + m - 1))
    deviation = math.sqrt(n * m / 12 * (n + m + 1 - tie_term))
    z = (max(u, n * m - u) - n * m / 2 - 0.5) / deviation
    return MannWhitney(2 * u / (n * m) - 1, min(1.0, math.erfc(z / math.sqrt(2))))


def rank_correlation(first: NDArray[np.generic], second: NDArray[np.generic]) -> float:
    """Return Spearman's correlation of pairs; 0 where all values of a side are equal."""
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(average_ranks(first), average_ranks(second))[0, 1])


MAX_P = 1e-3
"""Upper bound of an alarm's p-value."""
MIN_EFFECT = 0.2
"""Smallest absolute rank-biserial correlation of an alarm. For a pair of leases drawn from the two sides, the correlation is
the probability that the first side's is the longer minus the probability that it is the shorter."""
MIN_SHARE = 0.01
"""Smallest share of dropped leases that raises an alarm."""
MIN_LEASES = 20
"""Fewest leases of either side that raise an alarm. With fewer, most of them of one length, a single other one has a p-value of
1e-4: the test is an approximation."""
NUM_NEIGHBORS = 250
"""Leases in a block that ranks are taken within, about."""
MONITOR_WINDOW = 1000
"""Number of newest leases that the live alarm tests; it sounds at most once per window."""
MONITOR_INTERVAL = 100
"""Leases between two tests of the live alarm."""
MONITOR_MAX_P = 1e-6
"""Upper bound of the live alarm's p-value. Small, because a test every `MONITOR_INTERVAL` leases of a long run would otherwise
raise an alarm by chance."""
Quantity = Literal["length", "duration_s", "reward", "num_turns", "environment_s"]
"""A field of `EndedLease`."""
QUANTITIES: tuple[Quantity, ...] = ("length", "duration_s", "reward")
OF_EPISODES: tuple[Quantity, ...] = ("num_turns", "environment_s")
"""Quantities of runs with an environment."""
LABELS: dict[Quantity, str] = {
    "length": "tokens",
    "duration_s": "seconds",
    "reward": "reward",
    "num_turns": "turns",
    "environment_s": "environment's seconds",
}
"""Name of each quantity in text."""
FORMATS: dict[Quantity, str] = {
    "length": ",.1f",
    "duration_s": ",.2f",
    "reward": ".3f",
    "num_turns": ".1f",
    "environment_s": ",.2f",
}
"""Number format of each quantity."""
_NO_SIGNAL = "zero_variance"
_CURE = 'raise the bound or rollout.lease_timeout_s, or let staleness.staleness_policy = "gate" drop nothing'


class EndedLease(NamedTuple):
    """A lease that is no longer in flight; nan for unknown values."""

    lease_id: int
    outcome: str
    """`trained`, `dropped` or `expired`."""
    reason: str = ""
    """Reason why it was not trained on; empty for a trained one."""
    length: float = math.nan
    """Mean tokens of its completions."""
    duration_s: float = math.nan
    """Time that its group took to generate; without a group, time until the lease was late or too stale, a lower bound."""
    reward: float = math.nan
    """Mean reward of its completions, before any scaling or penalty."""
    taken_at: float = math.nan
    """Time at which its group left the buffer, selected with its batch or dropped, seconds since the epoch."""
    num_turns: float = math.nan
    """Mean turns of its episodes; nan without an environment, as the next."""
    environment_s: float = math.nan
    """Mean seconds that the functions of its episodes spent outside of the model's turns."""


class Distribution(msgspec.Struct, frozen=True):
    """The distribution of one quantity over some leases."""

    mean: float
    median: float
    p95: float


class OutcomeSummary(msgspec.Struct, frozen=True):
    """The leases that ended in one way, and the distribution of each quantity over them."""

    name: str
    count: int
    length: Distribution | None
    """Lengths in tokens; None where no lease has a known value."""
    duration_s: Distribution | None
    reward: Distribution | None
    num_turns: Distribution | None = None
    environment_s: Distribution | None = None


class BiasTest(msgspec.Struct, frozen=True):
    """A test of one quantity: the dropped leases against the trained ones."""

    quantity: Quantity
    count: int
    """Number of dropped leases with a known value."""
    num_others: int
    """Number of trained leases with a known value."""
    mean: float
    """Their mean; nan without any."""
    mean_of_others: float
    effect: float
    """Rank-biserial correlation, -1 to 1; above 0 where they have more than the others."""
    p_value: float
    """Two-sided."""

    @property
    def share(self) -> float:
        """Share of the dropped leases among all that are compared."""
        return self.count / max(1, self.count + self.num_others)

    def is_alarming(self, max_p: float = MAX_P) -> bool:
        """Return whether the difference is significant, large, and about more than a few leases."""
        is_many = self.share >= MIN_SHARE and min(self.count, self.num_others) >= MIN_LEASES
        return is_many and self.p_value < max_p and abs(self.effect) >= MIN_EFFECT


class Lateness(msgspec.Struct, frozen=True):
    """The distance between the order of training and the order of leasing.

    A group's displacement is the number of batches from its turn, the batch that its place among the trained leases falls in,
    to the batch it was trained in. The correlations are Spearman's; 0 where nothing is displaced.
    """

    share: float
    """Share of the trained groups with a displacement above 0."""
    mean_batches: float
    """Mean displacement of these groups."""
    length_correlation: float
    """Correlation of displacement and length."""
    duration_correlation: float
    """Correlation of displacement and duration."""


class BiasReport(msgspec.Struct, frozen=True):
    """The bias of a run: see the module's docstring."""

    parts: tuple[OutcomeSummary, ...]
    """`generated` (all that have a group), `trained`, then `dropped: REASON` and `expired: REASON`."""
    comparisons: tuple[BiasTest, ...]
    lateness: Lateness | None
    """Lateness of the trained groups; None where the groups of each batch are unknown."""
    alarm: str | None
    """The bias found, in a sentence."""


def ended_group(group: Group, *, outcome: str, reason: str, taken_at: float) -> EndedLease:
    """Return the record of a lease with a group; `taken_at` in seconds since the epoch."""
    has_environment = group.has_environment
    return EndedLease(
        group.lease_id,
        outcome,
        reason,
        fmean([len(rollout.token_ids) for rollout in group.rollouts]),
        group.generate_s,
        fmean([rollout.reward for rollout in group.rollouts]),
        taken_at,
        fmean([rollout.num_turns for rollout in group.rollouts]) if has_environment else math.nan,
        fmean([rollout.environment_s for rollout in group.rollouts]) if has_environment else math.nan,
    )


def bias_report(ended: Sequence[EndedLease]) -> BiasReport:
    """Test the leases of a run for bias; `ended` is in the order in which they ended."""
    comparisons = _compare(ended)
    return BiasReport(tuple(_parts(ended)), tuple(comparisons), _lateness(ended), _alarm(comparisons, MAX_P))


class BiasMonitor:
    """The alarm of a running job, over the last `MONITOR_WINDOW` leases. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._window: deque[EndedLease] = deque(maxlen=MONITOR_WINDOW)
        self._until_test = MONITOR_INTERVAL

    def take(self, lease: EndedLease) -> str | None:
        """Add a lease that has ended; return the alarm's text if this lease raises it."""
        with self._lock:
            self._window.append(lease)
            self._until_test -= 1
            if self._until_test:
                return None
            alarm = _alarm(_compare(self._window), MONITOR_MAX_P)
            # The next alarm is about other leases.
            self._until_test = MONITOR_WINDOW if alarm else MONITOR_INTERVAL
            return f"of the last {len(self._window)} leases, {alarm}" if alarm else None


# Parts


def _parts(ended: Iterable[EndedLease]) -> Iterable[OutcomeSummary]:
    by_name: dict[str, list[EndedLease]] = {"generated": [], "trained": []}
    for lease in ended:
        if not math.isnan(lease.length):
            by_name["generated"].append(lease)
        name = "trained" if lease.outcome == "trained" else f"{lease.outcome}: {lease.reason or 'no reason'}"
        by_name.setdefault(name, []).append(lease)
    for name, leases in by_name.items():
        yield OutcomeSummary(
            name, len(leases), *(_distribution(_values(leases, quantity)) for quantity in (*QUANTITIES, *OF_EPISODES))
        )


def _distribution(values: NDArray[np.float64]) -> Distribution | None:
    known = values[np.isfinite(values)]
    if len(known) == 0:
        return None
    median, p95 = np.quantile(known, (0.5, 0.95))
    return Distribution(float(known.mean()), float(median), float(p95))


def _values(leases: Iterable[EndedLease], quantity: Quantity) -> NDArray[np.float64]:
    return np.array([getattr(lease, quantity) for lease in leases], dtype=np.float64)


# Comparisons


def _compare(ended: Iterable[EndedLease]) -> list[BiasTest]:
    with_signal = [lease for lease in ended if lease.reason != _NO_SIGNAL]
    is_dropped = np.array([lease.outcome != "trained" for lease in with_signal], dtype=np.bool_)
    has_episodes = any(not math.isnan(lease.num_turns) for lease in with_signal)
    quantities = (*QUANTITIES, *OF_EPISODES) if has_episodes else QUANTITIES
    return [_comparison(quantity, with_signal, is_dropped) for quantity in quantities]


def _comparison(quantity: Quantity, leases: Sequence[EndedLease], is_dropped: NDArray[np.bool_]) -> BiasTest:
    values = _values(leases, quantity)
    known = np.isfinite(values)
    values, is_dropped = values[known], is_dropped[known]
    count, num_others = int(is_dropped.sum()), int((~is_dropped).sum())
    effect, p_value = 0.0, 1.0
    if count and num_others:
        ranks = _local_ranks(values)
        # The test's variance is 0 if all values are equal.
        if np.ptp(ranks) > 0:
            effect, p_value = mann_whitney(ranks[is_dropped], ranks[~is_dropped])
    return BiasTest(quantity, count, num_others, _mean(values[is_dropped]), _mean(values[~is_dropped]), effect, p_value)


def _local_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rank of each value within its block, as a share of the block, ties at their mean."""
    num_blocks = max(1, len(values) // NUM_NEIGHBORS)
    return np.concatenate([(average_ranks(block) - 0.5) / len(block) for block in np.array_split(values, num_blocks)])


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _alarm(comparisons: Iterable[BiasTest], max_p: float) -> str | None:
    """Return a sentence on the quantities that show a bias; None where none does."""
    alarming = [comparison for comparison in comparisons if comparison.is_alarming(max_p)]
    if not alarming:
        return None
    differences = ", ".join(
        f"{LABELS[c.quantity]} {c.mean:{FORMATS[c.quantity]}} against {c.mean_of_others:{FORMATS[c.quantity]}} "
        f"(effect {c.effect:+.2f}, p = {c.p_value:.0e})"
        for c in alarming
    )
    return f"{alarming[0].share:.1%} were dropped, and differ from the others: mean {differences}; {_CURE}"


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
        _correlation(displacement, _values(trained, "length")),
        _correlation(displacement, _values(trained, "duration_s")),
    )


def _correlation(displacement: NDArray[np.int64], values: NDArray[np.float64]) -> float:
    known = np.isfinite(values)
    return rank_correlation(displacement[known], values[known])
