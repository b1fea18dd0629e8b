"""Fetches one version of the weights from the learner's weight server, chunk by chunk, into the staging buffer.

A few requests are under way at a time. A chunk that arrives damaged, or not at all (the connection was cut), is asked for
again; what has arrived stays.
"""

import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import torch

from offbeat.common.weights import ALIGNMENT, checksum
from offbeat.protocols.addresses import ChannelError
from offbeat.protocols.channels import Link
from offbeat.protocols.messages import Chunk, ChunkGone, ChunkRequest, WeightPull
from offbeat.protocols.wire import Frame, WireError

WINDOW = 4
"""Largest number of requested chunks that have not arrived."""
POLL_S = 0.05
FIRST_RETRY_S = 1.0
"""Seconds of silence after which outstanding chunks are requested again; doubled each time, as the link may be slow."""
MAX_DAMAGED = 3
"""Number of damaged arrivals of one chunk after which the pull is given up."""


class PullError(RuntimeError):
    """The version was not fetched; the content of the buffer is worthless."""


def pull_weights(
    pull: WeightPull, flat: torch.Tensor, open_link: Callable[[str], Link], is_superseded: Callable[[], bool]
) -> None:
    """Fill the buffer, uint8 `[num_bytes]` on the host, with the version. Raise `PullError` that names server and reason.

    Waits for: chunks, `pull.timeout_s` each at most. Unblocked by: a chunk, the deadline, `is_superseded`.
    """
    host = f"[{pull.host}]" if ":" in pull.host else pull.host
    if pull.num_bytes != len(flat) or pull.chunk_bytes < 1 or pull.chunk_bytes % ALIGNMENT:
        raise PullError(f"{pull.num_bytes} bytes in chunks of {pull.chunk_bytes} do not fit a buffer of {len(flat)}")
    try:
        link = open_link(f"tcp://{host}:{pull.port}")
    except ChannelError as error:
        raise PullError(str(error)) from error
    with link:
        _Pull(pull, flat, link, source=f"the weight server at {host}:{pull.port}").run(is_superseded)


class _Pull:
    def __init__(self, pull: WeightPull, flat: torch.Tensor, link: Link, *, source: str) -> None:
        self._pull = pull
        self._link = link
        self._source = source
        self._chunks = flat.split(pull.chunk_bytes)
        self._to_ask = deque(range(len(self._chunks)))
        self._asked: set[int] = set()
        self._missing = set(range(len(self._chunks)))
        self._num_damaged: Counter[int] = Counter()

    def run(self, is_superseded: Callable[[], bool]) -> None:
        heard_at = retried_at = time.monotonic()
        retry_s = FIRST_RETRY_S
        while self._missing:
            if is_superseded():
                raise PullError("superseded by a newer update")
            self._ask()
            if self._receive():
                heard_at = retried_at = time.monotonic()
                retry_s = FIRST_RETRY_S
            now = time.monotonic()
            if now - heard_at > self._pull.timeout_s:
                raise PullError(
                    f"no chunk from {self._source} within {self._pull.timeout_s:g} s (weights.timeout_s); "
                    f"{len(self._missing)} of {len(self._chunks)} are missing"
                )
            if now - retried_at > retry_s:
                self._to_ask.extendleft(self._asked)
                self._asked.clear()
                retried_at, retry_s = now, 2 * retry_s

    def _ask(self) -> None:
        while self._to_ask and len(self._asked) < WINDOW:
            index = self._to_ask[0]
            if index in self._missing:
                if not self._link.send(ChunkRequest(policy_version=self._pull.policy_version, index=index)):
                    return
                self._asked.add(index)
            self._to_ask.popleft()

    def _receive(self) -> bool:
        """Handle the next message. Return True when it was a missing chunk."""
        try:
            received = self._link.receive(POLL_S)
        except WireError as error:
            # The chunk is unknown; it is requested again after `FIRST_RETRY_S`.
            self._count_damaged(-1, str(error))
            return False
        if received is None:
            return False
        match received.message:
            case ChunkGone(policy_version=self._pull.policy_version):
                raise PullError(f"{self._source} does not offer version {self._pull.policy_version} any longer")
            case Chunk(policy_version=self._pull.policy_version, index=index) as chunk if index in self._missing:
                return self._store(chunk, received.arrays[0])
        return False

    def _store(self, chunk: Chunk, frame: Frame) -> bool:
        target = self._chunks[chunk.index]
        self._asked.discard(chunk.index)
        if len(frame) == len(target):
            target.numpy()[:] = np.frombuffer(frame, dtype=np.uint8)
            if checksum(target) == chunk.checksum:
                self._missing.remove(chunk.index)
                return True
        self._count_damaged(chunk.index, "its checksum is wrong")
        self._to_ask.appendleft(chunk.index)
        return False

    def _count_damaged(self, index: int, why: str) -> None:
        self._num_damaged[index] += 1
        if self._num_damaged[index] >= MAX_DAMAGED:
            what = f"chunk {index + 1} of {len(self._chunks)}" if index >= 0 else "a message"
            raise PullError(f"{what} from {self._source} came damaged {MAX_DAMAGED} times: {why}")
