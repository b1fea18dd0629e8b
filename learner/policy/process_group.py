"""The process group of the learner's ranks: joining it, and gathering tensors through it."""

import os
from datetime import timedelta
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from offbeat.common.processes.environment import launcher_number, launcher_rank
from offbeat.common.processes.readiness import GPU_BYTES_VARIABLE, report_ready
from offbeat.common.weights.collectives import local_address

COLLECTIVE_TIMEOUT_S = 1800.0
"""A rank fails after waiting this long in a collective; otherwise the death of one would leave the others waiting forever."""


class Place(NamedTuple):
    """This process's place among the learner's processes."""

    rank: int
    world_size: int
    device: torch.device
    """The GPU of this rank, or the CPU."""


def join_process_group() -> Place:
    """Form the process group of all learner ranks unless it exists.

    torchrun and the DeepSpeed launcher set `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`; without them
    this process is the only rank, and no port is opened.
    """
    world_size, rank = launcher_number("WORLD_SIZE", 1), launcher_rank()
    # DeepSpeed requires the variable even for a single process.
    os.environ.setdefault("LOCAL_RANK", "0")
    local_rank = launcher_number("LOCAL_RANK", 0)
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        _take_memory(device)
    if not dist.is_initialized():
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        if world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            _choose_interface()
            dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    return Place(rank, world_size, device)


def _choose_interface() -> None:
    """Have gloo use the interface on the route to rank 0, unless `GLOO_SOCKET_IFNAME` is set.

    Left to itself gloo takes the address that the host's name resolves to, which on many machines is 127.0.0.1 or 127.0.1.1.
    """
    address = local_address(os.environ["MASTER_ADDR"], launcher_number("MASTER_PORT", 0))
    named = [name for name, found in psutil.net_if_addrs().items() if address in {one.address for one in found}]
    if named:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", named[0])


def _take_memory(device: torch.device) -> None:
    """Take this process's share of a GPU that actors share, and tell the launcher, which starts the actors only then.

    An engine measures at its start what is free; what the learner took later would be missing from the engine's part.
    """
    num_bytes = launcher_number(GPU_BYTES_VARIABLE, 0)
    if num_bytes:
        # Freed at once, and kept by torch's allocator, which serves later tensors from it.
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
    report_ready()


def gather_tensors(values: torch.Tensor, *, num_alike: int = 1) -> torch.Tensor:
    """Gather every rank's `values`, `[world_size / num_alike, *values.shape]`, on the CPU; a collective.

    `num_alike`: number of neighboring ranks that hold the same values, which are there once.
    """
    values = values.cpu()
    world_size = dist.get_world_size()
    if world_size == 1:
        # gloo would hand the copy to another thread.
        return values[None].clone()
    gathered = [torch.empty_like(values) for _ in range(world_size)]
    dist.all_gather(gathered, values)
    return torch.stack(gathered[::num_alike])


def gather_rows(rows: torch.Tensor, *, num_alike: int = 1) -> torch.Tensor:
    """Concatenate every rank's `rows`, `[num_rows, *shape]`, in the order of ranks, on the CPU; a collective.

    Ranks may have different numbers of rows, also none; shape and dtype must agree. `num_alike`: see `gather_tensors`.
    """
    counts = gather_tensors(torch.tensor(len(rows)), num_alike=num_alike).tolist()
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = gather_tensors(padded, num_alike=num_alike)
    return torch.cat([of_rank[:count] for of_rank, count in zip(gathered, counts, strict=True)])
