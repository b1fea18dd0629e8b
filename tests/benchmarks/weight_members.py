"""Weight updates while actors join, and while one dies or stops."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

import torch

from offbeat.actor.weights.receiver import WeightReceiver
from offbeat.learner.weights.actor_versions import Recipient
from offbeat.protocols.messages import LearnerMessage, WeightPull, WeightsCommitted, WeightsStaged, WeightUpdate
from tests.benchmarks.measuring import (
    print_table,
    processes,
    spread,
)
from tests.benchmarks.weight_transfer import (
    LAYOUT,
    NUM_BYTES,
    NUM_ROUNDS,
    TIMEOUT_S,
    actor_name,
    make_publisher,
    open_link,
)


class Actor:
    """An actor as the publisher knows it: its process, and the version it has committed."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self.connection = connection
        self.name = actor_name(rank - 1)
        self.peer = self.name.encode()
        self.policy_version: int | None = None
        self.committed_at: dict[int, float] = {}
        self.num_pulled = 0
        self.befell_at = 0.0
        """Time at which the actor was killed or stopped."""


def act(connection: Connection) -> None:
    """Run an actor: take announcements and send outcomes. On a signal's number, raise it half-way through the next transfer."""
    torch.set_num_threads(1)
    rank = connection.recv()
    receiver = WeightReceiver(LAYOUT, lambda address: open_link(address, rank))
    connection.send("up")
    halfway = receiver.buffer.flat[NUM_BYTES // 2 : NUM_BYTES // 2 + 1]
    signal_number, before = 0, 0
    while True:
        command = connection.recv() if connection.poll(0.001) else None
        if isinstance(command, WeightUpdate | WeightPull):
            receiver.announce(command)
        elif isinstance(command, int):
            signal_number, before = command, int(halfway)
        if signal_number and int(halfway) != before:
            connection.send(time.monotonic())
            mishap, signal_number = signal_number, 0
            os.kill(os.getpid(), mishap)
        outcome = receiver.outcome()
        if outcome is not None:
            connection.send(outcome)
            if not outcome.error:
                receiver.release()


class Stage:
    """A publisher, its actors, and a thread in place of the hub."""

    def __init__(self, connections: list[Connection], *, num_steady: int, timeout_s: float, max_pulls: int) -> None:
        self.actors = [Actor(connection, rank) for rank, connection in enumerate(connections, start=1)]
        self.live = self.actors[:num_steady]
        self.is_churning = False
        """True while an actor that has pulled joins again at once."""
        self.failures: list[BaseException] = []
        self.policy_version = -1
        for rank, connection in enumerate(connections, start=1):
            connection.send(rank)
        for connection in connections:
            assert connection.recv() == "up"
        self.publisher = make_publisher(timeout_s=timeout_s, max_pulls=max_pulls)
        self.publisher.start(self)
        self._is_over = False
        self._courier = threading.Thread(target=self._carry, daemon=True)
        self._courier.start()

    def close(self) -> None:
        """End the publisher's threads and the courier."""
        self.publisher.close()
        self._is_over = True
        self._courier.join()

    def recipients(self) -> list[Recipient]:
        """Return the live actors."""
        return [Recipient(actor.peer, actor.name, actor.policy_version) for actor in self.live]

    def fail(self, error: BaseException) -> None:
        """Keep the error that ended a thread of the publisher."""
        self.failures.append(error)

    def join(self, *actors: Actor) -> None:
        """Let these actors join as new ones."""
        for actor in actors:
            actor.policy_version = None
            self.live = [*(other for other in self.live if other is not actor), actor]
            self.publisher.joined(actor.peer)

    def publish(self) -> float:
        """Write the next version, which differs in every byte, and publish it; return the seconds waited for the buffer."""
        started = time.monotonic()
        with self.publisher.writing() as buffer:
            waited_s = time.monotonic() - started
            self.policy_version += 1
            buffer.flat.fill_(self.policy_version % 255 + 1)
            self.publisher.publish(self.policy_version)
        return waited_s

    def wait(self, claim: Callable[[], bool]) -> None:
        """Wait until the claim is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not claim():
            if self.failures:
                raise self.failures[0]
            assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s"
            time.sleep(0.002)

    def post(self, peer: bytes, message: LearnerMessage) -> None:
        """Send an announcement to an actor."""
        actor = next(actor for actor in self.actors if actor.peer == peer)
        # The pipe of a dead actor is closed at the other end.
        with contextlib.suppress(OSError):
            actor.connection.send(message)

    def _carry(self) -> None:
        connections = {actor.connection: actor for actor in self.actors}
        while not self._is_over:
            for connection in wait(list(connections), 0.05):
                assert isinstance(connection, Connection)
                try:
                    received = connection.recv()
                except (EOFError, OSError):
                    del connections[connection]
                    continue
                self._take(connections[connection], received)

    def _take(self, actor: Actor, received: WeightsStaged | float) -> None:
        if not isinstance(received, WeightsStaged):
            actor.befell_at = received
            return
        version = received.policy_version
        self.publisher.handle(actor.name, received)
        if received.error:
            return
        actor.policy_version = version
        actor.committed_at[version] = time.monotonic()
        self.publisher.handle(actor.name, WeightsCommitted(policy_version=version, stall_s=0.0))
        if received.epoch < 0:
            actor.num_pulled += 1
            if self.is_churning:
                self.join(actor)


STEP_MATMULS = 60
JOIN_S = 3.0
NUM_JOINERS = 4


def train_step(matrix: torch.Tensor) -> None:
    """Stand in for an optimizer step with many short operations, which would show waits for the interpreter's lock."""
    for _ in range(STEP_MATMULS):
        torch.mm(matrix, matrix)


def steps_per_second(stage: Stage, duration_s: float) -> float:
    """Return the rate of a loop that trains and publishes a version after each step."""
    matrix = torch.rand(384, 384)
    num_steps, started = 0, time.monotonic()
    while time.monotonic() - started < duration_s:
        train_step(matrix)
        stage.publish()
        num_steps += 1
        if stage.failures:
            raise stage.failures[0]
    return num_steps / (time.monotonic() - started)


def join() -> None:
    """Measure training while actors join. Learner and actors run on different cores, as if on two machines."""
    torch.set_num_threads(1)
    first, *others = sorted(os.sched_getaffinity(0))
    rows = []
    for max_pulls in (2, NUM_JOINERS):
        os.sched_setaffinity(0, others or {first})
        with processes(act, 1 + NUM_JOINERS) as connections:
            os.sched_setaffinity(0, {first})
            stage = Stage(connections, num_steady=1, timeout_s=TIMEOUT_S, max_pulls=max_pulls)
            steady, *joiners = stage.actors
            stage.publish()
            stage.wait(lambda: steady.policy_version == 0)  # noqa: B023  used before the next round
            rates: dict[int, list[float]] = {0: [], NUM_JOINERS: []}
            pulled: list[float] = []
            for round_index in range(NUM_ROUNDS + 1):
                for num_joiners, measured in rates.items():
                    before = sum(joiner.num_pulled for joiner in joiners)
                    stage.is_churning = True
                    stage.join(*joiners[:num_joiners])
                    rate = steps_per_second(stage, JOIN_S)
                    stage.is_churning = False
                    # The first round allocates buffers, makes connections, and is not counted.
                    if round_index:
                        measured.append(rate)
                    if round_index and num_joiners:
                        num_pulls = sum(joiner.num_pulled for joiner in joiners) - before
                        pulled.append(num_pulls * NUM_BYTES / 1e9 / JOIN_S)
                    stage.wait(lambda: not stage.publisher.problems())  # noqa: B023
                    stage.live = [steady]
            ratios = [with_ / without for with_, without in zip(rates[NUM_JOINERS], rates[0], strict=True)]
            rows.append([str(max_pulls), spread(rates[0]), spread(rates[NUM_JOINERS]), spread(ratios), spread(pulled)])
            stage.close()
    print_table(
        f"Training steps a second, {NUM_BYTES >> 20} MB published after each, one actor in the collective; and "
        f"{NUM_JOINERS} newcomers that pull without end: median (min–max)",
        ("pulls at once", "steps/s, no newcomer", f"steps/s, {NUM_JOINERS} newcomers", "ratio", "pulled, GB/s"),
        rows,
    )


DEATH_TIMEOUT_S = 5.0
NUM_MEMBERS = 3


def death() -> None:
    """Measure updates while a member dies or stops, and print the table."""
    torch.set_num_threads(1)
    rows = []
    for mishap in (signal.SIGKILL, signal.SIGSTOP):
        times = [_die(mishap) for _ in range(NUM_ROUNDS)]
        rows.append([mishap.name, *(spread([trial[index] for trial in times]) for index in range(3))])
    print_table(
        f"Seconds from a member's death or stop in mid-broadcast ({NUM_MEMBERS} members, {NUM_BYTES >> 20} MB, "
        f"weights.timeout_s {DEATH_TIMEOUT_S:g}, the hub not noticing): median (min–max)",
        ("", "to the next snapshot's buffer", "to that update at all others", "an undisturbed update"),
        rows,
    )


def _die(mishap: signal.Signals) -> tuple[float, float, float]:
    with processes(act, NUM_MEMBERS) as connections:
        stage = Stage(connections, num_steady=NUM_MEMBERS, timeout_s=DEATH_TIMEOUT_S, max_pulls=2)
        *survivors, victim = stage.actors
        started = time.monotonic()
        for version in range(2):
            started = time.monotonic()
            stage.publish()
            stage.wait(lambda: all(actor.policy_version == version for actor in stage.actors))  # noqa: B023
        undisturbed_s = time.monotonic() - started
        victim.connection.send(int(mishap))
        stage.publish()
        stage.wait(lambda: victim.befell_at > 0)
        stage.publish()
        written_at = time.monotonic()
        stage.wait(lambda: all(actor.policy_version == stage.policy_version for actor in survivors))
        recovered_at = max(actor.committed_at[stage.policy_version] for actor in survivors)
        stage.close()
    return written_at - victim.befell_at, recovered_at - victim.befell_at, undisturbed_s
