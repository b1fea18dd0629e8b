"""A stand-in for torch's ProcessGroupNCCL, with its semantics.

The communicator is made at the first collective, without a time limit. A work's `wait` blocks only with a timeout. The root's
part of a broadcast is over before the others have the bytes.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from offbeat.common.weights import nccl_group
from offbeat.common.weights.nccl_group import NcclStart

Fate = Literal["", "hang in init", "die in init", "refuse", "die", "stop", "never complete", "hang in wait", "no device"]

WIRE_S = 0.1
"""Seconds until a bucket has arrived at a member; the root's part of the broadcast is over at once."""
DUPLICATE = """NCCL error in: /pytorch/NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.29
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 65000"""


def serve(connection: Connection, place: NcclStart, fates: dict[int, Fate]) -> None:
    """Run NCCL's process with the stand-in and on the CPU; a rank's fate befalls it at its second bucket, or in its init."""
    fate = fates.get(place.seat.rank, "")

    def take_device(gpu_index: int) -> torch.device:
        if fate == "no device":
            raise RuntimeError("CUDA error: out of memory")
        return torch.device("cpu")

    nccl_group.take_device = take_device
    nccl_group.pin = lambda storage, gpu_index: None
    make_group: Any = partial(Group, fate=fate)
    make_group.Options = Options
    dist.ProcessGroupNCCL = make_group
    nccl_group.serve(connection, place)


class Options:
    _timeout: timedelta | None = None


class Group:
    """One rank; bytes travel through the store."""

    def __init__(self, store: Store, rank: int, size: int, options: Options, *, fate: Fate) -> None:
        self.store, self.rank, self.size, self.fate = store, rank, size, fate
        self.num_ops = 0
        settings = {name: os.environ[name] for name in sorted(os.environ) if "NCCL_" in name}
        assert options._timeout is not None
        store.set(f"recorded/{rank}", json.dumps(settings | {"timeout_s": options._timeout.total_seconds()}))

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> "Work":
        (tensor,) = tensors
        assert options.rootRank == 0
        self._begin()
        key = f"op/{self.num_ops}"
        if self.rank == 0:
            self.store.set(key, tensor.numpy().tobytes().hex())
            return Work(self, lambda: None)

        def arrive() -> None:
            self.store.wait([key])
            time.sleep(WIRE_S)
            try:
                os.kill(int(self.store.get("pid/0")), 0)
            except ProcessLookupError:
                raise RuntimeError(
                    "ncclRemoteError: A call failed possibly due to a network error or a remote process"
                ) from None
            tensor.copy_(torch.frombuffer(bytearray.fromhex(self.store.get(key).decode()), dtype=torch.uint8))

        return Work(self, arrive)

    def reduce(self, tensors: list[torch.Tensor], options: dist.ReduceOptions) -> "Work":
        assert options.rootRank == 0
        self._begin()
        self.store.set(f"op/{self.num_ops}/{self.rank}", "1")
        keys = [f"op/{self.num_ops}/{rank}" for rank in range(self.size)]
        return Work(self, lambda: self.store.wait(keys) if self.rank == 0 else None)

    def _begin(self) -> None:
        if not self.num_ops:
            self._init()
        self.num_ops += 1
        # The first is that of the construction.
        if self.num_ops == 3 and self.fate in ("die", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.fate == "die" else signal.SIGSTOP)

    def _init(self) -> None:
        if self.fate == "hang in init":
            threading.Event().wait()
        if self.fate == "die in init":
            os.kill(os.getpid(), signal.SIGKILL)
        self.store.set(f"pid/{self.rank}", str(os.getpid()))
        while not self.store.check([f"pid/{rank}" for rank in range(self.size)]):
            time.sleep(0.005)
        if self.fate == "refuse":
            raise RuntimeError(DUPLICATE)


class Work:
    def __init__(self, group: Group, complete: Callable[[], None]) -> None:
        self.group, self.complete = group, complete

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None:
            return
        if self.group.num_ops == 3 and self.group.fate == "hang in wait":
            threading.Event().wait()
        if self.group.num_ops == 3 and self.group.fate == "never complete":
            time.sleep(timeout.total_seconds())
            raise RuntimeError("Work WorkNCCL(SeqNum=2, OpType=BROADCAST) timed out in blocking wait.")
        self.complete()
