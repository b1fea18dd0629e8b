"""Sequence parallelism (Ulysses): neighboring ranks share a pack's inputs, and exchange inputs for heads to attend.

Each of `size` ranks computes every `size`-th input of a pack. Attention alone looks at other inputs. Before it, a rank sends
its inputs' queries, keys and values of other ranks' heads, and receives all inputs' of its own heads; after it, the ranks send
the results back (https://arxiv.org/abs/2309.14509). A rank takes every `size`-th input, not neighboring ones, so that all ranks
have about as many inputs that predict a completion token, and with them as much of the output layer's work.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812, torch's own convention
from torch import Tensor
from transformers import PretrainedConfig

from offbeat.common.settings.library_options import check_groups, check_heads
from offbeat.learner.policy.packing import Span
from offbeat.learner.policy.process_group import COLLECTIVE_TIMEOUT_S


class SequenceGroup:
    """The ranks that share packs with this one. Making one is a collective of all ranks, and of a divisor of their number."""

    def __init__(self, size: int) -> None:
        group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        assert isinstance(group, dist.ProcessGroup)
        self.size = size
        self.rank = group.rank()
        """This rank's number in the group."""
        self._group = group

    def take_share(
        self, token_ids: Tensor, position_ids: Tensor, spans: tuple[Span, ...]
    ) -> tuple[Tensor, Tensor, tuple[Span, ...]]:
        """Return this rank's token ids and position ids of a pack, `[num_inputs / size]`, and the spans of all its inputs.

        Inputs that give every rank as many are added at the end, in a span of their own.
        """
        padding = -len(token_ids) % self.size
        if padding:
            spans = (*spans, Span(len(token_ids), padding))
        own_ids, own_positions = (F.pad(part, (0, padding))[self.rank :: self.size] for part in (token_ids, position_ids))
        return own_ids, own_positions, spans

    def gather_inputs(self, states: Tensor) -> Tensor:
        """Exchange heads for inputs: `[1, heads, inputs / size, head_size]` to `[1, heads / size, inputs, head_size]`.

        Fewer heads than ranks, which divide their number, go to several ranks each.
        """
        heads = states.shape[1]
        if heads < self.size:
            states = states.repeat_interleave(self.size // heads, dim=1)
        received = _exchange(states[0].unflatten(0, (self.size, -1)), self._group)
        return received.permute(1, 2, 0, 3).flatten(1, 2)[None]

    def gather_heads(self, attended: Tensor) -> Tensor:
        """Exchange inputs for heads: `[1, inputs, heads / size, head_size]` to `[1, inputs / size, heads, head_size]`."""
        received = _exchange(attended[0].unflatten(0, (-1, self.size)).transpose(0, 1), self._group)
        return received.transpose(0, 1).flatten(1, 2)[None]

    def merge(self, values: Tensor, is_own: Tensor) -> Tensor:
        """Return the values of all ranks, `[num_tokens]`, from this rank's `values`, one for each True of `is_own`.

        Gradients reach this rank's values alone. Every rank computes the same loss of the merged values, so the gradients of
        the ranks add up to the loss's.
        """
        own = values.new_zeros(is_own.shape).masked_scatter(is_own, values)
        merged = own.detach().clone()
        dist.all_reduce(merged, group=self._group)
        return torch.where(is_own, own, merged)


class _Exchange(torch.autograd.Function):
    """Send part i of the first dimension to rank i, and receive its part of this rank's number. Its gradient is the same."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradients[0], ctx.group), None  # pyright: ignore[reportReturnType]


# A compiler would trace into the function, see no derivative through the collective, and drop the gradient without a word.
_exchange = cast(Callable[[Tensor, dist.ProcessGroup], Tensor], torch.compiler.disable(_Exchange.apply))


def join_sequence_group(size: int, *, world_size: int) -> SequenceGroup | None:
    """Return this rank's group of `size` ranks, None for 1; a collective. Raises `SettingError` where groups would differ."""
    check_groups(size, num_processes=world_size)
    return SequenceGroup(size) if size > 1 else None


def check_model_heads(config: PretrainedConfig, size: int) -> None:
    """Raise `SettingError` for a model whose heads cannot be divided among so many ranks."""
    if size > 1:
        text = config.get_text_config()
        num_heads = text.num_attention_heads
        num_key_heads = text.to_dict().get("num_key_value_heads") or num_heads
        check_heads(size, num_heads=num_heads, num_key_heads=num_key_heads)
