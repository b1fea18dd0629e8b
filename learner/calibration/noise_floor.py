"""The noise floor: a model of the difference between a learner's and its engine's log-probs under the same weights.

With `d_t = policy - behavior` of a completion's n tokens and `log s = mean_t d_t`, sampled and scored at lag 0:

    log s  =  mean + sqrt(variance + token_variance / n) z         for sequence ratios
    d_t    ~  the measured distribution                            for token ratios

`mean` is negative where the numerics differ at all: mu sampled the tokens, so `-mean` estimates KL(mu || pi) per token.
`token_variance / n` is the part of the noise that longer completions average out, `variance` the part that they do not. The
distributions of z and d are kept as quantiles: neither is normal, and a band depends on their tails.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.learner.objectives.bands import ClipBand, NoiseOfLength
from offbeat.learner.objectives.losses import LOG_RATIO_BOUND

Floats = NDArray[np.float64]

PROBABILITIES: Floats = 1 / (1 + np.exp(-np.linspace(-12, 12, 481)))
"""Probabilities whose quantiles are kept: 0.012 apart in the middle, and down to 6e-6 from either end."""
NOISE_CLIP_SHARE = 0.01
"""Largest share of completions, or tokens, that noise alone puts beyond one side of a recommended band."""

_NUM_ITERATIONS = 10
"""Iterations of the fit, which then has converged: each weighs the squares by the variance of the one before."""
_SMALLEST_SPREAD = 1e-12
"""Far below the smallest difference of float32 log-probs."""


class Differences(NamedTuple):
    """Differences between the log-probs of a learner and of an engine with the same weights, on completions of the engine."""

    lengths: NDArray[np.int64]
    """Tokens of each completion, at least 1, `[completions]`."""
    log_ratios: Floats
    """`policy - behavior` of every token, completions concatenated, `[sum(lengths)]`."""
    advantages: Floats
    """Advantage of every token in the objective, `[sum(lengths)]`."""
    groups: NDArray[np.int64]
    """Number of each completion's group, `[completions]`. Completions of a group share their prompt, and much of the noise."""
    behavior: Floats = np.empty(0)
    """The engine's log-prob of every token, `[sum(lengths)]`; empty where the noise alone is of interest."""

    @classmethod
    def join(cls, parts: Sequence["Differences"]) -> "Differences":
        """Concatenate parts that have no group in common."""
        offsets = np.cumsum([0, *(part.groups.max(initial=-1) + 1 for part in parts)])
        moved = [part._replace(groups=part.groups + offset) for part, offset in zip(parts, offsets, strict=False)]
        return cls(*(np.concatenate(arrays) for arrays in zip(*moved, strict=True)))

    @property
    def log_sequence_ratios(self) -> Floats:
        """`log s`, `[completions]`."""
        return self.means(self.log_ratios)

    @property
    def positive(self) -> Floats:
        """Share of each completion's tokens whose advantage is above 0."""
        return self.means(self.advantages > 0)

    @property
    def negative(self) -> Floats:
        """Share of each completion's tokens whose advantage is below 0."""
        return self.means(self.advantages < 0)

    def take(self, chosen: NDArray[np.bool_]) -> "Differences":
        """Return the completions that are True in `chosen`, `[completions]`."""
        tokens = np.repeat(chosen, self.lengths)
        behavior = self.behavior[tokens] if len(self.behavior) else self.behavior
        return Differences(
            self.lengths[chosen], self.log_ratios[tokens], self.advantages[tokens], self.groups[chosen], behavior
        )

    def with_signal(self) -> "Differences":
        """Return the groups whose advantages are not all 0, which equal rewards make them."""
        numbers, places = np.unique(self.groups, return_inverse=True)
        has_signal = np.zeros(len(numbers), dtype=np.bool_)
        has_signal[places[self.positive + self.negative > 0]] = True
        return self.take(has_signal[places])

    def clipped(self, band: "ClipBand") -> Floats:
        """Return the share of each completion's tokens whose gradient the band takes, by the sign of their advantage."""
        below, above = self._sides(band)
        with_advantage = self.advantages != 0
        pushed_up = with_advantage if band.is_prefix_ratio or band.takes_both_sides else self.advantages > 0
        pushed_down = with_advantage if band.takes_both_sides else self.advantages < 0
        return self.means((below & pushed_down) | (above & pushed_up))

    def beyond(self, band: "ClipBand") -> tuple[Floats, Floats]:
        """Return the shares of each completion's tokens below the band, and above it, at any advantage."""
        below, above = self._sides(band)
        return self.means(below), self.means(above)

    def _sides(self, band: "ClipBand") -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        ratios = self.log_ratios
        low, high = band.log_bounds_of(np.repeat(self.lengths, self.lengths))
        if band.is_sequence_ratio:
            ratios = np.repeat(self.log_sequence_ratios, self.lengths)
        elif band.is_prefix_ratio:
            before = np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
            sums = np.concatenate([[0.0], np.cumsum(ratios)])
            ratios = (sums[1:] - sums[before]) / np.sqrt(np.arange(1, len(ratios) + 1) - before)
        return ratios < low, ratios > high

    def group_means(self, of_completions: Floats) -> Floats:
        """Return the mean of each group's completions, `[groups]`, by rising number of the group."""
        _, places, sizes = np.unique(self.groups, return_inverse=True, return_counts=True)
        return np.bincount(places, weights=of_completions) / sizes

    def means(self, of_tokens: NDArray[np.generic]) -> Floats:
        """Return the mean of each completion's tokens, `[completions]`; `of_tokens`: `[sum(lengths)]`."""
        starts = np.cumsum(self.lengths) - self.lengths
        return np.add.reduceat(of_tokens.astype(np.float64), starts) / self.lengths


