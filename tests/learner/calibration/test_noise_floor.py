import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from offbeat.learner.calibration.bound_noise import NoiseBySign
from offbeat.learner.calibration.noise_floor import (
    NOISE_CLIP_SHARE,
    PROBABILITIES,
    ClipBand,
    Differences,
    NoiseFloor,
    describe,
    fit,
    noise_by_probability,
    recommend_band,
)

GSPO = ClipBand(3e-4, 4e-4, is_sequence_ratio=True)
"""Bands of the paper."""
GRPO = ClipBand(0.2, 0.2, is_sequence_ratio=False)


def sample(
    num_completions: int,
    *,
    seed: int = 0,
    kl: float = 1e-3,
    between: float = 0.0,
    lengths: tuple[int, int] = (20, 400),
    degrees: float = math.inf,
) -> Differences:
    """Sample tokens around `-kl`, variance `2 kl`, Student-t with `degrees`; shifts per completion of variance `between`."""
    random = np.random.default_rng(seed)
    num_tokens = np.exp(random.uniform(math.log(lengths[0]), math.log(lengths[1]), num_completions)).astype(np.int64)
    total = num_tokens.sum()
    normal = random.standard_normal(total)
    if math.isfinite(degrees):
        normal = random.standard_t(degrees, total) * math.sqrt((degrees - 2) / degrees)
    shifts = math.sqrt(between) * random.standard_normal(num_completions)
    signs = np.repeat(random.choice([-1.0, 1.0], num_completions), num_tokens)
    d = -kl + math.sqrt(2 * kl) * normal + np.repeat(shifts, num_tokens)
    return Differences(num_tokens, d, signs, np.arange(num_completions))


def normal_floor(kl: float) -> NoiseFloor:
    """Return a floor of exactly normal tokens with `E[exp d] = 1`."""
    quantiles = norm.ppf(PROBABILITIES)
    return NoiseFloor(
        mean=-kl,
        variance=0.0,
        token_variance=2 * kl,
        sequence_quantiles=tuple(quantiles),
        token_quantiles=tuple(-kl + math.sqrt(2 * kl) * quantiles),
        k1=kl,
        k3=kl,
        num_completions=1,
        num_tokens=1,
    )


def alike(floor: NoiseFloor) -> NoiseBySign:
    """Return noise that does not depend on the sign of the advantage."""
    return NoiseBySign(floor, floor, floor)


def expected_clip(floor: NoiseFloor, band: ClipBand, differences: Differences) -> float:
    shares = alike(floor).expected_clip(band, differences.lengths, differences.positive, differences.negative)
    return float(shares.mean())


# Shares of completions below 1 - 3e-4 and above 1 + 4e-4, by KL per token and length; from the normal distribution's tables.
@pytest.mark.parametrize(
    ("kl", "length", "below", "above"),
    [
        (1e-5, 100, 0.26, 0.18),
        (1e-4, 1000, 0.33, 0.13),
        (3e-4, 4000, 0.50, 0.04),
        (6.4e-4, 100, 0.54, 0.39),
        (6.4e-4, 1000, 0.62, 0.18),
        (6.4e-4, 16000, 0.89, 0.00),
        (1.5e-3, 1000, 0.76, 0.13),
        (4.5e-3, 4000, 1.00, 0.00),
    ],
)
def test_normal_noise_leaves_the_papers_band_as_often_as_the_normal_distribution_says(
    kl: float, length: int, below: float, above: float
) -> None:
    lengths = np.array([length])
    found_below, found_above = normal_floor(kl).beyond(GSPO, lengths)
    assert found_below[0] == pytest.approx(below, abs=0.007)
    assert found_above[0] == pytest.approx(above, abs=0.007)
    half = np.array([0.5])
    assert alike(normal_floor(kl)).expected_clip(GSPO, lengths, half, half)[0] == pytest.approx((below + above) / 2, abs=0.007)


