"""A transfer of weights, from the publisher to its receivers, against memcpy and a bare gloo broadcast."""

import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Literal, NamedTuple, cast

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import BroadcastOptions, ProcessGroup, ProcessGroupGloo

from offbeat.actor.weights.receiver import WeightReceiver
from offbeat.common.weights.flat import make_layout
from offbeat.learner.weights.actor_versions import Recipient
from offbeat.learner.weights.publisher import WeightPublisher
from offbeat.learner.weights.transport import Transport
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.messages import LearnerMessage, WeightPull, WeightsStaged, WeightUpdate
from tests.benchmarks.measuring import (
    Cost,
    print_table,
    processes,
    spread,
)

NUM_ROUNDS = 5
NUM_BYTES = 256 << 20
BUCKET_BYTES = 8 << 20
NUM_RECEIVERS = (1, 2)
TIMEOUT_S = 60.0
LAYOUT = make_layout([("weights", (NUM_BYTES // 4,))], torch.float32)


def open_hub() -> Hub:
    """Return the weight server's socket."""
    return Hub("tcp://127.0.0.1:0", max_message_bytes=1 << 16)


def open_link(address: str, rank: int) -> Link:
    """Return the socket of a receiver that pulls."""
    return Link(address, identity=actor_name(rank - 1).encode(), max_message_bytes=2 * BUCKET_BYTES)


def make_publisher(
    backend: Literal["gloo", "pull"] = "gloo", *, timeout_s: float = TIMEOUT_S, max_pulls: int = 2
) -> WeightPublisher:
    """Return a publisher of `LAYOUT` with the default sizes."""
    return WeightPublisher(
        layout=LAYOUT,
        transport=Transport(
            host="127.0.0.1",
            listen_on="127.0.0.1",
            backend=backend,
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
    """Command to receive the buffer in the bare group of this many receivers."""

    num_receivers: int
    bucket_bytes: int


class Received(NamedTuple):
    """A receiver's report at the end of a transfer."""

    policy_version: int
    epoch: int
    value: int
    """The buffer's last byte."""
    cpu_s: float
    """CPU seconds of the receiver's process since its start."""
    error: str = ""


def bare_groups(store: TCPStore, rank: int) -> dict[int, ProcessGroup]:
    """Return the process groups that contain this rank, by number of receivers; rank 0 sends in all of them."""
    groups = {}
    for num_receivers in NUM_RECEIVERS:
        if rank <= num_receivers:
            prefix = PrefixStore(str(num_receivers), store)
            group = ProcessGroupGloo(prefix, rank, num_receivers + 1, timedelta(seconds=TIMEOUT_S))
            groups[num_receivers] = cast(ProcessGroup, group)
    return groups


def broadcast(group: ProcessGroup, flat: torch.Tensor, bucket_bytes: int) -> None:
    """Broadcast the buffer from rank 0, piece by piece."""
    options = BroadcastOptions()
    options.rootRank = 0
    for bucket in flat.split(bucket_bytes):
        group.broadcast([bucket], options).wait()


def receive(connection: Connection, port: int) -> None:
    """Run a receiver: take its rank, then commands; send a `Received` after each transfer."""
    torch.set_num_threads(1)
    rank = connection.recv()
    groups = bare_groups(TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), rank)
    receiver = WeightReceiver(LAYOUT, lambda address: open_link(address, rank))
    flat = receiver.buffer.flat
    connection.send("up")
    while True:
        # An actor without work looks for the end of a transfer as often.
        command = connection.recv() if connection.poll(0.002) else None
        if isinstance(command, WeightUpdate | WeightPull):
            receiver.announce(command)
        elif isinstance(command, Broadcast):
            broadcast(groups[command.num_receivers], flat, command.bucket_bytes)
            connection.send(Received(-1, -1, int(flat[-1]), time.process_time()))
        outcome = receiver.outcome()
        if outcome is not None:
            connection.send(
                Received(outcome.policy_version, outcome.epoch, int(flat[-1]), time.process_time(), outcome.error or "")
            )
            receiver.release()


class Fleet:
    """A publisher, bare process groups, and connections to the receivers in place of the hub."""

    def __init__(self, connections: list[Connection], store: TCPStore, backend: Literal["gloo", "pull"]) -> None:
        self._connections = connections
        self._backend = backend
        self._cpu_s = [0.0] * len(connections)
        self._versions: list[int | None] = [None] * len(connections)
        self._num_members = 0
        self._value = 0
        """Last byte of the buffer being sent."""
        self._failures: list[BaseException] = []
        self._policy_version = 0
        self._copy = torch.zeros(NUM_BYTES, dtype=torch.uint8)
        self._flat = self._copy
        """The publisher's buffer, as bytes."""
        for rank, connection in enumerate(connections, start=1):
            connection.send(rank)
        self._groups = bare_groups(store, 0)
        for connection in connections:
            assert connection.recv() == "up"
        self._publisher = make_publisher(backend)
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
        """Publish the buffer to `num_receivers` receivers."""
        self._policy_version += 1
        self._num_members = num_receivers
        self._publisher.publish(self._policy_version)
        self._await(num_receivers)

    def measure(self, transfer: Callable[[int], None], num_receivers: int, value: int) -> Cost:
        """Return the cost of one transfer of a buffer filled with `value`."""
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
            self._publisher.handle(actor_name(index), staged)

    def recipients(self) -> list[Recipient]:
        """Return the receivers of this round."""
        return [
            Recipient(actor_name(index).encode(), actor_name(index), self._versions[index])
            for index in range(self._num_members)
        ]

    def fail(self, error: BaseException) -> None:
        """Keep the error that ended a thread of the publisher."""
        self._failures.append(error)

    def post(self, peer: bytes, message: LearnerMessage) -> None:
        """Send an announcement to a receiver."""
        assert self._backend == "gloo" or isinstance(message, WeightPull), message
        index = int(peer.decode().rpartition("-")[2])
        self._connections[index].send(message)


def transfer(backend: Literal["gloo", "pull"]) -> None:
    """Measure all variants and print the table."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rows = []
    with processes(receive, max(NUM_RECEIVERS), store.port) as connections:
        fleet = Fleet(connections, store, backend)
        variants: dict[str, Callable[[int], None]] = {
            "memcpy": fleet.memcpy,
            "gloo": lambda num_receivers: fleet.gloo(num_receivers, NUM_BYTES),
            "gloo 8 MB": lambda num_receivers: fleet.gloo(num_receivers, BUCKET_BYTES),
            "offbeat": fleet.offbeat,
        }
        for num_receivers in NUM_RECEIVERS:
            costs: dict[str, list[Cost]] = {variant: [] for variant in variants}
            # The first round is not counted: connections are made, and a newcomer pulls.
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
    """Return one line of the table: GB/s of all receivers together, and ratios to variants of the same round."""
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


def actor_name(index: int) -> str:
    return f"actor-{index}"
