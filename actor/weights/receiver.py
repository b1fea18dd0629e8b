"""Receives weight updates in a thread, into a staging buffer beside the running engine.

    actor loop: announce(update) ... staged() -> commit from `buffer` -> release()
    receiver thread: wait for an update -> ready -> go -> broadcast into `buffer` -> checksum -> staged
                     or for a pull      -> chunks into `buffer`, or differences added to it -> checksum -> staged

Until the actor loop commits, nothing has changed: a transfer that breaks half-way leaves the engine as it was.

Every wait in the thread has a deadline, most of them of their library. A thread that is stuck beyond it cannot be ended, and
could still write into the buffer: `outcome` raises, so that the actor ends and is started again.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from offbeat.actor.weights.pull import PullError, UselessAnswerError, add_deltas, fetch_deltas, pull_weights
from offbeat.common.weights.collectives import SUPERSEDED, CollectiveError, GlooGroup, Rendezvous, Seat, connect_store
from offbeat.common.weights.deltas import DeltaError, word_bytes
from offbeat.common.weights.flat import WRONG_CHECKSUM, WeightBuffer, checksum
from offbeat.common.weights.nccl_group import NcclGroup, WeightGroup
from offbeat.protocols.channels import Link
from offbeat.protocols.messages import TensorSpec, WeightPull, WeightsStaged, WeightUpdate

logger = logging.getLogger(__name__)

STUCK_S = 30.0
"""Time beyond the deadline of an update after which a transfer that does not move is stuck."""
LONGEST_LOOK_S = 5.0
"""Longest time between two looks that counts: a process that was stopped has not waited."""


class ChecksumError(RuntimeError):
    """The received bytes are not those of the learner."""


class StuckError(RuntimeError):
    """The receiver's thread hangs in a transfer."""


