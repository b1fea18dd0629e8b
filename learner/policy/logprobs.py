"""Log-probs of given tokens under a causal language model, computed without the logits of a whole batch."""

from collections.abc import Callable, Iterator
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
ALIGNED = 128
"""Chunks of the vocabulary start at multiples of this: a GPU multiplies matrices at a fraction of its speed where rows do not
start at multiples of some bytes."""


class HeadSettings(NamedTuple):
    """The settings of `token_logprobs`, which explains each."""

    temperature: float = 1.0
    max_chunk_logits: int = MAX_CHUNK_LOGITS
    fp32_head: bool = False
    with_entropy: bool = False
    softcap: float | None = None


class ChunkSums(NamedTuple):
    """The sums over some chunks of the vocabulary from which a token's distribution follows, `[num_tokens]` each.

    They are float64: it costs little, and there may be many chunks.
    """

    target_logits: Tensor
    """The logit of the given token, float32; 0 as long as its chunk has not come."""
    log_normalizers: Tensor
    mean_logits: Tensor
    """The mean of the logits under the distribution so far; 0 unless the entropy is wanted."""


class Targets(NamedTuple):
    """The given tokens, as one chunk of the vocabulary sees them."""

    inside: Tensor
    """True for tokens that are in the chunk, `[num_tokens]`."""
    columns: Tensor
    """Its column there, 0 if it is not, `[num_tokens, 1]`."""


class ChunkWork(NamedTuple):
    """The two functions that do all of a chunk's work but its matrix products, as they are or compiled."""

    add: Callable[[Tensor, Targets, ChunkSums, HeadSettings], ChunkSums]
    differentiate: Callable[..., Tensor]


