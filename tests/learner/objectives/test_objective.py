"""Each setting chooses the function of that name, against the right policies."""

import math

import pytest
import torch

from offbeat.common.config import LossSection
from offbeat.common.objectives import CORRECTION_BANDS, DEFAULTS
from offbeat.common.settings import load
from offbeat.learner.objectives import corrections, losses, objective
from offbeat.learner.objectives.objective import PolicyLogprobs

generator = torch.Generator().manual_seed(0)
POLICY, BEHAVIOR, PROXIMAL = (-torch.rand(3, 4, generator=generator) for _ in range(3))
ADVANTAGES = torch.tensor([[1.0], [-1.0], [0.5]]).expand(3, 4)
MASK = torch.tensor([[True] * 4, [True, True, False, False], [True, False, True, True]])


def section(*overrides: str) -> LossSection:
    return load(None, [f"loss.{override}" for override in overrides]).loss


EXPECTED = {
    "gspo": lambda anchor: losses.gspo(POLICY, anchor, MASK, ADVANTAGES, clip_low=0.1, clip_high=0.2),
    "gspo_token": lambda anchor: losses.gspo_token(POLICY, anchor, MASK, ADVANTAGES, clip_low=0.1, clip_high=0.2),
    "sapo": lambda anchor: losses.sapo(POLICY, anchor, MASK, ADVANTAGES, tau_positive=1.0, tau_negative=1.05),
    "cispo": lambda anchor: losses.cispo(POLICY, anchor, MASK, ADVANTAGES, clip_low=0.1, clip_high=0.2),
    "reinforce": lambda _: losses.reinforce(POLICY, MASK, ADVANTAGES),
} | dict.fromkeys(
    ("grpo", "dr_grpo", "dapo", "ppo"),
    lambda anchor: losses.ppo_clip(POLICY, anchor, MASK, ADVANTAGES, clip_low=0.1, clip_high=0.2, dual_clip=None),
)


@pytest.mark.parametrize("proximal", [None, PROXIMAL], ids=["behavior", "proximal"])
@pytest.mark.parametrize("name", DEFAULTS)
def test_objective_is_the_function_of_its_name_against_the_anchor(name: str, proximal: torch.Tensor | None) -> None:
    clip = ["clip_low=0.1", "clip_high=0.2"] if DEFAULTS[name].band else []
    found = objective.token_losses(
        section(f"objective={name}", *clip), PolicyLogprobs(POLICY, BEHAVIOR, proximal), MASK, ADVANTAGES
    )
    expected = EXPECTED[name](BEHAVIOR if proximal is None else proximal)
    assert torch.equal(found.losses, expected.losses)
    assert torch.equal(found.clipped, expected.clipped)


def test_objectives_are_told_apart() -> None:
    distinct = {name: tuple(EXPECTED[name](BEHAVIOR).losses.flatten().tolist()) for name in EXPECTED}
    # GSPO-token is GSPO where advantages are equal along a row; the clip's four names are one function.
    assert len(set(distinct.values())) == 5


@pytest.mark.parametrize("name", [name for name in DEFAULTS if DEFAULTS[name].dual_clip])
def test_dual_clip_caps_the_objectives_that_have_it(name: str) -> None:
    # Every ratio is at least 1, so that without the cap the losses of the negative row would be up to e times as large.
    logprobs = PolicyLogprobs(POLICY, POLICY - torch.linspace(0, 1, 12).view(3, 4), None)
    found = objective.token_losses(section(f"objective={name}", "dual_clip=1.01"), logprobs, MASK, ADVANTAGES)
    assert found.losses[1, :2].tolist() == pytest.approx([1.01, 1.01])
    assert found.clipped[1].tolist() == [True, True, False, False]
    without = objective.token_losses(section(f"objective={name}"), logprobs, MASK, ADVANTAGES)
    assert torch.equal(found.losses[[0, 2]], without.losses[[0, 2]])
    assert without.losses[1, :2].min() > 1.01


@pytest.mark.parametrize("proximal", [None, PROXIMAL], ids=["pi over mu", "pi_old over mu"])
@pytest.mark.parametrize("name", CORRECTION_BANDS)
def test_correction_is_the_function_of_its_name_for_what_lies_outside_the_ratio(name: str, proximal) -> None:
    bounds = ["correction_high=1.1"] + (["correction_low=0.9"] if name not in ("sequence_tis", "opsm", "m2po") else [])
    found = objective.correction(
        section(f"correction={name}", *bounds), PolicyLogprobs(POLICY, BEHAVIOR, proximal), MASK, ADVANTAGES, m2po_cutoff=0.01
    )
    log_rho = torch.where(MASK, (POLICY if proximal is None else proximal) - BEHAVIOR, 0.0)
    expected = {
        "token_tis": lambda: corrections.token_tis(log_rho, MASK, low=0.9, high=1.1),
        "sequence_tis": lambda: corrections.sequence_tis(log_rho, MASK, high=1.1),
        "icepop": lambda: corrections.icepop(log_rho, MASK, low=0.9, high=1.1),
        "sequence_mask": lambda: corrections.sequence_mask(log_rho, MASK, low=0.9, high=1.1),
        "geometric_mask": lambda: corrections.geometric_mask(log_rho, MASK, low=0.9, high=1.1),
        "opsm": lambda: corrections.opsm(log_rho, MASK, ADVANTAGES, threshold=1.1),
        "m2po": lambda: corrections.m2po(log_rho, MASK, ADVANTAGES, cutoff=0.01),
    }[name]()
    assert found is not None
    assert torch.equal(found.weights, expected)
    assert torch.equal(found.log_rho, log_rho)


def test_without_a_correction_there_are_no_weights() -> None:
    logprobs = PolicyLogprobs(POLICY, BEHAVIOR, None)
    assert objective.correction(section(), logprobs, MASK, ADVANTAGES, m2po_cutoff=math.inf) is None


def test_band_is_around_the_ratio_that_is_clipped() -> None:
    logprobs = PolicyLogprobs(POLICY, BEHAVIOR, None)
    of_tokens = objective.band(section("objective=grpo"), logprobs, MASK)
    of_rows = objective.band(section("objective=gspo"), logprobs, MASK)
    assert of_tokens is not None and of_rows is not None
    assert torch.equal(of_tokens.log_ratio, torch.where(MASK, POLICY - BEHAVIOR, 0.0))
    means = [row[mask].mean().item() for row, mask in zip(POLICY - BEHAVIOR, MASK, strict=True)]
    torch.testing.assert_close(of_rows.log_ratio, torch.tensor(means)[:, None].expand(3, 4))
    assert objective.band(section("objective=sapo"), logprobs, MASK) is None
