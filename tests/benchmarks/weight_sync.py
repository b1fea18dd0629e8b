"""What a weight update costs: in a quick-start run, against memcpy and a bare gloo broadcast, and when actors come or die.

    python -m tests.benchmarks.weight_sync run         # `offbeat train` on the quick start: stalls, waits, shares; 1 minute
    python -m tests.benchmarks.weight_sync transfer    # 256 MB to one and to two receivers; 20 seconds
    python -m tests.benchmarks.weight_sync checksum    # 256 MB, against memcpy
    python -m tests.benchmarks.weight_sync join        # optimizer steps a second while 4 newcomers pull, against none; 1 minute
    python -m tests.benchmarks.weight_sync death       # a member is killed, or stopped, in mid-broadcast; 1 minute

`transfer` measures from the moment the weights are ready to the moment the last receiver has said that it has all of them:

    memcpy      the bytes copied inside this process, once for each receiver, by one thread
    gloo        one `broadcast` of the whole buffer in a process group that exists already
    gloo 8 MB   the same in pieces of the publisher's size
    offbeat     WeightPublisher -> announcement -> checksum -> ready, go -> broadcast -> WeightReceiver -> checksum
"""

import contextlib
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, cast

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import BroadcastOptions, ProcessGroup, ProcessGroupGloo

from offbeat.actor.weight_receiver import Outcome, WeightReceiver
from offbeat.common.environment import prepare_environment
from offbeat.common.rows import ActorRow, CommitRow, StepRow, WeightsRow
from offbeat.common.weights import checksum as checksum_of
from offbeat.common.weights import make_layout
from offbeat.learner.weights.publisher import WeightPublisher
from offbeat.learner.weights.standings import Recipient
from offbeat.learner.weights.transport import Transport
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.messages import LearnerMessage, WeightPull, WeightsCommitted, WeightsStaged, WeightUpdate
from tests.benchmarks.measuring import (
    Cost,
    OffbeatRun,
    actor_shares,
    learner_shares,
    print_table,
    processes,
    run_offbeat,
    spread,
)

# The quick start

RUN_STEPS = 100
RUN_TIMEOUT_S = 170.0


def run() -> None:
    """One quick-start run, and what its rows say about weights."""
    of_run = run_offbeat(
        "deploy/quickstart/quickstart.toml", f"train.num_steps={RUN_STEPS}", "hub.heartbeat_s=0.2", timeout_s=RUN_TIMEOUT_S
    )
    steps = of_run.of_kind(StepRow)
    print_table(
        f"Quick start, {RUN_STEPS} steps, a weight update after each: median (min–max)",
        ("milliseconds", ""),
        [
            ["step", _milliseconds([step.measured("time/step_s") for step in steps[1:]])],
            ["generation stalled for an update (commit)", _milliseconds([row.stall_s for row in of_run.of_kind(CommitRow)])],
            ["update, announced to received (publish)", _milliseconds([row.publish_s for row in of_run.of_kind(WeightsRow)])],
            [
                "learner copies its weights and scores the canary",
                _milliseconds([step.measured("time/snapshot_s") for step in steps]),
            ],
            ["learner waits for the update before", _milliseconds([step.measured("time/publish_wait_s") for step in steps])],
            ["an actor's sampling in a step (baseline)", _milliseconds(_generate_s_per_step(of_run))],
        ],
    )
    print(
        f"\nstall / sampling: {_stalled_s(of_run) / _generating_s(of_run):.2%}; of an actor's time: {_stall_share(of_run):.2%}"
    )
    print(f"whole command: {of_run.cost.wall_s:.0f} s, {of_run.cost.cpu_s:.0f} CPU seconds")
    learner = [["learner", name, f"{share:.1%}"] for name, share in learner_shares(of_run).items()]
    actors = [["actors", name, _percent(shares)] for name, shares in actor_shares(of_run).items()]
    print_table("Shares of time, first to last step; commit_weights has the canary in it", ("", "", "share"), learner + actors)