class WeightReceiver:
    """A thread that receives weights, and its staging buffer. All methods are for the actor's loop."""

    def __init__(self, layout: tuple[TensorSpec, ...], open_link: Callable[[str], Link]) -> None:
        """`open_link(address)` connects to the weight server under the identity that the hub knows this actor by."""
        self.layout = layout
        self.buffer = WeightBuffer(layout)
        self._open_link = open_link
        self._announced: WeightUpdate | WeightPull | None = None
        self._outcome: WeightsStaged | None = None
        self._is_receiving = False
        self._patience_s = 0.0
        """Time for which the transfer under way may stay as it is."""
        self._looked_at = 0.0
        self._store: TCPStore | None = None
        self._group: WeightGroup | None = None
        self._is_buffer_free = True
        self._held: int | None = None
        """Checksum of the whole version that lies in the buffer; None when none does."""
        self._delta_error = ""
        """The reason why differences failed in the update under way."""
        self._is_closed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weight-receiver", daemon=True)
        self._thread.start()

    def announce(self, update: WeightUpdate | WeightPull) -> None:
        """Ask for this version. It replaces an announced one; a transfer under way is given up where that is possible."""
        with self._changed:
            self._announced = update
            self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """True while an update is announced or under way, or has an outcome that was not fetched."""
        with self._changed:
            return self._is_receiving or self._announced is not None or self._outcome is not None

    def outcome(self) -> WeightsStaged | None:
        """Return the transfer that ended since the last call. After a success, commit from `buffer`, then `release`."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            now = time.monotonic()
            self._patience_s -= min(now - self._looked_at, LONGEST_LOOK_S)
            self._looked_at = now
            if self._is_receiving and self._patience_s < 0:
                raise StuckError(
                    "the weight receiver is stuck in a transfer far beyond its deadline (weights.timeout_s): this actor ends, "
                    "because only a new process can take weights again"
                )
            outcome, self._outcome = self._outcome, None
            return outcome

    def release(self) -> None:
        """Let the next update overwrite the buffer."""
        with self._changed:
            self._is_buffer_free = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread. Waits a second; a thread inside a collective ends with the collective, or with the process."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(1.0)

    def _run(self) -> None:
        """Receive one update after the other.

        Consumes: announced updates and pulls. Waits for: the release of the buffer, then the learner's go or the next chunk.
        Unblocked by: `announce`, `release`, `close`, the deadline. Produces: outcomes.
        """
        try:
            while (update := self._next_update()) is not None:
                error = self._receive(update)
                with self._changed:
                    self._is_receiving = False
                    self._is_buffer_free = bool(error)
                    # The learner does not care how an update failed that it has replaced by a newer one.
                    if not error or self._announced is None:
                        epoch = update.epoch if isinstance(update, WeightUpdate) else -1
                        self._outcome = WeightsStaged(
                            policy_version=update.policy_version, epoch=epoch, error=error, delta_error=self._delta_error
                        )
            self._drop_group()
            self._store = None
        except BaseException as error:  # noqa: BLE001  a dead receiver must raise in the actor's loop
            with self._changed:
                self._failure = error

    def _next_update(self) -> WeightUpdate | WeightPull | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._announced is not None and self._is_buffer_free))
            update, self._announced = self._announced, None
            if self._is_closed or update is None:
                return None
            self._beat(update)
            self._is_receiving = True
            return update

    def _beat(self, update: WeightUpdate | WeightPull) -> None:
        """Note that a transfer moves."""
        self._patience_s, self._looked_at = update.timeout_s + STUCK_S, time.monotonic()

    def _receive(self, update: WeightUpdate | WeightPull) -> str:
        """Fill the buffer. Return the error if that failed or the bytes are not the learner's, else an empty text."""

        def is_superseded() -> bool:
            self._beat(update)
            return self._is_closed or self._announced is not None

        self._delta_error = ""
        try:
            if isinstance(update, WeightPull):
                self._pull(update, is_superseded)
            else:
                self._held = None
                self._join_collective(update, is_superseded)
                self._verify(update)
        except (PullError, ChecksumError, CollectiveError, dist.DistError) as error:
            self._drop_group()
            self._store = None
            if not self._is_closed:
                logger.warning("weights %d: %s", update.policy_version, error)
            return str(error).strip().splitlines()[0]
        return ""

    def _pull(self, pull: WeightPull, is_superseded: Callable[[], bool]) -> None:
        """Bring the buffer to this version by differences where the server has them, else by all weights."""
        if self._held is not None and self._held in (*pull.bases, pull.checksum):
            try:
                return self._pull_deltas(pull, self._held, is_superseded)
            except (DeltaError, UselessAnswerError, ChecksumError) as error:
                self._delta_error = str(error).splitlines()[0]
                logger.warning("weights %d: differences failed, all weights are pulled: %s", pull.policy_version, error)
        self._held = None
        pull_weights(pull, self.buffer.flat, self._open_link, is_superseded)
        self._verify(pull)
        return None

    def _pull_deltas(self, pull: WeightPull, held: int, is_superseded: Callable[[], bool]) -> None:
        flat = self.buffer.flat
        # With the announced version in the buffer there is nothing to fetch: the actor came back, or its engine is doubted.
        arrived = [] if held == pull.checksum else fetch_deltas(pull, held, flat, self._open_link, is_superseded)
        add_deltas(pull, arrived, flat, word_bytes(self.layout), lambda: self._beat(pull))
        self._verify(pull)
        num_bytes = sum(len(delta) for _, delta in arrived)
        sizes = (num_bytes / 1e6, len(flat) / 1e6)
        logger.info("weights %d: pulled as differences, %.3f MB for %.3f MB", pull.policy_version, *sizes)

    def _verify(self, update: WeightUpdate | WeightPull) -> None:
        """Raise `ChecksumError` unless the buffer holds the announced bytes."""
        received = checksum(self.buffer.flat)
        if received != update.checksum:
            raise ChecksumError(f"{WRONG_CHECKSUM}: {received:08x} arrived, {update.checksum:08x} was announced")
        self._held = received

    def _join_collective(self, update: WeightUpdate, is_superseded: Callable[[], bool]) -> None:
        """Receive one broadcast as a member of the update's epoch."""
        store = self._connect(update)
        if self._group is not None and self._group.epoch != update.epoch:
            self._drop_group()
        if self._group is None:
            seat = Seat(update.epoch, update.rank, update.world_size, update.bucket_bytes, update.timeout_s)
            if update.backend == "nccl":
                with _nccl_settings_of_the_learner():
                    self._group = NcclGroup(store, seat, avoided=update.avoided)
            else:
                self._group = GlooGroup(store, seat)
        self._group.prepare()
        rendezvous = Rendezvous(store, epoch=update.epoch, policy_version=update.policy_version)
        rendezvous.set_ready(update.rank)
        rendezvous.wait_go(update.timeout_s, is_superseded)
        if isinstance(self._group, GlooGroup):
            self._group.make(lambda: SUPERSEDED if is_superseded() else "")
        self._group.broadcast(self.buffer, lambda: self._beat(update))

    def _connect(self, update: WeightUpdate) -> TCPStore:
        address = update.store_host, update.store_port
        if self._store is None or (self._store.host, self._store.port) != address:
            self._drop_group()
            self._store = connect_store(*address, update.timeout_s)
        return self._store

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None


def _nccl_settings_of_the_learner() -> AbstractContextManager[None]:
    """Take back, for a process that is started in this context, the NCCL settings that vLLM made for its own communicators.

    In its batch-invariant mode vLLM pins some. NCCL never reconciles them, and members that differ hang.
    """
    if "vllm" not in sys.modules:
        return nullcontext()
    from vllm.utils.nccl import unpinned_nccl_env

    return unpinned_nccl_env()
