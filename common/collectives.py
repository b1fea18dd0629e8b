"""The collective that moves weights: one process group per membership epoch, gloo on CPUs, NCCL on GPUs.

Both sides hold the weights in host memory (`common.weights.WeightBuffer`). gloo broadcasts straight from and into it; NCCL
goes through one bucket on the device, so that a transfer needs a bucket of GPU memory and not a second model.

The learner owns the rendezvous store. An epoch's group is built in two steps, so that nobody blocks on a member that is not
there: every member sets its ready key; the learner waits for the keys, can name a missing member, and then sets go.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

logger = logging.getLogger(__name__)

POLL_S = 0.001
CLOSE_S = 5.0
"""Longest wait for a group to close; one that hangs for longer is left behind."""


class CollectiveError(RuntimeError):
    """A transfer did not take place; it changed nothing."""


def serve_store(host: str, port: int, timeout_s: float, *, listen_on: str) -> TCPStore:
    """Return the learner's rendezvous store, which members reach at `host`.

    The store listens on the address `listen_on` only (torch's own default is every interface).
    """
    listener = socket.create_server((listen_on, port))
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Return a member's connection to the learner's store."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


class Rendezvous:
    """The keys of one transfer in the store."""

    def __init__(self, store: TCPStore, *, epoch: int, policy_version: int) -> None:
        self._store = store
        self._prefix = f"weights/{epoch}/{policy_version}"

    def set_ready(self, rank: int) -> None:
        """Say that a member is about to enter."""
        self._store.set(f"{self._prefix}/ready/{rank}", "1")

    def is_ready(self, rank: int) -> bool:
        """Return whether that member is ready."""
        return self._store.check([f"{self._prefix}/ready/{rank}"])

    def set_go(self) -> None:
        """Tell the members, which are all ready, to enter."""
        self._store.set(f"{self._prefix}/go", "1")

    def wait_go(self, timeout_s: float, is_superseded: Callable[[], bool]) -> None:
        """Wait until the learner says go; raise `CollectiveError` past the deadline or when a newer update was announced."""
        deadline = time.monotonic() + timeout_s
        while not self._store.check([f"{self._prefix}/go"]):
            if is_superseded():
                raise CollectiveError("superseded by a newer update")
            if time.monotonic() > deadline:
                raise CollectiveError(f"the learner did not start the transfer within {timeout_s:g} s (weights.timeout_s)")
            time.sleep(POLL_S)

    def clear(self, world_size: int) -> None:
        """Delete the keys, so that the store does not grow with the run."""
        for key in ["go", *(f"ready/{rank}" for rank in range(1, world_size))]:
            self._store.delete_key(f"{self._prefix}/{key}")


class WeightGroup:
    """The process group of one epoch, with the learner as rank 0. Close it after any error: a broken group stays broken."""

    def __init__(
        self,
        store: TCPStore,
        *,
        epoch: int,
        rank: int,
        world_size: int,
        backend: Literal["gloo", "nccl"],
        timeout_s: float,
    ) -> None:
        self.epoch = epoch
        self._rank = rank
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._bucket = torch.empty(0, dtype=torch.uint8, device=self._device)
        prefix = PrefixStore(f"group/{epoch}", store)
        timeout = timedelta(seconds=timeout_s)
        with _as_collective_error(f"the process group of epoch {epoch} was not made"):
            if backend == "nccl":
                self._group = _nccl_group(prefix, rank, world_size, timeout)
            else:
                self._group = _gloo_group(prefix, rank, world_size, timeout, towards=(store.host, store.port))

    def broadcast(self, flat: torch.Tensor, bucket_bytes: int) -> None:
        """Copy the learner's buffer `[num_bytes]` (uint8, host) into every member's, bucket by bucket."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        buckets = flat.split(bucket_bytes)
        for index, bucket in enumerate(buckets):
            with _as_collective_error(f"bucket {index + 1} of {len(buckets)}"):
                carrier = self._load(bucket)
                self._group.broadcast([carrier], options).wait()
                if self._rank and carrier is not bucket:
                    bucket.copy_(carrier)

    def close(self) -> None:
        """Give up the group; members blocked in it fail at once instead of at their time limit."""
        held = [self._group]
        del self._group

        def end() -> None:
            if self._device.type == "cuda":
                held[0].abort()
            held.clear()

        # NCCL's abort and a group's destructor both wait for threads of their own.
        thread = threading.Thread(target=end, name="weight-group-end", daemon=True)
        thread.start()
        thread.join(CLOSE_S)
        if thread.is_alive():
            logger.warning("the process group of epoch %d did not close within %g s; it is left behind", self.epoch, CLOSE_S)

    def _load(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return the bucket on the device that the collective runs on."""
        if self._device.type == "cpu":
            return bucket
        if len(self._bucket) < len(bucket):
            self._bucket = torch.empty(len(bucket), dtype=torch.uint8, device=self._device)
        carrier = self._bucket[: len(bucket)]
        if self._rank == 0:
            carrier.copy_(bucket)
        return carrier


def _gloo_group(store: Store, rank: int, world_size: int, timeout: timedelta, *, towards: tuple[str, int]) -> dist.ProcessGroup:
    # Left to itself gloo takes the interface that the host name resolves to, which need not reach the learner.
    # The stubs know neither the options class nor the constructor that takes it.
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address(*towards))]
    options._timeout = timeout
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, world_size, options))


def _nccl_group(store: Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(store, rank, world_size, options))


def local_address(host: str, port: int) -> str:
    """Return this machine's address on the route to `host`; nothing is sent."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


@contextlib.contextmanager
def _as_collective_error(what: str):
    """Raise what torch.distributed reports of a lost peer or a missed deadline, a RuntimeError, as `CollectiveError`."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).strip().splitlines()[0]
        raise CollectiveError(f"{what}: {first_line}") from error