def test_only_the_side_that_the_advantage_pushes_to_is_clipped() -> None:
    floor, lengths = normal_floor(6.4e-4), np.array([1000, 1000, 1000])
    clipped = alike(floor).expected_clip(GSPO, lengths, positive=np.array([1.0, 0, 0]), negative=np.array([0, 1.0, 0]))
    assert clipped == pytest.approx([0.18, 0.62, 0.0], abs=0.007)


def test_prefix_ratios_are_clipped_as_often_as_foretold_and_recommended_bounds_lie_above_the_noise() -> None:
    band = ClipBand(0.025, 0.05, is_sequence_ratio=False, is_prefix_ratio=True)
    seen, unseen = (sample(2000, seed=seed, kl=1e-3, between=1e-6) for seed in (0, 1))
    floor = fit(seen)
    assert expected_clip(floor, band, unseen) == pytest.approx(unseen.clipped(band).mean(), abs=0.02)
    for expected, measured in zip(floor.beyond(band, unseen.lengths), unseen.beyond(band), strict=True):
        assert expected.mean() == pytest.approx(measured.mean(), abs=0.02) and measured.mean() > 0.05
    recommended = recommend_band(floor, seen.lengths, band)
    assert recommended.is_prefix_ratio and recommended.low > band.low
    assert all(share.mean() <= 2 * NOISE_CLIP_SHARE for share in unseen.beyond(recommended))


def test_prefix_ratio_is_the_sum_so_far_over_the_root_of_its_length_and_lost_above_at_any_sign() -> None:
    band = ClipBand(0.1, 0.1, is_sequence_ratio=False, is_prefix_ratio=True)
    # Sums over roots: 0.2, 0.071, -0.058 and -0.2, 0.071; log(0.9) = -0.105, log(1.1) = 0.095.
    ratios = np.array([0.2, -0.1, -0.2, -0.2, 0.3])
    differences = Differences(np.array([3, 2]), ratios, np.array([1.0, 1.0, 1.0, 1.0, 1.0]), np.arange(2))
    for sign, clipped in ((1.0, [1 / 3, 0.0]), (-1.0, [1 / 3, 0.5]), (0.0, [0.0, 0.0])):
        found = differences._replace(advantages=np.full(5, sign)).clipped(band)
        assert found == pytest.approx(clipped)
    assert [list(shares) for shares in differences.beyond(band)] == [[0.0, 0.5], [pytest.approx(1 / 3), 0.0]]


def test_variances_within_and_between_completions_are_found() -> None:
    floor = fit(sample(4000, kl=1e-3, between=4e-6))
    assert floor.mean == pytest.approx(-1e-3, rel=0.15)
    assert floor.token_variance == pytest.approx(2e-3, rel=0.15)
    assert floor.variance == pytest.approx(4e-6, rel=0.15)
    assert floor.k1 == pytest.approx(1e-3, rel=0.15)
    assert floor.k3 == pytest.approx(1e-3, rel=0.05)


def test_among_completions_of_one_length_the_variance_within_them_says_what_a_longer_one_averages_out() -> None:
    floor = fit(sample(4000, kl=1e-3, between=4e-6, lengths=(100, 100)))
    assert floor.token_variance == pytest.approx(2e-3, rel=0.05)
    assert floor.variance == pytest.approx(4e-6, rel=0.3)


def test_mean_estimates_and_clipped_shares_of_two_completions_worked_by_hand() -> None:
    differences = Differences(np.array([2, 1]), np.array([0.1, -0.3, 0.2]), np.array([-1.0, 1.0, 1.0]), np.arange(2))
    assert differences.log_sequence_ratios == pytest.approx([-0.1, 0.2])
    assert differences.positive == pytest.approx([0.5, 1])
    assert differences.negative == pytest.approx([0.5, 0])
    # Of the first, s = e^-0.1 < 0.95: its first token, with A < 0. Of the second, s = e^0.2 > 1.05, with A > 0.
    assert differences.clipped(ClipBand(0.05, 0.05, is_sequence_ratio=True)) == pytest.approx([0.5, 1])
    # e^0.1 has A < 0, e^-0.3 has A > 0: neither is on its side.
    assert differences.clipped(ClipBand(0.05, 0.05, is_sequence_ratio=False)) == pytest.approx([0, 1])
    floor = fit(differences)
    assert floor.k1 == pytest.approx(0.0, abs=1e-12)
    assert floor.k3 == pytest.approx((math.exp(0.1) + math.exp(-0.3) + math.exp(0.2) - 3) / 3)


