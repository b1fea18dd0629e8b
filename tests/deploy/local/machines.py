"""Imaginary machines and the published sizes of models, for tests of the device plan."""

from offbeat.deploy.local.devices import Gpu

GIB = 1 << 30

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
QWEN3_600M = {
    **QWEN3,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_8B = {
    **QWEN3,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
TINY = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 48,
    "tie_word_embeddings": True,
}


def machine(num_gpus: int, gib: float = 80.0, *, free: float = 1.0) -> tuple[Gpu, ...]:
    """Return a machine of equal GPUs, of whose memory a part is free."""
    return tuple(Gpu(f"GPU-{index}", "H100", int(gib * GIB), int(gib * free * GIB)) for index in range(num_gpus))
