"""Attention within packs: every token attends to those before it in its sequence, not to others in the pack."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812, torch's own convention
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from offbeat.common.models.families import mixing_obstacle, plain_attention, set_attention
from offbeat.learner.policy.packing import Pack, Span, pack
from offbeat.learner.policy.sequence_parallel import SequenceGroup

logger = logging.getLogger(__name__)

ATTENTION_NAME = "offbeat_packed"
"""Name of `packed_attention` in transformers' register of attention functions."""
SQUARE_KEYS = 1024
"""Least number of keys for which a span's prefix gets queries too, whose results are not used.

That makes a causal square, of which torch's kernel for CPUs skips half, but only in blocks of 512 keys. Measured with 4 to
2,048 keys: below this number the rectangle took up to half less time, forward and backward.
"""
SPANS_IN_LINE_DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of flash attention, which GPUs have."""
_MAX_MEAN_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest mean difference of packed and plain log-probs. In bfloat16 neighboring logits near 10 are 0.06 apart, and the two
computations round differently."""


@dataclass(frozen=True, eq=False)
class PlacedSpans:
    """The model's keyword argument `placed_spans`: the spans of a pack, arranged for the kernel that attends.

    Made once per forward pass, and used by every layer.
    """

    spans: tuple[Span, ...]
    device: torch.device
    sequence_group: SequenceGroup | None = None
    """The ranks that share the pack's inputs; None: this rank has all."""

    def is_in_line(self, dtype: torch.dtype) -> bool:
        """Return whether the kernel for queries of this dtype takes sequences of many lengths at once."""
        return self.device.type == "cuda" and dtype in SPANS_IN_LINE_DTYPES

    def arrange(self, dtype: torch.dtype) -> None:
        """Arrange the spans for the kernel of this dtype now, outside of layers that may be compiled."""
        _ = self.in_line if self.is_in_line(dtype) else self.by_shape

    @cached_property
    def in_line(self) -> "SpansInLine":
        """The spans for a kernel that takes sequences of many lengths at once."""
        return _in_line(self.spans, self.device)

    @cached_property
    def by_shape(self) -> "SpansByShape":
        """The spans for a kernel that takes sequences of one length at a time."""
        return _by_shape(self.spans, self.device)


class Heads(NamedTuple):
    """The heads of a policy's attention."""

    num_heads: int
    num_key_heads: int
    head_size: int


def attention_heads(policy: PreTrainedModel) -> Heads:
    """Return the policy's heads, from its config."""
    fields = policy.config.get_text_config().to_dict()
    num_heads: int = fields["num_attention_heads"]
    head_size = fields.get("head_dim") or fields["hidden_size"] // num_heads
    return Heads(num_heads, fields.get("num_key_value_heads") or num_heads, head_size)


class SpansInLine(NamedTuple):
    """Each span is a sequence whose queries are the span and whose keys are its prefix and the span."""

    key_indices: Tensor
    """Inputs that are keys, span by span, a prefix's inputs once for each span that has it, `[num_keys]` int64."""
    query_offsets: Tensor
    """First query of each span, then the number of queries, `[num_spans + 1]` int32."""
    key_offsets: Tensor
    """First entry of each span in `key_indices`, then their number, `[num_spans + 1]` int32."""
    max_queries: int
    """Length of the longest span."""
    max_keys: int
    """Length of the longest span with its prefix."""


class Shape(NamedTuple):
    """Spans of the same length and prefix length; their keys are the prefix and the span."""

    num_spans: int
    num_queries: int
    """Queries of each span: as many as keys where the prefix's are added, else its length."""
    num_keys: int


class SpansByShape(NamedTuple):
    """Queries and keys of all spans, those of one shape next to each other."""

    shapes: tuple[Shape, ...]
    query_indices: Tensor
    """Inputs that are queries, `[sum of num_spans * num_queries]` int64."""
    key_indices: Tensor
    """Inputs that are keys, `[sum of num_spans * num_keys]` int64."""
    results: Tensor
    """Entry of `query_indices` that is each input's own query, `[num_inputs]` int64."""


