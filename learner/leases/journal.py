"""The rollout log as the dispatcher writes it: in the order in which things happened, though some wait for room on the disk."""

from offbeat.learner.leases.events import LeaseEvent
from offbeat.learner.leases.rollout_log import LogFullError, Position, RolloutLog
from offbeat.protocols.wire import Frame


class LeaseJournal:
    """A run's events on their way into its log; where the run keeps none, nothing is written and there is always room."""

    def __init__(self, log: RolloutLog | None) -> None:
        self._log = log
        self.waiting: list[LeaseEvent] = []
        """What a full log did not take and could not wait for it."""
        self.num_events = 0
        """Of this process, those included that wait; 0 without a log."""
        self._needed = Position(0, 0)
        """The first record that a restart from the oldest kept checkpoint reads."""

    @property
    def end(self) -> Position | None:
        """Where the next record will begin; None without a log."""
        return self._log.end if self._log is not None else None

    @property
    def num_bytes(self) -> int:
        """Size of the log."""
        return self._log.num_bytes if self._log is not None else 0

    @property
    def is_over(self) -> bool:
        """Whether the log has outgrown its setting, and only a checkpoint allows to shorten it."""
        return self._log is not None and self._log.is_over(self._needed)

    def append(self, event: LeaseEvent, *arrays: Frame) -> Position | None:
        """Log it, or raise `LogFullError` and change nothing; where it begins, None without a log."""
        if self._log is None:
            return None
        if self.waiting:
            # The log must have the order in which things happened, or no restart can follow it.
            raise LogFullError("earlier events wait for room in the rollout log")
        position = self._log.append(event, *arrays)
        self.num_events += 1
        return position

    def append_late(self, event: LeaseEvent) -> None:
        """Log what has happened all the same; when there is room, if there is none now."""
        try:
            self.append(event)
        except LogFullError:
            self.waiting.append(event)
            self.num_events += 1

    def flush(self) -> None:
        """Log what waits; `LogFullError` while there is no room."""
        while self._log is not None and self.waiting:
            self._log.append(self.waiting[0])
            del self.waiting[0]

    def require_room(self) -> None:
        """Raise `LogFullError` while the disk is about to be full, or what waits cannot be logged."""
        if self._log is not None and self._log.is_full:
            raise LogFullError("the disk under the rollout log has less than log.min_free_mb left")
        self.flush()

    def sync(self) -> None:
        """Have all that was logged on disk now."""
        if self._log is not None:
            self._log.sync()

    def commit(self) -> None:
        """To be called before acknowledgements leave: as `RolloutLog.commit`."""
        if self._log is not None:
            self._log.commit()

    def prune(self, needed: Position) -> None:
        """No restart needs older records than this one."""
        self._needed = needed
        if self._log is not None:
            self._log.prune(needed)
