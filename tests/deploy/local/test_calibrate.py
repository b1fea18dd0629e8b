"""`offbeat calibrate` with real services on a tiny model: its noise floor, its predictions, and a run that uses them."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from offbeat.common.errors import SettingError
from offbeat.common.processes.process_table import processor_name
from offbeat.common.settings.checks import check_before_run
from offbeat.common.settings.config import Config
from offbeat.common.settings.learning_sections import LossSection
from offbeat.common.settings.loading import load
from offbeat.deploy.local import calibrating
from offbeat.deploy.local.calibrating import calibrate, collection_config
from offbeat.deploy.local.devices import VISIBLE, Device, Inventory, visible_gpus
from offbeat.deploy.local.plan import make_plan
from offbeat.lab.calibration import check_band, check_bounds, cross_fit, load_groups, print_calibration
from offbeat.learner.calibration.calibration import FILE, load_calibration
from offbeat.learner.calibration.noise_floor import Differences
from offbeat.learner.objectives.bands import ClipBand
from tests.deploy.local.warm import WarmProcess
from tests.deploy.services import SERVICES_S, Services, services_in, write_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(SERVICES_S)]

NUM_GROUPS = 128
GROUP_SIZE = 16
"""Completions per group; half of all completions are enough to measure a share to within 0.01."""


class Sampled(NamedTuple):
    """The output and the files of one `offbeat calibrate`."""

    services: Services
    config_file: str
    folder: Path
    output: dict

    @property
    def config(self) -> Config:
        """The config with a learner in bfloat16, to score completions that an engine in float32 has sampled."""
        config = load(Path(self.config_file))
        return replace(config, model=replace(config.model, dtype="bfloat16"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.anchor=proximal", "train.epochs_per_batch=2", "train.num_steps=10"],
        ["loss.anchor=decoupled", "loss.correction=token_tis(0.5, 2)", "loss.normalize_correction=true"],
        ["loss.objective=dapo", "train.warmup_steps=10", "weights.interval=3", "loss.noise_floor=nowhere.json"],
        ["loss.objective=ppo", "staleness.staleness_policy=drop", "evaluation.interval=5", "data.eval_data=x.jsonl"],
        ["run.mirror=s3://bucket/run"],
        ["loss.objective=sao", "rollout.group_size=1", "critic.trunk=own", "critic.alone_until=10"],
        ["evaluation.function=mine:numbers", "evaluation.interval=5", "data.eval_data=x.jsonl"],
        ["loss.anchor=proximal", "train.steps_per_batch=2", "loss.routing_replay=recomputed"],
        ["hub.address=tcp://10.0.0.1:5700", "hub.key=a", "hub.learner_key=b", "hub.allowed_keys=c", "log.enabled=false"],
    ],
    ids=" ".join,
)
def test_collecting_run_of_any_config_is_a_legal_one_of_a_single_step_that_drops_nothing(overrides: list[str]) -> None:
    config = load(None, ["model.path=m", "data.train_data=t.jsonl", "run.dir=here", *overrides])
    check_before_run(config)
    collecting = collection_config(config, 48)
    check_before_run(collecting)
    assert (collecting.train.num_steps, collecting.train.groups_per_step) == (1, 48)
    assert (collecting.staleness.max_staleness, collecting.loss.zero_variance) == (0, "count")
    assert (collecting.log.enabled, collecting.loss.anchor, collecting.loss.noise_floor) == (True, "behavior", "")
    assert collecting.run == replace(config.run, mirror=""), "the run's mirror would hold the calibration's log"
    assert (collecting.model, collecting.rollout, collecting.actor) == (config.model, config.rollout, config.actor)


def test_scoring_learner_works_on_the_gpus_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", VISIBLE):
        monkeypatch.setenv(name, "")
    # Another job has the first six.
    gpus = visible_gpus([Device(index, f"GPU-{index}", "H100", 80, 80) for index in range(8)], "6,7")
    config = load(None, ["model.path=m", "launch.learner_gpus=[1]", "launch.actor_gpus=[[0]]"])
    monkeypatch.setattr(calibrating, "plan_of_this_machine", lambda config: (make_plan(config, gpus, None), Inventory(gpus)))
    spawning = importlib.import_module("torch.multiprocessing.spawn")
    monkeypatch.setattr(spawning, "spawn", lambda score, given, nprocs: score(0, *given))

    def look() -> None:
        raise RuntimeError(os.environ[VISIBLE])

    monkeypatch.setattr(calibrating, "prepare_environment", look)
    with pytest.raises(RuntimeError, match=r"^7$"):
        calibrating._score_in_processes(config, tmp_path)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, warm: WarmProcess) -> Iterator[Sampled]:
    """Run `offbeat calibrate` in float32 on both sides."""
    folder = tmp_path_factory.mktemp("calibrate")
    config = write_config(
        folder,
        tiny_model,
        rollout={"group_size": GROUP_SIZE, "max_new_tokens": 12},
        # Calibration must work despite these settings: missing key files, several steps per batch, a warm-up.
        hub={"address": "tcp://127.0.0.1:0", "key": "nowhere", "learner_key": "nowhere", "allowed_keys": "nowhere"},
        train={"num_steps": 8, "steps_per_batch": 4, "groups_per_step": 2, "learning_rate": 1e-3, "warmup_steps": 2},
        staleness={"max_staleness": 5},
        loss={"clip_low": 3e-4, "clip_high": 4e-4},
        actor={"max_inflight_groups": 64},
    )
    with services_in(folder, warm) as services:
        arguments = ("--groups", str(NUM_GROUPS), "--out", "calibration", "--json")
        process = services.start("calibrate", config, *arguments)
        assert services.wait(process, "calibrate") == 0, services.output("calibrate")
        text = services.output("calibrate")
        # Other processes' progress may stand before it, without an end of line.
        printed, _ = json.JSONDecoder().raw_decode(text, text.index("{\n"))
        yield Sampled(services, config, folder / "calibration", printed)


def direct_differences(config: Config, source: Path) -> Differences:
    """Score the sampled tokens group by group with the plain model in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.bfloat16).eval()
    differences, lengths, advantages = [], [], []
    for group in load_groups(source):
        mean = np.mean([rollout.reward for rollout in group.rollouts])
        # Padding is on the right, where it does not affect a causal model.
        completions = [torch.from_numpy(rollout.token_ids.astype(np.int64)) for rollout in group.rollouts]
        padded = torch.nn.utils.rnn.pad_sequence(completions, batch_first=True)
        prompt = torch.from_numpy(group.prompt_token_ids.astype(np.int64)).expand(len(completions), -1)
        with torch.no_grad():
            logits = policy(torch.cat([prompt, padded], dim=1)).logits[:, prompt.shape[1] - 1 : -1].float()
        scored = logits.log_softmax(-1).gather(-1, padded[..., None]).squeeze(-1)
        for rollout, logprobs in zip(group.rollouts, scored, strict=True):
            policy_logprobs = logprobs[: len(rollout.token_ids)]
            differences.append(policy_logprobs.double().numpy() - rollout.behavior_logprobs)
            lengths.append(len(rollout.token_ids))
            advantages.append(np.full(len(rollout.token_ids), rollout.reward - mean))
    groups = np.arange(len(lengths)) // GROUP_SIZE
    return Differences(np.array(lengths), np.concatenate(differences), np.concatenate(advantages), groups)