class NoiseFloor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fitted model, in nats: see the module's docstring."""

    mean: float
    """Mean of `log s`."""
    variance: float
    """Part of the variance of `log s` that does not depend on the length."""
    token_variance: float
    """Part of the variance of `log s` that is divided by the length."""
    sequence_quantiles: tuple[float, ...]
    """Quantiles of z at `PROBABILITIES`."""
    token_quantiles: tuple[float, ...]
    """Quantiles of d at `PROBABILITIES`."""
    k1: float
    """Mean of `-d` over all tokens: an estimate of KL(mu || pi)."""
    k3: float
    """Mean of `exp(d) - 1 - d` over all tokens: an estimate of KL(mu || pi) that is never negative."""
    num_completions: int
    """Completions that the model was fitted to."""
    num_tokens: int
    """Tokens that the model was fitted to."""

    def __post_init__(self) -> None:
        for name, quantiles in (("sequence_quantiles", self.sequence_quantiles), ("token_quantiles", self.token_quantiles)):
            if len(quantiles) != len(PROBABILITIES) or list(quantiles) != sorted(quantiles):
                raise ValueError(f"{name} is not {len(PROBABILITIES)} rising numbers")
        if self.variance < 0 or self.token_variance < 0:
            raise ValueError("a variance is negative")

    def spread(self, lengths: NDArray[np.int64]) -> Floats:
        """Return the standard deviation of `log s` for completions of these lengths, each at least 1."""
        return np.sqrt(self.variance + self.token_variance / lengths).clip(min=_SMALLEST_SPREAD)

    @property
    def of_length(self) -> NoiseOfLength:
        """The mean and the variance of `log s`, as the band of a completion's own length takes them."""
        return NoiseOfLength(self.mean, self.variance, self.token_variance)

    def sequences_below(self, log_ratio: float | Floats, lengths: NDArray[np.int64]) -> Floats:
        """Return the probability that `log s` is below `log_ratio`, or each of these, for completions of these lengths."""
        return _cdf((log_ratio - self.mean) / self.spread(lengths), self.sequence_quantiles)

    def prefixes_below(self, log_ratio: float, lengths: NDArray[np.int64]) -> Floats:
        """Return the share of each completion's positions t at which the sum of t tokens' d is below `log_ratio sqrt(t)`.

        The first t tokens have the noise of a completion of t tokens.
        """
        positions = np.arange(1, int(lengths.max()) + 1)
        below = self.sequences_below(log_ratio / np.sqrt(positions), positions)
        return (np.cumsum(below) / positions)[lengths.astype(np.int64) - 1]

    def tokens_below(self, log_ratio: float) -> float:
        """Return the probability that a token's d is below `log_ratio`."""
        return float(_cdf(np.array(log_ratio), self.token_quantiles))

    def token_quantile(self, probabilities: Floats) -> Floats:
        """Return the values that a token's d is below with these probabilities."""
        return np.interp(probabilities, PROBABILITIES, self.token_quantiles)

    def beyond(self, band: ClipBand, lengths: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return the expected shares of each completion's tokens below the band, and above it."""
        low, high = band.log_bounds_of(lengths)
        if band.is_sequence_ratio:
            return self.sequences_below(low, lengths), 1 - self.sequences_below(high, lengths)
        # Only the ratio of a completion has bounds by its length.
        low, high = float(low), float(high)
        if band.is_prefix_ratio:
            return self.prefixes_below(low, lengths), 1 - self.prefixes_below(high, lengths)
        return np.full(len(lengths), self.tokens_below(low)), np.full(len(lengths), 1 - self.tokens_below(high))


class NoiseSummary(NamedTuple):
    """The noise of some completions in numbers."""

    name: str
    """Description of the completions."""
    num_completions: int
    num_tokens: int
    token_mean: float
    token_std: float
    sequence_mean: float
    """Mean of `log s`."""
    sequence_std: float
    """Standard deviation of `log s`."""
    expected_std: float
    """The model's standard deviation of `log s` for their lengths."""
    share_below: float
    """Share of the completions with `log s < 0`."""


class ProbabilityNoise(NamedTuple):
    """The noise of the tokens that the engine sampled with a probability of some range."""

    least: float
    """Smallest probability of the range; its end is the next range's."""
    share_of_tokens: float
    token_std: float
    share_of_noise: float
    """Share of the sum of `d^2` over all tokens."""
    share_beyond: float
    """Share of the range's tokens that a band for all tokens, three standard deviations of `d` wide on each side, touches."""


PROBABILITY_EDGES = (0.0, 0.1, 0.5, 0.9, 0.99)


def noise_by_probability(differences: Differences) -> list[ProbabilityNoise]:
    """Summarize the noise by the probability of the sampled token; ranges without tokens are left out.

    Where a token was nearly certain, rounding moves its log-prob little; where it was one of many, much. A band for all tokens
    is then narrow for the unlikely tokens and wide for the certain ones (arXiv 2607.22186 scales trust regions by entropy).
    """
    if not len(differences.behavior):
        return []
    places = np.searchsorted(PROBABILITY_EDGES, np.exp(differences.behavior), side="right") - 1
    d = differences.log_ratios
    beyond, squares = np.abs(d) > 3 * d.std(), np.square(d)
    total = squares.sum() or 1.0
    return [
        ProbabilityNoise(
            least=PROBABILITY_EDGES[place],
            share_of_tokens=float(chosen.mean()),
            token_std=float(d[chosen].std()),
            share_of_noise=float(squares[chosen].sum() / total),
            share_beyond=float(beyond[chosen].mean()),
        )
        for place in np.unique(places)
        for chosen in [places == place]
    ]


def fit(differences: Differences) -> NoiseFloor:
    """Fit the model to at least one completion. Raises ValueError when a log-prob is not finite.

    `variance` and `token_variance` are the non-negative least squares of `(log s - mean)^2` on 1 and 1/n, each square weighed
    by the inverse of its variance, which is proportional to the squared variance of `log s`. Where lengths hardly differ, they
    cannot tell the two apart; the variance within completions does, as if tokens were independent: it counts as one more
    completion.
    """
    if not np.isfinite(differences.log_ratios).all():
        raise ValueError("there are log-probs that are not finite: engine and learner do not have the same model")
    lengths, sequences = differences.lengths, differences.log_sequence_ratios
    # Imported here: half a second of CPU time, and a trainer only reads what was fitted.
    from scipy.optimize import nnls

    tokens = differences.log_ratios
    squares = np.square(tokens - np.repeat(sequences, lengths)).sum()
    variance, token_variance = float(sequences.var()), 0.0
    within = float(squares / max(1, (lengths - 1).sum()))
    mean = float(sequences.mean())
    smallest = max(1e-6 * variance, _SMALLEST_SPREAD**2)
    for _ in range(_NUM_ITERATIONS):
        weights = 1 / (variance + token_variance / lengths).clip(min=smallest)
        mean = float((weights * sequences).sum() / weights.sum())
        design = np.stack([weights, weights / lengths], axis=1)
        of_tokens = max(within, smallest)
        solution, _ = nnls(
            np.concatenate([design, [[0.0, 1 / of_tokens]]]),
            np.append(weights * np.square(sequences - mean), within / of_tokens),
        )
        variance, token_variance = float(solution[0]), float(solution[1])
    spread = np.sqrt(variance + token_variance / lengths).clip(min=_SMALLEST_SPREAD)
    bounded = tokens.clip(max=LOG_RATIO_BOUND)
    return NoiseFloor(
        mean=mean,
        variance=variance,
        token_variance=token_variance,
        sequence_quantiles=_quantiles((sequences - mean) / spread),
        token_quantiles=_quantiles(tokens),
        k1=float(-tokens.mean()),
        k3=float((np.expm1(bounded) - bounded).mean()),
        num_completions=len(lengths),
        num_tokens=len(tokens),
    )


def recommend_band(floor: NoiseFloor, lengths: NDArray[np.int64], own: ClipBand) -> ClipBand:
    """Return the narrowest band beyond either side of which noise alone puts at most `NOISE_CLIP_SHARE` of these completions.

    Noise then clips at most that share at any signs of the advantages. The band is never narrower than the objective's `own`,
    the distance that its paper allows the policy to move where there is no noise. Bounds are rounded up to two digits.
    """

    def below(log_ratio: float) -> float:
        if own.is_sequence_ratio:
            return float(floor.sequences_below(log_ratio, lengths).mean())
        if own.is_prefix_ratio:
            return float(floor.prefixes_below(log_ratio, lengths).mean())
        return floor.tokens_below(log_ratio)

    low = -math.expm1(min(0.0, inverse(below, NOISE_CLIP_SHARE)[0]))
    high = math.expm1(max(0.0, inverse(below, 1 - NOISE_CLIP_SHARE)[1]))
    return own._replace(low=min(1.0, max(own.low, round_up(low))), high=max(own.high, round_up(high)))


def sample_noise(floor: NoiseFloor, others: Differences, random: np.random.Generator) -> Differences:
    """Return completions of the lengths and advantages of `others` with noise drawn from the model.

    Tokens are drawn independently from the distribution of d, and then shifted so that their mean is a drawn `log s`.
    """
    lengths = others.lengths
    drawn = others._replace(log_ratios=floor.token_quantile(random.random(lengths.sum())))
    means = floor.mean + floor.spread(lengths) * np.interp(random.random(len(lengths)), PROBABILITIES, floor.sequence_quantiles)
    shifted = drawn.log_ratios + np.repeat(means - drawn.log_sequence_ratios, lengths)
    return drawn._replace(log_ratios=shifted)


def inverse(below: Callable[[float], float], share: float) -> tuple[float, float]:
    """Bisect for two nearly equal numbers: `below` is at most `share` at the first, and at least `share` at the second."""
    low, high = -LOG_RATIO_BOUND, LOG_RATIO_BOUND
    for _ in range(100):
        middle = (low + high) / 2
        if below(middle) <= share:
            low = middle
        else:
            high = middle
    return low, high


def round_up(value: float) -> float:
    """Round a number above 0 up to two digits; return 0 for any other."""
    if value <= 0:
        return 0.0
    digits = 1 - math.floor(math.log10(value))
    # A value that has two digits already must not grow by the error of its binary representation.
    return round(math.ceil(value * 10**digits * (1 - 1e-12)) / 10**digits, digits)


def describe(differences: Differences, floor: NoiseFloor) -> list[NoiseSummary]:
    """Summarize the noise of all completions, by length (in at most four equal bins), and by sign of advantage."""
    summaries = [_describe("all", differences, floor)]
    lengths = differences.lengths
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, 5)).round().astype(np.int64))
    if len(edges) > 2:
        bins = np.searchsorted(edges[1:-1], lengths, side="left")
        for index in range(len(edges) - 1):
            chosen = differences.take(bins == index)
            if len(chosen.lengths):
                name = f"{chosen.lengths.min()} to {chosen.lengths.max()} tokens"
                summaries.append(_describe(name, chosen, floor))
    for name, shares in (("A > 0", differences.positive), ("A < 0", differences.negative)):
        chosen = differences.take(shares > 0.5)
        if len(chosen.lengths):
            summaries.append(_describe(name, chosen, floor))
    return summaries


def _describe(name: str, differences: Differences, floor: NoiseFloor) -> NoiseSummary:
    tokens, sequences = differences.log_ratios, differences.log_sequence_ratios
    return NoiseSummary(
        name=name,
        num_completions=len(sequences),
        num_tokens=len(tokens),
        token_mean=float(tokens.mean()),
        token_std=float(tokens.std()),
        sequence_mean=float(sequences.mean()),
        sequence_std=float(sequences.std()),
        expected_std=float(np.sqrt(np.square(floor.spread(differences.lengths)).mean())),
        share_below=float((sequences < 0).mean()),
    )


def _quantiles(values: Floats) -> tuple[float, ...]:
    return tuple(np.quantile(values, PROBABILITIES, method="hazen").tolist())


def _cdf(values: Floats, quantiles: Sequence[float]) -> Floats:
    return np.interp(values, quantiles, PROBABILITIES, left=0.0, right=1.0)
