"""How fast rollouts travel from an actor to the learner, against a bare TCP socket that moves the same bytes.

    python -m tests.benchmarks.transport    # 1 minute

This process is the actor, another one the learner. The actor may have `WINDOW` groups unanswered, in every variant:

    tcp         sendall of the message's bytes as one block; recv_into of as many; an answer of an acknowledgement's size
    wire        encode -> Link -> Hub -> decode; each group is acknowledged
    dispatcher  the same with leases: HubThread, every check of the Dispatcher, ledger, buffer, batches taken and finished

Not in it: metrics rows (a learner writes one per group).
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from common.config import RolloutSection, TaskSection
from learner.hub_thread import HubThread
from protocols.channels import Hub, Link
from protocols.messages import (
    Ack,
    CompletionMeta,
    Credit,
    GroupDone,
    Hello,
    Lease,
    Segment,
    WeightsCommitted,
)
from protocols.wire import FromActor, FromLearner, encode, logprobs, token_ids
from tests.benchmarks.measuring import Cost, print_table, processes, spread
from tests.benchmarks.stand_ins import ENGINE, VOCABULARY_SIZE, make_dispatcher

NUM_ROUNDS = 5
GROUP_SIZE = 8
NUM_GROUPS = {64: 6400, 1024: 3200, 4096: 1280}
"""Groups of one trial, by tokens of a completion."""
WINDOW = 64
GROUPS_PER_STEP = 32
MAX_MESSAGE_BYTES = 1 << 28
PATIENCE_S = 20.0
LOOPBACK = "tcp://127.0.0.1:0"


class Payload(NamedTuple):
    """A group as an engine leaves it."""

    completions: tuple[CompletionMeta, ...]
    token_ids: np.ndarray
    """int32 `[GROUP_SIZE * num_tokens]`."""
    behavior_logprobs: np.ndarray
    """float32, the same shape."""

    def message(self, lease_id: int) -> GroupDone:
        """The answer to this lease."""
        return GroupDone(lease_id=lease_id, completions=self.completions, generate_s=1.0)


class Sizes(NamedTuple):
    """Bytes on the wire."""

    group: int
    ack: int


def make_payload(num_tokens: int) -> Payload:
    """A group whose completions have `num_tokens` tokens each."""
    generator = np.random.default_rng(num_tokens)
    num_all = GROUP_SIZE * num_tokens
    return Payload(
        completions=tuple(CompletionMeta(num_tokens, "stop", 1.0, (Segment(0, 0),)) for _ in range(GROUP_SIZE)),
        token_ids=generator.integers(0, VOCABULARY_SIZE, num_all, np.int32),
        behavior_logprobs=-generator.random(num_all, np.float32),
    )


def wire_sizes(payload: Payload) -> Sizes:
    """What a group and its acknowledgement take, ZeroMQ's own framing aside."""
    group = encode(payload.message(1000), payload.token_ids, payload.behavior_logprobs)
    ack = encode(Ack(lease_id=1000, outcome="accepted"))
    return Sizes(sum(map(len, group)), sum(map(len, ack)))


# The learner's process


def serve(connection: Connection) -> None:
    """Answer one trial after another; each command is `(variant, num_groups, sizes)`, each result this process's CPU time."""
    variants = {"tcp": receive_tcp, "wire": receive_wire, "dispatcher": receive_dispatcher}
    while True:
        variant, num_groups, sizes = connection.recv()
        started = time.process_time()
        variants[variant](connection, num_groups, sizes)
        connection.send(time.process_time() - started)


