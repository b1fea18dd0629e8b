"""Answers to leases that the learner has not acknowledged: sent, kept, and sent again."""

from dataclasses import dataclass

from offbeat.protocols.channels import Array
from offbeat.protocols.messages import ActorMessage


@dataclass
class Parcel:
    """One unacknowledged message."""

    message: ActorMessage
    arrays: tuple[Array, ...]
    sent_at: float = float("-inf")


class Outbox:
    """Unacknowledged messages by lease, oldest first. The actor's credit bounds their number."""

    def __init__(self, *, resend_after_s: float) -> None:
        self._resend_after_s = resend_after_s
        self._parcels: dict[int, Parcel] = {}

    def __len__(self) -> int:
        return len(self._parcels)

    @property
    def lease_ids(self) -> tuple[int, ...]:
        """Leases that these messages answer."""
        return tuple(self._parcels)

    def put(self, lease_id: int, message: ActorMessage, *arrays: Array) -> None:
        """Keep a message until `acknowledge`."""
        self._parcels[lease_id] = Parcel(message, arrays)

    def acknowledge(self, lease_id: int) -> None:
        """Forget the answer to a lease, if it is here."""
        self._parcels.pop(lease_id, None)

    def send_all_again(self) -> None:
        """Make every message due: those sent through an earlier connection may be lost."""
        for parcel in self._parcels.values():
            parcel.sent_at = float("-inf")

    def due(self, now: float) -> list[Parcel]:
        """Return the messages to send now: new ones, and those not acknowledged for `resend_after_s`."""
        return [parcel for parcel in self._parcels.values() if now - parcel.sent_at >= self._resend_after_s]
