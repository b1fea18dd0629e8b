"""Many live actors at one hub, under a load that does not depend on how fast the hub is.

    python -m tests.benchmarks.crowd [NUM_ACTORS [GROUPS_PER_S ...]]    # 1,000 actors, 3 minutes; the log is here

This process runs all actors, another one the learner: the production Hub, HubThread, Dispatcher and rollout log; its training
thread only takes batches. Each actor takes as many leases as its credit allows, answers each of them after a time around
`SECONDS_PER_GROUP`, and sends a heartbeat every `HEARTBEAT_S`, as real actors do. The credit follows from the offered load.

    offered      groups a second if every lease were renewed at once
    answered     groups a second that were acknowledged
    p50, p99 ack       from the sending of a group to its acknowledgement
    p99 beat     from a heartbeat to its answer
    lost         members that the learner took for dead
    late         how much later than due the actors' process sent a group, p99: where it is large, that process is the limit
"""

import gc
import heapq
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import zmq

from offbeat.common.processes.files import raise_limit
from offbeat.common.records.rows import EventRow, Row
from offbeat.common.settings.config import LogSection
from offbeat.learner.hub import HubThread
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.learner.service import WAIT_S
from offbeat.protocols.messages import (
    HEARTBEAT_S,
    Ack,
    ActorHeartbeat,
    ActorStats,
    Cancel,
    Credit,
    LearnerHeartbeat,
    LearnerMessage,
    Lease,
    SayHello,
    WeightsCommitted,
    Welcome,
)
from tests.benchmarks.measuring import print_table, processes, receive_from
from tests.benchmarks.simulated_actors import PATIENCE_S, EncodedGroup, make_hello, open_dealer, send
from tests.benchmarks.transport_trials import GROUP_SIZE, MEBI, Keys, make_keys, open_dispatcher, open_hub

NUM_TOKENS = 256
"""Tokens of a completion."""
GROUPS_PER_STEP = 1024
"""At 1,000 groups a second, a step each second."""
SECONDS_PER_GROUP = 4.0
WARM_UP_S = SECONDS_PER_GROUP
MEASURED_S = 10.0
LOOK_S = 0.005
"""Seconds between two looks at all sockets, which take a millisecond. Times are measured to this precision."""
MANY_STEPS = 1 << 30

_decoder = msgspec.msgpack.Decoder(LearnerMessage)


class Trial(NamedTuple):
    """One measurement's configuration."""

    keys: Keys | None
    num_actors: int
    groups_per_s: int
    """The offered load."""

    @property
    def capacity(self) -> int:
        """Leases of one actor at a time."""
        return max(1, round(self.groups_per_s * SECONDS_PER_GROUP / self.num_actors))


class Served(NamedTuple):
    """A trial as the learner saw it."""

    cpu_s: float
    """CPU seconds of all its threads while the actors were measured."""
    events: Counter[str]
    """Events of the whole trial, by name."""


# The learner's process


def serve(connection: Connection) -> None:
    """Serve one trial after another: send the address, and at the end what was seen."""
    raise_limit()
    settings = LogSection()
    while True:
        trial: Trial = connection.recv()
        events: Counter[str] = Counter()

        def record(row: Row, events: Counter[str] = events) -> None:
            if isinstance(row, EventRow):
                events[row.event] += 1

        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="crowd-benchmark-") as folder, open_hub(trial.keys) as hub:
            log = RolloutLog(
                Path(folder),
                run_id="run",
                fsync=settings.fsync,
                retain_bytes=settings.retain_mb * MEBI,
                min_free_bytes=settings.min_free_mb * MEBI,
            )
            dispatcher = open_dispatcher(MANY_STEPS, log, record, groups_per_step=GROUPS_PER_STEP)
            # As the learner does when it has loaded its model: a full collection of its imports takes 0.1 s.
            gc.freeze()
            hub_thread = HubThread(hub, dispatcher)
            hub_thread.start()
            connection.send(hub.address)
            cpu_s: list[float] = []

            def clock(cpu_s: list[float] = cpu_s) -> None:
                for expected in ("begin", "end"):
                    assert connection.recv() == expected
                    cpu_s.append(time.process_time())

            clock_thread = threading.Thread(target=clock)
            clock_thread.start()
            policy_version = 0
            while clock_thread.is_alive():
                groups = dispatcher.take_batch(WAIT_S)
                if groups is not None:
                    policy_version += 1
                    dispatcher.finish_batch(groups, policy_version)
                    hub.wake()
            served = Served(cpu_s[1] - cpu_s[0], events)
            hub_thread.close()
            log.close()
        # After the last answer this process is killed: the folder of the log is gone by then.
        connection.send(served)


