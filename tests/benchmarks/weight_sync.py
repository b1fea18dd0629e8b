"""What a weight update costs: in a quick-start run, and for a large buffer against memcpy and a bare gloo broadcast.

    python -m tests.benchmarks.weight_sync run         # `offbeat train` on the quick start: stalls, waits, shares; 1 minute
    python -m tests.benchmarks.weight_sync transfer    # 256 MB to one and to two receivers; 20 seconds

`transfer` measures from the moment the weights are ready to the moment the last receiver has said that it has all of them:

    memcpy      the bytes copied inside this process, once for each receiver, by one thread
    gloo        one `broadcast` of the whole buffer in a process group that exists already
    gloo 8 MB   the same in pieces of the publisher's size
    offbeat     WeightPublisher -> announcement -> ready, go -> broadcast -> WeightReceiver
"""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, cast

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import BroadcastOptions, ProcessGroup, ProcessGroupGloo

from actor.weight_receiver import WeightReceiver
from common.environment import prepare_environment
from common.weights import make_layout
from learner.weight_publisher import WeightPublisher
from protocols.messages import LearnerMessage, WeightsStaged, WeightUpdate
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
        "deploy/configs/quickstart.toml", f"train.num_steps={RUN_STEPS}", "hub.heartbeat_s=0.2", timeout_s=RUN_TIMEOUT_S
    )
    steps = of_run.of_kind("step")
    print_table(
        f"Quick start, {RUN_STEPS} steps, a weight update after each: median (min–max)",
        ("milliseconds", ""),
        [
            ["step", _milliseconds([step["time/step_s"] for step in steps[1:]])],
            ["generation stalled for an update (commit)", _milliseconds([row["stall_s"] for row in of_run.of_kind("commit")])],
            ["update, announced to received (publish)", _milliseconds([row["publish_s"] for row in of_run.of_kind("weights")])],
            ["learner copies its weights and scores the canary", _milliseconds([step["time/snapshot_s"] for step in steps])],
            ["learner waits for the update before", _milliseconds([step["time/publish_wait_s"] for step in steps])],
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
    last_beats = {row["actor"]: row["seconds"]["generate"] for row in of_run.of_kind("actor")}
    return sum(last_beats.values())


def _stalled_s(of_run: OffbeatRun) -> float:
    return sum(row["stall_s"] for row in of_run.of_kind("commit"))


def _stall_share(of_run: OffbeatRun) -> float:
    """Of the time of all actors between first and last step."""
    steps = of_run.of_kind("step")
    first_time, last_time = steps[0]["time"], steps[-1]["time"]
    stalled_s = sum(row["stall_s"] for row in of_run.of_kind("commit") if first_time < row["time"] <= last_time)
    num_actors = len({row["actor"] for row in of_run.of_kind("actor")})
    return stalled_s / (last_time - first_time) / num_actors


def _generate_s_per_step(of_run: OffbeatRun) -> list[float]:
    """For every actor, its sampling time between first and last step, per step."""
    steps = of_run.of_kind("step")
    step_s = (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)
    return [share * step_s for share in actor_shares(of_run)["generate"]]


# The transfer

NUM_ROUNDS = 5
NUM_BYTES = 256 << 20
BUCKET_BYTES = 8 << 20
NUM_RECEIVERS = (1, 2)
TIMEOUT_S = 60.0
LAYOUT = make_layout([("weights", (NUM_BYTES // 4,))], torch.float32)


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
    receiver = WeightReceiver(LAYOUT)
    flat = receiver.buffer.flat
    connection.send("up")
    while True:
        # As often as an actor that has nothing to sample looks for a transfer that is about to end.
        command = connection.recv() if connection.poll(0.002) else None
        if isinstance(command, WeightUpdate):
            receiver.announce(command)
        elif isinstance(command, Broadcast):
            broadcast(groups[command.num_receivers], flat, command.bucket_bytes)
            connection.send(Received(-1, -1, int(flat[-1]), time.process_time()))
        outcome = receiver.outcome()
        if outcome is not None:
            update = outcome.update
            connection.send(Received(update.policy_version, update.epoch, int(flat[-1]), time.process_time(), outcome.error))
            receiver.release()


class Fleet:
    """The publisher's process: publisher, bare groups, and the connections to the receivers in place of the hub."""

    def __init__(self, connections: list[Connection], store: TCPStore) -> None:
        self._connections = connections
        self._cpu_s = [0.0] * len(connections)
        self._versions = [-1] * len(connections)
        self._num_members = 0
        self._value = 0
        """Last byte of the buffer that is being sent."""
        self._failures: list[BaseException] = []
        self._policy_version = 0
        self._copy = torch.zeros(NUM_BYTES, dtype=torch.uint8)
        for rank, connection in enumerate(connections, start=1):
            connection.send(rank)
        self._groups = bare_groups(store, 0)
        for connection in connections:
            assert connection.recv() == "up"
        self._publisher = WeightPublisher(
            layout=LAYOUT,
            members=self._members,
            post=self._post,
            record=lambda kind, **row: None,
            host="127.0.0.1",
            listen_on="127.0.0.1",
            port=0,
            backend="gloo",
            timeout_s=TIMEOUT_S,
            bucket_bytes=BUCKET_BYTES,
            on_failure=self._failures.append,
        )
        self._publisher.start()

    def close(self) -> None:
        """End the publisher's thread."""
        self._publisher.close()

    def memcpy(self, num_receivers: int) -> None:
        """Copy the buffer inside this process."""
        for _ in range(num_receivers):
            self._copy.copy_(self._publisher.buffer.flat)

    def gloo(self, num_receivers: int, bucket_bytes: int) -> None:
        """Broadcast the buffer in the bare group."""
        for connection in self._connections[:num_receivers]:
            connection.send(Broadcast(num_receivers, bucket_bytes))
        broadcast(self._groups[num_receivers], self._publisher.buffer.flat, bucket_bytes)
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

    def _members(self) -> list[tuple[bytes, str, int]]:
        return [(_name(index).encode(), _name(index), self._versions[index]) for index in range(self._num_members)]

    def _post(self, peer: bytes, message: LearnerMessage) -> None:
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
            # The first round makes connections and is not counted.
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


def main() -> None:
    """The parts named on the command line; both if none is."""
    prepare_environment()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    parts = {"run": run, "transfer": transfer}
    for part in sys.argv[1:] or parts:
        parts[part]()


if __name__ == "__main__":
    main()
