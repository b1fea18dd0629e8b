"""An engine that starts without weights computes what the learner does, once an update has brought them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from offbeat.actor.engines.choice import make_engine
from offbeat.actor.engines.engine import EngineSettings
from offbeat.common.errors import SettingError
from offbeat.common.models.folders import WEIGHT_FILES
from offbeat.protocols.message_parts import ModelHashes
from offbeat.protocols.messages import Sampling
from tests.weights import buffer_of, check_updates

pytestmark = pytest.mark.engine
TOKENS = [5, 6, 7, 9, 8]


@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=pytest.mark.vllm), "transformers"])
def test_weights_of_an_update_are_all_that_the_model_needs(kind, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns(*WEIGHT_FILES))
    hashes = ModelHashes("", "", "")
    engine = make_engine(
        kind, str(tmp_path / "model"), EngineSettings(dtype="float32", max_model_len=64, hashes=hashes, seed=3, options={})
    )
    assert not engine.info.has_weight_files
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    if kind == "vllm":
        without_norm = [item for item in weights.items() if item[0] != "model.norm.weight"]
        engine.load_weights(buffer_of(without_norm), 0, recompute_kv=True)
        assert np.isnan(engine.score(TOKENS).logprobs).all(), "a weight that no update brings shows in the canary"
    for version in (1, 2):
        engine.load_weights(buffer_of(weights.items()), version, recompute_kv=True)
        with torch.inference_mode():
            logits = model(torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
        expected = logits.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(engine.score(TOKENS).logprobs, expected, atol=1e-4)
        for weight in weights.values():
            weight.mul_(1.1)
    engine.submit(["0"], TOKENS, Sampling(8))
    done = []
    while engine.num_unfinished:
        done += engine.step()
    assert [completion.segments[0].policy_version for completion in done] == [2]
    assert np.isfinite(done[0].behavior_logprobs).all()
    if kind == "vllm":
        with pytest.raises(SettingError, match=r'actor.engine = "vllm": .* does not take the weights .*layers.0.other'):
            engine.load_weights(buffer_of([("model.layers.0.other", torch.zeros(2))]), 3, recompute_kv=True)
    engine.close()


LINEAR = {
    "vocab_size": 44,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    # vLLM's kernel for CPUs takes these and 64.
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8}


@pytest.mark.vllm
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_vllm_samples_from_the_language_model_that_the_learner_trains(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    has_tower = model_type in ("qwen3_5", "qwen3_5_moe")
    settings = LINEAR if model_type in ("qwen3_5_text", "qwen3_5") else LINEAR | EXPERTS
    if model_type == "qwen3_next":
        settings |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    if has_tower:
        config = AutoConfig.for_model(model_type, text_config=settings, vision_config=TOWER)
        AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    else:
        config = AutoConfig.for_model(model_type, **settings)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    hashes = ModelHashes("", "", "")
    engine = make_engine(
        "vllm", str(tmp_path), EngineSettings(dtype="bfloat16", max_model_len=64, hashes=hashes, seed=3, options={})
    )
    assert engine.info.has_weight_files is not has_tower
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    check_updates(engine, model, TOKENS, times=1.2, atol=0.2)
    engine.close()
