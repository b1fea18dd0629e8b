"""Serves one version of the weights, chunk by chunk, to the actors that were told to pull it, on another socket and thread.

    publisher: lend(version) -> admit(actor) ... -> dismiss(actor) -> withdraw()
    server thread: ChunkRequest -> Chunk, or ChunkGone for an actor that is not admitted, or asks for another version

A chunk is part of the weights, or its difference from an older version, where the actor asks for that.

The buffer must not change between `lend` and `withdraw`. An actor is known by its socket's identity, as at the hub.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from offbeat.common.errors import pass_on
from offbeat.common.weights.deltas import encode_delta, word_bytes
from offbeat.common.weights.flat import checksum
from offbeat.learner.weights.double_buffer import WeightSnapshot
from offbeat.protocols.channels import Hub, Received
from offbeat.protocols.messages import MAX_BASES, Chunk, ChunkGone, ChunkRequest, TensorSpec
from offbeat.protocols.wire import WireError

logger = logging.getLogger(__name__)


class Delta(NamedTuple):
    """The difference between a version and the next one that was lent."""

    base: int
    """Checksum of the older version."""
    pieces: tuple[torch.Tensor, ...]
    """One for each chunk of the weights, uint8 `[num_bytes]`."""

    @property
    def num_bytes(self) -> int:
        """The size of all pieces."""
        return sum(len(piece) for piece in self.pieces)


class DeltaChain:
    """The newest lent version, and the differences that lead to it. For the weight server's thread."""

    def __init__(self, layout: tuple[TensorSpec, ...], chunk_bytes: int) -> None:
        self._word_bytes = word_bytes(layout)
        self._chunk_bytes = chunk_bytes
        self._newest: torch.Tensor | None = None
        """A copy of the newest lent version; None before the first."""
        self._newest_checksum = 0
        self.deltas: tuple[Delta, ...] = ()
        """From the oldest version that leads to the newest, to the newest."""

    def advance(self, snapshot: WeightSnapshot) -> None:
        """Extend the chain to this version, which is about to be lent. Takes long: the weights are compared word by word."""
        flat = snapshot.buffer.flat
        if self._newest is None:
            self._newest = flat.clone()
        elif snapshot.checksum != self._newest_checksum:
            self._extend(self._newest, flat, snapshot.policy_version)
            if snapshot.checksum in {delta.base for delta in self.deltas}:
                # The weights are as they were: a chain must not pass a version twice.
                self.deltas = ()
        self._newest_checksum = snapshot.checksum

    def _extend(self, newest: torch.Tensor, flat: torch.Tensor, policy_version: int) -> None:
        started = time.monotonic()
        pieces: list[torch.Tensor] = []
        for old, new in zip(newest.split(self._chunk_bytes), flat.split(self._chunk_bytes), strict=True):
            pieces.append(torch.from_numpy(encode_delta(old.numpy(), new.numpy(), self._word_bytes)))
            old.copy_(new)
        deltas = (*self.deltas, Delta(self._newest_checksum, tuple(pieces)))
        last = deltas[-1].num_bytes
        deltas = deltas[-MAX_BASES:]
        while sum(delta.num_bytes for delta in deltas) >= len(flat):
            deltas = deltas[1:]
        self.deltas = deltas
        logger.info(
            "weights %d: encoded %.3f MB of differences for %.3f MB in %.2f s; the last %d differences are kept",
            policy_version,
            last / 1e6,
            len(flat) / 1e6,
            time.monotonic() - started,
            len(deltas),
        )


LOOK_S = 0.05
BURST = 16
"""Requests answered between two calls of `tend`."""
MAX_SERVINGS = 4
"""An actor may ask for each chunk this many times on average, damaged and lost ones included."""


@dataclass
class Visitor:
    """An actor that may pull."""

    asked_at: float
    """Time of its admission or of its last request for a chunk, on `time.monotonic`."""
    num_requests: int = 0
    """Requests that were answered with a chunk."""
    num_bytes: int = 0
    """Size of these chunks."""


