"""Receives weight updates in a thread, into a staging buffer beside the running engine.

    actor loop: announce(update) ... staged() -> commit from `buffer` -> release()
    receiver thread: wait for an update -> ready -> go -> broadcast into `buffer` -> staged

Until the actor loop commits, nothing has changed: a transfer that breaks half-way leaves the engine as it was.
"""

import logging
import threading
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from common.collectives import CollectiveError, Rendezvous, WeightGroup, connect_store
from common.weights import WeightBuffer
from protocols.messages import TensorSpec, WeightUpdate

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """How a transfer ended."""

    update: WeightUpdate
    error: str
    """Empty: the whole version lies in the buffer."""


class WeightReceiver:
    """See the module's docstring. All methods are for the actor's loop; the thread is inside."""

    def __init__(self, layout: tuple[TensorSpec, ...]) -> None:
        self.layout = layout
        self.buffer = WeightBuffer(layout)
        self._announced: WeightUpdate | None = None
        self._outcome: Outcome | None = None
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

    def announce(self, update: WeightUpdate) -> None:
        """The learner wants to send this update; it replaces one that has not begun."""
        with self._changed:
            self._announced = update
            self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """An update is announced or under way, or `outcome` was not asked for since."""
        with self._changed:
            return self._is_receiving or self._announced is not None or self._outcome is not None

    def outcome(self) -> Outcome | None:
        """The transfer that ended since the last call. After a success: commit, then `release`."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            outcome, self._outcome = self._outcome, None
            return outcome

    def release(self) -> None:
        """The buffer may be overwritten."""
        with self._changed:
            self._is_buffer_free = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; one that is inside a collective ends with the process."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(1.0)

    def _run(self) -> None:
        """Consumes: announced updates. Waits for: the buffer to be released, then the learner's go. Unblocked by:
        `announce`, `release`, the deadline. Produces: outcomes."""
        try:
            while (update := self._next_update()) is not None:
                error = self._receive(update)
                with self._changed:
                    self._is_receiving = False
                    self._is_buffer_free = bool(error)
                    # The end of an update that a newer one replaced is news to nobody.
                    if not error or self._announced is None:
                        self._outcome = Outcome(update, error)
        except BaseException as error:  # noqa: BLE001  a dead receiver must raise in the actor's loop
            with self._changed:
                self._failure = error

    def _next_update(self) -> WeightUpdate | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._announced is not None and self._is_buffer_free))
            update, self._announced = self._announced, None
            self._is_receiving = not self._is_closed
            return None if self._is_closed else update

    def _receive(self, update: WeightUpdate) -> str:
        """Take part in one transfer; the error, if it failed."""
        try:
            store = self._connect(update)
            if self._group is not None and self._group.epoch != update.epoch:
                self._drop_group()
            rendezvous = Rendezvous(store, epoch=update.epoch, policy_version=update.policy_version)
            rendezvous.set_ready(update.rank)
            rendezvous.wait_go(update.timeout_s, is_superseded=lambda: self._is_closed or self._announced is not None)
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
        except (CollectiveError, dist.DistError) as error:
            self._drop_group()
            self._store = None
            if not self._is_closed:
                logger.warning("weights %d, epoch %d: %s", update.policy_version, update.epoch, error)
            return str(error).splitlines()[0]
        return ""

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
