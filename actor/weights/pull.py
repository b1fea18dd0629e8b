"""Fetches one version of the weights from the learner's weight server, chunk by chunk, into the staging buffer.

A few requests are under way at a time. A chunk that arrives damaged, or not at all (the connection was cut), is asked for
again; what has arrived stays. Where the buffer holds an older version that the server has differences from, only these are
fetched, and added to the buffer when all have arrived: a fetch that breaks half-way leaves the older version whole.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from offbeat.common.weights.deltas import DeltaError, apply_delta
from offbeat.common.weights.flat import ALIGNMENT, checksum
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
    """The version was not fetched. The content of the buffer is worthless, except while differences were fetched."""


class UselessAnswerError(PullError):
    """The server answers, but not with what was asked for; asking for something else may help."""


class _Part(NamedTuple):
    """The kinds of request."""

    base: int | None
    """Checksum of the version that a difference starts from; None for the chunk itself."""
    chunk: int


_Store = Callable[[_Part, Frame, int], bool]
"""Takes a part, its bytes and their expected checksum; returns False when they are damaged."""


def pull_weights(
    pull: WeightPull, flat: torch.Tensor, open_link: Callable[[str], Link], is_superseded: Callable[[], bool]
) -> None:
    """Fill the buffer, uint8 `[num_bytes]` on the host, with the version. Raise `PullError` that names server and reason.

    Waits for: chunks, `pull.timeout_s` each at most. Unblocked by: a chunk, the deadline, `is_superseded`.
    """
    chunks = _chunks(pull, flat)

    def store(part: _Part, frame: Frame, expected: int) -> bool:
        target = chunks[part.chunk]
        if len(frame) != len(target):
            return False
        target.numpy()[:] = np.frombuffer(frame, dtype=np.uint8)
        return checksum(target) == expected

    _fetch(pull, [_Part(None, index) for index in range(len(chunks))], store, open_link, is_superseded)


def fetch_deltas(
    pull: WeightPull, held: int, flat: torch.Tensor, open_link: Callable[[str], Link], is_superseded: Callable[[], bool]
) -> list[tuple[int, bytes]]:
    """Return the differences between the version with the checksum `held`, one of `pull.bases`, and the announced one: of each
    chunk, its index with the changes, in the encoding of `common.weights.deltas`.

    Waits and raises like `pull_weights`, and `DeltaError` as soon as they are larger than the weights.
    """
    arrived: list[tuple[int, bytes]] = []
    num_bytes = 0

    def store(part: _Part, frame: Frame, expected: int) -> bool:
        nonlocal num_bytes
        num_bytes += len(frame)
        if num_bytes > len(flat):
            raise DeltaError(f"the differences take more than the {len(flat)} bytes of the weights")
        if len(frame) % 8 or checksum(torch.frombuffer(bytearray(frame), dtype=torch.uint8)) != expected:
            return False
        arrived.append((part.chunk, bytes(frame)))
        return True

    bases = pull.bases[pull.bases.index(held) :]
    num_chunks = len(_chunks(pull, flat))
    _fetch(pull, [_Part(base, index) for base in bases for index in range(num_chunks)], store, open_link, is_superseded)
    return arrived


def add_deltas(
    pull: WeightPull, arrived: Iterable[tuple[int, bytes]], flat: torch.Tensor, word_bytes: int, beat: Callable[[], None]
) -> None:
    """Add differences to the buffer, and call `beat` after each. Raise `DeltaError` for bytes that are none; the buffer is then
    worthless."""
    chunks = _chunks(pull, flat)
    for chunk, delta in arrived:
        apply_delta(delta, chunks[chunk].numpy(), word_bytes)
        beat()


def _chunks(pull: WeightPull, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if pull.num_bytes != len(flat) or pull.chunk_bytes % ALIGNMENT:
        raise PullError(f"{pull.num_bytes} bytes in chunks of {pull.chunk_bytes} do not fit a buffer of {len(flat)}")
    return flat.split(pull.chunk_bytes)


def _fetch(
    pull: WeightPull, parts: list[_Part], store: _Store, open_link: Callable[[str], Link], is_superseded: Callable[[], bool]
) -> None:
    host = f"[{pull.host}]" if ":" in pull.host else pull.host
    try:
        link = open_link(f"tcp://{host}:{pull.port}")
    except ChannelError as error:
        raise PullError(str(error)) from error
    with link:
        _Pull(pull, parts, store, link, f"the weight server at {host}:{pull.port} (weights.pull_port)").run(is_superseded)


class _Pull:
    def __init__(self, pull: WeightPull, parts: list[_Part], store: _Store, link: Link, source: str) -> None:
        self._pull = pull
        self._num_parts = len(parts)
        self._store_part = store
        self._link = link
        self._source = source
        self._to_ask = deque(parts)
        self._asked: set[_Part] = set()
        self._missing = set(parts)
        self._num_damaged: Counter[_Part | None] = Counter()

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
                    f"{len(self._missing)} of {self._num_parts} are missing"
                )
            if now - retried_at > retry_s:
                self._to_ask.extendleft(self._asked)
                self._asked.clear()
                retried_at, retry_s = now, 2 * retry_s

    def _ask(self) -> None:
        while self._to_ask and len(self._asked) < WINDOW:
            part = self._to_ask[0]
            if part in self._missing:
                request = ChunkRequest(policy_version=self._pull.policy_version, index=part.chunk, base=part.base)
                if not self._link.send(request):
                    return
                self._asked.add(part)
            self._to_ask.popleft()

    def _receive(self) -> bool:
        """Handle the next message. Return True when it was a missing chunk."""
        try:
            received = self._link.receive(POLL_S)
        except WireError as error:
            # The chunk is unknown; it is requested again after `FIRST_RETRY_S`.
            self._count_damaged(None, str(error))
            return False
        if received is None:
            return False
        match received.message:
            case ChunkGone(policy_version=self._pull.policy_version, base=base, index=index) if (
                _Part(base, index) in self._missing
            ):
                raise UselessAnswerError(f"{self._source} does not offer version {self._pull.policy_version} any longer")
            case Chunk(policy_version=self._pull.policy_version, base=base, index=index) as chunk if (
                _Part(base, index) in self._missing
            ):
                return self._store(_Part(base, index), received.arrays[0], chunk.checksum)
        return False

    def _store(self, part: _Part, frame: Frame, expected: int) -> bool:
        self._asked.discard(part)
        if self._store_part(part, frame, expected):
            self._missing.remove(part)
            return True
        self._count_damaged(part, "its checksum is wrong")
        self._to_ask.appendleft(part)
        return False

    def _count_damaged(self, part: _Part | None, why: str) -> None:
        self._num_damaged[part] += 1
        if self._num_damaged[part] >= MAX_DAMAGED:
            what = "a message" if part is None else f"chunk {part.chunk + 1}"
            raise UselessAnswerError(f"{what} from {self._source} came damaged {MAX_DAMAGED} times: {why}")