@pytest.mark.parametrize("degrees", [math.inf, 2.5])
@pytest.mark.parametrize("band", [GSPO, ClipBand(1e-3, 1e-3, True), ClipBand(5e-3, 5e-3, True), ClipBand(0.03, 0.03, False)])
def test_predicted_clip_is_that_of_other_completions(degrees: float, band: ClipBand) -> None:
    floor = fit(sample(600, between=1e-6, degrees=degrees))
    fresh = sample(5000, seed=1, between=1e-6, degrees=degrees)
    measured = float(fresh.clipped(band).mean())
    assert measured > 0.005, "a band that clips nothing proves nothing"
    assert expected_clip(floor, band, fresh) == pytest.approx(measured, abs=0.03)


def test_heavy_tails_are_not_taken_for_normal_ones() -> None:
    heavy = sample(5000, lengths=(1, 3), degrees=2.2)
    floor = fit(heavy)
    band = ClipBand(0.25, 0.25, is_sequence_ratio=True)
    log_low, _ = band.log_bounds_of(heavy.lengths)
    normal = float(norm.cdf((log_low - floor.mean) / floor.spread(heavy.lengths)).mean())
    measured = float((heavy.log_sequence_ratios < log_low).mean())
    below, _ = floor.beyond(band, heavy.lengths)
    assert measured > 3 * normal
    assert float(below.mean()) == pytest.approx(measured, rel=0.3)


@pytest.mark.parametrize("own", [GSPO, ClipBand(1e-3, 1e-3, is_sequence_ratio=False)])
def test_noise_reaches_no_more_of_the_recommended_band_than_its_share_and_needs_that_width(own: ClipBand) -> None:
    floor = fit(sample(2000, between=1e-6))
    fresh = sample(4000, seed=1, between=1e-6)
    band = recommend_band(floor, fresh.lengths, own)
    for low, high, most in ((band.low, band.high, 1.6), (0.8 * band.low, 0.8 * band.high, math.inf)):
        beyond = ClipBand(low, high, own.is_sequence_ratio)
        ones = np.ones_like(fresh.log_ratios)
        for advantages in (-ones, ones):
            share = float(fresh._replace(advantages=advantages).clipped(beyond).mean())
            assert share < most * NOISE_CLIP_SHARE
            assert share > NOISE_CLIP_SHARE or most < math.inf


def test_recommended_band_leans_to_the_side_that_noise_leans_to_and_has_two_digits() -> None:
    band = recommend_band(normal_floor(1e-2), np.array([400, 4000]), GSPO)
    assert band.low > 1.5 * band.high
    assert (band.low, band.high) == (float(f"{band.low:.2g}"), float(f"{band.high:.2g}"))


def test_without_noise_the_objectives_own_band_is_recommended() -> None:
    lengths = np.array([5, 7])
    still = Differences(lengths, np.zeros(12), np.ones(12), np.arange(2))
    floor = fit(still)
    assert (floor.mean, floor.variance, floor.token_variance, floor.k3) == (0, 0, 0, 0)
    assert recommend_band(floor, lengths, GSPO) == GSPO
    assert recommend_band(floor, lengths, GRPO) == GRPO
    assert expected_clip(floor, GSPO, still) == 0
    assert describe(still, floor)[0].expected_std < 1e-11


def test_a_bound_of_one_is_none() -> None:
    # Nearly all tokens are below e^-7.
    floor = normal_floor(20.0)
    below, _ = floor.beyond(ClipBand(1.0, 4.0, is_sequence_ratio=False), np.array([3]))
    assert below[0] == 0
    assert recommend_band(floor, np.array([3]), ClipBand(1.0, 4.0, is_sequence_ratio=False)).low == 1