class WeightServer:
    """Answers chunk requests. All methods may be called from any thread."""

    def __init__(self, *, open_hub: Callable[[], Hub], chunk_bytes: int) -> None:
        """Open the socket; `start` begins to serve on it."""
        self._hub = open_hub()
        self.port = int(self._hub.address.rpartition(":")[2])
        self._chunk_bytes = chunk_bytes
        self._policy_version: int | None = None
        """The version that is served; None: none."""
        self._chunks: dict[int | None, tuple[torch.Tensor, ...]] = {}
        """The weights' chunks at None, and their differences by the checksum of the version that they start from."""
        self._visitors: dict[bytes, Visitor] = {}
        self.num_rejected = 0
        """Messages that were no chunk requests."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self, *, tend: Callable[[], None], on_failure: Callable[[BaseException], None]) -> None:
        """Begin to serve. The thread calls `tend` between requests, at least every `LOOK_S`."""
        self._thread = threading.Thread(target=self._run, args=(tend, on_failure), name="weight-server", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Call `tend` soon."""
        with self._lock:
            if not self._is_closed:
                self._hub.wake()

    def close(self) -> None:
        """End the thread and free the port."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._hub.wake()
        if self._thread is not None:
            self._thread.join()
        self._hub.close()

    def lend(self, policy_version: int, flat: torch.Tensor, deltas: Sequence[Delta] = ()) -> None:
        """Serve this buffer `[num_bytes]` (uint8, host), and the differences that lead to it."""
        with self._lock:
            self._policy_version = policy_version
            self._chunks = {None: flat.split(self._chunk_bytes)}
            self._chunks |= {delta.base: delta.pieces for delta in deltas}

    def withdraw(self) -> None:
        """Serve nothing."""
        with self._lock:
            self._policy_version, self._chunks = None, {}

    def admit(self, peer: bytes) -> None:
        """Let this actor pull."""
        with self._lock:
            self._visitors[peer] = Visitor(time.monotonic())

    def dismiss(self, peer: bytes) -> None:
        """Let this actor pull no longer."""
        with self._lock:
            self._visitors.pop(peer, None)

    def visitor(self, peer: bytes) -> Visitor:
        """Return a copy of what is known of an admitted actor."""
        with self._lock:
            visitor = self._visitors[peer]
            return replace(visitor)

    def _run(self, tend: Callable[[], None], on_failure: Callable[[BaseException], None]) -> None:
        """Consumes: chunk requests. Waits for: one, `LOOK_S` at most. Unblocked by: a request, `wake`. Produces: chunks."""
        try:
            while not self._is_closed:
                tend()
                self._hub.wait(LOOK_S)
                for _ in range(BURST):
                    received = self._hub.receive()
                    if received is None:
                        break
                    self._answer(received)
        except BaseException as error:  # noqa: BLE001  a dead server must raise in the training thread
            pass_on(error, on_failure)

    def _answer(self, received: Received) -> None:
        if isinstance(received.packet, WireError) or not isinstance(received.packet.message, ChunkRequest):
            self.num_rejected += 1
            return
        request = received.packet.message
        chunk = self._grant(received.peer, request)
        if chunk is None:
            gone = ChunkGone(policy_version=request.policy_version, index=request.index, base=request.base)
            self._hub.send(received.peer, gone)
            return
        answer = Chunk(policy_version=request.policy_version, index=request.index, checksum=checksum(chunk), base=request.base)
        # A peer that is gone, or does not read, asks again. One that reads after `withdraw` may get
        # changed bytes: the checksum tells.
        self._hub.send(received.peer, answer, chunk.numpy().view(np.int32))

    def _grant(self, peer: bytes, request: ChunkRequest) -> torch.Tensor | None:
        with self._lock:
            visitor = self._visitors.get(peer)
            chunks = self._chunks.get(request.base, ()) if request.policy_version == self._policy_version else ()
            num_chunks = sum(len(of_base) for of_base in self._chunks.values())
            if visitor is None or not 0 <= request.index < len(chunks) or visitor.num_requests >= MAX_SERVINGS * num_chunks:
                return None
            visitor.asked_at = time.monotonic()
            visitor.num_requests += 1
            visitor.num_bytes += len(chunks[request.index])
            return chunks[request.index]