def _in_line(spans: Sequence[Span], device: torch.device) -> SpansInLine:
    queries = [span.length for span in spans]
    keys = [span.prefix_length + span.length for span in spans]
    return SpansInLine(
        torch.from_numpy(np.concatenate([span.sequence() for span in spans])).to(device),
        torch.tensor(np.cumsum([0, *queries]), dtype=torch.int32, device=device),
        torch.tensor(np.cumsum([0, *keys]), dtype=torch.int32, device=device),
        max(queries),
        max(keys),
    )


def _by_shape(spans: Sequence[Span], device: torch.device) -> SpansByShape:
    alike: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        alike.setdefault((span.length, span.prefix_length), []).append(span)
    shapes: list[Shape] = []
    query_indices: list[NDArray[np.int64]] = []
    key_indices: list[NDArray[np.int64]] = []
    results = np.empty(sum(span.length for span in spans), dtype=np.int64)
    num_before = 0
    for (length, prefix_length), members in alike.items():
        keys = np.stack([span.sequence() for span in members])
        own = keys[:, prefix_length:]
        queries = keys if prefix_length < length and keys.shape[1] >= SQUARE_KEYS else own
        num_queries = queries.shape[1]
        first_own = num_before + num_queries * np.arange(len(members))[:, None] + num_queries - length
        results[own] = first_own + np.arange(length)
        num_before += queries.size
        shapes.append(Shape(len(members), num_queries, prefix_length + length))
        query_indices.append(queries.ravel())
        key_indices.append(keys.ravel())
    arrays = (np.concatenate(query_indices), np.concatenate(key_indices), results)
    return SpansByShape(tuple(shapes), *(torch.from_numpy(array).to(device) for array in arrays))


def use_packed_attention(policy: PreTrainedModel) -> str | None:
    """Make the policy's layers call `packed_attention` instead of their own attention, or return why they cannot.

    They keep their own where packing would mix completions, and where they ignore transformers' register of attention
    functions. Nothing is computed; see `find_packing_obstacle`.
    """
    obstacle = mixing_obstacle(policy)
    if obstacle is not None:
        set_attention(policy, plain_attention(policy))
        return obstacle
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    set_attention(policy, ATTENTION_NAME)
    if policy.config.get_text_config()._attn_implementation != ATTENTION_NAME:
        set_attention(policy, plain_attention(policy))
        return "it has an attention of its own"
    return None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    placed_spans: PlacedSpans | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within one layer; transformers calls it. Returns `[1, num_inputs, heads, head_size]`, and no weights.

    `query`: `[1, heads, num_inputs, head_size]`; `key`, `value`: the same with as many heads or fewer, each shared by
    `heads / key_heads` neighboring ones; `sliding_window`: number of positions that an input sees, its own included. Where
    ranks share a pack, `num_inputs` are this rank's. `others` are keywords of other attention functions. Raises ValueError for
    soft-capping (`softcap`), attention sinks (`s_aux`) and dropout.
    """
    if placed_spans is None:
        raise ValueError("packed attention was called without placed_spans, which the model should have passed on")
    if others.get("softcap") is not None or others.get("s_aux") is not None or others.get("dropout", 0.0) != 0.0:
        raise ValueError("packed attention has no soft-capping, no attention sinks and no dropout")
    assert attention_mask is None and len(query) == 1
    group = placed_spans.sequence_group
    if group is not None:
        query, key, value = (group.gather_inputs(part) for part in (query, key, value))
    if placed_spans.is_in_line(query.dtype):
        attended = _attend_at_once(query, key, value, placed_spans.in_line, scaling, sliding_window)
    else:
        attended = _attend_by_shape(query, key, value, placed_spans.by_shape, scaling, sliding_window)
    return (attended if group is None else group.gather_heads(attended)), None


def _attend_at_once(
    query: Tensor, key: Tensor, value: Tensor, placed: SpansInLine, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Attend with one call of flash attention, which aligns the last query with the last key: both are a span's last input."""
    # The kernel has one size of head; DeepSeek's values are narrower than its keys.
    value_size = value.shape[-1]
    value = F.pad(value, (0, key.shape[-1] - value_size))
    attended = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1).index_select(0, placed.key_indices),
        value[0].transpose(0, 1).index_select(0, placed.key_indices),
        placed.query_offsets,
        placed.key_offsets,
        placed.max_queries,
        placed.max_keys,
        scale=scaling,
        # The kernel's window does not count the query's own position.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=True,
    )
    return cast(Tensor, attended)[None, ..., :value_size]


