"""The recommendation of a sweep: one value by a stated rule, in sentences that say what its seeds can and cannot tell."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.lab.sweep.estimates import CONFIDENCE, MAX_SEEDS, POWER, Comparison, compare, compare_ratio, seeds_needed

RULE = (
    "Of the values whose final reward is not shown to be below the reference's, or by less than the margin over its whole "
    "interval, the one that comes soonest within the margin of the reference's final reward in every seed, by the geometric "
    "mean of the seeds' times."
)
"""The choice of the recommended value, as the page states it."""


@dataclass(frozen=True)
class ValueResult:
    """The results of one value's finished runs."""

    label: str
    rewards: list[float]
    """Final reward of each seed."""
    times_s: list[float | None]
    """Seconds in which each seed came within the margin of the reference's final reward; None for a seed that did not."""

    @property
    def every_time_s(self) -> list[float]:
        """The times of all seeds; empty where one did not come there."""
        times = [time_s for time_s in self.times_s if time_s is not None]
        return times if len(times) == len(self.times_s) else []


@dataclass(frozen=True)
class Recommendation:
    """The conclusion of a sweep."""

    label: str | None
    """The recommended value; None when there is none."""
    headline: str
    sentences: list[str]
    """Findings and limits of the comparison, one each."""


def recommend(results: Sequence[ValueResult], reference: str, margin: float) -> Recommendation:
    """Apply `RULE` to the values of a sweep, `margin` being the loss of final reward that does not matter to the user.

    With one seed there is no spread to judge by, and nothing is recommended.
    """
    results = [result for result in results if result.rewards]
    base = next((result for result in results if result.label == reference), None)
    if base is None:
        return Recommendation(None, f"Nothing can be said yet: {reference}, the reference, has no finished run.", [])
    if min(len(result.rewards) for result in results) < 2:
        return _without_spread(results)
    others = [result for result in results if result is not base]
    against_base = {other.label: _compare(base, other) for other in others}
    eligible = [result for result in results if result is base or not _is_worse(against_base[result.label], margin)]
    best = _soonest(eligible)
    # In the sweep's order; pairs with the reference are known.
    rivalries = [pair for pair in itertools.combinations(eligible, 2) if best in pair and base not in pair]
    sentences = [
        *(_reward_sentence(reference, label, comparison) for label, comparison in against_base.items()),
        *_missed_sentences(results, reference, margin),
        *(_reward_sentence(first.label, second.label, _compare(first, second)) for first, second in rivalries),
        *_time_sentences(best, base, eligible),
        *_seed_sentences([*((base, other) for other in others), *rivalries], margin),
    ]
    if best is None:
        headline = f"Nothing can be recommended: of no value did every seed come within {margin:g} of the final reward of "
        return Recommendation(None, f"{headline}{reference} without ending below it.", sentences)
    return Recommendation(best.label, _headline(best, base, against_base.get(best.label), margin), sentences)


def _is_worse(comparison: Comparison, margin: float) -> bool:
    """Return True when a value is told to be below the reference, and its interval reaches below the margin."""
    assert comparison.low is not None, "every value has two seeds"
    return comparison.is_told_apart and comparison.difference < 0 and comparison.low < -margin


def _soonest(eligible: Sequence[ValueResult]) -> ValueResult | None:
    """Return the first value with the smallest geometric mean of its times; None where no value has them all."""
    timed = [result for result in eligible if result.every_time_s]
    return min(timed, key=lambda result: statistics.fmean(map(math.log, result.every_time_s)), default=None)


def _compare(first: ValueResult, second: ValueResult) -> Comparison:
    comparison = compare(first.rewards, second.rewards)
    assert comparison is not None, "both have runs"
    return comparison


def _without_spread(results: Sequence[ValueResult]) -> Recommendation:
    single = [result.label for result in results if len(result.rewards) == 1]
    headline = (
        f"Nothing can be recommended yet: there is one seed of {', '.join(single)}, and one seed says nothing about the spread "
        "between seeds. Any difference seen here may be chance."
    )
    sentences = [
        f"{result.label}: final reward {statistics.fmean(result.rewards):.3f} with {_seeds(len(result.rewards))}."
        for result in results
    ]
    return Recommendation(None, headline, [*sentences, "Three seeds of each value are the least to begin with: --seeds 3."])


