"""Receives weight updates in a thread, into a staging buffer beside the running engine.

    actor loop: announce(update) ... staged() -> commit from `buffer` -> release()
    receiver thread: wait for an update -> ready -> go -> broadcast into `buffer` -> checksum -> staged
                     or for a pull      -> chunks into `buffer` -> checksum -> staged

Until the actor loop commits, nothing has changed: a transfer that breaks half-way leaves the engine as it was.
"""

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from offbeat.actor.weight_pull import PullError, pull_weights
from offbeat.common.collectives import CollectiveError, Rendezvous, WeightGroup, connect_store
from offbeat.common.weights import WRONG_CHECKSUM, WeightBuffer, checksum
from offbeat.protocols.channels import Link
from offbeat.protocols.messages import TensorSpec, WeightPull, WeightsStaged, WeightUpdate

logger = logging.getLogger(__name__)


class TransferEnd(NamedTuple):
    """The end of a transfer."""

    policy_version: int
    epoch: int | None
    """The collective's membership epoch; None for a pull."""
    error: str | None
    """The reason for a failure; None when the whole version lies in the buffer."""

    def as_message(self) -> WeightsStaged:
        """Return the report to the learner."""
        epoch = -1 if self.epoch is None else self.epoch
        return WeightsStaged(policy_version=self.policy_version, epoch=epoch, error=self.error or "")


class ChecksumError(RuntimeError):
    """The received bytes are not those of the learner."""


class WeightReceiver:
    """A thread that receives weights, and its staging buffer. All methods are for the actor's loop."""

    def __init__(self, layout: tuple[TensorSpec, ...], open_link: Callable[[str], Link]) -> None:
        """`open_link(address)` connects to the weight server under the identity that the hub knows this actor by."""
        self.layout = layout
        self.buffer = WeightBuffer(layout)
        self._open_link = open_link
        self._announced: WeightUpdate | WeightPull | None = None
        self._outcome: TransferEnd | None = None
        self._is_receiving = False
        self._store: TCPStore | None = None
        self._store_address = ("", 0)
        self._group: WeightGroup | None = None
        self._is_buffer_free = True
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

    def outcome(self) -> TransferEnd | None:
        """Return the transfer that ended since the last call. After a success, commit from `buffer`, then `release`."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
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
                    self._is_buffer_free = error is not None
                    # The learner does not care how an update failed that it has replaced by a newer one.
                    if error is None or self._announced is None:
                        epoch = update.epoch if isinstance(update, WeightUpdate) else None
                        self._outcome = TransferEnd(update.policy_version, epoch, error)
            self._drop_group()
            self._store = None
        except BaseException as error:  # noqa: BLE001  a dead receiver must raise in the actor's loop
            with self._changed:
                self._failure = error

    def _next_update(self) -> WeightUpdate | WeightPull | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._announced is not None and self._is_buffer_free))
            update, self._announced = self._announced, None
            self._is_receiving = not self._is_closed
            return None if self._is_closed else update

    def _is_superseded(self) -> bool:
        return self._is_closed or self._announced is not None

    def _receive(self, update: WeightUpdate | WeightPull) -> str | None:
        """Fill the buffer. Return the error if that failed or the bytes are not the learner's, else None."""
        try:
            if isinstance(update, WeightPull):
                pull_weights(update, self.buffer.flat, self._open_link, self._is_superseded)
            else:
                self._join_collective(update)
            received = checksum(self.buffer.flat)
            if received != update.checksum:
                raise ChecksumError(f"{WRONG_CHECKSUM}: {received:08x} arrived, {update.checksum:08x} was announced")
        except (PullError, ChecksumError, CollectiveError, dist.DistError) as error:
            self._drop_group()
            self._store = None
            if not self._is_closed:
                logger.warning("weights %d: %s", update.policy_version, error)
            return str(error).splitlines()[0]
        return None

    def _join_collective(self, update: WeightUpdate) -> None:
        """Receive one broadcast as a member of the update's epoch."""
        store = self._connect(update)
        if self._group is not None and self._group.epoch != update.epoch:
            self._drop_group()
        rendezvous = Rendezvous(store, epoch=update.epoch, policy_version=update.policy_version)
        rendezvous.set_ready(update.rank)
        rendezvous.wait_go(update.timeout_s, self._is_superseded)
        if self._group is None:
            self._group = WeightGroup(
                store,
                epoch=update.epoch,
                rank=update.rank,
                world_size=update.world_size,
                backend=update.backend,
                timeout_s=update.timeout_s,
            )
        self._group.broadcast(self.buffer.flat, update.bucket_bytes)

    def _connect(self, update: WeightUpdate) -> TCPStore:
        address = (update.store_host, update.store_port)
        if self._store is None or address != self._store_address:
            self._drop_group()
            self._store = connect_store(*address, update.timeout_s)
            self._store_address = address
        return self._store

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None
