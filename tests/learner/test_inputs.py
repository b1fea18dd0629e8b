"""Join settings have what an actor needs, and neither secrets nor paths of the learner's machine."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from offbeat.common.errors import SettingError
from offbeat.common.models.folders import WEIGHT_FILES, hash_model
from offbeat.common.settings.config import (
    ActorSection,
    Config,
    DataSection,
    HubSection,
    JudgeSection,
    ModelSection,
    RolloutSection,
    TaskSection,
)
from offbeat.common.settings.learning_sections import KlSection
from offbeat.common.settings.loading import explanations, load_text, refuse_masked
from offbeat.common.weights.flat import make_layout
from offbeat.deploy.checks.inputs import check_inputs
from offbeat.learner.inputs import OF_THIS_MACHINE, load_inputs, make_join_payload, without_this_machine
from offbeat.learner.policy.lora import base_shapes
from offbeat.protocols.message_parts import decode_join_settings
from offbeat.protocols.messages import TensorSpec

CONFIG = Config(
    model=ModelSection(path="/models/secret-project", dtype="float32"),
    data=DataSection(train_data="/data/train.jsonl"),
    task=TaskSection(reward="mine:digits"),
    rollout=RolloutSection(temperature=0.7),
    judge=JudgeSection(url="http://judge/v1", model="m", key_env="JUDGE_KEY", cache="/cache", options={"api_key": "sk-1"}),
    actor=ActorSection(name="a", engine_options={"hf_token": "hf-1", "max_num_seqs": 8}),
    hub=HubSection(address="tcp://10.0.0.1:5700", key="/keys/learner.key", dead_after_s=20.0),
)
NO_PATHS = {"data.image_field", "data.train_split", "data.eval_split"}
"""Settings whose texts speak of files and folders, and that name none."""


def layout_of(folder: Path) -> tuple[TensorSpec, ...]:
    return make_layout(base_shapes(AutoModelForCausalLM.from_pretrained(folder)), torch.float32)


def test_actor_gets_the_small_files_and_the_settings_without_secrets_and_paths(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "modeling.py").write_text("import os")
    (folder / "notes.json").write_text("{}")
    received = decode_join_settings(make_join_payload(CONFIG, folder, layout_of(folder)).content)
    there = {path.name for path in tiny_model.iterdir() if not any(path.match(pattern) for pattern in WEIGHT_FILES)}
    assert set(received.files) == there
    (tmp_path / "copy").mkdir()
    for name, content in received.files.items():
        (tmp_path / "copy" / name).write_bytes(content)
    assert hash_model(tmp_path / "copy") == hash_model(tiny_model)
    for secret in ("sk-1", "hf-1", "/models", "/data", "/keys", "/cache", "10.0.0.1"):
        assert secret not in received.settings
    config = load_text(received.settings)
    assert (config.rollout.temperature, config.task.reward, config.hub.dead_after_s) == (0.7, "mine:digits", 20.0)
    assert config.judge.key_env == "JUDGE_KEY", "a name, which the actor's machine gives a value"
    with pytest.raises(SettingError, match=r"actor\.engine_options.*masked.*actor\.engine_options\.NAME=VALUE"):
        refuse_masked(config)
    with pytest.raises(SettingError, match=r"judge\.options"):
        refuse_masked(load_text(received.settings, ["actor.engine_options={}"]))
    refuse_masked(load_text(received.settings, ["actor.engine_options.hf_token=hf-2", "judge.options.api_key=sk-2"]))


def config_with_model(tiny_model: Path, tmp_path: Path, **changes: object) -> Config:
    tmp_path.mkdir(exist_ok=True)
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "ÄÖÜ", "answer": ""}))
    return Config(model=ModelSection(path=str(folder)), data=DataSection(train_data=str(tmp_path / "train.jsonl")))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"model_type": "qwen99"}, "qwen99"), ({"vocab_size": 20}, "tokens, and the model's vocabulary 20. Use the tokenizer")],
)
def test_model_that_no_learner_can_load_is_a_mistake_about_its_path(
    tiny_model: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(SettingError, match=f"model.path = .*{said}"):
        load_inputs(config_with_model(tiny_model, tmp_path, **changes))


def test_reference_of_another_vocabulary_is_a_mistake_about_the_reference(tiny_model: Path, tmp_path: Path) -> None:
    config = config_with_model(tiny_model, tmp_path / "small", vocab_size=20)
    kl = KlSection(loss_coef=0.1, reference=config.model.path)
    with pytest.raises(SettingError, match=r"kl\.reference = .* the tokenizer has .* with the same vocabulary"):
        load_inputs(replace(config, model=ModelSection(path=str(tiny_model)), kl=kl))


def test_place_for_images_beyond_the_vocabulary_is_no_reason_to_refuse_a_model(tiny_model: Path, tmp_path: Path) -> None:
    # As of Gemma 3 1B, which reads text alone and has the tokenizer of the larger ones.
    config = config_with_model(tiny_model, tmp_path)
    tokenizer, size = AutoTokenizer.from_pretrained(config.model.path), AutoConfig.from_pretrained(config.model.path).vocab_size
    tokenizer.add_tokens([f"<{number}>" for number in range(size - len(tokenizer))])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(config.model.path)
    with pytest.raises(SettingError, match=f"the tokenizer has {size + 1} tokens"):
        load_inputs(config)
    file = Path(config.model.path) / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_token": "<image_soft_token>"}))
    assert load_inputs(config).vocabulary_size == size
    assert not [one for one in check_inputs(config) if one.kind == "mistake"]


def test_prompts_of_unknown_tokens_are_warned_about_with_the_first(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_inputs(config_with_model(tiny_model, tmp_path))
    assert (
        "data.train_data: the tokenizer does not know 100% of the prompts' tokens; the first prompt as tokens: '" in caplog.text
    )


def test_every_setting_that_names_a_file_of_a_machine_is_kept_back() -> None:
    speak = {row.setting for row in explanations() if re.search(r"\b([Ff]older|[Ff]ile)\b", row.text)}
    assert speak - set(OF_THIS_MACHINE) == NO_PATHS
    assert without_this_machine(CONFIG).actor == ActorSection(engine_options=CONFIG.actor.engine_options)


def test_model_that_files_make_and_its_config_does_not_is_not_handed_out(tiny_untied_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_untied_model, tmp_path / "model")
    layout = layout_of(folder)
    assert make_join_payload(CONFIG, folder, layout).content
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    received = make_join_payload(CONFIG, folder, layout)
    assert not received.content
    assert "differ in lm_head.weight. Give the actor the model's folder and the settings" in received.obstacle


def test_model_with_tensors_that_updates_do_not_bring_is_not_handed_out(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, from_config = layout_of(tiny_model), AutoModelForCausalLM.from_config

    def with_buffer(config: object) -> object:
        model = from_config(config)
        model.register_buffer("bias", torch.zeros(2))
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", with_buffer)
    assert "the model has bias, a tensor that its files bring" in make_join_payload(CONFIG, tiny_model, layout).obstacle
