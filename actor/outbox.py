"""Finished groups that the learner has not acknowledged: sent, kept, and sent again."""

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
    """Messages by lease, oldest first; it holds no more than the actor's credit allows leases."""

    def __init__(self, *, resend_after_s: float) -> None:
        self._resend_after_s = resend_after_s
        self._parcels: dict[int, Parcel] = {}

    def __len__(self) -> int:
        return len(self._parcels)

    @property
    def lease_ids(self) -> tuple[int, ...]:
        """The leases that these messages answer."""
        return tuple(self._parcels)

    def put(self, lease_id: int, message: ActorMessage, *arrays: Array) -> None:
        """Keep a message until `acknowledge`."""
        self._parcels[lease_id] = Parcel(message, arrays)

    def acknowledge(self, lease_id: int) -> None:
        """The learner has it; a second acknowledgement is as good as one."""
        self._parcels.pop(lease_id, None)

    def send_all_again(self) -> None:
        """The connection is a new one: whatever was sent through the old one may be lost."""
        for parcel in self._parcels.values():
            parcel.sent_at = float("-inf")

    def due(self, now: float) -> list[Parcel]:
        """What to send now: new, or not acknowledged for `resend_after_s`."""
        return [parcel for parcel in self._parcels.values() if now - parcel.sent_at >= self._resend_after_s]
