"""An NCCL group whose member runs in a process that can be killed: nothing that NCCL does can hang or end this process.

Why a process: making a communicator has no time limit and cannot be interrupted from another thread (torch knows the
communicator only when the call has returned); `abort` may hang too; a kernel that waits for a dead member holds up every
synchronization of the device, such as freeing memory, and with it training or sampling; and NCCL reads its settings once a
process, so that a transport that hangs could not be turned off for the next try. In a process of its own all of that is ended
by SIGKILL at the deadline. The price is a CUDA context (about 0.5 GB of the GPU, beside NCCL's own buffers), seconds at each
change of the members, and a GPU that two processes time-share during a transfer.

Weights lie in memory that the process maps: it reads them there at the learner, and writes them there at an actor. It answers
one request after the other until it is killed:

    parent:       start it -> "join" -> the memory of a transfer  -> kill it
    the process:           up  ->    done  ->  a bucket, a bucket, ..., done
"""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from offbeat.common.weights.collectives import (
    CLOSE_S,
    CollectiveError,
    CollectiveLateError,
    GlooGroup,
    Seat,
    connect_store,
    group_store,
)
from offbeat.common.weights.flat import Address, WeightBuffer, map_bytes, pin
from offbeat.protocols.messages import NcclTransport

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""Time beyond the deadline for the process to report how it was missed, before it is killed."""
NUM_BUCKETS = 2
"""Buckets of device memory: one is copied from or to the host while another is on the wire."""
MAX_ERROR_CHARS = 500
ENVIRONMENT = {
    # `wait` raises in the thread that waits, and no watchdog thread runs that would take the process down without a word.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Non-blocking communicators hang in some versions (pytorch#153960), and the parent's deadline does without.
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
}
"""Environment variables that torch reads when the group is made."""
context = multiprocessing.get_context("spawn")
"""Makes processes that inherit no CUDA state."""
T = TypeVar("T")


class Transfer(NamedTuple):
    """The request to broadcast memory: answered after each bucket, and once more when every member has all of them."""

    address: Address
    num_bytes: int


Request = Transfer | Literal["join"]


class NcclAnswer(NamedTuple):
    """The end of a request, or of a part of one."""

    error: str | None = None
    is_late: bool = False
    """The error came with the end of the time limit: something hangs."""


class NcclStart(NamedTuple):
    """Everything that the process is started with."""

    store: tuple[str, int]
    """Host and port of the learner's rendezvous store."""
    seat: Seat
    gpu_index: int
    """Index of the GPU among those that this process sees."""
    avoided: tuple[NcclTransport, ...]
    """Transports that NCCL must do without. They must be the same for all members."""