# The actors' process


@dataclass
class LiveActor:
    """One actor: a socket, and the leases that it holds."""

    name: str
    socket: zmq.Socket
    lease_ids: set[int] = field(default_factory=set)
    sent_at: dict[int, float] = field(default_factory=dict)
    """Times at which groups were sent that are not acknowledged, by lease."""
    beats: deque[float] = field(default_factory=deque)
    """Times of the heartbeats that are not answered."""
    newest_lease_id: int = -1
    """The newest lease that the learner says it has sent."""


@dataclass
class Seen:
    """A trial as its actors saw it."""

    ack_s: list[float] = field(default_factory=list)
    beat_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    num_lost: int = 0


class LiveActors:
    """All actors of a trial, in one loop."""

    def __init__(self, address: str, trial: Trial) -> None:
        self._trial = trial
        self._group = EncodedGroup(GROUP_SIZE, NUM_TOKENS)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * trial.num_actors + 64)
        key, learner_key = (None, None) if trial.keys is None else (trial.keys.actors, trial.keys.learner.owner)
        self._actors: dict[zmq.Socket, LiveActor] = {}
        self._poller = zmq.Poller()
        for index in range(trial.num_actors):
            name = f"actor-{index}"
            socket = open_dealer(self._context, address, name, key=key, learner_key=learner_key)
            self._actors[socket] = LiveActor(name, socket)
            self._poller.register(socket, zmq.POLLIN)
        self._random = np.random.default_rng(0)
        self._due: list[tuple[float, int, LiveActor]] = []
        """Groups that are being generated: when each is due, its lease, its actor."""
        self.seen = Seen()

    def join(self) -> float:
        """Say hello as every actor; return the seconds until all were welcome."""
        started = time.monotonic()
        for actor in self._actors.values():
            send(actor.socket, make_hello(actor.name))
        waiting = set(self._actors)
        while waiting:
            assert time.monotonic() - started < 2 * PATIENCE_S, f"{len(waiting)} actors are not welcome"
            ready = self._poller.poll(1000)
            if not ready:
                # Connections are closed where there are too many at once; actors repeat their hello.
                for socket in waiting:
                    send(socket, make_hello(self._actors[socket].name))
            for socket, _ in ready:
                message = _decoder.decode(socket.recv_multipart(zmq.NOBLOCK)[1])
                assert isinstance(message, Welcome), message
                waiting.discard(socket)
        joined_s = time.monotonic() - started
        for socket in self._actors:
            send(socket, WeightsCommitted(policy_version=0, stall_s=0.0))
            send(socket, Credit(capacity=self._trial.capacity))
        return joined_s

    def work(self, seconds: float) -> None:
        """Answer leases and send heartbeats for so long; `seen` has what happened."""
        now = time.monotonic()
        end, gap = now + seconds, HEARTBEAT_S / len(self._actors)
        beats = deque((now + index * gap, actor) for index, actor in enumerate(self._actors.values()))
        while (now := time.monotonic()) < end:
            while self._due and self._due[0][0] <= now:
                self._answer(*heapq.heappop(self._due))
            while beats[0][0] <= now:
                due, actor = beats.popleft()
                self._beat(actor)
                beats.append((due + HEARTBEAT_S, actor))
            for socket, _ in self._poller.poll(0):
                self._hear(self._actors[socket])
            time.sleep(max(0.0, now + LOOK_S - time.monotonic()))

    def close(self) -> None:
        """Disconnect."""
        self._context.destroy(linger=0)

    def _answer(self, due: float, lease_id: int, actor: LiveActor) -> None:
        now = actor.sent_at[lease_id] = time.monotonic()
        self.seen.late_s.append(now - due)
        actor.socket.send_multipart(self._group.frames(lease_id), zmq.NOBLOCK)

    def _beat(self, actor: LiveActor) -> None:
        actor.beats.append(time.monotonic())
        held, seen_id = tuple(actor.lease_ids), actor.newest_lease_id
        send(actor.socket, ActorHeartbeat(policy_version=0, stats=ActorStats(), lease_ids=held, seen_lease_id=seen_id))

    def _hear(self, actor: LiveActor) -> None:
        while True:
            try:
                message = _decoder.decode(actor.socket.recv_multipart(zmq.NOBLOCK)[1])
            except zmq.Again:
                return
            now = time.monotonic()
            match message:
                case Lease():
                    actor.lease_ids.add(message.lease_id)
                    due = now + SECONDS_PER_GROUP * self._random.uniform(0.5, 1.5)
                    heapq.heappush(self._due, (due, message.lease_id, actor))
                case Ack():
                    actor.lease_ids.discard(message.lease_id)
                    self.seen.ack_s.append(now - actor.sent_at.pop(message.lease_id))
                case LearnerHeartbeat():
                    actor.newest_lease_id = message.newest_lease_id
                    self.seen.beat_s.append(now - actor.beats.popleft())
                case SayHello():
                    self.seen.num_lost += 1
                case Cancel() | Welcome():
                    # Crossed an answer: the heartbeat still had the lease. Or the second answer to a repeated hello.
                    pass
                case _:
                    raise AssertionError(message)


