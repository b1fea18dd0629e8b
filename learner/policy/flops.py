"""Floating-point operations of a policy on a pack: those that the model needs, counted apart from those made twice.

A product of an `[m, k]` and a `[k, n]` matrix has `2 m k n` operations. Only products are counted: norms, rotations and
activations are less than a percent of them. In an attention each query meets the keys that it may see, not all of the pack's,
and the head is applied to completion tokens alone.
"""

import time
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from offbeat.common.models.families import backbone
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.packed_attention import Heads, attention_heads
from offbeat.learner.policy.packing import Pack, Span
from offbeat.learner.policy.zero import full_shape

PUBLISHED = {
    "GB300": 2.5e15,
    "B300": 2.25e15,
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989.4e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H800 PCIe": 756e12,
    "H800": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""Dense bfloat16 operations per second with float32 sums, from NVIDIA's data sheets and architecture papers, without sparsity.

A key is a run of words of torch's device name. Of several that fit, the first counts.
"""
_ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""Types of layers that attend, in a config's `layer_types`."""
_MEASURE_S = 0.05
"""Seconds for which products are repeated; one more may begin within them."""
_SIZES = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the measured matrices: large enough for the device's full speed, on a CPU a few milliseconds."""


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the device's operations per second: published for bfloat16 on a known GPU, else those of a product, once."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        published = published_flops(torch.cuda.get_device_name(device))
        if published is not None:
            return published
    return _measure_flops(device, dtype)


def published_flops(name: str) -> float | None:
    """Return the entry of `PUBLISHED` for a device name; None for an unknown one, and for a slice of a GPU (MIG)."""
    # A10 is not A10G, and L4 not L40.
    words = f" {name.replace('-', ' ')} "
    if " MIG " in words:
        return None
    return next((flops for model, flops in PUBLISHED.items() if f" {model} " in words), None)


def _measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of the fastest of some products, with torch's current number of threads."""
    size = _SIZES[device.type]
    left = torch.ones(size, size, device=device, dtype=dtype)
    right, out = torch.ones_like(left), torch.empty_like(left)
    shortest_s = float("inf")
    until = time.perf_counter() + _MEASURE_S
    while (start := time.perf_counter()) < until:
        torch.mm(left, right, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        shortest_s = min(shortest_s, time.perf_counter() - start)
    return 2.0 * size**3 / shortest_s


class Flops(NamedTuple):
    """Operations of passes over packs."""

    model: float
    """Operations that the result needs, each once: the numerator of model FLOPs utilization."""
    recomputed: float
    """Operations made a second time to save memory, or by a pass that only prepares."""


class _Matrices(NamedTuple):
    """Entries of the matrices that one token is multiplied with."""

    all: float
    trained: float
    """Entries of those that get a gradient."""


class FlopCounter:
    """Counts the operations of one policy from the shapes of its matrices, whole also where ZeRO-3 splits them.

    Of a mixture of experts, only the experts that a token is sent to count. Under an adapter the frozen matrices pass on a
    gradient and get none; that the first of them need not pass it on is left out.
    """

    def __init__(self, module: CompletionLogprobs, *, checkpointing: bool) -> None:
        policy = module.policy
        fields = policy.config.get_text_config().to_dict()
        per_token, num_experts = fields.get("num_experts_per_tok") or 1, 1
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            num_experts = fields.get(name) or num_experts
        self._checkpointing = checkpointing
        self._layers = _count_entries(backbone(policy), expert_share=per_token / num_experts)
        outputs = [module.head.output_layer, *([module.value_head] if module.value_head is not None else [])]
        self._head = _Matrices(*(sum(values) for values in zip(*map(_count_entries, outputs), strict=True)))
        # A state-space model has none.
        heads = attention_heads(policy) if fields.get("num_attention_heads") else Heads(0, 0, 0)
        self._query_size = heads.num_heads * heads.head_size
        self._windows = _windows(
            policy.config.get_text_config().num_hidden_layers, fields.get("layer_types"), fields.get("sliding_window")
        )

    def count_training(self, pack: Pack) -> Flops:
        """Count a forward and a backward pass.

        A backward pass has two products for each of the forward pass: one for the input's gradient, one for the weight's.
        """
        num_tokens, num_targets = len(pack.token_ids), len(pack.targets)
        attention = self._count_attention(pack.spans)
        layers = 2.0 * num_tokens * self._layers.all + attention
        head = 2.0 * num_targets * self._head.all
        weights = 2.0 * (num_tokens * self._layers.trained + num_targets * self._head.trained)
        # Attention has two products of two inputs each, so its backward pass has four.
        model = 2 * (layers + head) + attention + weights
        # `token_logprobs` makes its logits again in the backward pass.
        return Flops(model, head + (layers if self._checkpointing else 0.0))

    def count_forward(self, pack: Pack) -> float:
        """Count a forward pass."""
        products = len(pack.token_ids) * self._layers.all + len(pack.targets) * self._head.all
        return 2.0 * products + self._count_attention(pack.spans)

    def _count_attention(self, spans: tuple[Span, ...]) -> float:
        """Count queries times keys, and weights times values, of all layers."""
        ends = np.array([span.prefix_length + span.length for span in spans])
        starts = np.array([span.prefix_length for span in spans])
        pairs = sum(
            num_layers * float((_visible_pairs(ends, window) - _visible_pairs(starts, window)).sum())
            for window, num_layers in self._windows.items()
        )
        return 4.0 * self._query_size * pairs


def _count_entries(module: nn.Module, *, expert_share: float = 1.0) -> _Matrices:
    """Count the entries of the module's matrices but its embeddings, and this share of its stacks of matrices."""
    total = trained = 0.0
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            continue
        for parameter in part.parameters(recurse=False):
            shape = full_shape(parameter)
            if len(shape) < 2:
                continue
            entries = float(np.prod(shape, dtype=np.float64)) * (expert_share if len(shape) == 3 else 1.0)
            total += entries
            trained += entries if parameter.requires_grad else 0.0
    return _Matrices(total, trained)


def _windows(num_layers: int, types: list[str] | None, window: int | None) -> dict[int | None, int]:
    """Return the number of layers with each window of attention, None for no window."""
    # A model without types has its window, if any, in all layers.
    num_sliding = (num_layers if types is None else types.count("sliding_attention")) if window else 0
    if types is not None:
        # Others, such as linear attention, have no pairs of queries and keys.
        num_layers = sum(types.count(kind) for kind in _ATTENTION_TYPES)
    return {window: num_sliding, None: num_layers - num_sliding} if num_sliding else {None: num_layers}


def _visible_pairs(lengths: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    """Return the pairs of a query and a key that it sees in causal sequences of these lengths."""
    seen = lengths if window is None else np.minimum(lengths, window)
    return seen * (seen + 1) // 2 + (lengths - seen) * seen
