"""A publisher, and receivers in other processes, which tests kill, stop or corrupt."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from offbeat.actor.weights.receiver import WeightReceiver
from offbeat.common.records.rows import row_fields
from offbeat.common.weights import collectives
from offbeat.common.weights.flat import checksum, make_layout
from offbeat.learner.weights.actor_versions import Recipient
from offbeat.learner.weights.publisher import WeightPublisher
from offbeat.learner.weights.transport import Transport
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.messages import LearnerMessage, TensorSpec, WeightPull, WeightsCommitted, WeightsStaged, WeightUpdate
from tests.forked import context

SMALL = make_layout([("embed", (7, 3)), ("scale", ()), ("head", (5,))], torch.bfloat16)
LARGE = make_layout([("embed", (4096, 4096))], torch.float32)
BUCKET_BYTES = 1 << 18
CHUNK_BYTES = 1 << 18
MAX_PULLS = 2
MAX_MESSAGE_BYTES = 1 << 24
TIMEOUT_S = 2.5
PATIENCE_S = 30.0

Mishap = Literal["", "SIGKILL", "SIGSTOP", "wrong byte", "left"]


def open_hub() -> Hub:
    return Hub("tcp://127.0.0.1:0", max_message_bytes=1 << 16)


def receive_weights(connection: Connection, layout: tuple[TensorSpec, ...], peer: bytes, mishap: Mishap, poll_s: float) -> None:
    """Play an actor: take announcements, send `(outcome, checksum)`. A `mishap` happens half-way through the first transfer.

    One that has "left" does so when the learner has said go, and before the group is made.
    """
    collectives.POLL_S = poll_s
    if mishap == "left":
        collectives.Rendezvous.wait_go, mishap = leave_once, ""
    receiver = ClumsyReceiver(
        layout, lambda address: Link(address, identity=peer, max_message_bytes=MAX_MESSAGE_BYTES), mishap=mishap
    )
    connection.send("up")
    flat = receiver.buffer.flat
    while True:
        while connection.poll(0.0005):
            receiver.announce(connection.recv())
        outcome = receiver.outcome()
        if outcome is not None:
            connection.send((outcome, checksum(flat)))
            if not outcome.error:
                receiver.release()


_wait_go = collectives.Rendezvous.wait_go


def leave_once(self: collectives.Rendezvous, timeout_s: float, is_superseded: Callable[[], bool]) -> None:
    _wait_go(self, timeout_s, is_superseded)
    collectives.Rendezvous.wait_go = _wait_go
    raise collectives.CollectiveError("left")


class ClumsyReceiver(WeightReceiver):
    """A receiver whose mishap comes between two buckets or chunks, however slow the machine is."""

    def __init__(self, layout: tuple[TensorSpec, ...], open_link: Callable[[str], Link], *, mishap: Mishap) -> None:
        self._mishap: Mishap = mishap
        super().__init__(layout, open_link)

    def _beat(self, update: WeightUpdate | WeightPull) -> None:
        super()._beat(update)
        flat = self.buffer.flat
        if self._mishap and flat[len(flat) // 2] != 0 and flat[-1] == 0:
            befallen, self._mishap = self._mishap, ""
            if befallen == "wrong byte":
                flat[0] ^= 1
            else:
                os.kill(os.getpid(), signal.Signals[befallen])


class Receiver:
    """A receiver's process, as the publisher's side sees it."""

    def __init__(self, name: str, layout: tuple[TensorSpec, ...], mishap: Mishap, poll_s: float) -> None:
        self.name = name
        self.peer = f"{name}/1".encode()
        self.policy_version: int | None = None
        self.is_mute = False
        """True for a receiver that takes the weights and never reports them."""
        self.num_breaks = 0
        """Number of coming transfers that the receiver reports as broken."""
        self.checksums: dict[int, int] = {}
        self.epochs: dict[int, int] = {}
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=receive_weights, args=(theirs, layout, self.peer, mishap, poll_s), daemon=True)
        self.process.start()
        theirs.close()
        self.send: Callable[[LearnerMessage], None] = self.connection.send
        assert self.connection.poll(PATIENCE_S)
        assert self.connection.recv() == "up"

    def has(self, policy_version: int) -> bool:
        return self.policy_version is not None and self.policy_version >= policy_version

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        assert self.process.exitcode is not None
        self.connection.close()


class Fleet:
    """The publisher, its receivers, and a thread that carries messages between them as the hub would."""

    def __init__(
        self, layout: tuple[TensorSpec, ...], timeout_s: float, backend: Literal["gloo", "pull"], *, delta: bool = False
    ) -> None:
        self.layout = layout
        self.receivers: list[Receiver] = []
        self.rows: list[dict[str, Any]] = []
        self.failures: list[BaseException] = []
        self.announced: list[tuple[str, int]] = []
        """Receivers by name and the versions announced to them."""
        self.pulled: list[tuple[str, int]] = []
        """Announcements of pulls among them."""
        self.most_pulls = 0
        """Largest number of simultaneous pulls."""
        self.sent_checksums: dict[int, int] = {}
        self.publisher = WeightPublisher(
            layout=layout,
            transport=Transport(
                host="127.0.0.1",
                listen_on="127.0.0.1",
                backend=backend,
                port=0,
                timeout_s=timeout_s,
                bucket_bytes=BUCKET_BYTES,
                chunk_bytes=CHUNK_BYTES,
                max_pulls=MAX_PULLS,
                delta=delta,
            ),
            open_hub=open_hub,
            max_pull_lag=lambda: 2,
            record=lambda row: self.rows.append(row_fields(row)),
        )
        self.publisher.start(self)
        self._is_over = False
        self._courier = threading.Thread(target=self.carry, daemon=True)
        self._courier.start()

    def recipients(self) -> list[Recipient]:
        return [Recipient(receiver.peer, receiver.name, receiver.policy_version) for receiver in self.receivers]

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def join(self, name: str, mishap: Mishap = "", poll_s: float = 0.001) -> Receiver:
        receiver = Receiver(name, self.layout, mishap, poll_s)
        self.receivers.append(receiver)
        self.publisher.joined(receiver.peer)
        return receiver

    def post(self, peer: bytes, message: LearnerMessage) -> None:
        for receiver in self.receivers:
            if receiver.peer == peer and receiver.process.is_alive():
                assert isinstance(message, WeightUpdate | WeightPull)
                self.announced.append((receiver.name, message.policy_version))
                if isinstance(message, WeightPull):
                    self.pulled.append((receiver.name, message.policy_version))
                    self.most_pulls = max(self.most_pulls, len(self.publisher._pulls._pulls))
                # As with the hub, a message to a peer that has just died is lost: its pipe closes before it counts as dead.
                with suppress(ConnectionError):
                    receiver.send(message)

    def carry(self) -> None:
        while not self._is_over:
            for receiver in list(self.receivers):
                self.deliver(receiver)
            time.sleep(0.0005)

    def deliver(self, receiver: Receiver) -> None:
        try:
            if not receiver.connection.poll():
                return
            outcome, received = receiver.connection.recv()
        except (EOFError, OSError):
            return
        assert isinstance(outcome, WeightsStaged)
        if receiver.is_mute:
            return
        version = outcome.policy_version
        if receiver.num_breaks:
            receiver.num_breaks -= 1
            outcome = msgspec.structs.replace(outcome, error="bucket 1 of 1: Connection reset by peer")
        if not outcome.error:
            receiver.checksums[version] = received
            receiver.epochs[version] = outcome.epoch
            receiver.policy_version = version
        self.publisher.handle(receiver.name, outcome)
        if not outcome.error:
            self.publisher.handle(receiver.name, WeightsCommitted(policy_version=version, stall_s=0.0))

    def publish(self, policy_version: int) -> None:
        with self.publisher.writing() as buffer:
            buffer.flat.view(torch.int64).random_(generator=torch.Generator().manual_seed(policy_version))
            # A receiver must be able to tell how much has arrived from the zeros before it.
            buffer.flat[len(buffer.flat) // 2] = buffer.flat[-1] = 1
            self.sent_checksums[policy_version] = checksum(buffer.flat)
            self.publisher.publish(policy_version)

    def wait(self, policy_version: int, *receivers: Receiver) -> None:
        self.wait_for(lambda: all(receiver.has(policy_version) for receiver in receivers))
        for receiver in receivers:
            for version, received in receiver.checksums.items():
                assert received == self.sent_checksums[version]

    def wait_for(self, claim: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not claim():
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {self.rows}"
            time.sleep(0.002)

    def excluded(self) -> list[str]:
        return [row["actor"] for row in self.rows if row.get("event") == "actor_excluded"]

    def exclusions(self) -> list[str]:
        return [row["detail"] for row in self.rows if row.get("event") == "actor_excluded"]

    def updates(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == "weights"]

    def close(self) -> None:
        self.publisher.close()
        self._is_over = True
        self._courier.join(5)
        for receiver in self.receivers:
            receiver.end()
        for thread in (self.publisher._thread, self.publisher._server._thread):
            assert thread is None or not thread.is_alive()
        assert not self.failures, self.failures


@contextmanager
def fleet_of(
    layout: tuple[TensorSpec, ...],
    *names: str,
    timeout_s: float = TIMEOUT_S,
    backend: Literal["gloo", "pull"] = "gloo",
    delta: bool = False,
) -> Iterator[Fleet]:
    fleet = Fleet(layout, timeout_s, backend, delta=delta)
    try:
        for name in names:
            fleet.join(name)
        yield fleet
    finally:
        fleet.close()


def stopped(receiver: Receiver) -> bool:
    return Path(f"/proc/{receiver.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
