"""Attention within packs: every completion sees its prompt and itself, whoever else shares the row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812, torch's own convention
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from offbeat.learner.policy.packing import Pack, Span, pack

ATTENTION_NAME = "offbeat_packed"
"""What `packed_attention` is called in transformers' register of attention functions."""

_MAX_MEAN_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Of log-probs, packed and plain. In bfloat16 neighboring logits near 10 are 0.06 apart, and the two round differently."""


@dataclass(frozen=True, eq=False)
class PlacedSpans:
    """The spans of a pack, made once a forward pass, and where a kernel for sequences of many lengths finds them.

    To such a kernel a span is a sequence whose queries are the span and whose keys are its prefix and the span.
    """

    spans: tuple[Span, ...]
    key_indices: Tensor
    """`[num_keys]` int64: the inputs that are keys, span by span; a prompt's once for each of its completions."""
    query_offsets: Tensor
    """`[num_spans + 1]` int32: where each span's queries begin and end."""
    key_offsets: Tensor
    """`[num_spans + 1]` int32: the same in `key_indices`."""
    max_queries: int
    """The longest span."""
    max_keys: int
    """The longest span with its prefix."""


def place_spans(spans: tuple[Span, ...], device: torch.device) -> PlacedSpans:
    """What the model must be given as its keyword `placed_spans` to run a pack of these spans on `device`."""
    queries = [span.length for span in spans]
    keys = [span.prefix_length + span.length for span in spans]
    indices = [
        np.arange(start, start + length)
        for span in spans
        for start, length in ((span.prefix_start, span.prefix_length), (span.start, span.length))
    ]
    return PlacedSpans(
        spans,
        torch.from_numpy(np.concatenate(indices)).to(device),
        torch.tensor(np.cumsum([0, *queries]), dtype=torch.int32, device=device),
        torch.tensor(np.cumsum([0, *keys]), dtype=torch.int32, device=device),
        max(queries),
        max(keys),
    )


def use_packed_attention(policy: PreTrainedModel) -> None:
    """Have the policy's layers call `packed_attention`, from now on and instead of their own attention.

    Raises ValueError for a class of models whose layers do not ask transformers which attention to call, or which mix
    tokens in ways that packing would have to know of.
    """
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    policy.set_attn_implementation(ATTENTION_NAME)
    config = policy.config.get_text_config()
    if config._attn_implementation != ATTENTION_NAME:
        raise ValueError(f"{_model(policy)}: {type(policy).__name__} has an attention of its own, which cannot be packed")
    unknown = set(config.to_dict().get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"{_model(policy)} has layers of type {', '.join(sorted(unknown))}, which cannot be packed")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    placed_spans: PlacedSpans | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers calls it: `[1, num_inputs, heads, head_size]`, and no weights.

    `query`: `[1, heads, num_inputs, head_size]`; `key`, `value`: the same with as many heads or fewer, each shared by
    `heads / key_heads` neighboring ones; `sliding_window`: an input sees that many positions, its own included.
    Other keywords are for other attentions.
    """
    if placed_spans is None:
        raise ValueError("packed attention was called without placed_spans, which the model should have passed on")
    if softcap is not None or s_aux is not None or dropout != 0.0:
        raise ValueError("packed attention has no soft-capping, no attention sinks and no dropout")
    assert attention_mask is None and len(query) == 1
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _attend_at_once(query, key, value, placed_spans, scaling, sliding_window), None
    return _attend_by_shape(query, key, value, placed_spans.spans, scaling, sliding_window), None


def _attend_at_once(
    query: Tensor, key: Tensor, value: Tensor, placed: PlacedSpans, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """One call of flash attention, which aligns the last query with the last key: both are the span's last input."""
    attended = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1).index_select(0, placed.key_indices),
        value[0].transpose(0, 1).index_select(0, placed.key_indices),
        placed.query_offsets,
        placed.key_offsets,
        placed.max_queries,
        placed.max_keys,
        scale=scaling,
        # It counts the positions before a query's own.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=True,
    )
    return cast(Tensor, attended)[None]


