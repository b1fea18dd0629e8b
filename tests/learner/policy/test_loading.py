"""A model folder that cannot be loaded is a mistake of the user, named by its setting; what is left out of one is said."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.models.folders import load_tokenizer
from offbeat.common.settings.loading import load
from offbeat.learner.policy.loading import load_policy

DAMAGES: dict[str, Callable[[Path], object]] = {
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "weights cut": lambda folder: (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}"),
    "config no JSON": lambda folder: (folder / "config.json").write_text("{"),
    "unknown type": lambda folder: (folder / "config.json").write_text('{"model_type": "qwen99"}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_model_is_a_mistake_about_its_path(damage: str, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    DAMAGES[damage](folder)
    with pytest.raises(SettingError, match=r"model\.path = .*the model cannot be loaded \(.+\)"):
        load_policy(load(None, [f"model.path={folder}"]))


def test_damaged_tokenizer_is_a_mistake_about_the_models_path(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(SettingError, match=r"model\.path = .*its tokenizer cannot be loaded \(.+\)"):
        load_tokenizer(folder)


def test_learner_of_text_says_that_it_leaves_out_the_vision_tower(
    tiny_linear_vision_model: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "offbeat.learner.policy.loading"):
        module = load_policy(load(None, [f"model.path={tiny_linear_vision_model}"]))
        load_policy(load(None, [f"model.path={tiny_model}"]))
    assert not any("visual" in name for name, _ in module.policy.named_parameters())
    said = [text for text in caplog.messages if "more than a language model" in text]
    assert said == [f"{tiny_linear_vision_model} contains more than a language model: the rest is neither trained nor saved"]
