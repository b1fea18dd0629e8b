"""The one place where leases change: every event is logged first, then applied to the ledger and the prompt stream.

    event -> rollout log -> ledger, prompt stream

A restart reads the log and applies the same events in the same order (`apply_event`).
"""

import time
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained, Tuned, Weighed
from offbeat.learner.leases.groups import Group
from offbeat.learner.leases.ledger import Ledger, LedgerState
from offbeat.learner.leases.log_reading import LogFullError, Position
from offbeat.learner.leases.prompt_stream import PromptStream, StreamState
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.wire import Frame


class DispatcherState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The dispatcher in a checkpoint; the rollout log has what happened after it."""

    stream: StreamState
    ledger: LedgerState
    log_end: Position | None
    """End of the log; None for a run without a log."""
    newest_version: int
    """The newest policy version made, by this learner process or one before it."""
    tuned: dict[str, Tuned] = {}
    """The last event that changed each setting while the run went on."""


class LeaseJournal:
    """The ledger, the prompt stream and the rollout log of a run, changed together by one event at a time.

    A run without a log applies events and writes nothing; it never runs out of room.
    """

    def __init__(
        self, log: RolloutLog | None, ledger: Ledger, stream: PromptStream, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.ledger = ledger
        """The account of every lease. Others read it; only the journal changes its leases."""
        self.stream = stream
        """The order of the prompts. Others read it; only the journal moves it."""
        self.waiting: list[LeaseEvent] = []
        """Events that `commit_late` applied while the log was full, oldest first."""
        self.num_events = 0
        """Events from the start of this process on that are in the log or wait for room there; 0 without a log."""
        self._log = log
        self.now = wall_clock
        """Returns the time to stamp an event with, in seconds since the epoch."""
        self._needed = Position(0, 0)
        """The first record that a restart from the oldest kept checkpoint reads."""

    def commit(self, event: LeaseEvent, arrays: Sequence[Frame] = (), group: Group | None = None) -> None:
        """Log an event and apply it, or raise `LogFullError` and change nothing.

        An `Accepted` event comes with its group, and with the frames of its token ids and log-probs.
        """
        position = self._append(event, arrays)
        apply_event(event, self.ledger, self.stream, group, position)

    def commit_late(self, event: LeaseEvent) -> None:
        """Apply an event that cannot wait for the disk. While the log is full the event is logged later, in its order."""
        try:
            self._append(event)
        except LogFullError:
            self.waiting.append(event)
            self.num_events += 1
        apply_event(event, self.ledger, self.stream)

    @property
    def end(self) -> Position | None:
        """Position of the next record; None without a log."""
        return self._log.end if self._log is not None else None

    @property
    def num_bytes(self) -> int:
        """Size of the log."""
        return self._log.num_bytes if self._log is not None else 0

    @property
    def is_over(self) -> bool:
        """True when the log is larger than `log.retain_mb`, and only a new checkpoint lets it be shortened."""
        return self._log is not None and self._log.is_over(self._needed)

    def flush(self) -> None:
        """Log the waiting events, or raise `LogFullError` at the first one that finds no room."""
        while self._log is not None and self.waiting:
            self._log.append(self.waiting[0])
            del self.waiting[0]

    def require_room(self) -> None:
        """Raise `LogFullError` while the log is full, or waiting events cannot be logged."""
        if self._log is not None and self._log.is_full:
            raise LogFullError("the disk under the rollout log refused a record, or has less than log.min_free_mb left")
        self.flush()

    def sync(self) -> None:
        """Put every logged event on disk now."""
        if self._log is not None:
            self._log.sync()

    def sync_before_acks(self) -> None:
        """Put logged events on disk, as far as `log.fsync` asks for it, before their acknowledgements are sent."""
        if self._log is not None:
            self._log.commit()

    def prune(self, needed: Position) -> None:
        """Let the log delete old segments; no restart reads a record before `needed`."""
        self._needed = needed
        if self._log is not None:
            self._log.prune(needed)

    def _append(self, event: LeaseEvent, arrays: Sequence[Frame] = ()) -> Position | None:
        if self._log is None:
            return None
        if self.waiting:
            # No restart can follow a log that has events out of order.
            raise LogFullError("earlier events wait for room in the rollout log")
        position = self._log.append(event, *arrays)
        self.num_events += 1
        return position


def apply_event(
    event: LeaseEvent, ledger: Ledger, stream: PromptStream, group: Group | None = None, position: Position | None = None
) -> None:
    """Account for an event in the ledger and move the prompt stream accordingly.

    `group` and its `position` in the log come with `Accepted` alone. Raises `ValueError` for a grant of another prompt than the
    stream's next one and for shares of a task that no prompt has, and the errors of `Ledger.apply`.
    """
    match event:
        case Granted():
            turn = stream.next()
            if turn != (event.prompt_id, event.epoch):
                raise ValueError(f"it leases prompt {event.prompt_id} of epoch {event.epoch}, where {turn} was next")
            for epoch, number in stream.take_left_out().items():
                ledger.leave_out(epoch, number)
        case Expired() | Dropped(is_final=False):
            lease = ledger.find(event.lease_id)
            stream.give_back(lease.prompt_id, lease.epoch)
        case Weighed():
            stream.weigh(event.shares)
        case Started() | Accepted() | Dropped() | Trained() | Tuned():
            pass
        case _:
            assert_never(event)
    ledger.apply(event, group, position)
