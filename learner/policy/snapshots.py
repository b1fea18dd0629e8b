"""Snapshots of the policy for the actors: every rank writes what it holds into memory that a machine's ranks share."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.learner.policy.lora import base_name, base_parameters, merged_parameters, merged_weight
from offbeat.learner.policy.process_group import gather_tensors
from offbeat.learner.policy.zero import buckets, is_partitioned


def write_snapshot(policy: PreTrainedModel, views: dict[str, Tensor] | None, device: torch.device) -> None:
    """Copy the policy's weights into `views` by name, adapters merged, and return when they are whole; a collective.

    Rank 0 has views. The other ranks of its machine should have views of the same memory: under ZeRO-3 each rank then writes
    its own part of every weight, and otherwise a share of the weights. Ranks without views, such as those of another machine,
    send their parts of ZeRO-3 to one that has them. `device` is that of this rank.
    """
    has_views = gather_tensors(torch.tensor(views is not None)).tolist()
    ranks = _Ranks(dist.get_rank(), [rank for rank, has in enumerate(has_views) if has], len(has_views))
    named = list(base_parameters(policy))
    if all(_is_split_over_all(parameter, ranks.num) for _, parameter in named):
        _write_parts(named, views, ranks, device)
    elif any(is_partitioned(parameter) for _, parameter in named):
        # Partitioned in a way of its own, such as over groups of ranks, or lying on a disk.
        for name, weight in merged_parameters(policy):
            if ranks.own == 0 and views is not None:
                views[name].copy_(weight, non_blocking=True)
    elif views is not None:
        _write_share(policy, named, views, ranks)
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
    gather_tensors(torch.tensor(True))


class _Ranks(NamedTuple):
    """The learner's ranks, and which of them write."""

    own: int
    """This process's."""
    writers: list[int]
    """Those that have views; rank 0 is the first."""
    num: int

    def writer_of(self, rank: int) -> int:
        """Return the rank that writes what this one holds."""
        if rank in self.writers:
            return rank
        others = [other for other in range(self.num) if other not in self.writers]
        return self.writers[others.index(rank) % len(self.writers)]

    def senders(self) -> list[int]:
        """Return the ranks whose parts this one receives."""
        return [rank for rank in range(self.num) if rank != self.own and self.writer_of(rank) == self.own]


def _is_split_over_all(parameter: nn.Parameter, num_ranks: int) -> bool:
    if not is_partitioned(parameter):
        return False
    split = cast(Any, parameter)
    return split.ds_zero_partition_world_size == num_ranks and split.ds_tensor.final_location is None


def _write_parts(
    named: Sequence[tuple[str, nn.Parameter]], views: dict[str, Tensor] | None, ranks: _Ranks, device: torch.device
) -> None:
    """Write this rank's part of every weight, and those of the ranks that send theirs to it; or send them."""
    for bucket in buckets(named):
        parts = [cast(Tensor, cast(Any, parameter).ds_tensor).detach() for _, parameter in bucket]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        if views is None:
            dist.send(torch.cat([part.to(device, dtype) for part in parts]), ranks.writer_of(ranks.own))
            continue
        targets = [views[base_name(name)].view(-1) for name, _ in bucket]
        _put(parts, targets, ranks.own)
        sizes = [part.numel() for part in parts]
        for sender in ranks.senders():
            received = torch.empty(sum(sizes), dtype=dtype, device=device)
            dist.recv(received, sender)
            _put(received.split(sizes), targets, sender)


def _put(parts: Sequence[Tensor], targets: Sequence[Tensor], rank: int) -> None:
    """Copy a rank's parts to where they belong; the last ones are padded."""
    for part, target in zip(parts, targets, strict=True):
        place = target[part.numel() * rank : part.numel() * (rank + 1)]
        # Into pinned memory, in the order of the device's work.
        place.copy_(part[: place.numel()], non_blocking=True)


def _write_share(
    policy: PreTrainedModel, named: Sequence[tuple[str, nn.Parameter]], views: dict[str, Tensor], ranks: _Ranks
) -> None:
    """Write the weights that begin in this rank's share of the model: every rank holds them whole."""
    total = sum(parameter.numel() for _, parameter in named)
    begin = 0
    for name, parameter in named:
        if ranks.writers[begin * len(ranks.writers) // total] == ranks.own:
            views[base_name(name)].copy_(merged_weight(policy, name, parameter.detach()), non_blocking=True)
        begin += parameter.numel()
