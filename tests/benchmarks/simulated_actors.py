"""Many actors in one process, with sockets and messages but no engines, as cheap as Python allows.

An actor answers every lease at once with the same group. Only msgspec decodes the bodies; the answer is encoded once, and each
lease id is patched into its bytes.
"""

import time
from collections import deque
from typing import NamedTuple

import msgspec
import numpy as np
import zmq

from offbeat.common.settings.config import RolloutSection, TaskSection
from offbeat.protocols.keys import KeyPair, PublicKey
from offbeat.protocols.messages import (
    Ack,
    ActorMessage,
    Credit,
    GroupDone,
    Hello,
    LearnerMessage,
    Lease,
    WeightsCommitted,
    Welcome,
)
from offbeat.protocols.payload import CompletionMeta, Segment
from offbeat.protocols.wire import Frame, encode
from tests.benchmarks.stand_ins import ENGINE, VOCABULARY_SIZE

PATIENCE_S = 30.0
# Takes eight bytes in msgpack, like the ids that are patched into its place.
_ANY_LEASE_ID = 0x0123456789ABCDEF

_decoder = msgspec.msgpack.Decoder(LearnerMessage)


class EncodedGroup:
    """The frames of a group whose completions have `num_tokens` tokens each, for any lease."""

    def __init__(self, group_size: int, num_tokens: int) -> None:
        generator = np.random.default_rng(num_tokens)
        num_all = group_size * num_tokens
        completions = tuple(CompletionMeta(num_tokens, "stop", 1.0, (Segment(0, 0),)) for _ in range(group_size))
        magic, body, *arrays = encode(
            GroupDone(lease_id=_ANY_LEASE_ID, completions=completions, generate_s=1.0),
            generator.integers(0, VOCABULARY_SIZE, num_all, np.int32),
            -generator.random(num_all, np.float32),
        )
        self._magic = magic
        self._before, self._after = bytes(body).split(_ANY_LEASE_ID.to_bytes(8, "big"))
        self._arrays = arrays
        self.num_bytes = len(magic) + len(body) + sum(map(len, arrays))
        """Bytes of all frames, without ZeroMQ's framing."""

    def frames(self, lease_id: int) -> list[Frame]:
        """Return the frames that answer this lease."""
        return [self._magic, self._before + lease_id.to_bytes(8, "big") + self._after, *self._arrays]


class Answered(NamedTuple):
    """Times of a trial as its actors measure them."""

    wall_s: float
    """Seconds from the first request for leases to the last acknowledgement."""
    ack_s: list[float]
    """Seconds from sending to acknowledgement, of every group."""


class SimulatedActors:
    """`num_actors` actors at one hub, which share `key`. Without `key` there is no encryption, and no `learner_key`."""

    def __init__(self, address: str, num_actors: int, *, key: KeyPair | None, learner_key: PublicKey | None) -> None:
        self._context = zmq.Context()
        self._sockets = [
            open_dealer(self._context, address, f"actor-{index}", key=key, learner_key=learner_key)
            for index in range(num_actors)
        ]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)

    def join(self) -> None:
        """Say hello as every actor and wait until all are welcome. No actor asks for work yet."""
        for index, socket in enumerate(self._sockets):
            send(socket, make_hello(f"actor-{index}"))
        num_welcome = 0
        while num_welcome < len(self._sockets):
            for socket in self._ready():
                message = _decoder.decode(socket.recv_multipart(zmq.NOBLOCK)[1])
                assert isinstance(message, Welcome), message
                num_welcome += 1
        for socket in self._sockets:
            send(socket, WeightsCommitted(policy_version=0, stall_s=0.0))

    def answer(self, group: EncodedGroup, num_groups: int, capacity: int) -> Answered:
        """Ask for work, and answer leases until `num_groups` groups are acknowledged."""
        sent_at: dict[zmq.Socket, deque[float]] = {socket: deque() for socket in self._sockets}
        ack_s: list[float] = []
        started = time.monotonic()
        for socket in self._sockets:
            send(socket, Credit(capacity=capacity))
        while len(ack_s) < num_groups:
            for socket in self._ready():
                while (message := _receive(socket)) is not None:
                    if isinstance(message, Lease):
                        sent_at[socket].append(time.monotonic())
                        socket.send_multipart(group.frames(message.lease_id), zmq.NOBLOCK, copy=group.num_bytes < 1 << 16)
                    else:
                        assert isinstance(message, Ack) and message.outcome == "accepted", message
                        # The hub is one thread, so acks arrive in the order of the groups.
                        ack_s.append(time.monotonic() - sent_at[socket].popleft())
        return Answered(time.monotonic() - started, ack_s)

    def close(self) -> None:
        """Disconnect."""
        self._context.destroy(linger=0)

    def _ready(self) -> list[zmq.Socket]:
        ready = self._poller.poll(round(PATIENCE_S * 1000))
        if not ready:
            raise TimeoutError(f"the learner did not answer within {PATIENCE_S:g} s")
        return [socket for socket, _ in ready]


def open_dealer(
    context: zmq.Context, address: str, name: str, *, key: KeyPair | None, learner_key: PublicKey | None
) -> zmq.Socket:
    """Return a connected DEALER socket with the options of a `Link`'s."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, f"{name}/{time.time_ns()}".encode())
    socket.setsockopt(zmq.RCVTIMEO, round(PATIENCE_S * 1000))
    if key is not None and learner_key is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, learner_key.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.owner.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    socket.connect(address)
    return socket


def make_hello(name: str) -> Hello:
    """Return an actor's hello that satisfies the stand-in learner's contract."""
    return Hello(
        actor=name,
        incarnation=1,
        engine=ENGINE,
        temperature=RolloutSection().temperature,
        reward=TaskSection().reward,
        software="0",
    )


def send(socket: zmq.Socket, message: ActorMessage) -> None:
    """Send a message without arrays."""
    socket.send_multipart(encode(message))


def _receive(socket: zmq.Socket) -> LearnerMessage | None:
    try:
        return _decoder.decode(socket.recv_multipart(zmq.NOBLOCK)[1])
    except zmq.Again:
        return None