def test_completions_are_summed_up_by_length_and_by_sign_of_advantage() -> None:
    differences = sample(400)
    every, *by_length, positive, negative = describe(differences, fit(differences))
    assert every.num_completions == 400 == positive.num_completions + negative.num_completions
    assert every.num_tokens == differences.lengths.sum()
    assert [summary.num_completions for summary in by_length] == pytest.approx([100] * 4, abs=4)
    assert sum(summary.num_completions for summary in by_length) == 400
    spreads = [summary.sequence_std for summary in by_length]
    assert spreads == sorted(spreads, reverse=True), "the longer, the quieter"
    assert [summary.expected_std for summary in by_length] == pytest.approx(spreads, rel=0.25)


def test_numbers_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        fit(Differences(np.array([2]), np.array([0.1, -math.inf]), np.ones(2), np.zeros(1, dtype=np.int64)))


def test_floor_is_read_back_as_it_was_written_and_a_damaged_one_is_not() -> None:
    floor = fit(sample(50))
    encoded = msgspec.json.encode(floor)
    assert msgspec.json.decode(encoded, type=NoiseFloor) == floor
    damaged = msgspec.json.encode({**msgspec.to_builtins(floor), "token_quantiles": floor.token_quantiles[::-1]})
    with pytest.raises(msgspec.ValidationError, match="rising"):
        msgspec.json.decode(damaged, type=NoiseFloor)


FLOOR = fit(sample(100, between=1e-6, degrees=4))
bounds = st.floats(1e-6, 0.99)


@given(bounds, bounds, st.integers(1, 100_000), st.booleans())
def test_a_wider_band_never_clips_more(one: float, other: float, length: int, is_sequence_ratio: bool) -> None:
    narrow, wide = sorted((one, other))
    lengths, shares = np.array([length]), np.array([0.5])
    clipped = [
        alike(FLOOR).expected_clip(ClipBand(width, width, is_sequence_ratio), lengths, shares, shares)[0]
        for width in (narrow, wide)
    ]
    assert 0 <= clipped[1] <= clipped[0] <= 1


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=8))
def test_any_completions_can_be_fitted_and_recommended_for(log_ratios: list[list[float]]) -> None:
    lengths = np.array([len(row) for row in log_ratios])
    flat = np.concatenate([np.array(row) for row in log_ratios])
    floor = fit(Differences(lengths, flat, np.ones_like(flat), np.arange(len(lengths))))
    assert floor.variance >= 0
    assert floor.token_variance >= 0
    assert floor.k3 >= 0
    band = recommend_band(floor, lengths, GSPO)
    assert GSPO.low <= band.low <= 1
    below, above = floor.beyond(band, lengths)
    assert below.mean() <= NOISE_CLIP_SHARE + 1e-9
    assert above.mean() <= NOISE_CLIP_SHARE + 1e-9


def test_noise_goes_by_the_probability_of_the_token_and_one_band_touches_the_unlikely_ones() -> None:
    # 900 tokens that are nearly certain, with little noise, and 100 unlikely ones with a hundred times as much.
    random = np.random.default_rng(0)
    d = np.concatenate([random.normal(0, 1e-4, 900), random.normal(0, 1e-2, 100)])
    behavior = np.log(np.concatenate([np.full(900, 0.995), np.full(100, 0.2)]))
    differences = Differences(np.full(10, 100), d, np.ones(1000), np.arange(10), behavior)
    unlikely, certain = noise_by_probability(differences)
    assert (unlikely.least, certain.least) == (0.1, 0.99)
    assert (unlikely.share_of_tokens, certain.share_of_tokens) == (0.1, 0.9)
    assert unlikely.token_std == d[900:].std()
    assert unlikely.share_of_noise == pytest.approx(np.square(d[900:]).sum() / np.square(d).sum())
    assert unlikely.share_beyond == (np.abs(d[900:]) > 3 * d.std()).mean() > 0.05
    assert certain.share_beyond == 0
    # Half of the completions have the rest of them; without the engine's log-probs nothing is known.
    assert [row.least for row in noise_by_probability(differences.take(np.arange(10) < 9))] == [0.99]
    assert noise_by_probability(differences._replace(behavior=np.empty(0))) == []