def test_identical_numerics_have_a_floor_of_about_zero(sampled: Sampled) -> None:
    calibration = load_calibration(str(sampled.folder / FILE))
    floor = calibration.floor
    assert floor.num_completions == GROUP_SIZE * NUM_GROUPS
    assert floor.k3 < 1e-12
    assert abs(floor.mean) < 1e-7
    assert floor.spread(np.array([1]))[0] < 1e-6
    assert all(check.predicted == check.measured == 0 for check in calibration.checks)
    # The training step that the collecting run takes says the same.
    (step,) = sampled.services.rows("calibration", "step")
    assert step["ratio/first"] < 1e-6
    assert step["clip/fraction"] == 0
    assert step["length/mean"] * floor.num_completions == floor.num_tokens


def test_command_prints_what_it_stores_and_leaves_no_model(sampled: Sampled) -> None:
    assert sampled.output == json.loads((sampled.folder / FILE).read_text())
    assert sampled.output["engine"] | {"version": ""} == {
        "name": "vllm" if importlib.util.find_spec("vllm") else "transformers",
        "version": "",
        "dtype": "float32",
        "device": "cpu",
        "quantization": "",
        "processor": processor_name("cpu"),
    }
    assert sampled.output["recommended"] == [3e-4, 4e-4, True, False, False, None]
    assert not (sampled.folder / "model").exists()