def _attend_by_shape(
    query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], scaling: float | None, sliding_window: int | None
) -> Tensor:
    """One call of torch's attention for all spans of one length and length of prefix."""
    # split() and not slices: the gradient of a slice is as large as what it was taken from.
    lengths = [span.length for span in spans]
    queries, keys, values = (tensor.split(lengths, dim=2) for tensor in (query, key, value))
    indices = {span.start: index for index, span in enumerate(spans)}
    alike: dict[tuple[int, int], list[int]] = {}
    for index, span in enumerate(spans):
        alike.setdefault((span.length, span.prefix_length), []).append(index)
    attended: list[Tensor] = [query] * len(spans)
    for (length, prefix_length), members in alike.items():
        of_query, of_key, of_value = ([parts[index] for index in members] for parts in (queries, keys, values))
        num_keys = prefix_length + length
        window = sliding_window if sliding_window is not None and sliding_window < num_keys else None
        added_queries = 0
        if prefix_length > 0:
            prefixes = [indices[spans[index].prefix_start] for index in members]
            of_key = _joined(keys, prefixes, of_key)
            of_value = _joined(values, prefixes, of_value)
            if window is None and prefix_length < length:
                # All of the prefix's queries again, for a square, of which half is computed: less than the rectangle.
                of_query = _joined(queries, prefixes, of_query)
                added_queries = prefix_length
        square = length + added_queries == num_keys
        of_members = F.scaled_dot_product_attention(
            torch.cat(of_query),
            torch.cat(of_key),
            torch.cat(of_value),
            attn_mask=None if square and window is None else _visible(length, prefix_length, window, query.device),
            is_causal=square and window is None,
            scale=scaling,
            enable_gqa=True,
        )
        for index, of_span in zip(members, of_members[:, :, added_queries:].transpose(1, 2).split(1), strict=True):
            attended[index] = of_span
    return torch.cat(attended, dim=1)


def _joined(parts: Sequence[Tensor], prefixes: Sequence[int], of_spans: Sequence[Tensor]) -> list[Tensor]:
    """Each span's part behind that of its prefix."""
    return [torch.cat([parts[prefix], of_span], dim=2) for prefix, of_span in zip(prefixes, of_spans, strict=True)]


def _visible(length: int, prefix_length: int, window: int | None, device: torch.device) -> Tensor:
    """`[length, prefix_length + length]` bool: which of its keys each input of a span sees."""
    keys = torch.arange(prefix_length + length, device=device)
    before = keys[prefix_length:, None] - keys
    return before >= 0 if window is None else (before >= 0) & (before < window)


@torch.no_grad()
def check_packing(policy: PreTrainedModel) -> None:
    """Refuse a policy whose log-probs in a pack are not those of its own attention, completion by completion.

    Runs the model six times on a few tokens; under ZeRO-3 every rank must call. Raises ValueError naming `model.path`.
    Windows longer than those few tokens are not looked at.
    """
    use_packed_attention(policy)
    random = np.random.default_rng(0)
    vocab_size = policy.config.get_text_config().vocab_size
    sequences = [
        (_tokens(random, vocab_size, prompt_length), [_tokens(random, vocab_size, length) for length in completion_lengths])
        for prompt_length, completion_lengths in ((5, (7, 2, 1)), (3, (6, 9)))
    ]
    packed = pack(sequences).to(policy.device)
    try:
        logprobs = packed_logprobs(policy, packed)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_model(policy)}: {type(policy).__name__} cannot be packed: {error}") from error
    policy.set_attn_implementation("eager")
    try:
        plain = [_plain_logprobs(policy, prompt, completion) for prompt, completions in sequences for completion in completions]
    finally:
        policy.set_attn_implementation(ATTENTION_NAME)
    difference = (logprobs - torch.cat(plain)).abs().mean().item()
    # Said this way round, nan is refused too.
    if not difference <= _MAX_MEAN_DIFFERENCE[policy.dtype]:
        raise ValueError(
            f"{_model(policy)}: {type(policy).__name__} cannot be packed: "
            f"the log-probs of tokens differ by {difference:.3g} on average from those outside a pack"
        )


def _tokens(random: np.random.Generator, vocab_size: int, length: int) -> NDArray[np.int32]:
    return random.integers(0, vocab_size, length, dtype=np.int32)


def packed_logprobs(policy: PreTrainedModel, packed: Pack) -> Tensor:
    """Log-probs `[num_completion_tokens]` float32 from the logits that the policy itself makes of a pack."""
    outputs = policy(
        input_ids=packed.token_ids[None],
        position_ids=packed.position_ids[None],
        use_cache=False,
        placed_spans=place_spans(packed.spans, packed.token_ids.device),
    )
    return _gathered_logprobs(outputs.logits[0, packed.predictors], packed.targets)


def _plain_logprobs(policy: PreTrainedModel, prompt: NDArray[np.int32], completion: NDArray[np.int32]) -> Tensor:
    token_ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64)).to(policy.device)
    logits = policy(input_ids=token_ids[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
    return _gathered_logprobs(logits, token_ids[len(prompt) :])


def _gathered_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    return logits.float().log_softmax(dim=-1).gather(-1, token_ids[:, None]).squeeze(-1)


def _model(policy: PreTrainedModel) -> str:
    return f"model.path: {policy.name_or_path!r}"
