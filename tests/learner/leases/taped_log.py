"""A rollout log that records its entries, and an actor that outlives learners."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.learner.leases.events import LeaseEvent
from offbeat.learner.leases.log_reading import LogFullError, Position
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.messages import (
    Ack,
    ActorMessage,
    Cancel,
    Credit,
    LearnerHeartbeat,
    LearnerMessage,
    Lease,
    Refused,
    SayHello,
    WeightsCommitted,
    Welcome,
)
from tests.learner.dispatch.dispatch_desk import (
    Actor,
    Desk,
    make_hello,
    make_prompts,
)

NUM_PROMPTS = 7
PROMPTS = make_prompts(NUM_PROMPTS, "train")


class TapedLog(RolloutLog):
    """A real log that records its entries, and refuses them while the test declares the disk full."""

    tape: list[tuple[Position, LeaseEvent]]
    is_disk_full: bool
    failures: list[bool]

    @property
    def is_full(self) -> bool:
        return self.is_disk_full

    def append(self, event: LeaseEvent, *arrays: Any) -> Position:
        if self.is_disk_full or (self.failures and self.failures.pop()):
            raise LogFullError("no space left")
        position = super().append(event, *arrays)
        self.tape.append((position, event))
        return position


def open_log(folder: Path, tape: list[tuple[Position, LeaseEvent]], after: Position | None = None) -> TapedLog:
    log = TapedLog(folder, run_id="run", fsync="off", segment_bytes=1500, retain_bytes=3000, min_free_bytes=0, after=after)
    log.tape, log.is_disk_full, log.failures = tape, False, []
    return log


class Remote(Actor):
    """An actor behind a connection that delays and loses messages, but keeps their order; it outlives learners."""

    def __init__(self, desk: Desk, name: str, incarnation: int) -> None:
        super().__init__(desk, name, incarnation=incarnation)
        self.jobs: dict[int, Lease] = {}
        self.outbox: dict[int, tuple[ActorMessage, tuple[np.ndarray, ...]]] = {}
        self.seen = -1
        self.version = -1
        self.sent: deque[tuple[ActorMessage, tuple[np.ndarray, ...]]] = deque()
        """Messages on their way to the learner."""
        self.inbox: deque[LearnerMessage] = deque()
        """Messages on their way from the learner."""

    @property
    def held(self) -> tuple[int, ...]:
        return (*self.jobs, *self.outbox)

    def send(self, message: ActorMessage, *arrays: np.ndarray) -> None:
        self.sent.append((message, arrays))

    def send_hello(self) -> None:
        self.send(make_hello(self.name, self.incarnation, lease_ids=self.held))

    def commit_newest(self) -> None:
        assert self.desk.versions.published is not None
        self.version = self.desk.versions.published
        self.send(WeightsCommitted(policy_version=self.version, stall_s=0.0))

    def read(self) -> None:
        match message := self.inbox.popleft():
            case Welcome():
                self.seen = -1
                self.send(Credit(capacity=4))
                self.commit_newest()
                for parcel in self.outbox.values():
                    self.send(parcel[0], *parcel[1])
            case SayHello():
                self.send_hello()
            case Lease():
                self.jobs[message.lease_id] = message
            case Ack():
                self.outbox.pop(message.lease_id, None)
            case Cancel():
                for lease_id in message.lease_ids:
                    self.jobs.pop(lease_id, None)
                    self.outbox.pop(lease_id, None)
            case LearnerHeartbeat():
                self.seen = message.newest_lease_id
            case Refused():
                raise AssertionError(message.reason)