def measure(connection: Connection, trial: Trial) -> list[str]:
    """Run one trial, and return its line of the table."""
    connection.send(trial)
    actors = LiveActors(receive_from(connection), trial)
    try:
        joined_s = actors.join()
        actors.work(WARM_UP_S)
        actors.seen = Seen()
        connection.send("begin")
        started, cpu_before = time.monotonic(), time.process_time()
        actors.work(MEASURED_S)
        wall_s, cpu_s, seen = time.monotonic() - started, time.process_time() - cpu_before, actors.seen
        connection.send("end")
        served: Served = receive_from(connection)
    finally:
        actors.close()
    ack_ms = np.quantile(seen.ack_s, (0.5, 0.99, 1.0)) * 1e3
    return [
        "keys" if trial.keys else "–",
        f"{trial.groups_per_s:,}",
        f"{len(seen.ack_s) / wall_s:,.0f}",
        *(f"{value:,.0f}" for value in ack_ms),
        f"{np.quantile(seen.beat_s, 0.99) * 1e3:,.0f}",
        str(served.events["actor_lost"] + seen.num_lost),
        f"{joined_s:.1f}",
        f"{served.cpu_s / wall_s:.2f}, {cpu_s / wall_s:.2f}",
        f"{np.quantile(seen.late_s, 0.99) * 1e3:,.0f}",
    ]


def main() -> None:
    """Measure every load with and without keys, and print the table."""
    raise_limit()
    num_actors, *loads = [int(argument) for argument in sys.argv[1:]] or [1000]
    rows = []
    with tempfile.TemporaryDirectory(prefix="crowd-benchmark-") as folder, processes(serve, 1) as (connection,):
        keys = make_keys(Path(folder))
        for groups_per_s in loads or [700, 1000, 1500, 3200]:
            for of_all in (None, keys):
                rows.append(measure(connection, Trial(of_all, num_actors, groups_per_s)))
    print_table(
        f"{num_actors:,} actors at one hub, groups of {GROUP_SIZE} x {NUM_TOKENS}, with log, {MEASURED_S:g} s each",
        (
            *("keys", "offered/s", "answered/s", "p50 ack ms", "p99 ack ms", "longest ms", "p99 beat ms", "lost"),
            *("join s", "cores: learner, actors", "late ms"),
        ),
        rows,
    )


if __name__ == "__main__":
    main()
