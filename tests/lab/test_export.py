"""`offbeat export` makes folders that transformers and peft load, from checkpoints of any number of ranks."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.settings.config import Config
from offbeat.common.settings.learning_sections import LoraSection
from offbeat.common.settings.loading import resolved_toml
from offbeat.lab.export import export
from offbeat.learner.training import checkpoints
from tests.learner.training.trainer_cases import make_config, make_groups

pytestmark = pytest.mark.slow


def train(run: Path, config: Config, num_checkpoints: int = 1) -> list[dict[str, Tensor]]:
    """Make a run's folder with checkpoints of steps 1, 2, ...; return the weights of each as actors would get them."""
    from offbeat.common.weights.flat import WeightBuffer
    from offbeat.learner.training.trainer import Trainer

    run.mkdir()
    (run / "config.toml").write_text(resolved_toml(config))
    trainer = Trainer(config)
    weights: list[dict[str, Tensor]] = []
    for version in range(1, num_checkpoints + 1):
        trainer.train_batch(make_groups(3, seed=version))
        trainer.save_checkpoint(checkpoints.checkpoint_folder(run / "checkpoints", version), b"")
        buffer = WeightBuffer(trainer.layout())
        trainer.snapshot(dict(buffer.views()))
        weights.append(dict(buffer.views()))
    trainer.close()
    return weights


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 3}, {"lora": LoraSection(rank=4)}], ids=str)
def test_exported_model_is_the_checkpoints(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    first, _ = train(tmp_path / "run", make_config(tiny_model, **settings), num_checkpoints=2)
    out = export(tmp_path / "run", step=1, out=tmp_path / "out", only_adapter=False)
    model = load(out)
    assert all(torch.equal(first[name], parameter) for name, parameter in model.named_parameters())
    assert AutoTokenizer.from_pretrained(out).encode("7+8") == AutoTokenizer.from_pretrained(tiny_model).encode("7+8")


def test_exported_adapter_is_one_that_peft_puts_on_the_base_model(tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    (weights,) = train(tmp_path / "run", make_config(tiny_model, lora=LoraSection(rank=4)))
    out = export(tmp_path / "run", step=None, out=None, only_adapter=True)
    assert out == tmp_path / "run" / "adapter-step-00000001"
    assert {path.name for path in out.iterdir()} == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    merged = PeftModel.from_pretrained(load(tiny_model), str(out)).merge_and_unload()
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=0, atol=1e-6)
    base = dict(load(tiny_model).named_parameters())
    assert any(not torch.equal(base[name], weight) for name, weight in weights.items()), "the adapter was trained"


def test_newest_whole_checkpoint_is_taken_and_a_damaged_one_refused(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, _ = train(run, make_config(tiny_model), num_checkpoints=2)
    (run / "checkpoints" / "step-00000002" / "policy.safetensors").write_bytes(b"")
    out = export(run, step=None, out=None, only_adapter=False)
    assert out.name == "model-step-00000001"
    assert all(torch.equal(first[name], parameter) for name, parameter in load(out).named_parameters())
    with pytest.raises(SettingError, match=r"the checkpoint is damaged: policy\.safetensors has 0 bytes"):
        export(run, step=2, out=None, only_adapter=False)
    with pytest.raises(SettingError, match="There are: 1, 2"):
        export(run, step=3, out=None, only_adapter=False)
    with pytest.raises(SettingError, match="it exists already"):
        export(run, step=1, out=None, only_adapter=False)
    with pytest.raises(SettingError, match="trained all weights"):
        export(run, step=1, out=None, only_adapter=True)
    with pytest.raises(SettingError, match="the folder cannot be written"):
        export(run, step=1, out=run / "config.toml" / "model", only_adapter=False)


def test_disk_that_is_full_is_said_in_a_sentence(tiny_model: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", make_config(tiny_model))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(ServiceError, match=r"the model cannot be written to .*/out \(.*too large"):
            export(tmp_path / "run", step=None, out=tmp_path / "out", only_adapter=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_run_without_a_checkpoint_says_which_setting_makes_them(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"no config\.toml"):
        export(tmp_path, step=None, out=None, only_adapter=False)
    (tmp_path / "config.toml").write_text(resolved_toml(make_config(tmp_path)))
    with pytest.raises(SettingError, match=r"train\.checkpoint_interval"):
        export(tmp_path, step=None, out=None, only_adapter=False)