class NcclGroup:
    """The NCCL process of one epoch. Close it after any error: it stays broken."""

    def __init__(self, store: TCPStore, seat: Seat, gpu_index: int = 0, avoided: tuple[NcclTransport, ...] = ()) -> None:
        """Start the process; `prepare` waits for it. Raise `CollectiveError` if it cannot be started."""
        self.epoch = seat.epoch
        self._seat = seat
        self._has_joined = False
        self._is_up = False
        try:
            self._connection, theirs = context.Pipe()
            start = NcclStart((store.host, store.port), seat, gpu_index, avoided)
            self._process = context.Process(target=serve, args=(theirs, start), name="weights-nccl", daemon=True)
            self._process.start()
        except OSError as error:
            raise CollectiveError(f"NCCL's process was not started: {error}") from error
        theirs.close()

    def prepare(self) -> None:
        """Wait until the process has its device, which needs no other member."""
        if not self._is_up:
            self._await("NCCL's process did not start")
            self._is_up = True

    def broadcast(self, buffer: WeightBuffer, beat: Callable[[], None]) -> None:
        """Copy the learner's buffer into every member's, with the calls and errors of `GlooGroup.broadcast`."""
        self.prepare()
        if not self._has_joined:
            beat()
            self._ask("join")
            self._await(f"the NCCL communicator of epoch {self.epoch} was not made")
            self._has_joined = True
        num_buckets = -(-len(buffer.flat) // self._seat.bucket_bytes)
        self._ask(Transfer(buffer.address, len(buffer.flat)))
        for number in range(1, num_buckets + 1):
            self._await(f"bucket {number} of {num_buckets}")
            beat()
        self._await(f"the end of the transfer of epoch {self.epoch}")

    def close(self) -> None:
        """Kill the process, and with it whatever hangs there."""
        self._process.kill()
        self._process.join(CLOSE_S)
        if self._process.is_alive():
            logger.warning("NCCL's process of epoch %d did not die within %g s; it is left behind", self.epoch, CLOSE_S)
        self._connection.close()

    def _ask(self, request: Request) -> None:
        # A process that has ended left the reason among its answers.
        with contextlib.suppress(OSError):
            self._connection.send(request)

    def _await(self, what: str) -> None:
        """Wait for the answer to the oldest request; raise `CollectiveError` that begins with `what` when it is none or bad."""
        limit_s = self._seat.timeout_s + GRACE_S
        began = time.monotonic()
        try:
            answer: NcclAnswer | None = self._connection.recv() if self._connection.poll(limit_s) else None
        except (EOFError, OSError):
            self._process.join(CLOSE_S)
            raise CollectiveError(f"{what}: NCCL's process ended with exit status {self._process.exitcode}") from None
        if answer is None:
            waited_s = time.monotonic() - began
            raise CollectiveLateError(f"{what}: NCCL did not answer within {waited_s:.0f} s (weights.timeout_s)")
        if answer.error is not None:
            raise (CollectiveLateError if answer.is_late else CollectiveError)(f"{what}: {answer.error}")


WeightGroup = GlooGroup | NcclGroup
"""The process group of one epoch."""


def gpu_uuid(gpu_index: int) -> str:
    """Return the UUID of a GPU that this process sees, by which members of a group tell theirs apart."""
    return str(torch.cuda.get_device_properties(gpu_index).uuid)


def serve(connection: Connection, start: NcclStart) -> None:
    """Answer the parent's requests, in the process of its own that this function is the body of."""
    # Ctrl-C reaches the whole process group; the parent decides what becomes of the transfer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment_of(start.avoided))
    with contextlib.suppress(EOFError, OSError):
        member = _answer(connection, start.seat.timeout_s, lambda _: NcclMember(start))
        while True:
            _answer(connection, start.seat.timeout_s, partial(member.do, connection.recv()))


def _answer(connection: Connection, timeout_s: float, work: Callable[[Callable[[], None]], T]) -> T:
    """Do the work, and report the end of each part and of all to the parent; end the process if it failed."""
    began = time.monotonic()

    def report() -> None:
        nonlocal began
        connection.send(NcclAnswer())
        began = time.monotonic()

    try:
        result = work(report)
    except Exception as error:
        connection.send(NcclAnswer(describe(error), is_late=time.monotonic() - began >= timeout_s))
        raise SystemExit(1) from error
    report()
    return result


def environment_of(avoided: tuple[NcclTransport, ...]) -> dict[str, str]:
    """Return the environment variables of a process whose communicator avoids these transports."""
    return ENVIRONMENT | {f"NCCL_{transport}_DISABLE": "1" for transport in avoided}


def describe(error: Exception) -> str:
    """Return an error in one line: its first, and what torch quotes from NCCL under "Last error"."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    quoted = lines[lines.index("Last error:") + 1 :] if "Last error:" in lines else []
    return "; ".join([lines[0], *quoted])[:MAX_ERROR_CHARS]


class NcclMember:
    """One rank of an NCCL group, with device memory for `NUM_BUCKETS` buckets."""

    def __init__(self, start: NcclStart) -> None:
        self._start = start
        self._device = take_device(start.gpu_index)
        num_bytes = start.seat.bucket_bytes
        self._buckets = [torch.empty(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(NUM_BUCKETS)]
        self._memories: dict[Address, torch.Tensor] = {}
        """The parent's memories, mapped and pinned once."""
        self._group: Any = None

    def do(self, request: Request, report: Callable[[], None]) -> None:
        """Do what the parent asks for, and `report` after each bucket; return when it is over on the device too."""
        match request:
            case "join":
                self._join()
            case Transfer():
                self._transfer(request, report)

    def _join(self) -> None:
        """Meet the others. torch makes the communicator with the first collective, and that call has no time limit."""
        seat = self._start.seat
        store = group_store(connect_store(*self._start.store, seat.timeout_s), seat.epoch)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seat.timeout_s)
        self._group = dist.ProcessGroupNCCL(store, seat.rank, seat.world_size, options)
        self._end(self._group.broadcast([self._buckets[0][:1]], dist.BroadcastOptions()))

    def _transfer(self, transfer: Transfer, report: Callable[[], None]) -> None:
        """Broadcast the memory. While a bucket is on the wire, rank 0 copies the next one, and the others the one before."""
        parts = self._memory(transfer).split(self._start.seat.bucket_bytes)
        buckets = [self._buckets[index % NUM_BUCKETS][: len(part)] for index, part in enumerate(parts)]
        is_root = self._start.seat.rank == 0
        if is_root:
            buckets[0].copy_(parts[0], non_blocking=True)
        for index, bucket in enumerate(buckets):
            # On the device it begins after the copies before, which are on the current stream.
            work = self._group.broadcast([bucket], dist.BroadcastOptions())
            if is_root and index + 1 < len(parts):
                buckets[index + 1].copy_(parts[index + 1], non_blocking=True)
            if not is_root and index:
                parts[index - 1].copy_(buckets[index - 1], non_blocking=True)
            self._end(work)
            report()
        if not is_root:
            parts[-1].copy_(buckets[-1])
        self._finish()

    def _memory(self, transfer: Transfer) -> torch.Tensor:
        if transfer.address not in self._memories:
            memory = map_bytes(transfer.address, transfer.num_bytes)
            pin(memory.untyped_storage(), self._start.gpu_index)
            self._memories[transfer.address] = memory
        return self._memories[transfer.address]

    def _finish(self) -> None:
        """Return at rank 0 when every member has all buckets.

        The root's part of a broadcast is over earlier than theirs, and giving up the communicator then would cut the last one.
        """
        self._end(self._group.reduce([self._buckets[0][:1]], dist.ReduceOptions()))

    def _end(self, work: Any) -> None:
        # Without the time limit NCCL's `wait` returns at once: it only makes the device's stream wait.
        work.wait(timedelta(seconds=self._start.seat.timeout_s))


def take_device(gpu_index: int) -> torch.device:
    """Return the GPU of this index, made the current one."""
    torch.cuda.set_device(gpu_index)
    return torch.device("cuda", gpu_index)


def _end_with_parent() -> None:
    """End this process with the parent, also when it hangs in NCCL."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
