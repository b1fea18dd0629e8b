"""Tiny random models of many families, with the settings of transformers that make each one small and unlike the others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
STATES = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}


class Family(NamedTuple):
    """A family of models."""

    config_class: str
    settings: dict[str, Any]
    obstacle: str | None
    """Words of the reason for which it is not packed; None where it is."""


FAMILIES = {
    "Qwen3.5": Family("Qwen3_5TextConfig", LINEAR, "linear_attention"),
    "Qwen3.5-MoE": Family("Qwen3_5MoeTextConfig", LINEAR | EXPERTS, "linear_attention"),
    "Qwen3-Next": Family("Qwen3NextConfig", LINEAR | EXPERTS, "linear_attention"),
    "gpt-oss": Family("GptOssConfig", WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2}, "sinks"),
    "Gemma 2": Family(
        "Gemma2Config", WINDOWS | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}, "soft-capping"
    ),
    "Gemma 3": Family("Gemma3TextConfig", WINDOWS, None),
    "Llama 4": Family(
        "Llama4TextConfig",
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 24,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 4,
            "no_rope_layers": [1, 0],
        },
        "chunked_attention",
    ),
    "Mamba 2": Family(
        "Mamba2Config", {"state_size": 8, "num_heads": 4, "n_groups": 1, "chunk_size": 8, "expand": 2}, "convolutions"
    ),
    "Falcon-H1": Family("FalconH1Config", STATES | {"mamba_d_ssm": 32, "lm_head_multiplier": 0.5}, "convolutions"),
    "GLM-4.5": Family("Glm4MoeConfig", ROUTED | {"n_group": 1}, None),
    "GLM-5": Family(
        "GlmMoeDsaConfig", ROUTED | LATENT | {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 8}, "indexed_attention"
    ),
    "DeepSeek V3": Family("DeepseekV3Config", ROUTED | LATENT | {"n_group": 2}, None),
    "Mixtral": Family("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, None),
    "Granite": Family("GraniteConfig", {"logits_scaling": 3.0}, None),
    # Their layers do not hand on what a pack and a paged cache need.
    "StableLM": Family("StableLmConfig", {}, "spans"),
    "Nemotron": Family("NemotronConfig", {"head_dim": 4}, "spans"),
}


IN_VLLM = {
    "Gemma 2": {},
    "Llama 4": {"intermediate_size_mlp": 64, "attention_chunk_size": 128},
    "Mamba 2": {"intermediate_size": 128},
    "Falcon-H1": {},
    "GLM-4.5": {"moe_intermediate_size": 64},
    "Mixtral": {},
}
"""Families that vLLM's kernels for CPUs can run, with sizes that they take besides those of `LARGER`."""
LARGER = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def make_family(folder: Path, name: str, tokenizer: Path, other: Mapping[str, Any] | None = None) -> None:
    """Write a model with random weights that every part of it matters for, and the tokenizer of another model.

    `other` are settings that differ from those of `FAMILIES`.
    """
    import torch
    import transformers

    family = FAMILIES[name]
    words = transformers.AutoTokenizer.from_pretrained(tokenizer)
    tokens = {"vocab_size": len(words), "eos_token_id": words.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        config = getattr(transformers, family.config_class)(**SHAPE | tokens | family.settings | dict(other or {}))
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            # Constants, such as norms, differ; matrices have an effect that can be told from rounding.
            parameter += torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.05)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
