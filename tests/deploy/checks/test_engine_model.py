"""Models that vLLM cannot sample from are refused before anything starts."""

import inspect
import json
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import load
from offbeat.deploy.checks import model_folders
from offbeat.deploy.checks.model_folders import (
    SMALLEST_FLOAT32_HEAD,
    SMALLEST_TRITON_HEAD,
    check_engine_model,
    known_architectures,
)
from offbeat.deploy.local import devices
from offbeat.deploy.local.devices import Device
from tests.deploy.local.machines import TINY
from tests.families import FAMILIES


def config_for(folder: Path, *overrides: str, **fields: Any) -> Config:
    (folder / "config.json").write_text(json.dumps({**TINY, "architectures": ["Qwen3ForCausalLM"], **fields}))
    return load(None, [f"model.path={folder}", "model.dtype=float32", *overrides])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_devices", lambda: [Device(0, "GPU-a", "L4", 24 << 30, 24 << 30)])
    monkeypatch.setattr(devices, "torch_is_built_for_gpus", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "fields", [{"head_dim": 8}, {"head_dim": None, "hidden_size": 32}, {"text_config": TINY | {"head_dim": 8}}]
)
def test_heads_that_vllm_cannot_attend_with_in_float32_are_refused_on_a_gpu(
    fields: dict[str, Any], gpu: None, tmp_path: Path
) -> None:
    (found,) = check_engine_model(config_for(tmp_path, **fields))
    assert (found.kind, found.text) == (
        "mistake",
        'model.dtype = "float32": the model\'s attention heads have 8 numbers, and on a GPU vLLM computes in float32 with 16 '
        'or more. Set model.dtype="bfloat16" or actor.engine="transformers".',
    )
    for cure in ('model.dtype="bfloat16"', 'actor.engine="transformers"'):
        assert not list(check_engine_model(config_for(tmp_path, cure, **fields)))
    assert not list(check_engine_model(config_for(tmp_path, **fields | {"head_dim": 16, "text_config": None})))
    latent = {"kv_lora_rank": 8}
    assert not list(check_engine_model(config_for(tmp_path, **fields | {"text_config": None} | latent)))


@pytest.mark.vllm
@pytest.mark.parametrize("fields", [{"attn_logit_softcapping": 50.0}, {"model_type": "gpt_oss"}])
def test_heads_with_soft_caps_or_sinks_need_vllms_triton_kernel(fields: dict[str, Any], gpu: None, tmp_path: Path) -> None:
    (found,) = check_engine_model(config_for(tmp_path, head_dim=31, **fields))
    assert "heads have 31 numbers, and on a GPU vLLM computes in float32 with 32 or more" in found.text
    assert not list(check_engine_model(config_for(tmp_path, head_dim=32, **fields)))


@pytest.mark.vllm
@pytest.mark.parametrize(("engine", "said"), [("auto", "it chooses vLLM"), ("vllm", "it is vLLM")])
def test_architecture_that_vllm_has_no_class_for_is_refused(engine: str, said: str, tmp_path: Path) -> None:
    unknown = {"architectures": ["MoshiForCausalLM"]}
    (found,) = check_engine_model(config_for(tmp_path, f"actor.engine={engine}", **unknown))
    assert (found.kind, found.text) == (
        "mistake",
        f'actor.engine = "{engine}": {said}, whose version here has no class for MoshiForCausalLM. Set '
        'actor.engine="transformers", or actor.engine_options.model_impl="transformers" to try its class under vLLM.',
    )
    for cure in ('actor.engine="transformers"', 'actor.engine_options.model_impl="transformers"'):
        assert not list(check_engine_model(config_for(tmp_path, cure, **unknown)))
    for known in (["MoshiForCausalLM", "Qwen3ForCausalLM"], [], None):
        assert not list(check_engine_model(config_for(tmp_path, f"actor.engine={engine}", architectures=known)))


def test_plugin_of_vllm_may_have_a_class_for_any_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = EntryPoint("mine", "my_models:register", "vllm.general_plugins")
    monkeypatch.setattr(model_folders, "entry_points", lambda group: EntryPoints([plugin]) if group == plugin.group else ())
    assert not list(check_engine_model(config_for(tmp_path, architectures=["MoshiForCausalLM"])))


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_has_a_class_for_every_family_of_the_docs_table() -> None:
    import transformers

    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    types = [getattr(transformers, family.config_class).model_type for family in FAMILIES.values()]
    types += ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "cohere"]
    assert known_architectures().issuperset(mapping[one] for one in types)


@pytest.mark.vllm
def test_linear_attention_that_vllms_kernel_for_cpus_does_not_compute_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "list_devices", list)
    fields: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    (found,) = check_engine_model(config_for(tmp_path, **fields))
    assert found.text == (
        'model.dtype = "float32": the model has linear attention, which vLLM computes on a CPU in bfloat16 only. Set '
        'model.dtype="bfloat16" or actor.engine="transformers".'
    )
    for cure in ('model.dtype="bfloat16"', 'actor.engine="transformers"'):
        assert not list(check_engine_model(config_for(tmp_path, cure, **fields)))
    (found,) = check_engine_model(config_for(tmp_path, 'model.dtype="bfloat16"', **fields | {"linear_key_head_dim": 64}))
    assert found.text == (
        'actor.engine = "auto": the model has linear attention, which vLLM computes on a CPU with 64 or 128 numbers in each '
        'head; this one\'s keys have 64 and its values 128. Set actor.engine="transformers".'
    )


@pytest.mark.vllm
def test_linear_attention_is_nothing_to_a_machine_with_gpus(gpu: None, tmp_path: Path) -> None:
    assert not list(check_engine_model(config_for(tmp_path, linear_key_head_dim=32, linear_value_head_dim=32)))


def test_small_heads_are_nothing_to_a_machine_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_devices", list)
    assert not list(check_engine_model(config_for(tmp_path, head_dim=8)))


@pytest.mark.slow
@pytest.mark.vllm
def test_architectures_are_those_of_vllms_registry() -> None:
    from vllm import ModelRegistry

    assert known_architectures() == set(ModelRegistry.get_supported_archs())


@pytest.mark.slow
@pytest.mark.vllm
def test_smallest_float32_head_is_that_of_vllms_and_torchs_kernels() -> None:
    import torch
    from torch._inductor.kernel.flex import flex_attention
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend, FlexAttentionImpl
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    assert not FlashAttentionBackend.supports_dtype(torch.float32)
    assert not TritonAttentionBackend.supports_head_size(SMALLEST_TRITON_HEAD - 1)
    assert TritonAttentionBackend.supports_head_size(SMALLEST_TRITON_HEAD)
    assert TritonAttentionBackend.supports_sink()
    assert not FlexAttentionBackend.supports_sink()
    assert "FlexAttention does not support logits soft cap" in inspect.getsource(FlexAttentionImpl)
    assert FlexAttentionBackend.supports_dtype(torch.float32)
    assert FlexAttentionBackend.supports_head_size(SMALLEST_FLOAT32_HEAD - 1), "vLLM leaves the refusal to torch"
    assert f"at least {SMALLEST_FLOAT32_HEAD} but got" in inspect.getsource(flex_attention)
