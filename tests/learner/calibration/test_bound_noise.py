"""The noise floor foretells how much the bounds of a correction reach with nothing stale."""

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.common.settings.completion import complete_loss
from offbeat.common.settings.corrections import CORRECTIONS, CorrectionChoice
from offbeat.common.settings.learning_sections import LossSection
from offbeat.learner.calibration.bound_noise import (
    expected_dropped,
    expected_touched,
    measured_dropped,
    measured_touched,
    recommend_bounds,
    recommend_m2_threshold,
)
from offbeat.learner.calibration.noise_floor import NOISE_CLIP_SHARE, fit, sample_noise
from offbeat.learner.calibration.watch import noise_warnings
from offbeat.learner.objectives.correction_rules import CorrectionRule, apply_correction
from offbeat.learner.objectives.objective import make_objective
from tests.learner.calibration.test_calibration import make_calibration
from tests.learner.calibration.test_noise_floor import alike, sample

DEFAULT_RULES = [CorrectionRule(name, own.low or 0.0, own.high) for name, own in CORRECTIONS.items()]
TIGHT = [
    CorrectionRule("icepop", 0.95, 1.05),
    CorrectionRule("token_tis", 0.97, 1.02),
    CorrectionRule("sequence_mask", 0.7, 1.3),
    CorrectionRule("sequence_tis", 0.7, 1.3),
    CorrectionRule("geometric_tis", 0.998, 1.001),
    CorrectionRule("k2_mask", 0.0, 1.5e-3),
    CorrectionRule("k3_mask", 0.0, 1.5e-3),
]


def apart(log_rho: Tensor, completion_mask: Tensor, advantages: Tensor) -> Tensor:
    """Weigh 0 where a token of negative advantage is more than 5% below the engine's probability, as a user's own."""
    return (completion_mask & ~((log_rho < -0.05) & (advantages < 0))).float()


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [float("inf"), 4.0])
@pytest.mark.parametrize("kl", [1e-4, 1.5e-3])
@pytest.mark.parametrize("rule", [*DEFAULT_RULES, *TIGHT], ids=lambda rule: f"{rule.name} {rule.low} {rule.high}")
def test_reach_into_other_completions_is_foretold(rule: CorrectionRule, kl: float, degrees: float) -> None:
    seen, unseen = (sample(1500, seed=seed, kl=kl, degrees=degrees, between=1e-7) for seed in (0, 1))
    expected, measured = expected_touched(alike(fit(seen)), rule, unseen).mean(), measured_touched(unseen, rule).mean()
    assert expected == pytest.approx(measured, abs=0.035)


@pytest.mark.slow
@pytest.mark.parametrize("kl", [1e-4, 1.5e-3])
def test_reach_of_an_own_correction_and_of_m2po_is_foretold(kl: float) -> None:
    seen, unseen = (sample(1500, seed=seed, kl=kl, between=1e-7) for seed in (0, 1))
    floor = fit(seen)
    measured = measured_touched(unseen, apart).mean()
    assert expected_touched(alike(floor), apart, unseen).mean() == pytest.approx(measured, abs=0.005)
    threshold = 1.5 * kl
    assert expected_dropped(floor, threshold) == pytest.approx(measured_dropped(unseen, threshold), abs=0.005)
    assert measured_dropped(unseen, threshold) > 0.01
    assert expected_dropped(floor, recommend_m2_threshold(floor, 0.0)) == 0
    assert recommend_m2_threshold(floor, 0.04) == 0.04


@pytest.mark.slow
@pytest.mark.parametrize("rule", DEFAULT_RULES, ids=lambda rule: rule.name)
def test_recommended_bounds_are_the_narrowest_above_the_noise_and_no_narrower_than_the_corrections_own(
    rule: CorrectionRule,
) -> None:
    seen, unseen = (sample(1500, seed=seed, kl=1.5e-3, between=1e-6)._replace() for seed in (0, 1))
    unseen = unseen._replace(advantages=-np.ones_like(unseen.advantages))
    found, own = recommend_bounds(fit(seen), rule, seen.lengths), CORRECTIONS[rule.name]
    if rule.name == "segment_mask":
        assert found is None
        return
    assert found is not None and found.high is not None
    assert found.high >= own.high and (own.low is None or (found.low is not None and found.low <= own.low))
    reach = measured_touched(unseen, CorrectionRule(rule.name, found.low or 0.0, found.high)).mean()
    assert reach <= 2 * NOISE_CLIP_SHARE + 0.01
    if found != CorrectionChoice(rule.name, own.low, own.high):
        halfway = CorrectionRule(rule.name, 1 - (1 - (found.low or 0.0)) / 2, 1 + (found.high - 1) / 2)
        if own.low is None:
            halfway = CorrectionRule(rule.name, 0.0, found.high / 2)
        assert measured_touched(unseen, halfway).mean() > NOISE_CLIP_SHARE