def _headline(best: ValueResult, base: ValueResult, reward: Comparison | None, margin: float) -> str:
    if reward is None:
        return (
            f"{best.label}, the reference itself: no other value came sooner within {margin:g} of its final reward without "
            "ending below it."
        )
    text = f"{best.label}: it comes soonest within {margin:g} of the final reward of {base.label}"
    ratio = compare_ratio(base.every_time_s, best.every_time_s)
    if ratio is not None:
        shown = "" if ratio.is_told_apart_from(1) else ", which holds 1: that it is sooner at all is not shown"
        text += f", in {ratio.difference:.2f} of its time ({_interval(ratio, '.2f')}{shown})"
    end = "higher" if reward.difference > 0 else "lower"
    where = (
        f"{end} by {abs(reward.difference):.3f}" if reward.is_told_apart else f"not distinguishable: {reward.difference:+.3f}"
    )
    text += f". Its own final reward is {where} ({_interval(reward)})"
    assert reward.low is not None, "every value has two seeds"
    if reward.low >= -margin:
        return f"{text}, which leaves out a loss of more than {margin:g}."
    return f"{text}, which leaves room for a loss of {-reward.low:.3f}, more than {margin:g}."


def _reward_sentence(first: str, second: str, comparison: Comparison) -> str:
    if comparison.is_told_apart:
        end = "higher" if comparison.difference > 0 else "lower"
        return f"{second} ends {end} than {first}: by {abs(comparison.difference):.3f}, {_interval(comparison)}."
    told = f"difference {comparison.difference:+.3f}, {_interval(comparison)}"
    return f"{first} and {second} cannot be distinguished with {_seeds(*comparison.num_seeds)}: {told}."


def _missed_sentences(results: Sequence[ValueResult], reference: str, margin: float) -> list[str]:
    """Return a sentence for each value of which some seed did not come within the margin."""
    return [
        f"{result.label}: {len(result.times_s) - result.times_s.count(None)} of {_seeds(len(result.times_s))} came within "
        f"{margin:g} of the final reward of {reference}."
        for result in results
        if not result.every_time_s
    ]


def _time_sentences(best: ValueResult | None, base: ValueResult, eligible: Sequence[ValueResult]) -> list[str]:
    """Return a sentence for the time of each eligible value against the best; the headline has the reference's."""
    if best is None:
        return []
    return [_time_sentence(best, rival) for rival in eligible if rival.every_time_s and rival not in (best, base)]


def _time_sentence(best: ValueResult, rival: ValueResult) -> str:
    ratio = compare_ratio(best.every_time_s, rival.every_time_s)
    assert ratio is not None, "both have times"
    if ratio.is_told_apart_from(1):
        return f"{rival.label} takes {ratio.difference:.2f} times as long as {best.label} ({_interval(ratio, '.2f')})."
    return (
        f"In time {rival.label} and {best.label} cannot be distinguished: the ratio is {ratio.difference:.2f} "
        f"({_interval(ratio, '.2f')})."
    )


def _seed_sentences(compared: Sequence[tuple[ValueResult, ValueResult]], margin: float) -> list[str]:
    """Return the seeds needed to detect the margin, and the number of pairs that chance alone would tell apart."""
    sentences = []
    apart = [pair for pair in compared if not _compare(*pair).is_told_apart]
    needed = {
        (first.label, second.label): seeds_needed(statistics.stdev(first.rewards), statistics.stdev(second.rewards), margin)
        for first, second in apart
        if margin > 0
    }
    if needed:
        pair = max(needed, key=lambda pair: needed[pair] or math.inf)
        number = f"more than {MAX_SEEDS}" if needed[pair] is None else str(needed[pair])
        whom = f"between {pair[0]} and {pair[1]}" + (", which takes most," if len(needed) > 1 else "")
        sentences.append(
            f"To tell a difference of {margin:g} {whom} with a chance of {POWER:.0%} takes {number} seeds of each, if they "
            "spread as they do here; so few seeds say only roughly how much that is."
        )
    if len(compared) > 1:
        chance = (1 - CONFIDENCE) * len(compared)
        sentences.append(
            f"{len(compared)} pairs are compared at {CONFIDENCE:.0%} each: were all the same, about {chance:.1f} of them would "
            "differ by chance."
        )
    return sentences


def _interval(comparison: Comparison, form: str = "+.3f") -> str:
    if comparison.low is None or comparison.high is None:
        return "no interval"
    return f"{CONFIDENCE:.0%} interval {comparison.low:{form}} to {comparison.high:{form}}"


def _seeds(*numbers: int) -> str:
    """`3 seeds`, or `2 and 3 seeds`."""
    different: Mapping[int, None] = dict.fromkeys(numbers)
    return f"{' and '.join(map(str, different))} {'seed' if list(different) == [1] else 'seeds'}"
