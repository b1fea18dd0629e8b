"""Counts of what arrived and was refused, by sender and reason, bounded whatever arrives."""

from collections import Counter

MAX_ENTRIES = 1000
"""Pairs of sender and reason that are counted apart; further ones share one count, since senders choose their names."""
OTHERS = "others"


class Rejections:
    """Refusals since the start of this process."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, sender: str, reason: str) -> bool:
        """Count a refusal. Return True for the first, tenth, hundredth... of its kind, which is worth a line."""
        key = f"{sender[:64]}: {reason[:80]}"
        if key not in self._counts and len(self._counts) >= MAX_ENTRIES:
            key = OTHERS
        self._counts[key] += 1
        number = self._counts[key]
        return number == 10 ** (len(str(number)) - 1)

    def counts(self) -> dict[str, int]:
        """Return the counts by `sender: reason`."""
        return dict(self._counts)
