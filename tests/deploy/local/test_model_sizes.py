"""A model's sizes from its config.json alone, and what its layers keep for the backward pass."""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import msgspec
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offbeat.common.settings.config import ActorSection, Config, ModelSection, TrainSection
from offbeat.common.weights.flat import tensor_dtype
from offbeat.deploy.local import model_sizes as model_sizes_module
from offbeat.deploy.local.memory import completion_bytes, learner_need
from offbeat.deploy.local.model_sizes import EAGER_TYPES, ModelSizes, model_sizes, sizes_of
from offbeat.deploy.local.quickstart.tiny_models import make_tiny_model
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.packing import pack
from tests.deploy.local.machines import QWEN3_8B, QWEN3_30B_A3B, QWEN3_600M
from tests.families import FAMILIES, SHAPE
from tests.live_bytes import LiveBytes

Dtype = Literal["float32", "bfloat16"]


@pytest.mark.parametrize(
    ("fields", "num_parameters"),
    [(QWEN3_600M, 596_049_920), (QWEN3_8B, 8_190_735_360), (QWEN3_30B_A3B, 30_532_122_624)],
    ids=["0.6B", "8B", "30B-A3B"],
)
def test_published_models_have_their_published_numbers_of_parameters(fields: dict[str, Any], num_parameters: int) -> None:
    assert sizes_of(fields).num_parameters == num_parameters


# Mamba 2 has no attention, and no sizes here.
@pytest.mark.parametrize(
    "config_class",
    [
        *(family.config_class for name, family in FAMILIES.items() if name != "Mamba 2"),
        *("ApertusConfig", "ArceeConfig", "GPTNeoXConfig", "Jais2Config", "PersimmonConfig", "PhiConfig", "Starcoder2Config"),
    ],
)
def test_parameters_of_every_family_are_not_too_few_and_at_most_a_twentieth_too_many(config_class: str) -> None:
    config = getattr(transformers, config_class)()
    if config_class == "NemotronConfig":
        # By default it has none, and transformers makes no model of that.
        config.num_key_value_heads = config.num_attention_heads
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    exact = sum(parameter.numel() for parameter in model.parameters())
    assert -0.001 <= sizes_of(config.to_dict()).num_parameters / exact - 1 <= 0.05


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


def activation_bytes(
    sizes: ModelSizes, num_tokens: int, *, max_length: int = 16, dtype: Dtype = "bfloat16", checkpointing: bool = False
) -> float:
    train = TrainSection(micro_batch_tokens=num_tokens, activation_checkpointing=checkpointing)
    need = learner_need(Config(model=ModelSection(path="m", max_length=max_length, dtype=dtype), train=train), sizes)
    return next(part.num_bytes for part in need.parts if part.name == "activations")


@pytest.mark.slow
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


ROW = 256
MIXERS: dict[str, dict[str, Any]] = {
    "gpt-oss": {},
    "Gemma 2": {},
    "Qwen3.5": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "Falcon-H1": {"mamba_chunk_size": 64, "mamba_d_state": 32},
}
"""Families whose layers mix tokens by other means than packed attention, and settings with which that takes much memory."""


def family_config(name: str) -> PreTrainedConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 4, "vocab_size": 64}
    settings = SHAPE | FAMILIES[name].settings | sizes | {"max_position_embeddings": ROW} | MIXERS[name]
    if "layer_types" in settings:
        settings["layer_types"] = 2 * settings["layer_types"]
    return getattr(transformers, FAMILIES[name].config_class)(**settings)


def most_bytes(config: PreTrainedConfig, dtype: Dtype, *, checkpointing: bool) -> int:
    """Return the most bytes of a micro-batch's forward and backward pass at once, gradients taken away as ZeRO does."""
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(config, dtype=tensor_dtype(dtype)).eval()
    if checkpointing:
        policy.gradient_checkpointing_enable()
        for layer in policy.modules():
            layer.training = isinstance(layer, GradientCheckpointingLayer)
    module = CompletionLogprobs(policy)
    assert module.packing_obstacle is not None
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    rows = pack([([1] * (ROW // 4), [[1] * (3 * ROW // 4)] * 2)])
    with LiveBytes("cpu") as live:
        scores, _, _ = module(*rows.inputs, 1.0)
        scores.sum().backward()
        return live.most


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MIXERS)
def test_activations_in_the_device_plan_hold_those_of_a_family_that_is_not_packed(name: str, dtype: Dtype) -> None:
    config = family_config(name)
    sizes = sizes_of(msgspec.json.decode(config.to_json_string(use_diff=False)))
    parts = {"matrices": sizes.matrices is not None, "scan": sizes.scan is not None}
    assert parts == {"matrices": name in ("gpt-oss", "Gemma 2"), "scan": name in ("Qwen3.5", "Falcon-H1")}
    ratios = {}
    for checkpointing in (False, True):
        # Many tokens, so that the part does not hide behind the optimizer's step.
        many = activation_bytes(sizes, 1 << 20, max_length=ROW, dtype=dtype, checkpointing=checkpointing)
        ratios[checkpointing] = most_bytes(config, dtype, checkpointing=checkpointing) / (many / (1 << 20) * 2 * ROW)
    assert 0.6 <= ratios[False] <= 1.0
    assert 0.4 <= ratios[True] <= 1.0


@pytest.mark.slow
def test_types_that_are_counted_with_matrices_have_no_kernel_of_torchs() -> None:
    for model_type in EAGER_TYPES:
        assert not getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])._supports_sdpa


LINEAR = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
}
MAMBA = {"mamba_num_heads": 32, "ssm_state_size": 128, "mamba_head_dim": 64, "chunk_size": 128}


@pytest.mark.parametrize(
    ("fields", "num_scans"),
    [
        (LINEAR | {"layer_types": ["linear_attention", "full_attention"] * 18}, 18),
        (LINEAR | {"full_attention_interval": 4}, 27),
        (MAMBA | {"hybrid_override_pattern": "M-M*" * 9}, 18),
        ({"mamba_n_heads": 32, "mamba_d_state": 128, "mamba_d_ssm": 2048}, 36),
    ],
)
def test_completion_takes_a_cache_in_layers_that_attend_and_a_state_in_those_that_scan(
    fields: dict[str, Any], num_scans: int
) -> None:
    sizes = sizes_of(QWEN3_8B | fields)
    num_attention = 36 if num_scans == 36 else 36 - num_scans
    config = Config(model=ModelSection(path="m", max_length=1000, dtype="bfloat16"))
    cache = 1000 * num_attention * 2 * 8 * 128 * 2
    assert completion_bytes(config, sizes) == cache + num_scans * 32 * 128 * 64 * 4


@pytest.mark.parametrize(("parallel", "num_heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_each_gpu_of_an_actor_has_a_key_value_head_at_least(parallel: int, num_heads: int) -> None:
    actor = ActorSection(engine_options={"tensor_parallel_size": parallel})
    config = Config(model=ModelSection(path="m", max_length=1000, dtype="bfloat16"), actor=actor)
    assert completion_bytes(config, sizes_of(QWEN3_8B)) == 1000 * 36 * 2 * num_heads * 128 * 2


def test_kernels_of_a_package_leave_nothing_of_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_of(QWEN3_8B | LINEAR | {"full_attention_interval": 4})
    assert sizes.mixing_bytes(1000, 2, is_checkpointed=False) > 0
    monkeypatch.setattr(model_sizes_module, "find_spec", lambda name: name == "fla" or None)
    assert sizes.mixing_bytes(1000, 2, is_checkpointed=False) == 0