def _milliseconds(seconds: list[float]) -> str:
    return spread([1000 * value for value in seconds], 1)


def _percent(shares: list[float]) -> str:
    return " and ".join(f"{share:.1%}" for share in sorted(shares))


def _generating_s(of_run: OffbeatRun) -> float:
    """Of all actors, over the whole run."""
    last_beats = {row.actor: row.seconds["generate"] for row in of_run.of_kind(ActorRow)}
    return sum(last_beats.values())


def _stalled_s(of_run: OffbeatRun) -> float:
    return sum(row.stall_s for row in of_run.of_kind(CommitRow))


def _stall_share(of_run: OffbeatRun) -> float:
    """Of the time of all actors between first and last step."""
    steps = of_run.of_kind(StepRow)
    first_time, last_time = steps[0].time, steps[-1].time
    stalled_s = sum(row.stall_s for row in of_run.of_kind(CommitRow) if first_time < row.time <= last_time)
    num_actors = len({row.actor for row in of_run.of_kind(ActorRow)})
    return stalled_s / (last_time - first_time) / num_actors


def _generate_s_per_step(of_run: OffbeatRun) -> list[float]:
    """For every actor, its sampling time between first and last step, per step."""
    steps = of_run.of_kind(StepRow)
    step_s = (steps[-1].time - steps[0].time) / (len(steps) - 1)
    return [share * step_s for share in actor_shares(of_run)["generate"]]


# The transfer