def test_floor_of_a_learner_in_bfloat16_is_what_direct_scoring_finds_and_foretells_what_is_clipped(
    sampled: Sampled, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calibration = calibrate(sampled.config, sampled.folder)
    floor = calibration.floor
    direct = direct_differences(sampled.config, sampled.folder)
    assert floor.num_tokens == len(direct.log_ratios)
    assert floor.k3 == pytest.approx((np.expm1(direct.log_ratios) - direct.log_ratios).mean(), rel=0.1)
    every = calibration.summaries[0]
    assert every.token_std == pytest.approx(direct.log_ratios.std(), rel=0.05)
    assert every.sequence_std == pytest.approx(direct.log_sequence_ratios.std(), rel=0.05)
    error = direct.log_sequence_ratios.std() / np.sqrt(len(direct.lengths))
    assert every.sequence_mean == pytest.approx(direct.log_sequence_ratios.mean(), abs=3 * error)

    own, configured, above_noise = calibration.checks
    assert own.measured > 0.1, "the paper's band clips much for noise alone"
    for of_band in (own, configured, above_noise):
        assert of_band.predicted == pytest.approx(of_band.measured, abs=0.05)
        assert of_band.measured == pytest.approx(float(direct.clipped(of_band.band).mean()), abs=0.05)
    is_even = np.arange(len(direct.lengths)) % (2 * GROUP_SIZE) < GROUP_SIZE
    models = cross_fit(direct.take(is_even), direct.take(~is_even))
    for width in (1e-4, 2e-4, 6e-4, 1e-3):
        for is_sequence_ratio in (True, False):
            of_band = check_band("", ClipBand(width, width, is_sequence_ratio), models)
            assert of_band.predicted == pytest.approx(of_band.measured, abs=0.05)
    assert above_noise.measured < 0.03
    assert calibration.recommended == above_noise.band

    print_calibration(calibration, tmp_path, as_json=False)
    printed = capsys.readouterr().out
    assert f"clip_low = {above_noise.band.low:g}\nclip_high = {above_noise.band.high:g}" in printed
    assert f'noise_floor = "{tmp_path / FILE}"' in printed


def test_band_is_foretold_of_groups_that_the_model_has_not_seen_and_its_error_is_that_of_whole_groups() -> None:
    # 400 groups of two completions in each half. Those of the first have A > 0 and no noise; those of the second A < 0, and
    # each group its own noise: below the band in three of four, above it in the fourth.
    lengths, groups = np.full(800, 2), np.arange(800) // 2
    still = Differences(lengths, np.zeros(1600), np.ones(1600), groups)
    noisy = Differences(lengths, np.tile(np.repeat([-0.2, -0.2, -0.2, 0.2], 4), 100), -np.ones(1600), groups)
    checked = check_band("", ClipBand(0.1, 0.1, True), cross_fit(still, noisy))
    assert (checked.measured_below, checked.measured_above) == (3 / 8, 1 / 8)
    assert checked.predicted_below == pytest.approx(3 / 8, abs=0.01)
    assert checked.predicted_above == pytest.approx(1 / 8, abs=0.01)
    # The model of the still half expects nothing of the other; that of the noisy half a quarter of the still one, with A > 0.
    assert checked.predicted == pytest.approx((0 + 1 / 4) / 2, abs=0.01)
    assert checked.measured == 3 / 8
    assert checked.measured_error == pytest.approx(np.std([0.0] * 500 + [1.0] * 300, ddof=1) / np.sqrt(800))


def test_reach_of_bounds_is_foretold_of_the_other_half_and_measured_on_both() -> None:
    # Two completions in each half; log s of the second half is -0.2 where A < 0, that of the first is 0.
    lengths, signs = np.full(2, 2), np.array([-1.0, -1.0, 1.0, 1.0])
    still, noisy = (Differences(lengths, np.full(4, log_ratio), signs, np.arange(2)) for log_ratio in (0.0, -0.2))
    opsm, truncation = check_bounds(LossSection(correction="opsm(0.1) + token_tis(0.9, 2)"), (still, noisy))
    assert (opsm.setting, opsm.value, opsm.measured) == ("loss.correction", "opsm(0.1)", 1 / 4)
    # The still half expects nothing of the noisy one; the noisy one expects the negative half of the still one.
    assert opsm.predicted == pytest.approx((0 + 1 / 2) / 2)
    assert (truncation.value, truncation.predicted, truncation.measured) == ("token_tis(0.9, 2)", pytest.approx(1 / 2), 1 / 2)
    assert check_bounds(LossSection(), (still, noisy)) == ()
    # With A > 0 and A < 0 alike, half of the noisy tokens are pushed to where they are.
    (threshold,) = check_bounds(LossSection(objective="m2po(0.01)"), (still, noisy))
    assert (threshold.setting, threshold.value, threshold.measured) == ("loss.objective", "m2po(0.01)", 1 / 4)
    assert threshold.predicted == pytest.approx((0 + 1 / 2) / 2)


@pytest.mark.parametrize(("section", "setting", "value"), [("rollout", "temperature", 0.5), ("model", "path", "elsewhere")])
def test_rollouts_of_another_distribution_are_refused(sampled: Sampled, section: str, setting: str, value: object) -> None:
    config = replace(sampled.config, **{section: replace(getattr(sampled.config, section), **{setting: value})})
    with pytest.raises(SettingError, match=rf"{section}\.{setting} = .*the run in"):
        calibrate(config, sampled.folder)


def test_folder_without_a_run_is_refused(sampled: Sampled, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="RUN"):
        calibrate(sampled.config, tmp_path)


def test_run_without_a_rollout_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="it has no rollout log"):
        calibrate(Config(), tmp_path)


def test_mistake_that_a_scoring_process_finds_is_told_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").mkdir()
    monkeypatch.setattr(calibrating, "engine_of", lambda source: None)
    monkeypatch.setattr(calibrating, "check_source", lambda config, source, engine: None)
    with pytest.raises(SettingError, match=r'^config file = ".*": the file cannot be read'):
        calibrate(Config(), tmp_path)
