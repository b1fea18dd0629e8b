"""A model's sizes from its config.json alone, and what its layers keep of a row to mix its tokens."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from msgspec import json

from offbeat.common.models.folders import find_config

EAGER_TYPES = {"deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"}
"""Values of `model_type` of models that transformers computes without torch's kernels, most because of attention sinks."""
SCAN_TYPES = {"linear_attention", "mamba", "M"}
"""Kinds of layers with a state, in a config's `layer_types` or the pattern of Nemotron-H."""
SCAN_BYTES = {"fla": (21, 18, 9), "mamba_ssm": (12, 22, 4)}
"""Bytes that a head keeps of one token, by package, as counted in transformers 5.19: for each token of its chunk, and for each
number of its key and value in float32 and, times the model's dtype, before they are made float32."""
BACKWARD_PAIR_BYTES = 8
"""Bytes of a head's pair of tokens in the backward pass of one layer, beside those that are kept."""

UNGATED = {"apertus", "arcee", "gpt_neox", "jais2", "nemotron", "persimmon", "phi", "starcoder2"}
"""Types of models whose MLP has two matrices: it has no gate."""


class Matrices(NamedTuple):
    """Eager attention, which keeps scores of every pair of tokens of a row."""

    num_heads: int
    is_capped: bool
    """Scores have soft caps."""

    def pair_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes that a layer keeps of two tokens: its weights, under soft caps also the caps and a float32 copy."""
        return self.num_heads * (8 if self.is_capped else dtype_bytes)


class Scan(NamedTuple):
    """Layers that carry a state along a sequence: linear attention by the gated delta rule, or the state spaces of Mamba 2.

    transformers computes them in float32 and in chunks, within which each token meets all others.
    """

    num_layers: int
    num_heads: int
    key_size: int
    """Rows of a head's state."""
    value_size: int
    """Columns of a head's state."""
    chunk: int
    """Tokens of a chunk."""
    package: str
    """The package whose kernels transformers takes instead where it is installed."""
    num_parameters: int
    """Parameters of one layer, beside its MLP."""

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state in one layer."""
        return self.num_heads * self.key_size * self.value_size

    def token_bytes(self, dtype_bytes: int) -> float:
        """Return the bytes that a layer keeps of one token."""
        of_chunk, plain, rounded = SCAN_BYTES[self.package]
        own = of_chunk * self.chunk + (plain + rounded * dtype_bytes) * (self.key_size + self.value_size)
        return self.num_heads * own + 4 * self.state_size / self.chunk


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
    num_attention_layers: int
    """Layers that have keys and values."""
    num_key_value_heads: int
    matrices: Matrices | None = None
    scan: Scan | None = None

    def mixing_bytes(self, length: int, dtype_bytes: int, *, is_checkpointed: bool) -> float:
        """Return the most bytes that eager attention and scans hold for one token in a row of this length."""
        total = 0.0
        if self.matrices is not None:
            num_layers = 1 if is_checkpointed else self.num_attention_layers
            backward = BACKWARD_PAIR_BYTES * self.matrices.num_heads
            total += length * (num_layers * self.matrices.pair_bytes(dtype_bytes) + backward)
        if self.scan is not None and find_spec(self.scan.package) is None:
            # One layer's backward pass holds as much once more.
            num_layers = 1 if is_checkpointed else self.scan.num_layers
            total += (num_layers + 1) * self.scan.token_bytes(dtype_bytes)
        return total


def model_sizes(path: str, *, asks_hub: bool = True) -> ModelSizes | None:
    """Return the sizes of the model that `model.path` names; None if its config is unavailable or has other fields."""
    content = find_config(path, asks_hub=asks_hub)
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
    key_value_heads = fields.get("num_key_value_heads") or heads
    query, key_value = heads * head_size, key_value_heads * head_size
    num_experts = fields.get("num_experts") or fields.get("num_local_experts") or fields.get("n_routed_experts") or 0
    inner = fields.get("moe_intermediate_size") or fields["intermediate_size"] if num_experts else fields["intermediate_size"]
    model_type = str(fields.get("model_type", ""))
    # An expert of every token, beside those that are chosen.
    shared = fields.get("shared_expert_intermediate_size") or (inner if model_type.startswith("llama4") else 0)
    num_matrices = 2 if model_type in UNGATED else 3
    mlp = num_matrices * hidden * (inner * (num_experts or 1) + shared) + hidden * num_experts
    # Qwen3 normalizes queries and keys too; where it has linear attention, the other layers have a gate as large as the query.
    norms = 2 * hidden + (2 * head_size if model_type.startswith("qwen3") else 0)
    gate = query if model_type.startswith(("qwen3_5", "qwen3_next")) else 0
    attention = hidden * (2 * query + 2 * key_value + gate)
    # Where the field is missing the head is counted: rather too much memory than too little.
    is_capped, scan = fields.get("attn_logit_softcapping") is not None, _scan_of(fields)
    num_embeddings = 1 if fields.get("tie_word_embeddings") else 2
    # A model with a state in every layer has attention in every layer, too.
    num_attention_layers = layers - (scan.num_layers if scan and scan.num_layers < layers else 0)
    mixers = num_attention_layers * attention + (scan.num_layers * scan.num_parameters if scan else 0)
    return ModelSizes(
        num_parameters=num_embeddings * vocab * hidden + layers * (mlp + norms) + mixers + hidden,
        num_layers=layers,
        hidden_size=hidden,
        query_size=query,
        key_value_size=key_value,
        mlp_size=inner * (fields.get("num_experts_per_tok") or 1 if num_experts else 1),
        vocab_size=vocab,
        num_attention_layers=num_attention_layers,
        num_key_value_heads=key_value_heads,
        matrices=Matrices(heads, is_capped) if is_capped or fields.get("model_type") in EAGER_TYPES else None,
        scan=scan,
    )


def _scan_of(fields: Mapping[str, Any]) -> Scan | None:
    """Return the layers with a state, None for a model without; raise `KeyError` where a field is missing."""
    kinds = fields.get("layer_types") or fields.get("layers_block_type") or fields.get("hybrid_override_pattern") or ()
    num_layers = sum(kind in SCAN_TYPES for kind in kinds)
    if not num_layers:
        # Older configs of Qwen3-Next have no kinds. Those without either have a state in every layer.
        num_layers = fields["num_hidden_layers"]
        interval = fields.get("full_attention_interval")
        num_layers -= num_layers // interval if interval else 0
    hidden = fields["hidden_size"]
    if heads := fields.get("linear_num_value_heads"):
        key_size, value_size = fields["linear_key_head_dim"], fields["linear_value_head_dim"]
        keys, values = fields["linear_num_key_heads"] * key_size, heads * value_size
        return Scan(num_layers, heads, key_size, value_size, 64, "fla", hidden * (2 * keys + 3 * values + 2 * heads))
    if heads := fields.get("mamba_n_heads"):
        inner = fields.get("mamba_d_ssm") or fields["mamba_expand"] * hidden
        state_size, groups = fields["mamba_d_state"], fields.get("mamba_n_groups") or 1
        chunk = fields.get("mamba_chunk_size") or 256
    elif heads := fields.get("mamba_num_heads"):
        inner, state_size, groups = heads * fields["mamba_head_dim"], fields["ssm_state_size"], fields.get("n_groups") or 1
        chunk = fields["chunk_size"]
    else:
        return None
    num_parameters = hidden * (3 * inner + 2 * groups * state_size + heads)
    return Scan(num_layers, heads, state_size, inner // heads, chunk, "mamba_ssm", num_parameters)