def test_default_thresholds_lie_inside_the_noise_of_a_thousand_tokens() -> None:
    """With all advantages below 0: engine KLs of 1e-4 and 1.5e-3 nats; the shares of a normal distribution."""
    for kl, of_opsm, of_geometric_mask in ((1e-4, 0.5, 0.03), (1.5e-3, 0.79, 0.66)):
        noise = sample(2000, kl=kl, lengths=(1000, 1001))
        noise = noise._replace(advantages=-np.ones_like(noise.advantages))
        floor = fit(noise)
        opsm, mask = (rule for rule in DEFAULT_RULES[::-1] if rule.name in ("opsm", "geometric_mask"))
        assert expected_touched(alike(floor), opsm, noise).mean() == pytest.approx(of_opsm, abs=0.04)
        assert expected_touched(alike(floor), mask, noise).mean() == pytest.approx(of_geometric_mask, abs=0.03)


def test_measured_reach_is_that_of_the_corrections_own_weights_on_each_completion() -> None:
    noise = sample(70, kl=2e-3, lengths=(5, 9))
    starts = np.cumsum(noise.lengths) - noise.lengths
    for rule in (CorrectionRule("icepop", 0.95, 1.05), CorrectionRule("opsm", 0.0, 1e-3), apart):
        measured = measured_touched(noise, rule)
        for share, start, length in zip(measured, starts, noise.lengths, strict=True):
            log_rho, advantages = (
                torch.from_numpy(values[start : start + length]).float()[None]
                for values in (noise.log_ratios, noise.advantages)
            )
            weights = apply_correction(rule, log_rho, torch.ones_like(log_rho, dtype=torch.bool), advantages)
            assert share == pytest.approx((weights == 0).double().mean().item())


def test_sampled_noise_has_the_tokens_and_the_means_of_the_model() -> None:
    floor = fit(sample(2000, kl=1e-3, between=1e-5))
    others = sample(2000, seed=5)
    noise = sample_noise(floor, others, np.random.default_rng(3))
    assert np.array_equal(noise.lengths, others.lengths) and np.array_equal(noise.advantages, others.advantages)
    for value in (-3e-3, -1e-3, 2e-3):
        expected = floor.sequences_below(value, others.lengths).mean()
        assert (noise.log_sequence_ratios < value).mean() == pytest.approx(expected, abs=0.03)
    assert (noise.log_ratios < -0.05).mean() == pytest.approx(floor.tokens_below(-0.05), abs=0.01)


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        (
            {"clip_low": 3e-4, "clip_high": 4e-4},
            ["clip_low = 0.0003, loss.clip_high = 0.0004 clips", "would do so on at most 1%"],
        ),
        ({"correction": "opsm"}, ["loss.correction: opsm(0.0001) masks 2", "nothing stale. opsm(0.0"]),
        ({"correction": "k3_mask(1e-4)"}, ["k3_mask(0.0001) masks 100%", "k3_mask(0.01) would"]),
        ({"correction": "segment_mask(0.9999, 1.0001)"}, ["segment_mask(0.9999, 1.0001) masks", "nothing stale."]),
        ({"correction": "token_tis(0.98, 1.01)"}, ["token_tis(0.98, 1.01) truncates", "token_tis(0, 2) would"]),
        (
            {"objective": "minirl", "clip_low": 0.02},
            ["clip_high = 0.27 clips", "nothing stale. 0.2, 0.27"],
        ),
        (
            {"objective": "dppo_tv", "clip_low": 0.02, "clip_high": 0.02},
            ["clip_low = 0.02, loss.clip_high = 0.02 drops up to", "nothing stale. 0.15, 0.15 would"],
        ),
        ({"objective": "ctpo"}, ["clip_low = 0.0246901, loss.clip_high = 0.0512711 clips", "nothing stale. 0."]),
        ({"objective": "m2po(1e-4)"}, ["loss.objective: m2po(0.0001) drops", "m2po(0.04) would drop none"]),
        ({"correction": "tests.learner.calibration.test_bound_noise:apart"}, [":apart masks"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bound_inside_the_noise_is_told_with_its_reach_and_bounds_above_it(loss: dict[str, object], parts: list[str]) -> None:
    section = complete_loss(LossSection(**loss), max_new_tokens=8)  # pyright: ignore[reportArgumentType], a section's settings
    (warning,) = noise_warnings(section, make_objective(section), make_calibration())
    for part in parts:
        assert part in warning


@pytest.mark.parametrize(
    "loss",
    [
        {"objective": "dppo_tv"},
        {"objective": "dppo_tv", "clip_low": 0.02, "anchor": "proximal"},
        {},
        {"correction": "icepop + geometric_mask(0.9, 1.1)"},
        {"objective": "m2po"},
        {"clip_low": 3e-4, "anchor": "decoupled"},
    ],
    ids=str,
)
def test_bound_above_the_noise_is_not_told(loss: dict[str, object]) -> None:
    section = complete_loss(LossSection(**loss), max_new_tokens=8)  # pyright: ignore[reportArgumentType], a section's settings
    assert noise_warnings(section, make_objective(section), make_calibration()) == []
