"""The process group of the learner's ranks: joining it, comparing settings, and gathering tensors through it."""

import importlib.metadata
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
import xxhash
from torch._C._distributed_c10d import HashStore

from offbeat.common.errors import SettingError
from offbeat.common.processes.environment import launcher_number, launcher_rank
from offbeat.common.processes.own_process import GPU_BYTES_VARIABLE, GPU_RESERVE, report_ready
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import setting_names, setting_text
from offbeat.common.weights.collectives import local_address

COLLECTIVE_TIMEOUT_S = 1800.0
"""A rank fails after waiting this long in a collective; otherwise the death of one would leave the others waiting forever."""

SECTIONS = ("model", "rollout", "loss", "advantage", "reward", "kl", "critic", "lora", "train")
"""The sections that every rank computes with."""
PATHS = ("model.path", "kl.reference", "loss.noise_floor")
"""Settings that may differ between machines."""
PACKAGES = ("offbeat", "torch", "deepspeed", "transformers")


class LearnerRank(NamedTuple):
    """This process's place among the learner's processes."""

    rank: int
    world_size: int
    device: torch.device
    """The GPU of this rank, or the CPU."""


def join_process_group() -> LearnerRank:
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
    if not dist.is_initialized():
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        if world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            _choose_interface()
            dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    return LearnerRank(rank, world_size, device)


def _choose_interface() -> None:
    """Have gloo use the interface on the route to rank 0, unless `GLOO_SOCKET_IFNAME` is set.

    Left to itself gloo takes the address that the host's name resolves to, which on many machines is 127.0.0.1 or 127.0.1.1.
    """
    address = local_address(os.environ["MASTER_ADDR"], launcher_number("MASTER_PORT", 0))
    named = [name for name, found in psutil.net_if_addrs().items() if address in {one.address for one in found}]
    if named:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", named[0])


def take_memory(device: torch.device) -> None:
    """Take this process's share of a GPU that actors share, then signal the launcher, which starts the actors only after that.

    An engine measures at its start what is free; what the learner took later would be missing from the engine's part. From here
    on torch frees what it caches rather than take more than the share and the plan's reserve. Called when the models are
    loaded: DeepSpeed hands cached memory back while it makes its engine.
    """
    num_bytes = launcher_number(GPU_BYTES_VARIABLE, 0)
    if num_bytes:
        share = num_bytes / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share + GPU_RESERVE), device)
        # Freed at once, and kept by torch's allocator, which serves later tensors from it.
        torch.empty(max(0, num_bytes - torch.cuda.memory_reserved(device)), dtype=torch.uint8, device=device)
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


def require_same_settings(config: Config) -> None:
    """Raise `SettingError` on every rank where one has other software or settings than rank 0; a collective.

    Ranks that compute differently would train a wrong model, or wait for each other in different collectives.
    """
    # First: other versions may have other settings.
    _compare(
        {f"package {name}": importlib.metadata.version(name) for name in PACKAGES}, "Install the same versions everywhere."
    )
    names = [name for name in setting_names() if name.partition(".")[0] in SECTIONS and name not in PATHS]
    cure = "Give all machines of the learner the same settings."
    _compare({name: setting_text(config, name) for name in ["run.seed", *names]}, cure)


def _compare(values: Mapping[str, str], cure: str) -> None:
    digests = gather_tensors(torch.tensor([xxhash.xxh3_64_intdigest(value.encode()) >> 1 for value in values.values()]))
    for index, (name, value) in enumerate(values.items()):
        others = [rank for rank, digest in enumerate(digests[:, index]) if digest != digests[0, index]]
        if others:
            raise SettingError(name, value, f"learner ranks 0 and {others[0]} have different values", cure)
