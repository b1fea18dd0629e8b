"""The sizes of a decoder-only language model, computed from its config.json."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import json

from offbeat.common.models.folders import find_config


class ModelSizes(NamedTuple):
    """The numbers of a model that its memory depends on."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    query_size: int
    """Numbers of a token's queries in one layer."""
    key_value_size: int
    """Numbers of a token's keys in one layer; its values have as many."""
    mlp_size: int
    """Inner numbers of a token in one layer's MLP; for a mixture of experts, those of the experts that a token is sent to."""
    vocab_size: int


def model_sizes(path: str) -> ModelSizes | None:
    """Return the sizes of the model that `model.path` names; None where its config cannot be had or has other fields."""
    content = find_config(path)
    if content is None:
        return None
    try:
        return sizes_of(json.decode(content, type=dict[str, Any]))
    except (ValueError, KeyError, TypeError, AttributeError):
        # A damaged config is refused by the check of the model's folder.
        return None


def sizes_of(fields: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes of a model of Llama's structure, from config.json; raise `KeyError` where a field is missing."""
    fields = fields.get("text_config") or fields
    hidden, layers, vocab = fields["hidden_size"], fields["num_hidden_layers"], fields["vocab_size"]
    heads = fields["num_attention_heads"]
    head_size = fields.get("head_dim") or hidden // heads
    query, key_value = heads * head_size, (fields.get("num_key_value_heads") or heads) * head_size
    num_experts = fields.get("num_experts") or fields.get("num_local_experts") or fields.get("n_routed_experts") or 0
    inner = fields.get("moe_intermediate_size") or fields["intermediate_size"] if num_experts else fields["intermediate_size"]
    mlp = 3 * hidden * inner * (num_experts or 1) + hidden * num_experts
    # Qwen3 normalizes queries and keys too.
    norms = 2 * hidden + (2 * head_size if str(fields.get("model_type", "")).startswith("qwen3") else 0)
    layer = hidden * (2 * query + 2 * key_value) + mlp + norms
    # Where the field is missing the head is counted: rather too much memory than too little.
    num_embeddings = 1 if fields.get("tie_word_embeddings") else 2
    return ModelSizes(
        num_parameters=num_embeddings * vocab * hidden + layers * layer + hidden,
        num_layers=layers,
        hidden_size=hidden,
        query_size=query,
        key_value_size=key_value,
        mlp_size=inner * (fields.get("num_experts_per_tok") or 1 if num_experts else 1),
        vocab_size=vocab,
    )
