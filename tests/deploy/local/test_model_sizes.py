"""A model's sizes from its config.json alone, and what its layers keep for the backward pass."""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from offbeat.common.settings.config import Config, ModelSection, TrainSection
from offbeat.deploy.local.memory import ModelSizes, learner_need, model_sizes, sizes_of
from offbeat.deploy.local.quickstart.tiny_models import make_tiny_model
from tests.deploy.local.machines import QWEN3_8B, QWEN3_30B_A3B, QWEN3_600M


@pytest.mark.parametrize(
    ("fields", "num_parameters"),
    [(QWEN3_600M, 596_049_920), (QWEN3_8B, 8_190_735_360), (QWEN3_30B_A3B, 30_532_122_624)],
    ids=["0.6B", "8B", "30B-A3B"],
)
def test_published_models_have_their_published_numbers_of_parameters(fields: dict[str, Any], num_parameters: int) -> None:
    assert sizes_of(fields).num_parameters == num_parameters


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_parameters_of_a_model_that_is_made_are_those_in_its_files(
    architecture: Literal["qwen3", "qwen3_moe"], tmp_path: Path
) -> None:
    make_tiny_model(tmp_path, alphabet="0123456789>", architecture=architecture)
    sizes = model_sizes(str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sizes is not None
    assert sizes.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("content", [None, "{", "[]", '{"hidden_size": 8}', '{"hidden_size": "x", "num_hidden_layers": null}'])
def test_model_whose_sizes_cannot_be_read_has_none(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert model_sizes(str(tmp_path)) is None


def test_sizes_of_a_hub_name_come_from_its_cache_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-8B/snapshots/abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--Qwen--Qwen3-8B/refs").mkdir()
    (tmp_path / "models--Qwen--Qwen3-8B/refs/main").write_text("abc")
    (snapshot / "config.json").write_bytes(msgspec.json.encode(QWEN3_8B))

    def ask(*arguments: str) -> str:
        raise AssertionError(f"the hub is asked for {arguments}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", ask)
    look = partial(huggingface_hub.try_to_load_from_cache, cache_dir=tmp_path)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", look)
    assert model_sizes("Qwen/Qwen3-8B") == sizes_of(QWEN3_8B)


def kept_bytes(config: PreTrainedConfig, num_tokens: int) -> int:
    """Return the bytes of the tensors that autograd keeps in a forward pass, but for parameters."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    storages = {parameter.untyped_storage().data_ptr(): 0 for parameter in model.parameters()}
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long), use_cache=False)
    return sum(storages.values())


def activation_bytes(sizes: ModelSizes, num_tokens: int) -> float:
    train = TrainSection(micro_batch_tokens=num_tokens)
    need = learner_need(Config(model=ModelSection(path="m", max_length=16), train=train), sizes)
    return next(part.num_bytes for part in need.parts if part.name == "activations")


@pytest.mark.parametrize("make", [Qwen3Config, Qwen2Config, LlamaConfig])
def test_activations_of_a_layer_are_those_that_autograd_keeps(make: type[PreTrainedConfig]) -> None:
    fields = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    measured, computed = {}, {}
    for layers in (2, 6):
        config = make.from_dict({**fields, "num_hidden_layers": layers})
        measured[layers] = kept_bytes(config, num_tokens=256)
        sizes = sizes_of(msgspec.json.decode(msgspec.json.encode({**config.to_dict(), "num_hidden_layers": layers})))
        # Many tokens, so that the part does not hide behind the optimizer's step.
        computed[layers] = activation_bytes(sizes, num_tokens=1 << 20) / (1 << 20) * 256
    four_layers = measured[6] - measured[2]
    assert four_layers <= (computed[6] - computed[2]) * 1.01
    assert four_layers >= (computed[6] - computed[2]) * 0.75, "an estimate far too high refuses runs that fit"
