"""The trainer with a noise floor: its comparison with an engine, and the share of noise in a step's metrics."""

from pathlib import Path

import numpy as np
import pytest
import torch

from offbeat.common.settings.learning_sections import RewardSection
from offbeat.learner.calibration.calibration import load_calibration, save_calibration
from offbeat.learner.objectives.bands import ClipBand
from tests.learner.calibration.test_calibration import make_calibration
from tests.learner.training.test_trainer import running, with_own_logprobs
from tests.learner.training.test_trainer_objectives import completion_logits
from tests.learner.training.trainer_cases import make_config, make_groups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_comparison_is_the_plain_forward_pass_less_the_engines_logprobs(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    groups = make_groups(3)
    # Micro-batches so small that completions come in another order, and a group's advantages on several.
    with running(make_config(tiny_model, micro_batch_tokens=20)) as trainer:
        differences = trainer.compare(groups)
    expected = []
    for number, group in enumerate(groups):
        rewards = np.array([rollout.reward for rollout in group.rollouts])
        for index, rollout in enumerate(group.rollouts):
            with torch.no_grad():
                logits = completion_logits(policy, group, index)
            logprobs = logits[
                torch.arange(len(rollout.token_ids)), torch.from_numpy(rollout.token_ids.astype(np.int64))
            ].numpy()
            sign = np.sign(rollout.reward - rewards.mean())
            expected.append((len(logprobs), float((logprobs - rollout.behavior_logprobs).mean()), sign, number))
    shares = differences.positive - differences.negative
    columns = (differences.lengths, differences.log_sequence_ratios, shares, differences.groups)
    found = zip(*(column.tolist() for column in columns), strict=True)
    assert np.array(sorted(found)) == pytest.approx(np.array(sorted(expected)), abs=1e-6)


def test_comparison_leaves_the_running_reward_moments_alone(tiny_model: Path) -> None:
    with running(make_config(tiny_model, reward=RewardSection(norm_std="running"))) as trainer:
        before = trainer._adaptive
        trainer.compare(make_groups(3))
        assert trainer._adaptive == before
        trainer.train_batch(make_groups(3))
        assert trainer._adaptive.rewards.count == 12


def test_step_says_what_of_its_clip_fraction_and_divergence_is_noise(tiny_model: Path, tmp_path: Path) -> None:
    file = str(save_calibration(make_calibration(), tmp_path))
    calibration = load_calibration(file)
    floor = calibration.floor
    # Narrow for the given floor, and wide for the log-probs, which are the trainer's own: the floor alone expects clips.
    band = {"clip_low": 1e-3, "clip_high": 2e-3}
    with running(make_config(tiny_model, loss={**band, "noise_floor": file})) as trainer:
        groups = with_own_logprobs(trainer, make_groups(3))
        differences = trainer.compare(groups)
        (metrics,) = trainer.train_batch(groups)
    expected = calibration.noise.expected_clip(
        ClipBand(1e-3, 2e-3, is_sequence_ratio=True), differences.lengths, differences.positive, differences.negative
    ).mean()
    assert expected > 0.2
    assert metrics["clip/noise"] == pytest.approx(expected) == metrics["by_lag/0/clip_noise"]
    assert metrics["clip/fraction"] == 0
    assert metrics["clip/drift"] == pytest.approx(-expected)
    assert metrics["kl/noise"] == floor.k3
    assert metrics["kl/drift"] == pytest.approx(-floor.k3, abs=1e-9)


@pytest.mark.parametrize(
    "loss",
    [
        {"objective": "sapo", "clip_low": None, "clip_high": None},
        {"objective": "cispo"},
        {"anchor": "decoupled", "correction": "token_tis"},
    ],
)
def test_what_clips_no_ratio_to_the_engine_has_no_clip_to_divide(tiny_model: Path, tmp_path: Path, loss: dict) -> None:
    file = str(save_calibration(make_calibration(), tmp_path))
    with running(make_config(tiny_model, loss={**loss, "noise_floor": file})) as trainer:
        (metrics,) = trainer.train_batch(make_groups(3))
    assert metrics["kl/noise"] == load_calibration(file).floor.k3
    assert not {name for name in metrics if name.endswith(("clip/noise", "clip/drift", "clip_noise", "clip_drift"))}
