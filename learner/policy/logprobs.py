"""Log-probs of given tokens under a causal language model, computed without the logits of a whole batch."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812, torch's own convention
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig, PreTrainedModel

from offbeat.common.models.families import backbone
from offbeat.learner.policy.images import image_states
from offbeat.learner.policy.packed_attention import PlacedSpans, use_packed_attention
from offbeat.learner.policy.packing import PackedImages, Span, WholeRows, whole_rows
from offbeat.learner.policy.sequence_parallel import SequenceGroup

Packed = Tensor | tuple[torch.device, Tensor]
"""A tensor that stays where it is, or its device and its copy on the host."""


def _to_host(tensor: Tensor) -> Packed:
    """Copy an activation to pinned host memory; parameters stay where they are."""
    if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    # The stream that copies back is the same, so it waits for this copy.
    host.copy_(tensor, non_blocking=tensor.is_cuda)
    return tensor.device, host


def _to_device(packed: Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=True)


MAX_CHUNK_LOGITS = 2**24
"""Logits in memory at once: 64 MiB in float32, such as 8,192 tokens by 2,048 entries of the vocabulary."""


def token_logprobs(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    *,
    temperature: float,
    max_chunk_logits: int = MAX_CHUNK_LOGITS,
    fp32_head: bool = False,
    with_entropy: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`log p_t(y_t)` and the entropy `H_t = -sum_v p_t(v) log p_t(v)` of `p_t = softmax(z_t / temperature)`.

    `z_t = hidden_states_t @ weight.T + bias`, `y = token_ids`; with a `softcap` c, `c tanh(z_t / c)` takes the place of
    `z_t`. Both results are `[num_tokens]` float32; the entropy is None unless `with_entropy`. Differentiable, once, with
    respect to states, weight and bias:
    `d log p(y) / dz_v = (1[v = y] - p_v) / temperature` and `d H / dz_v = -p_v (log p_v + H) / temperature`.

    `hidden_states`: `[num_tokens, hidden_size]`, the states that predict the tokens; `weight`: `[vocab_size,
    hidden_size]`; `token_ids`: `[num_tokens]` int64. Products are rounded to the states' dtype, unless `fp32_head`
    makes states and weight float32 first; what follows is float32 or better.

    Logits are computed for a chunk of the vocabulary at a time, and again in the backward pass. A chunk's logits, and its part
    of the weight, have at most `max_chunk_logits` numbers, or one entry. The vocabulary is split, not the tokens: the weight's
    gradient is then final for each chunk, and the sums over chunks are no larger than the states.
    """
    return _TokenLogprobs.apply(  # pyright: ignore[reportReturnType]
        hidden_states, weight, bias, token_ids, temperature, max_chunk_logits, fp32_head, with_entropy, softcap
    )


