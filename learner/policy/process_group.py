"""The process group of the learner's ranks: joining it, comparing settings, and gathering tensors through it."""

import contextlib
import importlib.metadata
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
import xxhash
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from offbeat.common.errors import SettingError
from offbeat.common.processes.environment import launcher_number, launcher_rank
from offbeat.common.processes.own_process import GPU_BYTES_VARIABLE, GPU_RESERVE, report_ready
from offbeat.common.records.logs import doing
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import setting_names, setting_text
from offbeat.common.weights.collectives import local_address, refusal

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 1800.0
"""A rank fails after waiting this long in a collective; otherwise the death of one would leave the others waiting forever."""
MEET_S = 600.0
"""Longest wait for the other ranks to start. Rank 0 reads the data before it joins."""
CONNECT_S = 12.0
"""Limit for connecting ranks that have all started."""
ALL_CONNECT_S = 5 * CONNECT_S
"""Longest wait for the other ranks' connections, as long as gloo's rank that is connected to waits."""
ANSWER_S = 5.0
"""Longest wait for rank 0's port to answer, before the next try."""
LOOK_S = 0.2
LOST_S = 30
"""A rank that waits for gloo fails after another one's machine has not answered for this long. A shorter outage is survived."""

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
            store = _meet(rank, world_size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
            notice_lost_machines()
    return LearnerRank(rank, world_size, device)


def _choose_interface() -> None:
    """Have gloo use the interface on the route to rank 0, unless `GLOO_SOCKET_IFNAME` is set.

    Left to itself gloo takes the address that the host's name resolves to, which on many machines is 127.0.0.1 or 127.0.1.1.
    """
    host, interfaces = os.environ["MASTER_ADDR"], psutil.net_if_addrs()
    try:
        address = local_address(host, launcher_number("MASTER_PORT", 0))
    except OSError as error:
        problem = f"this machine has no way to it ({error.strerror})"
        cure = "Give --master-addr an address of the learner's first machine that this one reaches."
        raise SettingError("environment variable MASTER_ADDR", host, problem, cure) from error
    named = [name for name, found in interfaces.items() if address in {one.address for one in found}]
    if named:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", named[0])
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if unknown := set(filter(None, chosen.split(","))) - interfaces.keys():
        problem = f"this machine has no interface {min(unknown)}, only {', '.join(interfaces)}"
        cure = f"Unset it, or choose the interface that `ip route get {host}` shows."
        raise SettingError("environment variable GLOO_SOCKET_IFNAME", chosen, problem, cure)


def _meet(rank: int, world_size: int) -> Store:
    """Return the store at rank 0 once all ranks use it and can connect to each other; raise `SettingError` if they cannot.

    torch alone waits for each of these as long as for a collective, without a word.
    """
    host, port = os.environ["MASTER_ADDR"], launcher_number("MASTER_PORT", 0)
    cure = (
        "Give all learner processes the same MASTER_ADDR and MASTER_PORT: an address of the first machine that the others "
        "reach, and a port that is free and open there."
    )

    def state() -> str:
        reason = refusal(host, port, ANSWER_S)
        return f": it does not answer ({reason}). {cure}" if reason else f": it answers, and others have not come. {cure}"

    with doing(logger, f"waiting for all {world_size} learner processes at MASTER_ADDR:MASTER_PORT = {host}:{port}", state):
        try:
            deadline = time.monotonic() + MEET_S
            # Before torch looks for rank 0, because it prints a page where it finds nobody.
            while rank and (reason := refusal(host, port, ANSWER_S)):
                if time.monotonic() > deadline:
                    raise dist.DistNetworkError(f"no answer within {MEET_S:g} s: {reason}")
                time.sleep(LOOK_S)
            store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=MEET_S)))
            store.set(f"offbeat/{rank}", f"{os.environ.get('GLOO_SOCKET_IFNAME', 'no interface')} of {socket.gethostname()}")
            keys = [f"offbeat/{other}" for other in range(world_size)]
            store.wait(keys, timedelta(seconds=MEET_S))
        except dist.DistError as error:
            problem = f"the learner processes did not meet there ({reason_of(error)})"
            raise SettingError("environment variables MASTER_ADDR:MASTER_PORT", f"{host}:{port}", problem, cure) from error
    places = ", ".join(sorted({store.get(key).decode() for key in keys}))
    with doing(logger, f"connecting the learner processes through {places}"):
        try:
            trial = dist.ProcessGroupGloo(PrefixStore("offbeat/trial", store), rank, world_size, timedelta(seconds=CONNECT_S))
            store.set(f"offbeat/connected/{rank}", "")
            connected = [f"offbeat/connected/{other}" for other in range(world_size)]
            store.wait(connected, timedelta(seconds=ALL_CONNECT_S))
            # Not before: it closes connections that a slower rank may still be making.
            del trial
        except RuntimeError as error:
            problem = f"the learner processes cannot connect to each other through {places} ({reason_of(error)})"
            cure = (
                "Set it on each machine to the interface that leads to the others, and open the ports of "
                "net.ipv4.ip_local_port_range between them."
            )
            chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
            raise SettingError("environment variable GLOO_SOCKET_IFNAME", chosen, problem, cure) from error
    return store


def reason_of(error: RuntimeError) -> str:
    """Return what torch says in its first sentence, without the file's name where gloo puts it."""
    text = str(error).partition(". This is typically")[0].splitlines()[0]
    return re.sub(r"\[[^]]*gloo/transport[^]]*\] ", "", text)[:300]


def notice_lost_machines() -> None:
    """Have the kernel end each connection of this process whose other side is silent for `LOST_S`.

    gloo never asks: after a cable is cut, a collective would wait until its own limit. A busy process is not silent, because
    its kernel answers. Call it after new groups are made.
    """
    if sys.platform != "linux":
        return
    third = max(1, LOST_S // 3)
    timing = ((socket.TCP_KEEPIDLE, third), (socket.TCP_KEEPINTVL, third), (socket.TCP_KEEPCNT, 2))
    for connection in psutil.Process().net_connections("tcp"):
        # Another thread may have closed it by now.
        with contextlib.suppress(OSError):
            if connection.status == psutil.CONN_ESTABLISHED:
                with socket.socket(fileno=os.dup(connection.fd)) as found:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in (*timing, (socket.TCP_USER_TIMEOUT, LOST_S * 1000)):
                        found.setsockopt(socket.IPPROTO_TCP, option, value)


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
