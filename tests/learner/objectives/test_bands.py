"""Claims about the band of a completion's own length."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from offbeat.common.settings.loading import load
from offbeat.learner.diagnostics.row_statistics import Column, row_statistics
from offbeat.learner.objectives.bands import USUAL_NOISE, ClipBand, NoiseOfLength
from offbeat.learner.objectives.losses import TokenLosses, gspo, gspo_token
from offbeat.learner.objectives.objective import PolicyLogprobs, make_objective
from tests.learner.objectives.loss_cases import inputs_of

BAND = ClipBand(0.05, 0.05, is_sequence_ratio=True, by_length=USUAL_NOISE)


@pytest.mark.parametrize(("length", "high"), [(1, 0.07), (2, 0.05), (6, 0.05), (10, 0.03), (100, 0.007), (10_000, 0.0007)])
def test_bound_is_that_of_the_drift_where_completions_are_short_and_of_the_noise_where_they_are_long(
    length: int, high: float
) -> None:
    low_of, high_of = BAND.bounds_of(np.array([length]))
    assert high_of == pytest.approx([high])
    noise = 0.07 / math.sqrt(length) + 0.035**2 / 2
    assert low_of == pytest.approx([max(noise, min(0.05, 0.3 / length))])


@pytest.mark.parametrize("length", [1, 8, 64, 256, 1024, 8192])
def test_noise_alone_clips_about_one_completion_in_forty_at_any_length(length: int) -> None:
    # The engine chooses the tokens: E[pi/mu] = 1, so the mean of the log-ratio is -sigma^2 / 2.
    random = np.random.default_rng(length)
    log_s = random.normal(-(0.035**2) / 2, 0.035 / math.sqrt(length), size=100_000)
    low, high = BAND.log_bounds_of(np.array([length]))
    assert (log_s < low).mean() < 0.027
    assert (log_s > high).mean() < 0.027


def test_band_of_the_longest_completion_clips_short_ones_for_noise() -> None:
    # 0.035 / sqrt(0.4 * 8192), the band of the run: the completions of 256 tokens lose two in five.
    log_s = np.random.default_rng(0).normal(-(0.035**2) / 2, 0.035 / 16, size=100_000)
    low, _ = ClipBand(6.1e-4, 6.1e-4, is_sequence_ratio=True).log_bounds_of(np.array([256]))
    assert (log_s < low).mean() > 0.39


def test_calibrated_noise_widens_the_band_to_two_of_its_standard_deviations_from_its_mean() -> None:
    noise = NoiseOfLength(mean=-0.01, variance=0.0004, token_variance=0.25)
    low, high = noise.bounds(np.array([100]), low=0.05, high=0.05)
    spread = math.sqrt(0.0004 + 0.25 / 100)
    assert (low[0], high[0]) == (pytest.approx(2 * spread + 0.01), pytest.approx(2 * spread))


def test_each_row_is_clipped_at_its_own_bound_and_counted_there() -> None:
    # log s = 0.004 in both rows: inside 0.3 / 10, beyond 0.07 / sqrt(1000).
    lengths = torch.tensor([10, 1000])
    mask = torch.arange(1000) < lengths[:, None]
    behavior = torch.full((2, 1000), -1.0)
    policy = (behavior + 0.004).requires_grad_()
    loss = load(None, ["rollout.max_new_tokens=1000"]).loss
    advantages = torch.ones(2, 1000)
    logprobs = PolicyLogprobs(policy, behavior, None)
    found = make_objective(loss).evaluate(logprobs, mask, advantages)
    found.losses.sum().backward()
    assert policy.grad is not None
    assert (policy.grad.abs().sum(dim=-1) > 0).tolist() == [True, False]
    assert found.clipped[mask].float().mean().item() == pytest.approx(1000 / 1010)
    assert found.clipped_ratio is not None
    above = found.clipped_ratio.log_ratio.exp() > 1 + found.clipped_ratio.clip_high
    assert above[:, 0].tolist() == [False, True]
    table = row_statistics(
        logprobs,
        found,
        completion_mask=mask,
        advantages=advantages,
        row_weights=torch.ones(2),
        policy_lags=torch.zeros(2),
        turns=torch.zeros(2, 1000, dtype=torch.long),
    )
    assert table[:, Column.NUM_POSITIVE_ABOVE].tolist() == [0, 1000]


@pytest.mark.parametrize("function", [gspo, gspo_token])
def test_equal_bounds_of_rows_are_the_band_of_the_run(function: Callable[..., TokenLosses]) -> None:
    generator = torch.Generator().manual_seed(0)
    policy, behavior = -torch.rand(2, 6, 7, generator=generator)
    mask = torch.rand(6, 7, generator=generator) < 0.8
    advantages = torch.randn(6, 1, generator=generator).expand(6, 7)
    inputs = inputs_of(policy, behavior, mask, advantages)
    of_run = function(inputs, clip_low=0.05, clip_high=0.1)
    of_rows = function(inputs, clip_low=torch.full((6, 1), 0.05), clip_high=torch.full((6, 1), 0.1))
    assert torch.equal(of_run.losses, of_rows.losses)
    assert torch.equal(of_run.clipped, of_rows.clipped)
    assert of_run.clipped.any() and not of_run.clipped[mask].all()
