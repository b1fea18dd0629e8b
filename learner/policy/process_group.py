"""The process group of the learner's ranks: this process's place in it, and what the trainer exchanges through it."""

import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

COLLECTIVE_TIMEOUT_S = 1800.0
"""A rank that waits longer in a collective fails: one that died would otherwise leave the others waiting for ever."""


class Place(NamedTuple):
    """Where this process stands among the learner's processes."""

    rank: int
    world_size: int
    device: torch.device
    """The GPU of this rank, or the CPU."""


def join_process_group() -> Place:
    """Form the process group of all learner ranks, or take the one that is there.

    torchrun and the DeepSpeed launcher say who is who in `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and
    `MASTER_PORT`; without them this process is the only rank, and no port is opened.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    # Set also for a single process: DeepSpeed insists on it.
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        if world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    return Place(rank, world_size, device)


def gather_tensors(values: torch.Tensor) -> torch.Tensor:
    """Every rank's `values`, `[world_size, *values.shape]`, on the CPU; a collective."""
    values = values.cpu()
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return torch.stack(gathered)


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Every rank's `rows`, `[num_rows, *shape]`, one below the other in the order of ranks, on the CPU; a collective.

    Ranks may have different numbers of rows, none included; shape and dtype must agree.
    """
    counts = gather_tensors(torch.tensor(len(rows))).tolist()
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = gather_tensors(padded)
    return torch.cat([of_rank[:count] for of_rank, count in zip(gathered, counts, strict=True)])
