"""The actors that a collective reaches, and its backend, from what the actors say of their GPUs."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from offbeat.learner.weights.standings import Recipient
from offbeat.learner.weights.transport import Transport


class Reach(NamedTuple):
    """The actors that may take part in collectives; the others pull."""

    backend: Literal["gloo", "nccl"]
    peers: frozenset[bytes]


def find_reach(recipients: Iterable[Recipient], transport: Transport) -> Reach:
    """Return which of the live actors a collective reaches.

    NCCL reaches actors with a GPU of their own: it takes one process to a GPU, and none without. Where it reaches nobody, gloo
    reaches everybody, through host memory.
    """
    recipients = sorted(recipients)
    everyone = frozenset(recipient.peer for recipient in recipients)
    match transport.backend:
        case "pull":
            return Reach("gloo", frozenset())
        case "gloo":
            return Reach("gloo", everyone)
        case "nccl":
            taken = set() if transport.gpu is None else {transport.gpu.uuid}
            peers: set[bytes] = set()
            for recipient in recipients:
                if recipient.gpu is not None and recipient.gpu not in taken:
                    taken.add(recipient.gpu)
                    peers.add(recipient.peer)
            return Reach("nccl", frozenset(peers)) if peers else Reach("gloo", everyone)