class _TokenLogprobs(torch.autograd.Function):
    """See `token_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: float,
        max_chunk_logits: int,
        fp32_head: bool,
        with_entropy: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.settings = (temperature, max_chunk_logits, fp32_head, softcap)
        states = hidden_states.float() if fp32_head else hidden_states
        target_logits = states.new_zeros(len(states), dtype=torch.float32)
        # Sums over chunks are float64: it costs little, and there may be many chunks.
        log_normalizers = torch.full_like(target_logits, -torch.inf, dtype=torch.float64)
        mean_logits = torch.zeros_like(log_normalizers)
        for chunk in _chunks(weight, len(states), max_chunk_logits):
            logits = _logits(
                states, weight[chunk].to(states.dtype), None if bias is None else bias[chunk], temperature, softcap
            )
            inside, columns = _columns(token_ids, chunk)
            target_logits = torch.where(inside, logits.gather(1, columns).squeeze(1), target_logits)
            largest = logits.amax(dim=1, keepdim=True)
            shifted = logits.sub_(largest)
            exponentials = shifted.exp() if with_entropy else shifted.exp_()
            totals, largest = exponentials.sum(dim=1).double(), largest.squeeze(1).double()
            of_chunk = largest + totals.log()
            updated = torch.logaddexp(log_normalizers, of_chunk)
            if with_entropy:
                mean_of_chunk = largest + torch.linalg.vecdot(exponentials, shifted).double() / totals
                mean_logits = mean_logits * (log_normalizers - updated).exp() + mean_of_chunk * (of_chunk - updated).exp()
            log_normalizers = updated
        logprobs = (target_logits - log_normalizers).float()
        entropies = (log_normalizers - mean_logits).float() if with_entropy else None
        ctx.save_for_backward(hidden_states, weight, bias, token_ids, log_normalizers.float(), entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = gradients
        hidden_states, weight, bias, token_ids, log_normalizers, entropies = ctx.saved_tensors
        temperature, max_chunk_logits, fp32_head, softcap = ctx.settings
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        states = hidden_states.float() if fp32_head else hidden_states
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_normalizers)
        grad_states = torch.zeros_like(states, dtype=torch.float32) if needs_states else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for chunk in _chunks(weight, len(states), max_chunk_logits):
            chunk_weight = weight[chunk].to(states.dtype)
            logits = _logits(states, chunk_weight, None if bias is None else bias[chunk], temperature, softcap)
            slope = None if softcap is None else 1 - (logits * (temperature / softcap)).square_()
            chunk_logprobs = logits.sub_(log_normalizers[:, None])
            if grad_entropies is None:
                grad_logits = chunk_logprobs.exp_().mul_(-grad_logprobs[:, None])
            else:
                probabilities = chunk_logprobs.exp()
                grad_logits = chunk_logprobs.add_(entropies[:, None]).mul_(-grad_entropies[:, None])
                grad_logits.sub_(grad_logprobs[:, None]).mul_(probabilities)
                del probabilities
            inside, columns = _columns(token_ids, chunk)
            grad_logits.scatter_add_(1, columns, torch.where(inside, grad_logprobs, 0.0)[:, None])
            if temperature != 1.0:
                grad_logits.div_(temperature)
            if slope is not None:
                grad_logits.mul_(slope)
            if grad_bias is not None:
                grad_bias[chunk] = grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(states.dtype)
            if grad_states is not None and states.dtype == torch.float32:
                # Avoids a temporary. torch adds products to float32 only for float32 factors.
                grad_states.addmm_(grad_logits, chunk_weight)
            elif grad_states is not None:
                grad_states += grad_logits @ chunk_weight
            if grad_weight is not None:
                grad_weight[chunk] = grad_logits.T @ states
        if grad_states is not None:
            grad_states = grad_states.to(hidden_states.dtype)
        return grad_states, grad_weight, grad_bias, *[None] * 6


def _chunks(weight: Tensor, num_tokens: int, max_chunk_logits: int) -> Iterator[slice]:
    """Split the vocabulary into slices whose logits and whose part of the weight have at most `max_chunk_logits` numbers."""
    size = max(1, max_chunk_logits // max(num_tokens, weight.shape[1]))
    for start in range(0, len(weight), size):
        yield slice(start, min(start + size, len(weight)))


def _logits(
    states: Tensor, chunk_weight: Tensor, chunk_bias: Tensor | None, temperature: float, softcap: float | None
) -> Tensor:
    """Return logits `[num_tokens, chunk]` float32, which the caller may overwrite."""
    logits = F.linear(states, chunk_weight, None if chunk_bias is None else chunk_bias.to(states.dtype)).float()
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _columns(token_ids: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
    """Return whether each token is in the chunk, `[num_tokens]`, and its column there (0 if not), `[num_tokens, 1]`."""
    inside = (token_ids >= chunk.start) & (token_ids < chunk.stop)
    return inside, torch.where(inside, token_ids - chunk.start, 0)[:, None]


class LogitRule(NamedTuple):
    """The changes that a model makes to its output layer's logits: `softcap tanh(factor z / softcap)`."""

    factor: float = 1.0
    softcap: float | None = None
    """Soft cap of the logits; None for no cap."""


def logit_rule(config: PretrainedConfig) -> LogitRule:
    """Return the rule that a model's config names; `learner.policy.loading.check_policy` tests if it is the whole one."""
    fields = config.get_text_config().to_dict()
    # Falcon-H1; Cohere; Granite, which divides by what HyperCLOVA multiplies with.
    factor = (fields.get("lm_head_multiplier") or 1.0) * (fields.get("logit_scale") or 1.0)
    scaling = fields.get("logits_scaling") or 1.0
    factor *= scaling if str(fields.get("model_type")).startswith("hyperclovax") else 1 / scaling
    # Gemma; Recurrent Gemma.
    return LogitRule(factor, fields.get("final_logit_softcapping") or fields.get("logits_soft_cap"))


