"""Mutes senders that flood the hub with bad messages.

A sender is a public key, or the identity of a connection where no keys are in use. Names and keys are the senders' to choose,
so everything remembered about them is bounded.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

MAX_MALFORMED = 100
"""Mute a sender after this many malformed messages in a row."""
MAX_REJECTED = 1000
"""Mute a sender after this many rejected messages in a row."""
MUTE_S = 60.0
"""Seconds during which the messages of a muted sender are dropped unread."""
MAX_REMEMBERED = 16_384
"""Senders remembered for one purpose; the one heard least recently is forgotten first."""
MAX_DROP_KINDS = 1000
"""Keys of `FloodGuard.num_dropped`; the names of further senders are replaced by `others`."""

V = TypeVar("V")


class FloodGuard:
    """Counts bad messages by sender, and decides who is muted. Only `is_muted` may be called by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num_dropped: Counter[str] = Counter()
        """Messages dropped unread, by `name: reason`."""
        self._num_malformed: dict[bytes, int] = {}
        """Malformed messages since the sender's last well-formed one."""
        self._num_rejected: dict[bytes, int] = {}
        """Rejected messages since the sender's last accepted one."""
        self._muted_until: dict[bytes, float] = {}

    def is_muted(self, sender: bytes) -> bool:
        """Return True while the sender's messages are to be dropped unread."""
        return bool(self._muted_until) and self._clock() < self._muted_until.get(sender, 0.0)

    def note_malformed(self, sender: bytes) -> None:
        """Count a message that could not be decoded."""
        self._count(sender, self._num_malformed, MAX_MALFORMED)

    def note_well_formed(self, sender: bytes) -> None:
        """Forget the sender's malformed messages."""
        if self._num_malformed:
            self._num_malformed.pop(sender, None)

    def note_rejected(self, sender: bytes) -> None:
        """Count a message whose content the learner rejected."""
        self._count(sender, self._num_rejected, MAX_REJECTED)

    def note_accepted(self, sender: bytes) -> None:
        """Forget the sender's rejected messages."""
        if self._num_rejected:
            self._num_rejected.pop(sender, None)

    def count_dropped(self, name: str, reason: str) -> None:
        """Count a message that was dropped unread."""
        kind = f"{name}: {reason}"
        is_counted_by_name = kind in self.num_dropped or len(self.num_dropped) < MAX_DROP_KINDS
        self.num_dropped[kind if is_counted_by_name else f"others: {reason}"] += 1

    def _count(self, sender: bytes, numbers: dict[bytes, int], limit: int) -> None:
        number = numbers.pop(sender, 0) + 1
        if number < limit:
            remember(numbers, sender, number)
        else:
            remember(self._muted_until, sender, self._clock() + MUTE_S)


def remember(table: dict[bytes, V], sender: bytes, value: V) -> None:
    """Store a sender's value as the newest entry; drop the oldest entry above `MAX_REMEMBERED`."""
    table.pop(sender, None)
    table[sender] = value
    if len(table) > MAX_REMEMBERED:
        del table[next(iter(table))]
