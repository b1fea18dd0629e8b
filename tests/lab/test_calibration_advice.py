"""A calibration tells what a quantized engine costs; its log-probs are the learner's with noise added."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from offbeat.common.setting_checks import check
from offbeat.common.settings import load
from offbeat.lab.calibration import ScoredHalves, fit_calibration, render_calibration
from offbeat.learner.diagnostics.calibration import Calibration
from offbeat.learner.diagnostics.noise_floor import Differences
from offbeat.protocols.engine_info import EngineInfo, ModelHashes

pytestmark = pytest.mark.slow

NUM_GROUPS, GROUP_SIZE = 64, 8
CURE = ["loss.anchor=decoupled", "loss.correction=token_tis"]


def calibrated(model: Path, noise: float, *, objective: str = "gspo") -> Calibration:
    """Return the calibration of an engine whose log-probs differ by `noise` times a normal number of each token."""
    random = np.random.default_rng(0)

    def half() -> Differences:
        lengths = random.integers(20, 200, NUM_GROUPS // 2 * GROUP_SIZE)
        log_ratios = noise * random.standard_normal(lengths.sum())
        return Differences(lengths, log_ratios, np.repeat(random.choice([-1.0, 1.0], len(lengths)), lengths))

    engine = EngineInfo(
        "vllm", "0.32.0", "bfloat16", "cuda", 512, ModelHashes("", "", ""), quantization="fp8_per_channel weights"
    )
    config = load(None, [f"model.path={model}", f"loss.objective={objective}"])
    return fit_calibration(config, engine, ScoredHalves((half(), half()), NUM_GROUPS, torch.device("cpu")))


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
    # 2.33 standard deviations of the mean of 20 tokens are 0.26.
    assert calibration.recommended.low > 0.1
    assert "The engine's noise is large: it needs a band beyond the objective's 0.05, 0.05" in text
    assert all(setting.split("=")[1] in text for setting in CURE)
    check(load(None, ["model.path=m", "task.train_data=d", *CURE]))


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
