"""A calibration tells what a quantized engine costs; its log-probs are the learner's with noise added."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from rich.console import Console

from offbeat.common.settings.checks import check
from offbeat.common.settings.learning_sections import LossSection
from offbeat.common.settings.loading import load
from offbeat.lab.calibration import ScoredHalves, counted_halves, doubts, fit_calibration, render_calibration
from offbeat.learner.calibration.calibration import Calibration
from offbeat.learner.calibration.noise_floor import Differences
from offbeat.protocols.message_parts import EngineInfo, ModelHashes

pytestmark = pytest.mark.slow

NUM_GROUPS, GROUP_SIZE = 64, 8
CURE = ["loss.anchor=decoupled", "loss.correction=token_tis"]


def calibrated(model: Path, noise: float, *, objective: str = "gspo", num_groups: int = NUM_GROUPS) -> Calibration:
    """Return the calibration of an engine whose log-probs differ by `noise` times a normal number of each token."""
    random = np.random.default_rng(0)

    def half() -> Differences:
        lengths = random.integers(20, 200, num_groups // 2 * GROUP_SIZE)
        log_ratios = noise * random.standard_normal(lengths.sum())
        signs = np.repeat(random.choice([-1.0, 1.0], len(lengths)), lengths)
        return Differences(lengths, log_ratios, signs, np.arange(len(lengths)) // GROUP_SIZE)

    engine = EngineInfo(
        "vllm", "0.32.0", "bfloat16", "cuda", 512, ModelHashes("", "", ""), quantization="fp8_per_channel weights"
    )
    config = load(None, [f"model.path={model}", f"loss.objective={objective}"])
    return fit_calibration(config, engine, ScoredHalves((half(), half()), num_groups, torch.device("cpu")))


def printed(calibration: Calibration) -> str:
    console = Console(width=1000)
    with console.capture() as capture:
        console.print(render_calibration(calibration))
    return capture.get()


def test_large_noise_of_a_quantized_engine_is_told_with_settings_that_keep_it_out_of_the_ratio(tiny_model: Path) -> None:
    calibration = calibrated(tiny_model, noise=0.5)
    text = printed(calibration)
    assert "vllm 0.32.0 in bfloat16 with fp8_per_channel weights on cuda against a learner" in text
    assert calibration.recommended is not None
    # Two standard deviations of the mean of 20 tokens are 0.22.
    assert calibration.recommended.bounds_of(np.array([20]))[0] > 0.1
    assert "The engine's noise is large: it needs a band beyond 0.05, 0.05, the widest default" in text
    assert all(setting.split("=")[1] in text for setting in CURE)
    check(load(None, ["model.path=m", "data.train_data=d", *CURE]))


def test_noise_is_kept_out_of_the_ratio_of_an_objective_that_weighs_by_the_engines_itself(tiny_model: Path) -> None:
    calibration = calibrated(tiny_model, noise=0.5, objective="minirl")
    assert calibration.recommended is not None and calibration.recommended.low > 0.5
    text = printed(calibration)
    assert 'with loss.anchor="proximal"; or' in text and "decoupled" not in text


def test_bounds_of_a_divergence_are_not_judged_by_noise_that_is_known_as_ratios(tiny_model: Path) -> None:
    calibration = calibrated(tiny_model, noise=0.05, objective="dppo_kl")
    assert calibration.recommended is None and calibration.checks == []
    text = printed(calibration)
    assert "drops tokens by their probabilities" in text and "clip/fraction" in text and "clips no gradient" not in text


@pytest.mark.parametrize(("noise", "objective"), [(0.05, "gspo"), (0.05, "dapo"), (0.5, "cispo"), (0.5, "sapo")])
def test_noise_that_the_objective_bears_is_no_reason_to_change_it(noise: float, objective: str, tiny_model: Path) -> None:
    assert "noise is large" not in printed(calibrated(tiny_model, noise, objective=objective))


def test_prediction_of_few_groups_says_that_it_is_not_to_be_trusted_and_how_many_would_do(tiny_model: Path) -> None:
    few = calibrated(tiny_model, noise=0.05, num_groups=16)
    own = few.checks[0]
    half_width = 1.96 * own.measured_error
    assert half_width > 0.05
    needed = math.ceil(16 * (half_width / 0.05) ** 2)
    assert f"only known to ± {half_width:.1%}; --groups {needed} would measure it to ± 5%" in printed(few)
    assert f"{own.measured:.1%} ± {half_width:.1%}" in printed(few)
    assert doubts(calibrated(tiny_model, noise=0.05, num_groups=256)) == []


def test_prediction_that_misses_what_was_measured_and_a_sign_that_is_hardly_there_are_told(tiny_model: Path) -> None:
    calibration = calibrated(tiny_model, noise=0.05, num_groups=256)
    own = calibration.checks[0]
    missed = replace(own, predicted=own.measured + 2.58 * own.measured_error + 0.011)
    (told,) = doubts(replace(calibration, checks=[missed, *calibration.checks[1:]]))
    assert told.startswith("Do not trust the prediction for the band own: it misses what was measured by ")
    near = replace(own, predicted=own.measured - 2.58 * own.measured_error - 0.009)
    assert doubts(replace(calibration, checks=[near, *calibration.checks[1:]])) == []
    (rare,) = doubts(replace(calibration, positive=calibration.floor))
    assert rare.startswith("Fewer than 10 groups have completions with A > 0")
    assert doubts(replace(calibration, positive=calibration.floor, sign_shares=(1.0, 0.0))) == []


def test_groups_of_equal_rewards_count_as_the_metric_counts_them() -> None:
    random = np.random.default_rng(0)
    lengths, groups = np.full(16, 3), np.arange(16) // 4
    signs = np.repeat([1.0, -1.0, 1.0, -1.0, *[0.0] * 4, *[1.0, -1.0] * 2, *[0.0] * 4], 3)
    half = Differences(lengths, random.standard_normal(48), signs, groups)
    for loss, kept in ((LossSection(zero_variance="count"), [0, 1, 2, 3]), (LossSection(zero_variance="drop"), [0, 2])):
        counted = counted_halves(loss, (half, half))
        assert [sorted(set(of_half.groups.tolist())) for of_half in counted] == [kept, kept]
    assert counted_halves(LossSection(zero_variance="drop"), (half, half.take(groups < 2)))[0] is half