class CompletionHead(nn.Module):
    """The policy's output layer, applied to the states that predict completion tokens."""

    def __init__(self, output_layer: nn.Linear, *, max_chunk_logits: int, fp32_head: bool, rule: LogitRule) -> None:
        super().__init__()
        self._rule = rule
        self.output_layer = output_layer
        self._max_chunk_logits = max_chunk_logits
        self._fp32_head = fp32_head

    def forward(self, hidden_states: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
        """See `token_logprobs`; entropies only where gradients are computed."""
        # Use the layer's parameters, not the layer: under ZeRO-3 each call gathers its weight, a collective, and ranks have
        # different numbers of chunks.
        return token_logprobs(
            hidden_states,
            self.output_layer.weight,
            self.output_layer.bias,
            token_ids,
            temperature=temperature / self._rule.factor,
            max_chunk_logits=self._max_chunk_logits,
            fp32_head=self._fp32_head,
            softcap=None if self._rule.softcap is None else self._rule.softcap / self._rule.factor,
            # Frozen passes need no entropy, and it costs them a chunk of logits more.
            with_entropy=torch.is_grad_enabled(),
        )


class CompletionLogprobs(nn.Module):
    """The policy as it is trained: a pack in, one log-prob per completion token out.

    Switches `policy` to packed attention where it can; `learner.policy.loading.check_policy` tests if that worked. A policy
    that cannot be packed keeps its own attention, and computes the completions of a pack as `WholeRows`.

    With `value_head` there is a critic on the policy's states. It starts at 0, is trained and saved in checkpoints, and is not
    a part of `policy`, so actors do not get it.

    With `sequence_group` every rank of the group passes the same pack, computes a share of it, and gets all results.
    With `offloads` the policy's activations wait for the backward pass in the host's memory.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        *,
        max_chunk_logits: int = MAX_CHUNK_LOGITS,
        fp32_head: bool = False,
        value_head: bool = False,
        sequence_group: SequenceGroup | None = None,
        offloads: bool = False,
    ) -> None:
        super().__init__()
        output_layer = policy.get_output_embeddings()
        if not isinstance(output_layer, nn.Linear):
            raise TypeError(f"the policy's output layer is {type(output_layer).__name__}; only a plain Linear is supported")
        self.packing_obstacle = use_packed_attention(policy)
        """The reason for which the policy cannot be packed; None where it is."""
        self.policy = policy
        self.sequence_group = sequence_group
        self._offloads = offloads
        self.head = CompletionHead(
            output_layer, max_chunk_logits=max_chunk_logits, fp32_head=fp32_head, rule=logit_rule(policy.config)
        )
        self.value_head: nn.Linear | None = None
        if value_head:
            weight = output_layer.weight
            self.value_head = nn.Linear(output_layer.in_features, 1, device=weight.device, dtype=weight.dtype)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        predictors: Tensor,
        targets: Tensor,
        spans: tuple[Span, ...],
        temperature: float,
        images: PackedImages | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probs, entropies and values of a `learner.policy.packing.Pack`, `[num_completion_tokens]` float32 each.

        Entropies are None without gradients, values without a value head. A value is that of the state before its token.
        """
        group = self.sequence_group
        is_own = torch.ones_like(predictors, dtype=torch.bool)
        if group is not None:
            token_ids, position_ids, spans = group.take_share(token_ids, position_ids, spans)
            is_own = predictors % group.size == group.rank
            predictors, targets = predictors[is_own] // group.size, targets[is_own]
        states = self.states(token_ids, position_ids, spans, images).index_select(0, predictors)
        logprobs, entropies = self.head(states, targets, temperature)
        values = self.value_head(states).squeeze(-1).float() if self.value_head is not None else None
        if group is None:
            return logprobs, entropies, values
        entropies, values = (None if part is None else group.merge(part, is_own) for part in (entropies, values))
        return group.merge(logprobs, is_own), entropies, values

    def states(self, token_ids: Tensor, position_ids: Tensor, spans: tuple[Span, ...], images: PackedImages | None) -> Tensor:
        """Return the last states of a pack's inputs, `[num_inputs, hidden_size]`; with `sequence_group` of a share of them."""
        # Offloaded activations are on the host until the backward pass fetches each. Of a layer that is computed again only
        # its input is one.
        with torch.autograd.graph.saved_tensors_hooks(_to_host, _to_device) if self._offloads else nullcontext():
            if self.packing_obstacle is not None:
                return self._row_states(token_ids, position_ids, whole_rows(spans, token_ids.device), images)
            placed_spans = PlacedSpans(spans, token_ids.device, self.sequence_group)
            return self._packed_states(token_ids, position_ids, placed_spans, images)

    def _packed_states(
        self, token_ids: Tensor, position_ids: Tensor, placed_spans: PlacedSpans, images: PackedImages | None
    ) -> Tensor:
        """Return the last states of a pack's inputs, `[num_inputs, hidden_size]`."""
        placed_spans.arrange(self.policy.dtype)
        if images is not None:
            return image_states(self.policy, token_ids, position_ids, images, None, placed_spans=placed_spans)
        outputs = backbone(self.policy)(
            input_ids=token_ids[None], position_ids=position_ids[None], use_cache=False, placed_spans=placed_spans
        )
        return outputs.last_hidden_state[0]

    def _row_states(self, token_ids: Tensor, position_ids: Tensor, rows: WholeRows, images: PackedImages | None) -> Tensor:
        """Return the last states of a pack's inputs, `[num_inputs, hidden_size]`, each computed in a whole row."""
        if images is not None:
            return image_states(self.policy, token_ids, position_ids, images, rows)
        # Positions that stand still in the padding would be taken for packed sequences.
        states = backbone(self.policy)(input_ids=token_ids[rows.inputs], use_cache=False).last_hidden_state
        return states.flatten(0, 1).index_select(0, rows.places)

    @contextmanager
    def whole_packs(self) -> Iterator[None]:
        """Compute whole packs on this rank while the context is open, whatever `sequence_group`."""
        group, self.sequence_group = self.sequence_group, None
        try:
            yield
        finally:
            self.sequence_group = group
