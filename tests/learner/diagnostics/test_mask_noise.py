"""The noise floor foretells how much a correction masks with nothing stale."""

import numpy as np
import pytest
import torch

from offbeat.common.objectives import CORRECTION_BANDS
from offbeat.learner.diagnostics.mask_noise import expected_masked, measured_masked
from offbeat.learner.diagnostics.noise_floor import Differences, fit
from offbeat.learner.objectives import corrections
from offbeat.learner.objectives.objective import CorrectionRule
from tests.learner.diagnostics.test_noise_floor import sample

DEFAULT_RULES = [CorrectionRule(name, bounds.low, bounds.high) for name, bounds in CORRECTION_BANDS.items()]
TIGHT = [CorrectionRule("icepop", 0.95, 1.05), CorrectionRule("sequence_mask", 0.7, 1.3)]


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [float("inf"), 4.0])
@pytest.mark.parametrize("kl", [1e-4, 1.5e-3])
@pytest.mark.parametrize("rule", [*DEFAULT_RULES, *TIGHT], ids=lambda rule: f"{rule.name} {rule.low} {rule.high}")
def test_masked_share_of_other_completions_is_foretold(rule: CorrectionRule, kl: float, degrees: float) -> None:
    seen, unseen = (sample(3000, seed=seed, kl=kl, degrees=degrees, between=1e-7) for seed in (0, 1))
    expected, measured = expected_masked(fit(seen), rule, unseen).mean(), measured_masked(unseen, rule).mean()
    assert expected == pytest.approx(measured, abs=0.02)


def test_default_thresholds_lie_inside_the_noise_of_a_thousand_tokens() -> None:
    """With all advantages below 0: engine KLs of 1e-4 and 1.5e-3 nats; the shares of a normal distribution."""
    for kl, of_opsm, of_geometric_mask in ((1e-4, 0.5, 0.03), (1.5e-3, 0.79, 0.66)):
        noise = sample(4000, kl=kl, lengths=(1000, 1001))
        noise = noise._replace(advantages=-np.ones_like(noise.advantages))
        floor = fit(noise)
        opsm, mask = (CorrectionRule(name, *CORRECTION_BANDS[name]) for name in ("opsm", "geometric_mask"))
        assert expected_masked(floor, opsm, noise).mean() == pytest.approx(of_opsm, abs=0.03)
        assert expected_masked(floor, mask, noise).mean() == pytest.approx(of_geometric_mask, abs=0.03)


@pytest.mark.parametrize("rule", [*DEFAULT_RULES, *TIGHT], ids=lambda rule: f"{rule.name} {rule.low} {rule.high}")
def test_measured_share_is_that_of_the_corrections_own_weights(rule: CorrectionRule) -> None:
    noise = sample(50, kl=2e-3, lengths=(5, 9))
    for start, length in zip(np.cumsum(noise.lengths) - noise.lengths, noise.lengths, strict=True):
        part = slice(start, start + length)
        one = Differences(np.array([length]), noise.log_ratios[part], noise.advantages[part])
        weights = _weights(one, rule)
        assert measured_masked(one, rule).item() == pytest.approx((weights == 0).double().mean().item())


def _weights(one: Differences, rule: CorrectionRule) -> torch.Tensor:
    log_rho, advantages = (torch.from_numpy(array)[None] for array in (one.log_ratios, one.advantages))
    mask = torch.ones_like(log_rho, dtype=torch.bool)
    match rule.name:
        case "token_tis":
            return corrections.token_tis(log_rho, mask, low=rule.low, high=rule.high)
        case "sequence_tis":
            return corrections.sequence_tis(log_rho, mask, high=rule.high)
        case "icepop":
            return corrections.icepop(log_rho, mask, low=rule.low, high=rule.high)
        case "sequence_mask":
            return corrections.sequence_mask(log_rho, mask, low=rule.low, high=rule.high)
        case "geometric_mask":
            return corrections.geometric_mask(log_rho, mask, low=rule.low, high=rule.high)
        case "opsm":
            return corrections.opsm(log_rho, mask, advantages, threshold=rule.high)
