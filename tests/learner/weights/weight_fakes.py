"""Parts around the weight publisher that its tests replace: a server without a socket, and a transport of small sizes."""

import time
from collections.abc import Callable, Sequence

import torch

from offbeat.common.weights.flat import make_layout
from offbeat.learner.weights.actor_versions import Recipient
from offbeat.learner.weights.server import Delta, Visitor
from offbeat.learner.weights.transport import Transport

LAYOUT = make_layout([("w", (64,))], torch.float32)
TRANSPORT = Transport(
    host="learner",
    listen_on="learner",
    backend="pull",
    port=0,
    timeout_s=5.0,
    bucket_bytes=100,
    chunk_bytes=100,
    max_pulls=2,
)


class FakeServer:
    """A server that serves nobody, and records the admitted peers and the version."""

    port = 4711
    num_rejected = 0

    def __init__(self) -> None:
        self.visitors: dict[bytes, Visitor] = {}
        self.lent_version: int | None = None
        self.tend: Callable[[], None] = lambda: None
        """Set by `start`; a test calls it in place of the server's thread."""

    def start(self, *, tend: Callable[[], None], on_failure: Callable[[BaseException], None]) -> None:
        self.tend = tend

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass

    def lend(self, policy_version: int, flat: torch.Tensor, deltas: Sequence[Delta] = ()) -> None:
        self.lent_version = policy_version

    def withdraw(self) -> None:
        self.lent_version = None

    def admit(self, peer: bytes) -> None:
        self.visitors[peer] = Visitor(time.monotonic())

    def dismiss(self, peer: bytes) -> None:
        del self.visitors[peer]

    def visitor(self, peer: bytes) -> Visitor:
        return self.visitors[peer]


def actor(name: str, policy_version: int | None = None) -> Recipient:
    return Recipient(name.encode(), name, policy_version)