def receive_tcp(connection: Connection, num_groups: int, sizes: Sizes) -> None:
    """Read blocks of a group's size and answer each with as many bytes as an acknowledgement has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection.send(listener.getsockname()[1])
        stream, _ = listener.accept()
    block, answer = memoryview(bytearray(sizes.group)), bytes(sizes.ack)
    with stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # One more than are counted: the first opens the connection.
        for _ in range(num_groups + 1):
            num_read = 0
            while num_read < sizes.group:
                num_read += stream.recv_into(block[num_read:])
            stream.sendall(answer)
        connection.recv()


def receive_wire(connection: Connection, num_groups: int, sizes: Sizes) -> None:
    """Decode groups to arrays and acknowledge each."""
    with Hub(LOOPBACK, max_message_bytes=MAX_MESSAGE_BYTES) as hub:
        connection.send(hub.address)
        num_left = num_groups + 1
        while num_left:
            hub.wait(PATIENCE_S)
            while (received := hub.receive()) is not None:
                assert isinstance(received.packet, FromActor), received.packet
                message, arrays = received.packet
                assert isinstance(message, GroupDone)
                assert len(token_ids(arrays[0])) == len(logprobs(arrays[1]))
                hub.send(received.peer, Ack(lease_id=message.lease_id, outcome="accepted"))
                num_left -= 1
        # An actor loses what it has not read when the connection ends.
        connection.recv()


def receive_dispatcher(connection: Connection, num_groups: int, sizes: Sizes) -> None:
    """What the learner does with rollouts, training itself left out."""
    num_steps = num_groups // GROUPS_PER_STEP
    dispatcher = make_dispatcher(
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS_PER_STEP,
        num_steps=num_steps,
        # Never the bound: credit is.
        max_staleness=num_steps,
        layout=(),
        record=lambda kind, **row: None,
        on_join=lambda peer: None,
        on_weights=lambda actor, message: None,
    )
    dispatcher.publish(0)
    with Hub(LOOPBACK, max_message_bytes=MAX_MESSAGE_BYTES) as hub:
        hub_thread = HubThread(hub, dispatcher)
        hub_thread.start()
        connection.send(hub.address)
        for policy_version in range(1, num_steps + 1):
            groups = dispatcher.take_batch(PATIENCE_S)
            assert groups is not None, dispatcher.waiting_for()
            dispatcher.finish_batch(groups, policy_version)
            hub.wake()
        assert dispatcher.counts().trained == num_groups
        connection.recv()
        hub_thread.close()


# The actor's process


def measure(connection: Connection, variant: str, num_tokens: int) -> Cost:
    """One trial, from the first group sent to the last one answered."""
    payload, num_groups = make_payload(num_tokens), NUM_GROUPS[num_tokens]
    sizes = wire_sizes(payload)
    connection.send((variant, num_groups, sizes))
    address = receive_from(connection)
    cpu_before = time.process_time()
    if variant == "tcp":
        wall_s = send_tcp(address, num_groups, sizes)
    elif variant == "wire":
        with link_to(address) as link:
            wall_s = send_wire(link, num_groups, payload)
    else:
        with link_to(address) as link:
            wall_s = answer_leases(link, num_groups, payload)
    connection.send("answered")
    return Cost(wall_s, time.process_time() - cpu_before + receive_from(connection))


def receive_from(connection: Connection):
    """What the learner's process says; one that died or hangs ends the benchmark."""
    if not connection.poll(PATIENCE_S):
        raise TimeoutError(f"the other process did not answer within {PATIENCE_S:g} s")
    return connection.recv()


def send_tcp(port: int, num_groups: int, sizes: Sizes) -> float:
    """Seconds."""
    block = bytes(sizes.group)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.sendall(block)
        num_answer_bytes = 0
        while num_answer_bytes < sizes.ack:
            num_answer_bytes += len(stream.recv(sizes.ack))
        started = time.monotonic()
        num_sent = num_answer_bytes = 0
        while num_answer_bytes < num_groups * sizes.ack:
            while num_sent < num_groups and num_sent - num_answer_bytes // sizes.ack < WINDOW:
                stream.sendall(block)
                num_sent += 1
            num_answer_bytes += len(stream.recv(1 << 16))
        return time.monotonic() - started


@contextmanager
def link_to(address: str) -> Iterator[Link]:
    """A link like an actor's."""
    identity = f"benchmark/{time.time_ns()}/{threading.get_ident()}".encode()
    with Link(address, identity=identity, max_message_bytes=MAX_MESSAGE_BYTES) as link:
        yield link