def token_logprobs(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    settings: HeadSettings,
    work: ChunkWork | None = None,
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
        hidden_states, weight, bias, token_ids, settings, work or ChunkWork(_add_chunk, _differentiate_chunk)
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
        settings: HeadSettings,
        work: ChunkWork,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.work = settings, work
        states = hidden_states.float() if settings.fp32_head else hidden_states
        zeros = states.new_zeros(len(states), dtype=torch.float64)
        sums = ChunkSums(zeros.float(), zeros - torch.inf, zeros)
        for chunk in _chunks(weight, len(states), settings.max_chunk_logits):
            _, product = _product(states, weight, bias, chunk)
            sums = work.add(product, _targets(token_ids, chunk), sums, settings)
        logprobs = (sums.target_logits - sums.log_normalizers).float()
        entropies = (sums.log_normalizers - sums.mean_logits).float() if settings.with_entropy else None
        ctx.save_for_backward(hidden_states, weight, bias, token_ids, sums.log_normalizers.float(), entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = gradients
        hidden_states, weight, bias, token_ids, log_normalizers, entropies = ctx.saved_tensors
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        states = hidden_states.float() if ctx.settings.fp32_head else hidden_states
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_normalizers)
        grad_states = torch.zeros_like(states, dtype=torch.float32) if needs_states else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for chunk in _chunks(weight, len(states), ctx.settings.max_chunk_logits):
            chunk_weight, product = _product(states, weight, bias, chunk)
            targets = _targets(token_ids, chunk)
            grad_logits = ctx.work.differentiate(
                product, targets, log_normalizers, entropies, grad_logprobs, grad_entropies, ctx.settings
            )
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
        return grad_states, grad_weight, grad_bias, *[None] * 3


def _chunks(weight: Tensor, num_tokens: int, max_chunk_logits: int) -> Iterator[slice]:
    """Split the vocabulary into slices whose logits and whose part of the weight have at most `max_chunk_logits` numbers."""
    size = max(1, max_chunk_logits // max(num_tokens, weight.shape[1]))
    size -= size % ALIGNED if size > ALIGNED else 0
    for start in range(0, len(weight), size):
        yield slice(start, min(start + size, len(weight)))


def _product(states: Tensor, weight: Tensor, bias: Tensor | None, chunk: slice) -> tuple[Tensor, Tensor]:
    """Return a chunk's part of the weight and its product with the states, `[num_tokens, chunk]`, both in the states' dtype."""
    chunk_weight = weight[chunk].to(states.dtype)
    return chunk_weight, F.linear(states, chunk_weight, None if bias is None else bias[chunk].to(states.dtype))


def _targets(token_ids: Tensor, chunk: slice) -> Targets:
    inside = (token_ids >= chunk.start) & (token_ids < chunk.stop)
    return Targets(inside, torch.where(inside, token_ids - chunk.start, 0)[:, None])


def _logits(product: Tensor, settings: HeadSettings) -> Tensor:
    """Return a chunk's logits in float32; they may take the product's place in memory."""
    logits = product.float()
    if settings.softcap is not None:
        logits = logits.div_(settings.softcap).tanh_().mul_(settings.softcap)
    return logits if settings.temperature == 1.0 else logits.div_(settings.temperature)


def _add_chunk(product: Tensor, targets: Targets, sums: ChunkSums, settings: HeadSettings) -> ChunkSums:
    """Return the sums with a chunk more; `product` is overwritten."""
    logits = _logits(product, settings)
    found = torch.where(targets.inside, logits.gather(1, targets.columns).squeeze(1), sums.target_logits)
    largest = logits.amax(dim=1, keepdim=True)
    shifted = logits.sub_(largest)
    exponentials = shifted.exp() if settings.with_entropy else shifted.exp_()
    totals, largest = exponentials.sum(dim=1).double(), largest.squeeze(1).double()
    of_chunk = largest + totals.log()
    normalizers = torch.logaddexp(sums.log_normalizers, of_chunk)
    if not settings.with_entropy:
        return ChunkSums(found, normalizers, sums.mean_logits)
    mean = largest + torch.linalg.vecdot(exponentials, shifted).double() / totals
    mean = sums.mean_logits * (sums.log_normalizers - normalizers).exp() + mean * (of_chunk - normalizers).exp()
    return ChunkSums(found, normalizers, mean)


def _differentiate_chunk(
    product: Tensor,
    targets: Targets,
    log_normalizers: Tensor,
    entropies: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    settings: HeadSettings,
) -> Tensor:
    """Return the gradient with respect to `product`, `[num_tokens, chunk]` float32; `product` is overwritten."""
    logits = _logits(product, settings)
    slope = None if settings.softcap is None else 1 - (logits * (settings.temperature / settings.softcap)).square_()
    chunk_logprobs = logits.sub_(log_normalizers[:, None])
    if grad_entropies is None or entropies is None:
        grad_logits = chunk_logprobs.exp_().mul_(-grad_logprobs[:, None])
    else:
        probabilities = chunk_logprobs.exp()
        grad_logits = chunk_logprobs.add_(entropies[:, None]).mul_(-grad_entropies[:, None])
        grad_logits.sub_(grad_logprobs[:, None]).mul_(probabilities)
    of_targets = torch.where(targets.inside, grad_logprobs, 0.0)[:, None]
    if torch.compiler.is_compiling():
        # Without atomic additions all of this is one kernel.
        is_target = targets.columns == torch.arange(grad_logits.shape[1], device=grad_logits.device)
        grad_logits = grad_logits + torch.where(is_target, of_targets, 0.0)
    else:
        grad_logits.scatter_add_(1, targets.columns, of_targets)
    if settings.temperature != 1.0:
        grad_logits = grad_logits.div_(settings.temperature)
    return grad_logits if slope is None else grad_logits.mul_(slope)


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
        self._work: ChunkWork | None = None

    def compile_work(self, backend: str) -> None:
        """Compile what follows the matrix products, which is bound by memory, into one kernel."""
        self._work = ChunkWork(
            torch.compile(_add_chunk, dynamic=True, backend=backend),
            torch.compile(_differentiate_chunk, dynamic=True, backend=backend),
        )

    def forward(self, hidden_states: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
        """See `token_logprobs`; entropies only where gradients are computed."""
        # Use the layer's parameters, not the layer: under ZeRO-3 each call gathers its weight, a collective, and ranks have
        # different numbers of chunks.
        softcap, factor = self._rule.softcap, self._rule.factor
        settings = HeadSettings(
            temperature / factor,
            self._max_chunk_logits,
            self._fp32_head,
            # Frozen passes need no entropy, and it costs them a chunk of logits more.
            with_entropy=torch.is_grad_enabled(),
            softcap=None if softcap is None else softcap / factor,
        )
        weight, bias = self.output_layer.weight, self.output_layer.bias
        return token_logprobs(hidden_states, weight, bias, token_ids, settings, self._work)


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
