"""Counts what arrived and was refused, by sender and reason, within bounds whatever arrives."""

from collections import Counter

MAX_ENTRIES = 1000
"""More pairs of sender and reason than this are counted under one name: names are the sender's to choose."""
OTHERS = "others"


class Rejections:
    """The counts since the start of this process."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, sender: str, reason: str) -> bool:
        """Count one more; True when it is worth telling: the first, tenth, hundredth... of its kind."""
        key = f"{sender[:64]}: {reason[:80]}"
        if key not in self._counts and len(self._counts) >= MAX_ENTRIES:
            key = OTHERS
        self._counts[key] += 1
        number = self._counts[key]
        return number == 10 ** (len(str(number)) - 1)

    def counts(self) -> dict[str, int]:
        """By `sender: reason`."""
        return dict(self._counts)
