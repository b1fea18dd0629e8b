"""The collective that moves weights: one process group per membership epoch, gloo on CPUs, NCCL on GPUs.

Both sides hold the weights in host memory (`common.weights.flat.WeightBuffer`). gloo broadcasts straight from and into it, in
the thread that asks. NCCL runs in a process of its own (`common.weights.nccl_group`).

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
from typing import NamedTuple, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from offbeat.common.weights.flat import WeightBuffer

logger = logging.getLogger(__name__)

SUPERSEDED = "superseded by a newer update"
POLL_S = 0.001
LOOK_S = 0.05
MAKE_S = 1.0
"""Time in which members that are all ready have long made their group; one that takes longer lacks a member."""
CLOSE_S = 5.0
"""Longest wait for a group to close; one that hangs for longer is left behind."""


class CollectiveError(RuntimeError):
    """A transfer did not take place; it changed nothing."""


class CollectiveLateError(CollectiveError):
    """A transfer did not move until its deadline."""


class Seat(NamedTuple):
    """A member's place in the group of one epoch."""

    epoch: int
    rank: int
    """0 is the learner."""
    world_size: int
    bucket_bytes: int
    """Size of one broadcast."""
    timeout_s: float
    """Deadline for making the group, and for each bucket."""


def serve_store(host: str, port: int, timeout_s: float, *, listen_on: str) -> TCPStore:
    """Return the learner's rendezvous store, which members reach at `host`.

    The store listens on the address `listen_on` only (torch's own default is every interface).
    """
    family = socket.AF_INET6 if ":" in listen_on else socket.AF_INET
    listener = socket.create_server((listen_on, port), family=family)
    port, timeout = listener.getsockname()[1], timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach())


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Return a member's connection to the learner's store; raise `CollectiveError` if nothing answers there."""
    # torch prints a page where it finds nobody.
    if reason := refusal(host, port, timeout_s):
        raise CollectiveError(
            f"weights.port = {port}: {host} does not answer there ({reason}). Open this port on the learner's machine, and let "
            'the machines of actors reach it, or set weights.backend = "pull"'
        )
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
        while not self._has_go():
            # The learner announces a newer update when its own part of this one is over, or when it has given this one up.
            # In the first case the others count on this member.
            if is_superseded() and not self._has_go():
                raise CollectiveError(SUPERSEDED)
            if time.monotonic() > deadline:
                raise CollectiveError(f"the learner did not start the transfer within {timeout_s:g} s (weights.timeout_s)")
            time.sleep(POLL_S)

    def _has_go(self) -> bool:
        return self._store.check([f"{self._prefix}/go"])

    def clear(self, world_size: int) -> None:
        """Delete the keys, so that the store does not grow with the run."""
        for key in ["go", *(f"ready/{rank}" for rank in range(1, world_size))]:
            self._store.delete_key(f"{self._prefix}/{key}")


class GlooGroup:
    """A gloo group. All members meet in `make`, before the first broadcast. Close it after any error: it stays broken."""

    def __init__(self, store: TCPStore, seat: Seat) -> None:
        self.epoch = seat.epoch
        self._store = store
        self._seat = seat
        self._group: dist.ProcessGroup | None = None

    def prepare(self) -> None:
        """Do nothing: a gloo group needs all of its members."""

    def make(self, reason_to_stop: Callable[[], str]) -> None:
        """Connect to the other members, which are about to do the same. Does nothing where that was done.

        Raises `CollectiveError` past the deadline, and with the `reason_to_stop`, if there is one, after `MAKE_S`: a member has
        left. gloo itself waits for five times its time limit, in which no other update would reach this process.
        """
        if self._group is not None:
            return
        made: list[dist.ProcessGroup] = []
        store, seat = self._store, self._seat
        began = time.monotonic()

        def connect() -> None:
            with _as_collective_error(f"the process group of epoch {seat.epoch} was not made"):
                # A connection of its own: gloo's waits would keep others from using this one.
                made.append(_gloo_group(connect_store(store.host, store.port, seat.timeout_s), seat))

        def problem() -> str:
            waited = time.monotonic() - began
            if waited > MAKE_S and (reason := reason_to_stop()):
                return reason
            late = f"the process group of epoch {seat.epoch} was not made within {seat.timeout_s:g} s"
            return late if waited > seat.timeout_s else ""

        run_until(problem, connect, "weight-group-start")
        self._group = made.pop()

    def broadcast(self, buffer: WeightBuffer, beat: Callable[[], None]) -> None:
        """Copy the learner's buffer into every member's, bucket by bucket.

        Calls `beat` after each bucket. Raises `CollectiveError` past the deadline of a bucket, and when a member is lost.
        """
        assert self._group is not None, "it was not made"
        buckets = buffer.flat.split(self._seat.bucket_bytes)
        for index, bucket in enumerate(buckets):
            beat()
            with _as_collective_error(f"bucket {index + 1} of {len(buckets)}"):
                # Rank 0, the learner, is the root by default. No local name: an exception would keep it, and with it the group,
                # alive beyond `close`.
                self._group.broadcast([bucket], dist.BroadcastOptions()).wait()

    def close(self) -> None:
        """Give up the group; members blocked in it fail at once instead of at their time limit."""
        held, self._group = [self._group], None
        # A group's destructor waits for threads of its own.
        thread = threading.Thread(target=held.clear, name="weight-group-end", daemon=True)
        thread.start()
        thread.join(CLOSE_S)
        if thread.is_alive():
            logger.warning("the process group of epoch %d did not close within %g s; it is left behind", self.epoch, CLOSE_S)


def run_until(problem: Callable[[], str], work: Callable[[], None], name: str) -> None:
    """Run `work` in a thread of that name, and raise what it raises.

    Raises `CollectiveError` as soon as there is a problem. The thread is left behind then, with what it holds: no thread can be
    ended from outside.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            raised.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_S)
        if thread.is_alive() and (text := problem()):
            raise CollectiveError(text)
    if raised:
        raise raised[0]


def _gloo_group(store: TCPStore, seat: Seat) -> dist.ProcessGroup:
    # Left to itself gloo takes the interface that the host name resolves to, which need not reach the learner.
    # The stubs know neither the options class nor the constructor that takes it.
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address(store.host, store.port))]
    options._timeout = timedelta(seconds=seat.timeout_s)
    group = dist.ProcessGroupGloo(group_store(store, seat.epoch), seat.rank, seat.world_size, options)
    return cast(dist.ProcessGroup, group)


def group_store(store: TCPStore, epoch: int) -> Store:
    """Return the part of the learner's store in which the members of this epoch's group meet."""
    return PrefixStore(f"group/{epoch}", store)


def refusal(host: str, port: int, timeout_s: float) -> str:
    """Return the reason why no store answers there, or "". A store does not mind a connection that is closed again."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


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