NUM_ROUNDS = 5
NUM_BYTES = 256 << 20
BUCKET_BYTES = 8 << 20
NUM_RECEIVERS = (1, 2)
TIMEOUT_S = 60.0
LAYOUT = make_layout([("weights", (NUM_BYTES // 4,))], torch.float32)


def open_hub() -> Hub:
    """The weight server's socket."""
    return Hub("tcp://127.0.0.1:0", max_message_bytes=1 << 16)


def open_link(address: str, rank: int) -> Link:
    """A puller's socket."""
    return Link(address, identity=_name(rank - 1).encode(), max_message_bytes=2 * BUCKET_BYTES)


def make_publisher(*, timeout_s: float = TIMEOUT_S, max_pulls: int = 2) -> WeightPublisher:
    """Return a publisher of `LAYOUT` over gloo, with the default sizes."""
    return WeightPublisher(
        layout=LAYOUT,
        transport=Transport(
            host="127.0.0.1",
            listen_on="127.0.0.1",
            backend="gloo",
            port=0,
            timeout_s=timeout_s,
            bucket_bytes=BUCKET_BYTES,
            chunk_bytes=BUCKET_BYTES,
            max_pulls=max_pulls,
        ),
        open_hub=open_hub,
        max_pull_lag=lambda: 4,
        record=lambda row: None,
    )


class Broadcast(NamedTuple):
    """Receive the buffer in the bare group of this many receivers."""

    num_receivers: int
    bucket_bytes: int


class Received(NamedTuple):
    """What a receiver says at the end of a transfer."""

    policy_version: int
    epoch: int
    value: int
    """The buffer's last byte."""
    cpu_s: float
    """Of its process, since it started."""
    error: str = ""


def bare_groups(store: TCPStore, rank: int) -> dict[int, ProcessGroup]:
    """Process groups of 1, 2, ... receivers beside rank 0, by that number; a receiver is in those that reach its rank."""
    groups = {}
    for num_receivers in NUM_RECEIVERS:
        if rank <= num_receivers:
            prefix = PrefixStore(str(num_receivers), store)
            group = ProcessGroupGloo(prefix, rank, num_receivers + 1, timedelta(seconds=TIMEOUT_S))
            groups[num_receivers] = cast(ProcessGroup, group)
    return groups


def broadcast(group: ProcessGroup, flat: torch.Tensor, bucket_bytes: int) -> None:
    """From rank 0, piece by piece."""
    options = BroadcastOptions()
    options.rootRank = 0
    for bucket in flat.split(bucket_bytes):
        group.broadcast([bucket], options).wait()


def receive(connection: Connection, port: int) -> None:
    """A receiver's process: commands in, `Received` out. The first message is its rank."""
    torch.set_num_threads(1)
    rank = connection.recv()
    groups = bare_groups(TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), rank)
    receiver = WeightReceiver(LAYOUT, lambda address: open_link(address, rank))
    flat = receiver.buffer.flat
    connection.send("up")
    while True:
        # As often as an actor that has nothing to sample looks for a transfer that is about to end.
        command = connection.recv() if connection.poll(0.002) else None
        if isinstance(command, WeightUpdate | WeightPull):
            receiver.announce(command)
        elif isinstance(command, Broadcast):
            broadcast(groups[command.num_receivers], flat, command.bucket_bytes)
            connection.send(Received(-1, -1, int(flat[-1]), time.process_time()))
        outcome = receiver.outcome()
        if outcome is not None:
            epoch = outcome.as_message().epoch
            connection.send(Received(outcome.policy_version, epoch, int(flat[-1]), time.process_time(), outcome.error or ""))
            receiver.release()


class Fleet:
    """The publisher's process: publisher, bare groups, and the connections to the receivers in place of the hub."""

    def __init__(self, connections: list[Connection], store: TCPStore) -> None:
        self._connections = connections
        self._cpu_s = [0.0] * len(connections)
        self._versions: list[int | None] = [None] * len(connections)
        self._num_members = 0
        self._value = 0
        """Last byte of the buffer that is being sent."""
        self._failures: list[BaseException] = []
        self._policy_version = 0
        self._copy = torch.zeros(NUM_BYTES, dtype=torch.uint8)
        self._flat = self._copy
        """What is in the publisher's buffer."""
        for rank, connection in enumerate(connections, start=1):
            connection.send(rank)
        self._groups = bare_groups(store, 0)
        for connection in connections:
            assert connection.recv() == "up"
        self._publisher = make_publisher()
        self._publisher.start(self)

    def close(self) -> None:
        """End the publisher's thread."""
        self._publisher.close()

    def memcpy(self, num_receivers: int) -> None:
        """Copy the buffer inside this process."""
        for _ in range(num_receivers):
            self._copy.copy_(self._flat)

    def gloo(self, num_receivers: int, bucket_bytes: int) -> None:
        """Broadcast the buffer in the bare group."""
        for connection in self._connections[:num_receivers]:
            connection.send(Broadcast(num_receivers, bucket_bytes))
        broadcast(self._groups[num_receivers], self._flat, bucket_bytes)
        self._await(num_receivers)

    def offbeat(self, num_receivers: int) -> None:
        """Publish the buffer to so many actors."""
        self._policy_version += 1
        self._num_members = num_receivers
        self._publisher.publish(self._policy_version)
        self._await(num_receivers)

    def measure(self, transfer: Callable[[int], None], num_receivers: int, value: int) -> Cost:
        """One transfer of a buffer whose last byte is `value`."""
        with self._publisher.writing() as buffer:
            buffer.flat.fill_(value)
        self._flat = buffer.flat
        self._value = value
        receivers_cpu_s, cpu_before, started = sum(self._cpu_s), time.process_time(), time.monotonic()
        transfer(num_receivers)
        wall_s, cpu_s = time.monotonic() - started, time.process_time() - cpu_before
        return Cost(wall_s, cpu_s + sum(self._cpu_s) - receivers_cpu_s)

    def _await(self, num_receivers: int) -> None:
        waiting = list(self._connections[:num_receivers])
        deadline = time.monotonic() + TIMEOUT_S
        while waiting:
            for connection in wait(waiting, 0.1):
                assert isinstance(connection, Connection)
                self._take(connection)
                waiting.remove(connection)
            if self._failures:
                raise self._failures[0]
            assert time.monotonic() < deadline, f"{len(waiting)} receivers have no weights after {TIMEOUT_S:g} s"

    def _take(self, connection: Connection) -> None:
        received: Received = connection.recv()
        assert not received.error, received.error
        assert received.value == self._value, f"a receiver has {received.value}, not {self._value}"
        index = self._connections.index(connection)
        self._cpu_s[index] = received.cpu_s
        if received.policy_version >= 0:
            self._versions[index] = received.policy_version
            staged = WeightsStaged(policy_version=received.policy_version, epoch=received.epoch)
            self._publisher.handle(_name(index), staged)

    def recipients(self) -> list[Recipient]:
        """Return the receivers of this round."""
        return [Recipient(_name(index).encode(), _name(index), self._versions[index]) for index in range(self._num_members)]

    def fail(self, error: BaseException) -> None:
        """Keep what ended a thread of the publisher."""
        self._failures.append(error)

    def post(self, peer: bytes, message: LearnerMessage) -> None:
        """Send an announcement to a receiver."""
        index = int(peer.decode().rpartition("-")[2])
        self._connections[index].send(message)


def _name(index: int) -> str:
    return f"actor-{index}"


def transfer() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rows = []
    with processes(receive, max(NUM_RECEIVERS), store.port) as connections:
        fleet = Fleet(connections, store)
        variants: dict[str, Callable[[int], None]] = {
            "memcpy": fleet.memcpy,
            "gloo": lambda num_receivers: fleet.gloo(num_receivers, NUM_BYTES),
            "gloo 8 MB": lambda num_receivers: fleet.gloo(num_receivers, BUCKET_BYTES),
            "offbeat": fleet.offbeat,
        }
        for num_receivers in NUM_RECEIVERS:
            costs: dict[str, list[Cost]] = {variant: [] for variant in variants}
            # The first round makes connections, and one newcomer pulls in it; it is not counted.
            for round_index in range(NUM_ROUNDS + 1):
                for index, (variant, transfer_to) in enumerate(variants.items()):
                    value = (len(variants) * round_index + index) % 255 + 1
                    cost = fleet.measure(transfer_to, num_receivers, value)
                    if round_index:
                        costs[variant].append(cost)
            rows += [_transfer_row(num_receivers, variant, costs) for variant in variants]
        fleet.close()
    print_table(
        f"{NUM_BYTES >> 20} MB of weights, {NUM_ROUNDS} interleaved rounds: median (min–max)",
        ("receivers", "variant", "ms", "GB/s", "CPU ms", "time / memcpy", "time / gloo"),
        rows,
    )


def _transfer_row(num_receivers: int, variant: str, costs: dict[str, list[Cost]]) -> list[str]:
    """GB/s of all receivers together; ratios to the same round."""
    of_variant = costs[variant]
    gigabytes = NUM_BYTES * num_receivers / 1e9
    return [
        str(num_receivers),
        variant,
        spread([cost.wall_s * 1000 for cost in of_variant], 0),
        spread([gigabytes / cost.wall_s for cost in of_variant]),
        spread([cost.cpu_s * 1000 for cost in of_variant], 0),
        _ratios(of_variant, costs["memcpy"]),
        _ratios(of_variant, costs["gloo"]),
    ]


def _ratios(costs: list[Cost], baseline: list[Cost]) -> str:
    return spread([cost.wall_s / other.wall_s for cost, other in zip(costs, baseline, strict=True)])


# The checksum


def checksum() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    flat = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8)
    copy = torch.zeros_like(flat)
    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: copy.copy_(flat),
        "offbeat.common.weights.checksum": lambda: checksum_of(flat),
        "zlib.crc32": lambda: zlib.crc32(flat.numpy().data),
    }
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(2 * NUM_ROUNDS):
        for way, run_once in ways.items():
            started = time.monotonic()
            run_once()
            speeds[way].append(NUM_BYTES / 1e9 / (time.monotonic() - started))
    rows = [[way, spread(speeds[way])] for way in ways]
    print_table(f"{NUM_BYTES >> 20} MB, one thread: median (min–max)", ("", "GB/s"), rows)


# Actors that come, and actors that die


class Actor:
    """An actor as the publisher knows it: its process, and the version that it has committed."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self.connection = connection
        self.name = _name(rank - 1)
        self.peer = self.name.encode()
        self.policy_version: int | None = None
        self.committed_at: dict[int, float] = {}
        self.num_pulled = 0
        self.befell_at = 0.0
        """When it was killed or stopped."""


def act(connection: Connection) -> None:
    """An actor's process: announcements in, outcomes out. A signal's number: send it to itself half-way through the next."""
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
    """A publisher, its actors, and a thread in the hub's place."""

    def __init__(self, connections: list[Connection], *, num_steady: int, timeout_s: float, max_pulls: int) -> None:
        self.actors = [Actor(connection, rank) for rank, connection in enumerate(connections, start=1)]
        self.live = self.actors[:num_steady]
        self.is_churning = False
        """Whoever has pulled joins again at once."""
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
        """Keep what ended a thread of the publisher."""
        self.failures.append(error)

    def join(self, *actors: Actor) -> None:
        """Have these actors join as new ones."""
        for actor in actors:
            actor.policy_version = None
            self.live = [*(other for other in self.live if other is not actor), actor]
            self.publisher.joined(actor.peer)

    def publish(self) -> float:
        """Write the next version, every byte another than before; seconds waited for the buffer."""
        started = time.monotonic()
        with self.publisher.writing() as buffer:
            waited_s = time.monotonic() - started
            self.policy_version += 1
            buffer.flat.fill_(self.policy_version % 255 + 1)
            self.publisher.publish(self.policy_version)
        return waited_s

    def wait(self, claim: Callable[[], bool]) -> None:
        """Until it is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not claim():
            if self.failures:
                raise self.failures[0]
            assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s"
            time.sleep(0.002)

    def post(self, peer: bytes, message: LearnerMessage) -> None:
        """Send an announcement to an actor."""
        actor = next(actor for actor in self.actors if actor.peer == peer)
        # A dead one's pipe is closed at the other end.
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

    def _take(self, actor: Actor, received: Outcome | float) -> None:
        if not isinstance(received, Outcome):
            actor.befell_at = received
            return
        version, epoch, error = received
        self.publisher.handle(actor.name, received.as_message())
        if error:
            return
        actor.policy_version = version
        actor.committed_at[version] = time.monotonic()
        self.publisher.handle(actor.name, WeightsCommitted(policy_version=version, stall_s=0.0))
        if epoch is None:
            actor.num_pulled += 1
            if self.is_churning:
                self.join(actor)


STEP_MATMULS = 60
JOIN_S = 3.0
NUM_JOINERS = 4


def train_step(matrix: torch.Tensor) -> None:
    """Stands in for an optimizer step: many short operations, so that waiting for the interpreter's lock would show."""
    for _ in range(STEP_MATMULS):
        torch.mm(matrix, matrix)


def steps_per_second(stage: Stage, duration_s: float) -> float:
    """Of a loop that trains and publishes a version after each step."""
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
    """Measure and print. The learner keeps to one core and the actors to the others, as if on machines of their own."""
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
                    # The first round makes buffers and connections and is not counted.
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
        ("weights.max_pulls", "steps/s, no newcomer", f"steps/s, {NUM_JOINERS} newcomers", "ratio", "pulled, GB/s"),
        rows,
    )


DEATH_TIMEOUT_S = 5.0
NUM_MEMBERS = 3


def death() -> None:
    """Measure and print."""
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


def main() -> None:
    """The parts named on the command line; all if none is."""
    prepare_environment()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    parts = {"run": run, "transfer": transfer, "checksum": checksum, "join": join, "death": death}
    for part in sys.argv[1:] or parts:
        parts[part]()


if __name__ == "__main__":
    main()