def send_wire(link: Link, num_groups: int, payload: Payload) -> float:
    """Seconds."""
    arrays = payload.token_ids, payload.behavior_logprobs
    while not link.send(payload.message(0), *arrays):
        time.sleep(0.001)
    must_receive(link)
    started = time.monotonic()
    num_sent = num_answered = 0
    while num_answered < num_groups:
        while num_sent < num_groups and num_sent - num_answered < WINDOW:
            num_sent += link.send(payload.message(num_sent + 1), *arrays)
        must_receive(link)
        num_answered += 1
        while link.receive() is not None:
            num_answered += 1
    assert num_answered == num_groups
    return time.monotonic() - started


def answer_leases(link: Link, num_groups: int, payload: Payload) -> float:
    """Seconds from the first lease to the last acknowledgement."""
    hello = Hello(
        actor="benchmark",
        incarnation=1,
        engine=ENGINE,
        temperature=RolloutSection().temperature,
        reward=TaskSection().reward,
        software="0",
    )
    while not link.send(hello):
        time.sleep(0.001)
    link.send(Credit(capacity=WINDOW))
    must_receive(link)
    link.send(WeightsCommitted(policy_version=0, stall_s=0.0))
    received: FromLearner | None = must_receive(link)
    started, num_answered = time.monotonic(), 0
    while num_answered < num_groups:
        while received is not None:
            if isinstance(received.message, Lease):
                link.send(payload.message(received.message.lease_id), payload.token_ids, payload.behavior_logprobs)
            else:
                assert isinstance(received.message, Ack) and received.message.outcome == "accepted", received.message
                num_answered += 1
            received = link.receive()
        if num_answered < num_groups:
            received = must_receive(link)
    return time.monotonic() - started


def must_receive(link: Link) -> FromLearner:
    """The next message; a learner that is silent ends the benchmark."""
    received = link.receive(PATIENCE_S)
    if received is None:
        raise TimeoutError(f"no message within {PATIENCE_S:g} s")
    return received


def main() -> None:
    """Measure and print."""
    variants = ("tcp", "wire", "dispatcher")
    rows = []
    with processes(serve, 1) as (connection,):
        for num_tokens, num_groups in NUM_GROUPS.items():
            costs: dict[str, list[Cost]] = {variant: [] for variant in variants}
            for _ in range(NUM_ROUNDS):
                for variant in variants:
                    costs[variant].append(measure(connection, variant, num_tokens))
            rows += [table_row(variant, num_tokens, num_groups, costs) for variant in variants]
    print_table(
        f"Rollout transport, groups of {GROUP_SIZE}, {WINDOW} unanswered at most, {NUM_ROUNDS} interleaved rounds: "
        "median (min–max)",
        ("tokens", "variant", "Mtok/s", "MB/s", "CPU ns/token", "speed / tcp", "CPU / tcp"),
        rows,
    )


def table_row(variant: str, num_tokens: int, num_groups: int, costs: dict[str, list[Cost]]) -> list[str]:
    """One line of the table: rates, and ratios to the TCP trial of the same round."""
    num_all = num_groups * GROUP_SIZE * num_tokens
    num_bytes = num_groups * wire_sizes(make_payload(num_tokens)).group
    pairs = list(zip(costs[variant], costs["tcp"], strict=True))
    return [
        f"{GROUP_SIZE} x {num_tokens}",
        variant,
        spread([num_all / cost.wall_s / 1e6 for cost in costs[variant]], 1),
        spread([num_bytes / cost.wall_s / 1e6 for cost in costs[variant]], 0),
        spread([cost.cpu_s / num_all * 1e9 for cost in costs[variant]], 1),
        spread([tcp.wall_s / cost.wall_s for cost, tcp in pairs]),
        spread([cost.cpu_s / tcp.cpu_s for cost, tcp in pairs]),
    ]


if __name__ == "__main__":
    main()