def _attend_by_shape(
    query: Tensor, key: Tensor, value: Tensor, placed: SpansByShape, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Attend with one call of torch's attention for all spans of the same length and prefix length."""
    # Gathered at once and then split: gradients of many small pieces took longer than the attention.
    num_queries = [shape.num_spans * shape.num_queries for shape in placed.shapes]
    num_keys = [shape.num_spans * shape.num_keys for shape in placed.shapes]
    queries = query[0].transpose(0, 1).index_select(0, placed.query_indices).split(num_queries)
    keys, values = (part[0].transpose(0, 1).index_select(0, placed.key_indices).split(num_keys) for part in (key, value))
    attended: list[Tensor] = []
    for shape, of_query, of_key, of_value in zip(placed.shapes, queries, keys, values, strict=True):
        window = sliding_window if sliding_window is not None and sliding_window < shape.num_keys else None
        is_causal = shape.num_queries == shape.num_keys and window is None
        of_shape = F.scaled_dot_product_attention(
            *(part.unflatten(0, (shape.num_spans, -1)).transpose(1, 2) for part in (of_query, of_key, of_value)),
            attn_mask=None if is_causal else _visible(shape, window, query.device),
            is_causal=is_causal,
            scale=scaling,
            enable_gqa=True,
        )
        attended.append(of_shape.transpose(1, 2).flatten(0, 1))
    return torch.cat(attended).index_select(0, placed.results)[None]


def _visible(shape: Shape, window: int | None, device: torch.device) -> Tensor:
    """Return the keys that each query of a span sees, `[num_queries, num_keys]` bool."""
    keys = torch.arange(shape.num_keys, device=device)
    before = keys[shape.num_keys - shape.num_queries :, None] - keys
    return before >= 0 if window is None else (before >= 0) & (before < window)


class Trial(NamedTuple):
    """A few random tokens, on which a policy's passes are compared."""

    sequences: Sequence[tuple[NDArray[np.int32], Sequence[NDArray[np.int32]]]]
    packed: Pack

    @torch.no_grad()
    def plain_logprobs(self, policy: PreTrainedModel) -> Tensor:
        """Return the log-probs of the pack's completion tokens from one pass for each completion, with eager attention."""
        used = str(policy.config.get_text_config()._attn_implementation)
        set_attention(policy, "eager")
        try:
            return torch.cat(
                [_plain_logprobs(policy, prompt, one) for prompt, completions in self.sequences for one in completions]
            )
        finally:
            set_attention(policy, used)


def make_trial(policy: PreTrainedModel) -> Trial:
    """Return tokens of the policy's vocabulary, the same on every rank."""
    random = np.random.default_rng(0)
    vocab_size = policy.config.get_text_config().vocab_size
    sequences = [
        (_tokens(random, vocab_size, prompt_length), [_tokens(random, vocab_size, length) for length in completion_lengths])
        for prompt_length, completion_lengths in ((5, (7, 2, 1)), (3, (6, 9)))
    ]
    return Trial(sequences, pack(sequences).to(policy.device))


@torch.no_grad()
def find_packing_obstacle(policy: PreTrainedModel) -> str | None:
    """Make the policy's layers attend within packs, or return why they cannot and leave them their own attention.

    A policy whose log-probs in a pack differ from those of its own attention without packing cannot. Runs the model six times
    on a few tokens; under ZeRO-3 every rank must call. Windows longer than those tokens are not tested.
    """
    obstacle = use_packed_attention(policy)
    if obstacle is not None:
        return obstacle
    trial = make_trial(policy)
    try:
        logprobs = packed_logprobs(policy, trial.packed)
    except (TypeError, ValueError) as error:
        set_attention(policy, plain_attention(policy))
        return str(error)
    difference = (logprobs - trial.plain_logprobs(policy)).abs().mean().item()
    # `not <=` refuses nan too.
    if not difference <= _MAX_MEAN_DIFFERENCE[policy.dtype]:
        set_attention(policy, plain_attention(policy))
        return f"the log-probs of tokens differ by {difference:.3g} on average from those outside a pack"
    return None


def _tokens(random: np.random.Generator, vocab_size: int, length: int) -> NDArray[np.int32]:
    return random.integers(0, vocab_size, length, dtype=np.int32)


def packed_logprobs(policy: PreTrainedModel, packed: Pack) -> Tensor:
    """Return log-probs `[num_completion_tokens]` float32 from the policy's own logits of a pack."""
    outputs = policy(
        input_ids=packed.token_ids[None],
        position_ids=packed.position_ids[None],
        use_cache=False,
        placed_spans=PlacedSpans(packed.spans, packed.token_ids.device),
    )
    return _gathered_logprobs(outputs.logits[0, packed.predictors], packed.targets)


def _plain_logprobs(policy: PreTrainedModel, prompt: NDArray[np.int32], completion: NDArray[np.int32]) -> Tensor:
    token_ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64)).to(policy.device)
    logits = policy(input_ids=token_ids[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
    return _gathered_logprobs(logits, token_ids[len(prompt) :])


def _gathered_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    return logits.float().log_softmax(dim=-1).gather(-1, token_ids[:, None]).squeeze(-1)


GENERATIONS = {9: ("FA3", "FA4"), 10: ("FA4",)}
"""Generations that torch can be switched to, by the GPU's major compute capability, the one to be tried first in front."""


def use_newest_flash_attention(policy: PreTrainedModel, device: torch.device) -> None:
    """Switch this process to the newest flash attention that runs the policy's heads on this GPU, forward and backward.

    FA3 is in the module `flash_attn_interface`, FA4 in `flash_attn.cute`. Without them, and on a CPU, torch's own stays.
    """
    if device.type != "cuda" or policy.dtype not in (torch.bfloat16, torch.float16):
        return
    refusals: list[str] = []
    for name in GENERATIONS.get(torch.cuda.get_device_capability(device)[0], ()):
        try:
            _switch(name, policy, device)
        except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            refusals.append(f"{name} cannot be used: {type(error).__name__}: {error}")
        else:
            logger.info("flash attention: %s", name)
            return
    logger.info("flash attention: torch's own (%s)", "; ".join(refusals) or "this GPU has no newer one")


def _switch(name: str, policy: PreTrainedModel, device: torch.device) -> None:
    """Switch to a generation; switch back where it raises for the policy's heads."""
    activate_flash_attention_impl(name)
    try:
        _try_heads(policy, device)
    except BaseException:
        restore_flash_attention_impl()
        raise


def _try_heads(policy: PreTrainedModel, device: torch.device) -> None:
    """Attend once with the sizes of the policy's heads, and with the arguments that packed attention uses."""
    heads = attention_heads(policy)
    query, key, value = (
        torch.ones(4, count, heads.head_size, device=device, dtype=policy.dtype, requires_grad=True)
        for count in (heads.num_heads, heads.num_key_heads, heads.num_key_heads)
    )
    offsets = torch.tensor([0, 4], dtype=torch.int32, device=device)
    attended = varlen_attn(query, key, value, offsets, offsets, 4, 4, window_size=(-1, 0), enable_gqa=True)
    assert isinstance(attended, torch.Tensor)
    attended.sum().backward()
    torch.cuda.synchronize(device)
