"""An NCCL group whose member runs in a process that can be killed: nothing that NCCL does can hang or end this process.

Why a process: making a communicator has no time limit and cannot be interrupted from another thread (torch knows the
communicator only when the call has returned); `abort` may hang too; a kernel that waits for a dead member holds up every
synchronization of the device, such as freeing memory, and with it training or sampling; and NCCL reads its settings once a
process, so that a transport that hangs could not be turned off for the next try. In a process of its own all of that is ended
by SIGKILL at the deadline. The price is a CUDA context (about 0.5 GB of the GPU, beside NCCL's own buffers), seconds at each
change of the members, and a GPU that is shared by time slices during a transfer.

Weights lie in memory that the process maps: it reads them there at the learner, and writes them there at an actor.
"""

import contextlib
import logging
import multiprocessing
import time
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import TCPStore

from offbeat.common.weights.collectives import CLOSE_S, CollectiveError, CollectiveLateError, Seat
from offbeat.common.weights.flat import WeightBuffer
from offbeat.common.weights.nccl_process import Answer, Place, Request, Transfer, serve
from offbeat.protocols.messages import NcclTransport

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""Time beyond the deadline for the process to report how it was missed, before it is killed."""

context = multiprocessing.get_context("spawn")
"""Makes processes that inherit no CUDA state."""


class NcclGroup:
    """The NCCL process of one epoch."""

    def __init__(self, store: TCPStore, seat: Seat, gpu_index: int = 0, avoided: tuple[NcclTransport, ...] = ()) -> None:
        """Start the process; `prepare` waits for it. Raise `CollectiveError` if it cannot be started."""
        self.epoch = seat.epoch
        self._seat = seat
        self._has_joined = False
        self._is_up = False
        try:
            self._connection, theirs = context.Pipe()
            place = Place((store.host, store.port), seat, gpu_index, avoided)
            self._process = context.Process(target=serve, args=(theirs, place), name="weights-nccl", daemon=True)
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
        """Copy the learner's buffer into every member's, bucket by bucket."""
        self.prepare()
        if not self._has_joined:
            beat()
            self._ask("join")
            self._await(f"the NCCL communicator of epoch {self.epoch} was not made")
            self._has_joined = True
        num_buckets = -(-len(buffer.flat) // self._seat.bucket_bytes)
        self._ask(Transfer(buffer.memory.address, len(buffer.flat)))
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
            answer: Answer | None = self._connection.recv() if self._connection.poll(limit_s) else None
        except (EOFError, OSError):
            self._process.join(CLOSE_S)
            raise CollectiveError(f"{what}: NCCL's process ended with exit status {self._process.exitcode}") from None
        if answer is None:
            waited_s = time.monotonic() - began
            raise CollectiveLateError(f"{what}: NCCL did not answer within {waited_s:.0f} s (weights.timeout_s)")
        if answer.error is not None:
            raise (CollectiveLateError if answer.is_late else CollectiveError)(f"{what}: {answer.error}")


def gpu_uuid(gpu_index: int) -> str:
    """Return the UUID of a GPU that this process sees, by which members of a group tell theirs apart."""
    return str(torch.cuda.get_device_properties(gpu_index).uuid)
