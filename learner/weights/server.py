"""Serves one version of the weights, chunk by chunk, to the actors that were told to pull it, on another socket and thread.

    publisher: lend(version) -> admit(actor) ... -> dismiss(actor) -> withdraw()
    server thread: ChunkRequest -> Chunk, or ChunkGone for an actor that is not admitted, or asks for another version

The buffer must not change between `lend` and `withdraw`. An actor is known by its socket's identity, as at the hub.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from offbeat.common.weights import checksum
from offbeat.protocols.channels import Hub, Received
from offbeat.protocols.messages import Chunk, ChunkGone, ChunkRequest
from offbeat.protocols.wire import WireError

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


class WeightServer:
    """Answers chunk requests. All methods may be called from any thread."""

    def __init__(self, *, open_hub: Callable[[], Hub], chunk_bytes: int) -> None:
        """Open the socket; `start` begins to serve on it."""
        self._hub = open_hub()
        self.port = int(self._hub.address.rpartition(":")[2])
        self._chunk_bytes = chunk_bytes
        self._policy_version: int | None = None
        """The version that is served; None: none."""
        self._chunks: tuple[torch.Tensor, ...] = ()
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

    def lend(self, policy_version: int, flat: torch.Tensor) -> None:
        """Serve this buffer `[num_bytes]` (uint8, host)."""
        with self._lock:
            self._policy_version, self._chunks = policy_version, flat.split(self._chunk_bytes)

    def withdraw(self) -> None:
        """Serve nothing."""
        with self._lock:
            self._policy_version, self._chunks = None, ()

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
            return Visitor(visitor.asked_at, visitor.num_requests)

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
            on_failure(error)

    def _answer(self, received: Received) -> None:
        if isinstance(received.packet, WireError) or not isinstance(received.packet.message, ChunkRequest):
            self.num_rejected += 1
            return
        request = received.packet.message
        chunk = self._grant(received.peer, request)
        if chunk is None:
            self._hub.send(received.peer, ChunkGone(policy_version=request.policy_version, index=request.index))
            return
        answer = Chunk(policy_version=request.policy_version, index=request.index, checksum=checksum(chunk))
        # A peer that is gone, or does not read, asks again.
        self._hub.send(received.peer, answer, chunk.numpy().view(np.int32))

    def _grant(self, peer: bytes, request: ChunkRequest) -> torch.Tensor | None:
        with self._lock:
            visitor = self._visitors.get(peer)
            is_here = request.policy_version == self._policy_version and 0 <= request.index < len(self._chunks)
            if visitor is None or not is_here or visitor.num_requests >= MAX_SERVINGS * len(self._chunks):
                return None
            visitor.asked_at = time.monotonic()
            visitor.num_requests += 1
            return self._chunks[request.index]
